"""Queries, keys and values of hosts with separate matrices or biases, or another order of rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Projection, Site, heads
from regard.mixers.shared.heads import HeadLayer

SEPARATE_BIASES = {"q_bias": "qkv.q_bias", "v_bias": "qkv.v_bias"}
"""The host's names of separate biases -> those of `SeparateBiases`."""
SEPARATE_MATRICES = {"q_proj": "qkv.q_proj", "k_proj": "qkv.k_proj", "v_proj": "qkv.v_proj"}
"""The host's names of separate matrices -> those of `SeparateProjection`, which tools find by the host's names."""
SHORT_MATRICES = {"query": "qkv.q", "key": "qkv.k", "value": "qkv.v"}
"""Other names of separate matrices -> those of `SeparateProjection`."""


class SeparateProjection(Projection):
    """A linear child for each role in use: `LinearQKV` of a host with three matrices.

    biases: the roles that have a bias. ending: of the children's names, q_proj, k_proj and v_proj for "_proj".
    groups: query heads that share one head of keys and values.
    """

    def __init__(self, site: Site, roles: str, biases: str, ending: str = "", groups: int = 1) -> None:
        super().__init__()
        self.heads, self.ending = site.heads, ending
        self.repeats = {"q": 1, "k": groups, "v": groups}
        for role in roles:
            inner = site.inner // self.repeats[role]
            self.add_module(role + ending, nn.Linear(site.dim, inner, bias=role in biases))

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        return tuple(self._heads(role, self.get_submodule(role + self.ending)(x)) for role in roles)

    def _heads(self, role: str, y: Tensor) -> Tensor:
        times = self.repeats[role]
        y = heads(y, self.heads // times)
        return y if times == 1 else y.repeat_interleave(times, 1)


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


class TokenConv(nn.Conv2d):
    """A 1x1 convolution that takes tokens (B, N, C) instead of a map."""

    def forward(self, x: Float[Tensor, "*B N C"]) -> Float[Tensor, "*B N D"]:
        return F.linear(x, self.weight.flatten(1), self.bias)


class SeparateBiases(nn.Linear):
    """One fused matrix, and biases q_bias and v_bias for the roles in use; keys have none."""

    def __init__(self, site: Site, roles: str) -> None:
        super().__init__(site.dim, len(roles) * site.inner, bias=False)
        self.roles = roles
        for role in set(roles) & set("qv"):
            self.register_parameter(f"{role}_bias", nn.Parameter(torch.zeros(site.inner)))

    def forward(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B N R_inner"]:
        zeros = self.weight.new_zeros(len(self.weight) // len(self.roles))
        biases = [self._parameters.get(f"{role}_bias", zeros) for role in self.roles]
        return F.linear(x, self.weight, torch.cat(biases))  # type: ignore[arg-type]


def match_host_projection(mixer: Any, host: nn.Module, names: Mapping[str, str]) -> None:
    """Give a mixer with linear queries, keys and values the same parts as its host, in place.

    These are q and kv, or a matrix for each role, or q_bias and v_bias. Where the host has one matrix and one bias,
    nothing changes. names: `Port.parameter_names`, which say the host's name of the matrix qkv.q_proj or qkv.q.
    """
    if not isinstance(mixer, HeadLayer) or type(getattr(mixer, "qkv", None)) is not nn.Linear:
        return
    roles = mixer.config.roles
    parts, ending = _separate(host, names)
    if hasattr(host, "kv"):
        mixer.qkv = PairProjection(mixer.site, roles)
    elif parts:
        groups = getattr(host, "num_kv_groups", None) or 1
        mixer.qkv = SeparateProjection(mixer.site, roles, roles_with_bias(**parts), ending, groups)
    elif getattr(host, "q_bias", None) is not None:
        mixer.qkv = SeparateBiases(mixer.site, roles)


def _separate(host: nn.Module, names: Mapping[str, str]) -> tuple[dict[str, nn.Linear], str]:
    """The host's linear layers by their roles, and the ending of their names in the mixer; {} where it has one."""
    linears = {
        names[path]: module
        for path, module in host.named_modules(remove_duplicate=False)
        if path in names and isinstance(module, nn.Linear)
    }
    for ending in ("_proj", ""):
        parts = {role: linears[name] for role in "qkv" if (name := f"qkv.{role}{ending}") in linears}
        if len(parts) == len("qkv"):
            return parts, ending
    return {}, ""


def keep_fused(mixer: HeadLayer, host: Any) -> None:
    """Give a mixer, in place, a map like the host's `qkv`, a linear layer or a 1x1 convolution, with all its rows."""
    (rows, channels), bias = host.qkv.weight.shape[:2], host.qkv.bias is not None
    linear = host.qkv.weight.ndim == 2
    mixer.qkv = nn.Linear(channels, rows, bias) if linear else TokenConv(channels, rows, 1, bias=bias)
    mixer.qkv_roles = "qkv"


def split_matrices(mixer: Any, q: nn.Linear, k: nn.Linear, v: nn.Linear) -> None:
    """Give a mixer with linear queries, keys and values one matrix for each, with the biases that the host's have."""
    if isinstance(mixer, HeadLayer) and type(getattr(mixer, "qkv", None)) is nn.Linear:
        mixer.qkv = SeparateProjection(mixer.site, mixer.config.roles, roles_with_bias(q=q, k=k, v=v))


def fused_roles(name: str) -> str:
    """The roles whose rows a tensor of the host has, in order, by the mixer's name of it; "" if it is not fused."""
    return "qkv" if name in ("qkv.weight", "qkv.bias") else "kv" if name.startswith("qkv.kv.") else ""


def joined_qkv(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None] | None:
    """The joined weight (3 inner, C) and bias of q, k and v of a state by the mixer's names; None if it has none."""
    if "qkv.weight" in state:
        weight = state["qkv.weight"].flatten(1)
        biases = _joined_biases([state.get(f"qkv.{role}_bias") for role in "qkv"], weight.chunk(3))
        return weight, state.get("qkv.bias", biases)
    for names in (("q", "k", "v"), ("q_proj", "k_proj", "v_proj"), ("q", "kv")):
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
