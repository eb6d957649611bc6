"""Linear queries, keys and values: one fused matrix, as in a ViT."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Cost, Projection, ProjectionConfig, Site, heads, linear_cost


@dataclass(frozen=True, kw_only=True)
class LinearQKV(ProjectionConfig):
    """q, k, v = W x + b, one fused matrix with the rows of the roles in order."""

    def build(self, site: Site, roles: str, shared: nn.Module | None = None) -> "LinearProjection":
        return LinearProjection(site, roles)

    def cost(self, site: Site, roles: str) -> Cost:
        return sum((linear_cost(site.tokens(role), site.dim, site.inner, site.qkv_bias) for role in roles), Cost())


def role_rows(fused: Float[Tensor, "R_inner ..."], all_roles: str, roles: str) -> Float[Tensor, "S_inner ..."]:
    """The rows of some roles, in their order, of a weight or bias with the rows of `all_roles`."""
    if roles == all_roles:
        return fused
    blocks = fused.unflatten(0, (len(all_roles), -1))
    return torch.cat([blocks[all_roles.index(role)] for role in roles])


class LinearProjection(Projection):
    """weight (R * inner, C) and bias (R * inner,) under the names of a fused `nn.Linear`; R = number of roles."""

    def __init__(self, site: Site, roles: str) -> None:
        super().__init__()
        self.roles, self.heads = roles, site.heads
        self.weight = nn.Parameter(torch.empty(len(roles) * site.inner, site.dim))
        self.bias = nn.Parameter(torch.empty(len(roles) * site.inner)) if site.qkv_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(C), as `nn.Linear` does; biases zero."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if f"{prefix}weight1" in state_dict and f"{prefix}weight" not in state_dict:
            error_msgs.append(
                f"{prefix}weight1 belongs to an embedding with hidden layers, LinearQKV has weight; load it into a "
                "model with the projection that was trained: SNE(...), PSNE(...) or FSNE(...)"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def offset(self, roles: str) -> Float[Tensor, " R_inner"] | None:
        """The bias of these roles."""
        return None if self.bias is None else role_rows(self.bias, self.roles, roles)

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        if not roles:
            return ()
        weight, bias = role_rows(self.weight, self.roles, roles), self.offset(roles)
        return tuple(heads(y, self.heads) for y in F.linear(x, weight, bias).chunk(len(roles), -1))
