"""Linear queries, keys and values: one fused matrix, as in a ViT."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import skip_init

from regard.core import Cost, ProjectionConfig, Site, linear_cost


@dataclass(frozen=True, kw_only=True)
class LinearQKV(ProjectionConfig):
    """q, k, v = W x + b: one plain `nn.Linear`, which tools find, with the rows of the roles in order."""

    def build(self, site: Site, roles: str, shared: nn.Module | None = None) -> nn.Linear:
        return fused_linear(site, roles)

    def cost(self, site: Site, roles: str) -> Cost:
        return sum((linear_cost(site.tokens(role), site.dim, site.inner, site.qkv_bias) for role in roles), Cost())


def fused_linear(site: Site, roles: str) -> nn.Linear:
    """weight (R * inner, C) and bias (R * inner,), where the site has one; R = number of roles."""
    linear = skip_init(
        nn.Linear, site.dim, len(roles) * site.inner, bias=site.qkv_bias, device=torch.get_default_device()
    )
    draw_linear(linear)
    return linear


def draw_linear(linear: nn.Linear) -> None:
    """Draw the weight uniform in +-1/sqrt(C), as PyTorch does, and set the bias to zero, in place."""
    bound = 1 / math.sqrt(linear.in_features)
    nn.init.uniform_(linear.weight, -bound, bound)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def role_rows(fused: Float[Tensor, "R_inner ..."], all_roles: str, roles: str) -> Float[Tensor, "S_inner ..."]:
    """The rows of some roles, in their order, of a weight or bias with the rows of `all_roles`."""
    if roles == all_roles:
        return fused
    blocks = fused.unflatten(0, (len(all_roles), -1))
    return torch.cat([blocks[all_roles.index(role)] for role in roles])


def project_roles(
    layer: nn.Module, x: Float[Tensor, "B N C"], all_roles: str, roles: str, number: int, by_head: bool = False
) -> tuple[Float[Tensor, "B H N d"], ...]:
    """Some roles of x, in their order, by a layer that gives all of them: an `nn.Linear`, or what a tool has put there.

    number: of heads. by_head: whether its rows are ordered (heads, roles, width), not (roles, heads, width).
    Only the rows of these roles are computed where the layer is plain; an adapter or a quantised layer computes all.
    """
    if not roles:
        return ()
    if roles != all_roles and not by_head and isinstance(layer, nn.Linear) and _is_plain(layer):
        bias = None if layer.bias is None else role_rows(layer.bias, all_roles, roles)
        y, all_roles = F.linear(x, role_rows(layer.weight, all_roles, roles), bias), roles
    else:
        y = layer(x)
    if by_head:
        parts = y.unflatten(-1, (number, len(all_roles), -1)).permute(3, 0, 2, 1, 4).unbind()
    else:
        parts = y.unflatten(-1, (len(all_roles), number, -1)).permute(2, 0, 3, 1, 4).unbind()
    return parts if roles == all_roles else tuple(parts[all_roles.index(role)] for role in roles)


def _is_plain(layer: nn.Linear) -> bool:
    """Whether nothing but its weight and bias decides what a linear layer computes: no hook, adapter, int8."""
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not layer._forward_pre_hooks
        and not layer._forward_hooks
        and not hasattr(layer.weight, "__tensor_flatten__")
    )
