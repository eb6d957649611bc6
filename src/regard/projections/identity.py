"""Queries that are the input itself, as in SKAFormer in the authors' code of "Static Key Attention in Vision"."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Cost, Projection, ProjectionConfig, Site, heads

from .linear import LinearQKV, draw_linear, fused_linear, project_roles


@dataclass(frozen=True, kw_only=True)
class IdentityQuery(ProjectionConfig):
    """q = x, split into heads without a matrix; k and v are linear."""

    def build(self, site: Site, roles: str, shared: nn.Module | None = None) -> "IdentityQueryProjection":
        if "q" in roles and site.inner != site.dim:
            raise ConfigError(
                f"IdentityQuery: the queries are the input, with {site.dim} channels; {site.heads} heads of width "
                f"{site.width} need {site.inner}: use LinearQKV()"
            )
        return IdentityQueryProjection(site, roles)

    def cost(self, site: Site, roles: str) -> Cost:
        return LinearQKV().cost(site, roles.replace("q", ""))


class IdentityQueryProjection(Projection):
    """linear: the projection of the roles but q, or None."""

    def __init__(self, site: Site, roles: str) -> None:
        super().__init__()
        self.roles, self.heads = roles, site.heads
        self.linear_roles = roles.replace("q", "")
        self.linear = fused_linear(site, self.linear_roles) if self.linear_roles else None

    def reset_parameters(self) -> None:
        """Draw the matrices of k and v anew."""
        if self.linear is not None:
            draw_linear(self.linear)

    def adopt_linear(self, weight: Float[Tensor, "R_inner C"], bias: Float[Tensor, " R_inner"] | None) -> bool:
        """Copy the host's rows of k and v; those of q are not used."""
        if self.linear is None:
            return False
        rows = [self.roles.index(role) for role in self.linear_roles]
        for parameter, value in ((self.linear.weight, weight), (self.linear.bias, bias)):
            if parameter is not None and value is not None:
                parameter.data.copy_(value.unflatten(0, (len(self.roles), -1))[rows].flatten(0, 1))
        return True

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        """Under autocast the queries get its dtype, like k and v, unless they are float64."""
        outputs = {}
        if self.linear is not None:
            linear_roles = roles.replace("q", "")
            projected = project_roles(self.linear, x, self.linear_roles, linear_roles, self.heads)
            outputs = dict(zip(linear_roles, projected, strict=True))
        device = x.device.type
        if x.dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        return tuple(heads(x, self.heads) if role == "q" else outputs[role] for role in roles)
