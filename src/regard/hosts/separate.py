"""Queries, keys and values of hosts that have their matrices, or only their biases, apart."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Projection, Site, heads
from regard.projections.linear import LinearProjection

BIASES_APART = {"q_bias": "qkv.q_bias", "v_bias": "qkv.v_bias"}
"""The host's names of biases that are apart, and those of `BiasesApart`."""


class SeparateProjection(Projection):
    """Linear children q, k and v, as far as the roles ask for them: `LinearQKV` in a host that names them apart.

    biases: the roles that have a bias.
    """

    def __init__(self, site: Site, roles: str, biases: str) -> None:
        super().__init__()
        self.roles, self.heads = roles, site.heads
        for role in roles:
            self.add_module(role, nn.Linear(site.dim, site.inner, bias=role in biases))

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        return tuple(heads(self.get_submodule(role)(x), self.heads) for role in roles)


class BiasesApart(LinearProjection):
    """One fused matrix, and biases q_bias and v_bias, as far as the roles ask for them; keys have none."""

    def __init__(self, site: Site, roles: str) -> None:
        super().__init__(replace(site, qkv_bias=False), roles)
        for role in set(roles) & set("qv"):
            self.register_parameter(f"{role}_bias", nn.Parameter(torch.zeros(site.inner)))

    def offset(self, roles: str) -> Float[Tensor, " R_inner"]:
        none = self.weight.new_zeros(len(self.weight) // len(self.roles))
        return torch.cat([self._parameters.get(f"{role}_bias", none) for role in roles])  # type: ignore[misc]


def put_apart(mixer: Any, host: Any) -> None:
    """Give a mixer with linear queries, keys and values the parts that its host has: q_proj, ... or q_bias, v_bias."""
    if not isinstance(getattr(mixer, "qkv", None), LinearProjection):
        return
    roles = mixer.config.roles
    if getattr(host, "qkv", None) is None:
        mixer.qkv = SeparateProjection(mixer.site, roles, biased(q=host.q_proj, k=host.k_proj, v=host.v_proj))
    elif getattr(host, "q_bias", None) is not None:
        mixer.qkv = BiasesApart(mixer.site, roles)


def together(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None] | None:
    """The fused weight (3 inner, C) and bias of a host's state by the mixer's names; None if it has none."""
    weights = [state.get(f"qkv.{role}.weight") for role in "qkv"]
    if "qkv.weight" in state:
        weight = state["qkv.weight"]
    elif all(part is not None and part.ndim == 2 for part in weights):
        weight = torch.cat(weights)  # type: ignore[arg-type]
    else:
        return None
    biases = [state.get(f"qkv.{role}.bias", state.get(f"qkv.{role}_bias")) for role in "qkv"]
    if all(part is None for part in biases):
        return weight, state.get("qkv.bias")
    none = weight.new_zeros(len(weight) // 3)
    return weight, torch.cat([none if part is None else part for part in biases])


def biased(**linears: nn.Linear) -> str:
    """The roles whose matrix has a bias, such as "qv" in a host without key bias."""
    return "".join(role for role, linear in linears.items() if linear.bias is not None)
