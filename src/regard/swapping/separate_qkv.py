"""Projections for hosts with separate matrices, or only separate biases, of queries, keys and values."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Projection, Site, heads
from regard.projections.linear import LinearProjection

SEPARATE_BIASES = {"q_bias": "qkv.q_bias", "v_bias": "qkv.v_bias"}
"""The host's names of separate biases -> those of `SeparateBiases`."""
SEPARATE_MATRICES = {"q_proj": "qkv.q", "k_proj": "qkv.k", "v_proj": "qkv.v"}
"""The host's names of separate matrices -> those of `SeparateProjection`."""
SHORT_MATRICES = {"query": "qkv.q", "key": "qkv.k", "value": "qkv.v"}
"""Other names of separate matrices -> those of `SeparateProjection`."""


class SeparateProjection(Projection):
    """Linear children q, k and v for the roles in use: `LinearQKV` of a host with three matrices.

    biases: the roles that have a bias.
    """

    def __init__(self, site: Site, roles: str, biases: str) -> None:
        super().__init__()
        self.roles, self.heads = roles, site.heads
        for role in roles:
            self.add_module(role, nn.Linear(site.dim, site.inner, bias=role in biases))

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        return tuple(heads(self.get_submodule(role)(x), self.heads) for role in roles)


class PairProjection(Projection):
    """Linear children q, and kv with the rows of keys and values, for the roles in use: `LinearQKV` of PVT."""

    def __init__(self, site: Site, roles: str) -> None:
        super().__init__()
        self.roles, self.heads = roles, site.heads
        self.pair = "".join(role for role in "kv" if role in roles)
        if "q" in roles:
            self.q = nn.Linear(site.dim, site.inner, bias=site.qkv_bias)
        if self.pair:
            self.kv = nn.Linear(site.dim, len(self.pair) * site.inner, bias=site.qkv_bias)

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        projected = {"q": self.q(x)} if "q" in roles else {}
        if set(roles) & set(self.pair):
            projected |= zip(self.pair, self.kv(x).chunk(len(self.pair), -1), strict=True)
        return tuple(heads(projected[role], self.heads) for role in roles)


class HostMap(Projection):
    """A host's own fused map `map` of queries, keys and values: a linear layer or a 1x1 convolution.

    by_head: whether its rows are ordered (heads, 3, width), not (3, heads, width). All its rows are kept.
    """

    def __init__(self, host_map: nn.Linear | nn.Conv2d, heads: int, by_head: bool) -> None:
        super().__init__()
        self.map, self.heads, self.by_head, self.roles = copy.deepcopy(host_map), heads, by_head, "qkv"

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        y = on_tokens(self.map, x)
        if self.by_head:
            parts = y.unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        else:
            parts = y.unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return tuple(parts["qkv".index(role)].transpose(1, 2) for role in roles)


class TokenConv(nn.Conv2d):
    """A 1x1 convolution that takes tokens (B, N, C) instead of a map."""

    def forward(self, x: Tensor) -> Tensor:
        return on_tokens(self, x)


def on_tokens(layer: nn.Linear | nn.Conv2d, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B N D"]:
    """A linear layer or a 1x1 convolution, applied to tokens."""
    return F.linear(x, layer.weight.flatten(1), layer.bias) if isinstance(layer, nn.Conv2d) else layer(x)


class SeparateBiases(LinearProjection):
    """One fused matrix, and biases q_bias and v_bias for the roles in use; keys have none."""

    def __init__(self, site: Site, roles: str) -> None:
        super().__init__(replace(site, qkv_bias=False), roles)
        for role in set(roles) & set("qv"):
            self.register_parameter(f"{role}_bias", nn.Parameter(torch.zeros(site.inner)))

    def offset(self, roles: str) -> Float[Tensor, " R_inner"]:
        zeros = self.weight.new_zeros(len(self.weight) // len(self.roles))
        return torch.cat([self._parameters.get(f"{role}_bias", zeros) for role in roles])  # type: ignore[misc]


def match_host_projection(mixer: Any, host: Any) -> None:
    """Give a mixer with linear queries, keys and values the same parts as its host, in place.

    These are q and kv, or q_proj, k_proj and v_proj, or q_bias and v_bias. Where the host has one matrix and one bias,
    nothing changes.
    """
    if not isinstance(getattr(mixer, "qkv", None), LinearProjection):
        return
    roles = mixer.config.roles
    if hasattr(host, "kv"):
        mixer.qkv = PairProjection(mixer.site, roles)
    elif getattr(host, "q_proj", None) is not None:
        mixer.qkv = SeparateProjection(mixer.site, roles, roles_with_bias(q=host.q_proj, k=host.k_proj, v=host.v_proj))
    elif getattr(host, "q_bias", None) is not None:
        mixer.qkv = SeparateBiases(mixer.site, roles)


def split_matrices(mixer: Any, q: nn.Linear, k: nn.Linear, v: nn.Linear) -> None:
    """Give a mixer with linear queries, keys and values one matrix for each, with the biases that the host's have."""
    if isinstance(getattr(mixer, "qkv", None), LinearProjection):
        mixer.qkv = SeparateProjection(mixer.site, mixer.config.roles, roles_with_bias(q=q, k=k, v=v))


def fused_roles(name: str) -> str:
    """The roles whose rows a tensor of the host has, in order, by the mixer's name of it; "" if it is not fused."""
    return "qkv" if name in ("qkv.weight", "qkv.bias") else "kv" if name.startswith("qkv.kv.") else ""


def joined_qkv(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None] | None:
    """The joined weight (3 inner, C) and bias of q, k and v of a state by the mixer's names; None if it has none."""
    if "qkv.weight" in state:
        weight = state["qkv.weight"]
        biases = _joined_biases([state.get(f"qkv.{role}_bias") for role in "qkv"], weight.chunk(3))
        return weight, state.get("qkv.bias", biases)
    for names in (("q", "k", "v"), ("q", "kv")):
        parts = [state[f"qkv.{name}.weight"] for name in names if f"qkv.{name}.weight" in state]
        if len(parts) == len(names) and all(part.ndim == 2 for part in parts):
            return torch.cat(parts), _joined_biases([state.get(f"qkv.{name}.bias") for name in names], parts)
    return None


def _joined_biases(biases: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    """All biases as one vector, with zeros where one is missing; None where all are missing."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in pairs])


def roles_with_bias(**linears: nn.Linear) -> str:
    """The roles whose matrix has a bias, such as "qv" in a host without key bias."""
    return "".join(role for role, linear in linears.items() if linear.bias is not None)
