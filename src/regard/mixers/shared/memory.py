"""Layers whose keys and values are projected from a memory: tokens that the operator computes from the input."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from regard.core import ConfigError, Contract, Cost, Grid, Inputs, Mask, Site, UnsupportedError, merge

from .heads import HeadMixer, HeadMixerConfig


@dataclass(frozen=True, kw_only=True)
class MemoryMixerConfig(HeadMixerConfig):
    """A mechanism whose operator has `memory(x, q, grid, plain)` -> tokens (B, M, C) and a bias of the logits, or None.

    Raises: ConfigError for dwc, since values do not lie on the grid of the queries; building, UnsupportedError for a
    host with rotary positions.
    """

    @property
    def contract(self) -> Contract:
        return Contract(skip={"geometry": "its values lie on another grid than its queries"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dwc:
            name = type(self).__name__
            raise ConfigError(f"{name}'s values do not lie on the grid of its queries: dwc must be 0, not {self.dwc}")

    @abstractmethod
    def sides(self, grid: Grid) -> tuple[int, int]:
        """Rows and columns of the memory, without prefix and suffix tokens."""

    def build(self, site: Site, shared: nn.Module | None = None) -> "MemoryMixer":
        if site.rotary:
            raise rotary_error(self)
        return MemoryMixer(self, site, shared)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        """The cost of every layer, with keys and values made from the tokens of the memory instead of all tokens."""
        total, rows, columns = super().cost(site, accounting), *self.sides(site.grid)
        memory = replace(site, memory=Grid.sequence(rows * columns + site.grid.extra))
        less, more = (self.projection.cost(s, "qkv").macs for s in (site, memory))
        return Cost(total.params, total.macs - less + more)


class MemoryMixer(HeadMixer):
    """The layer of a `MemoryMixerConfig`."""

    def project_heads(self, x: Tensor, grid: Grid, rope: Tensor | None = None) -> dict[str, Tensor | None]:
        return self._heads_and_bias(x, grid, plain=False)[0]

    def operator_inputs(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Tensor | None) -> Inputs:
        heads, bias = self._heads_and_bias(x, grid, plain=False)
        return Inputs(heads["q"], heads["k"], heads["v"], grid, mask=bias)

    def _heads_and_bias(self, x: Tensor, grid: Grid, plain: bool) -> tuple[dict[str, Tensor | None], Mask | None]:
        q = self.normalise_and_rotate("q", self.project(x, "q")[0], grid, None)
        operator: Any = self.operator
        memory, bias = operator.memory(x, q, grid, plain)
        k, v = self.project(memory, "kv")
        heads: dict[str, Tensor | None] = {"q": q, "k": self.normalise_and_rotate("k", k, grid, None), "v": v}
        return heads, None if bias is None else Mask(bias=bias)

    def compute(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Tensor | None, plain: bool) -> Tensor:
        self.check(x, grid, mask)
        if rope is not None:
            raise rotary_error(self.config)
        heads, bias = self._heads_and_bias(x, grid, plain)
        operator = self.operator.reference if plain else self.operator
        return self.project_output(x, merge(operator(*heads.values(), grid=grid, mask=bias)))


def rotary_error(config: HeadMixerConfig) -> UnsupportedError:
    """The error for a host with rotary positions, which the memory's tokens do not have."""
    return UnsupportedError(f"{type(config).__name__} has keys between the cells: no rotary positions")
