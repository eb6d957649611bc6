"""Queries that are the input itself: what the authors' code of "Static Key Attention in Vision" has in SKAFormer."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Cost, Projection, ProjectionConfig, Site, heads

from .linear import LinearProjection, LinearQKV


@dataclass(frozen=True, kw_only=True)
class IdentityQuery(ProjectionConfig):
    """q = x, cut into heads without a matrix; k and v are linear."""

    def build(self, site: Site, roles: str, shared: nn.Module | None = None) -> "IdentityQueryProjection":
        if "q" in roles and site.inner != site.dim:
            raise ConfigError(
                f"IdentityQuery: queries that are the input have its {site.dim} channels; {site.heads} heads of "
                f"{site.width} need {site.inner}: use LinearQKV()"
            )
        return IdentityQueryProjection(site, roles)

    def cost(self, site: Site, roles: str) -> Cost:
        return LinearQKV().cost(site, roles.replace("q", ""))


class IdentityQueryProjection(Projection):
    """linear: the projection of k and v, as far as the roles have them; else None."""

    def __init__(self, site: Site, roles: str) -> None:
        super().__init__()
        self.roles, self.heads = roles, site.heads
        others = roles.replace("q", "")
        self.linear = LinearProjection(site, others) if others else None

    def reset_parameters(self) -> None:
        """Draw the matrices of k and v anew."""
        if self.linear is not None:
            self.linear.reset_parameters()

    def adopt_linear(self, weight: Float[Tensor, "R_inner C"], bias: Float[Tensor, " R_inner"] | None) -> bool:
        """The host's k and v; its queries' matrix is left out."""
        if self.linear is None:
            return False
        rows = [self.roles.index(role) for role in self.linear.roles]
        for own, theirs in ((self.linear.weight, weight), (self.linear.bias, bias)):
            if own is not None and theirs is not None:
                own.data.copy_(theirs.unflatten(0, (len(self.roles), -1))[rows].flatten(0, 1))
        return True

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        """Under autocast the queries take its dtype, as products do: k and v come by another call. float64 stays."""
        others = roles.replace("q", "")
        made = dict(zip(others, self.linear(x, others), strict=True)) if self.linear is not None else {}
        kind = x.device.type
        if x.dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return tuple(heads(x, self.heads) if role == "q" else made[role] for role in roles)
