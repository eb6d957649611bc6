"""Spatial-reduction attention: keys and values come from a coarser map of the tokens (PVT, Wang et al. 2021, Eq. 2-3).

k, v are made from LayerNorm(Conv_{r x r, stride r}(x)), or from LayerNorm and GELU of a 1x1 convolution of the map
averaged to a fixed size (PVTv2's linear form); q from x. With ratio 1 nothing is reduced: softmax attention.
Where r does not divide the grid the map is filled up with zeros at the bottom and right (timm drops the rows).
Extra tokens are queries, and keys behind the reduced ones, as they are.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import (
    Card,
    ConfigError,
    Contract,
    Cost,
    Grid,
    GridError,
    Mask,
    Operator,
    Site,
    UnsupportedError,
    attend,
    linear,
    merge,
)
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig
from regard.mixers.shared.sdpa import sdpa

from .softmax import softmax_reference

__all__ = ["PVT"]


class MemoryMixer(HeadMixer):
    """A layer whose keys and values are made from other tokens than the queries; its operator makes those tokens.

    operator.memory(x, q, grid, plain) -> tokens (B, M, C) and what is added to the logits, or None.
    """

    def roles(self, x: Tensor, grid: Grid, rope: Tensor | None = None) -> dict[str, Tensor | None]:
        return self._made(x, grid, plain=False)[0]

    def _made(self, x: Tensor, grid: Grid, plain: bool) -> tuple[dict[str, Tensor | None], Mask | None]:
        q = self.normalised("q", self.qkv(x, "q")[0], grid, None)
        operator: Any = self.operator
        memory, bias = operator.memory(x, q, grid, plain)
        k, v = self.qkv(memory, "kv")
        return {"q": q, "k": self.normalised("k", k, grid, None), "v": v}, None if bias is None else Mask(bias=bias)

    def _apply_operator(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Tensor | None, plain: bool) -> Tensor:
        self.check(x, grid, mask)
        if rope is not None:
            raise UnsupportedError(f"{type(self.config).__name__} has keys between the cells: no rotary positions")
        made, bias = self._made(x, grid, plain)
        operator = self.operator.reference if plain else self.operator
        return self.finish(x, merge(operator(made["q"], made["k"], made["v"], grid=grid, mask=bias)))


def refuse_memory(config: HeadMixerConfig, site: Site) -> None:
    """Raises UnsupportedError for a site with rotary positions, which keys of a `MemoryMixer` do not have."""
    if site.rotary:
        raise UnsupportedError(f"{type(config).__name__} has keys between the cells: no rotary positions")


def memory_cost(config: HeadMixerConfig, site: Site, whole: Cost, memory: int) -> Cost:
    """The cost `whole` of a layer, with keys and values made from `memory` tokens instead of all."""
    projection, other = config.projection, replace(site, memory=Grid.sequence(memory))
    return Cost(whole.params, whole.macs - projection.cost(site, "qkv").macs + projection.cost(other, "qkv").macs)


@dataclass(frozen=True, kw_only=True)
class PVT(HeadMixerConfig):
    """ratio: side of the patches that become one key, 1 = none. pool: side of the averaged map of PVTv2's linear form.

    pool 0 is the convolution. Its weights start as the mean of a patch (PVT draws them anew), so that a swapped layer
    starts near the tokens that it had. dwc must be 0: values do not lie on the queries' grid.
    Raises: ConfigError for numbers below 1 (pool: 0), ratio together with pool, or dwc; building, GridError if the
    site's grid is smaller than the pooled map, UnsupportedError for a host with rotary positions.
    """

    ratio: int = 2
    pool: int = 0

    revision: ClassVar[int] = 2  # its first weights in `regard.tasks` were others
    card: ClassVar[Card] = Card(
        title="Spatial-reduction attention",
        source="Wang et al. 2021 (PVT), Eq. 2-3; 2022 (PVTv2)",
        formula="softmax(q k_r^T / sqrt(d)) v_r,  k_r, v_r of LN(Conv_{r x r, stride r}(x))",
        complexity="O(N^2 C / r^2 + N C^2)",
        query_content=True,
        key_content=True,
        dynamic="one-step",
        scaling=frozenset({"compression"}),
        expert_type="MLP of width N / r^2",
        expert_count="1",
        construction="learned strided projection",
        topology="all-to-one",
        conditions="K, V, position",
        prefix="queries, and keys behind the reduced ones",
        row_maps=False,  # its columns are not the tokens
    )
    samples: ClassVar[tuple[str, ...]] = (
        "PVT()",
        "PVT(ratio=3)",
        "PVT(pool=1)",
    )

    @property
    def contract(self) -> Contract:
        return Contract(skip={"geometry": "its values lie on another grid than its queries"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio < 1 or self.pool < 0:
            raise ConfigError(f"ratio is at least 1 and pool at least 0, not ratio={self.ratio}, pool={self.pool}")
        if self.pool and self.ratio != PVT.ratio:
            raise ConfigError(f"pool={self.pool} gives the number of keys; leave ratio={self.ratio} out")
        if self.dwc:
            raise ConfigError(f"PVT's values lie on a coarser grid than its queries: dwc must be 0, not {self.dwc}")

    def build(self, site: Site, shared: nn.Module | None = None) -> MemoryMixer:
        refuse_memory(self, site)
        return MemoryMixer(self, site, shared)

    def operator(self, site: Site) -> "PVTOperator":
        self.sides(site.grid)
        return PVTOperator(self, site)

    def sides(self, grid: Grid) -> tuple[int, int]:
        """Rows and columns of the reduced map. Raises: GridError if the grid is smaller than the pooled map."""
        if not self.pool:
            return -(-grid.height // self.ratio), -(-grid.width // self.ratio)
        if self.pool > min(grid.height, grid.width):
            raise GridError(f"pool={self.pool} is larger than {grid}; it is at most {min(grid.height, grid.width)}")
        return self.pool, self.pool

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        rows, columns = self.sides(site.grid)
        return memory_cost(self, site, super().cost(site, accounting), rows * columns + site.grid.extra)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        rows, columns = self.sides(site.grid)
        total = attend(site.grid.tokens, rows * columns + site.grid.extra, site.inner)
        if self.ratio == 1 and not self.pool:
            return total
        side = 1 if self.pool else self.ratio
        return total + linear(rows * columns, side**2 * site.dim, site.dim) + Cost(2 * site.dim, 0)


class PVTOperator(Operator):
    """reduce: the convolution (C, C, r, r), and norm: LayerNorm; None where nothing is reduced."""

    def __init__(self, config: PVT, site: Site) -> None:
        super().__init__()
        self.config = config
        side = 1 if config.pool else config.ratio
        whole = side == 1 and not config.pool
        self.reduce = None if whole else MeanConv(site.dim, side)
        self.norm = None if whole else nn.LayerNorm(site.dim)

    def memory(
        self, x: Float[Tensor, "B N C"], q: Tensor, grid: Grid, plain: bool
    ) -> tuple[Float[Tensor, "B M C"], None]:
        """The reduced tokens, extra tokens behind them."""
        if self.reduce is None or self.norm is None:
            return x, None
        rows, columns = self.config.sides(grid)
        extra, cells = grid.to_map(x)
        if self.config.pool:
            cells = _pooled(cells, rows, columns) if plain else F.adaptive_avg_pool2d(cells, (rows, columns))
        side = self.reduce.stride[0]
        cells = F.pad(cells, (0, columns * side - cells.shape[-1], 0, rows * side - cells.shape[-2]))
        tokens = _patches(cells, self.reduce) if plain else self.reduce(cells).flatten(2).mT
        tokens = self.norm(tokens).to(x.dtype)
        tokens = F.gelu(tokens) if self.config.pool else tokens
        return (tokens if not grid.extra else torch.cat([tokens, extra], 1)), None

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        return sdpa(cast(Tensor, q), cast(Tensor, k), cast(Tensor, v))

    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        return softmax_reference(cast(Tensor, q), cast(Tensor, k), cast(Tensor, v))


class MeanConv(nn.Conv2d):
    """A convolution of patches that starts as their mean, channel by channel."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__(width, width, side, stride=side)

    def reset_parameters(self) -> None:
        """The mean of a patch; biases zero."""
        with torch.no_grad():
            eye = torch.eye(self.weight.shape[0], dtype=self.weight.dtype, device=self.weight.device)
            self.weight.copy_(eye[:, :, None, None].expand_as(self.weight) / self.weight[0, 0].numel())
            cast(Tensor, self.bias).zero_()


def _patches(cells: Float[Tensor, "B C h w"], conv: nn.Conv2d) -> Float[Tensor, "B M C"]:
    """The convolution, plainly: every patch as one vector times the matrix of weights."""
    side = conv.stride[0]
    patches = cells.unflatten(2, (-1, side)).unflatten(4, (-1, side))  # (B, C, rows, r, columns, r)
    return torch.einsum("bcyixj,ocij->byxo", patches, conv.weight).flatten(1, 2) + cast(Tensor, conv.bias)


def _pooled(cells: Float[Tensor, "B C h w"], rows: int, columns: int) -> Float[Tensor, "B C r c"]:
    """Window i of n averages floor(i h / n) to ceil((i + 1) h / n) - 1."""
    height, width = cells.shape[-2:]
    bands = [cells[..., i * height // rows : -((i + 1) * height // -rows), :].mean(-2) for i in range(rows)]
    image = torch.stack(bands, -2)
    return torch.stack(
        [image[..., i * width // columns : -((i + 1) * width // -columns)].mean(-1) for i in range(columns)], -1
    )
