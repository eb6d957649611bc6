"""Spatial-reduction attention: keys and values come from a coarser map of the tokens (PVT, Wang et al. 2021, Eq. 2-3).

k and v are projected from LayerNorm(Conv_{r x r, stride r}(x)), or from LayerNorm and GELU of a 1x1 convolution of the
map averaged to a fixed size (PVTv2's linear form); q from x. With ratio 1 nothing is reduced: softmax attention.
Where r does not divide the grid the map is padded with zeros at the bottom and right (timm drops those rows).
Prefix and suffix tokens are queries, and are appended unchanged to the reduced keys.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Cost, Grid, GridError, Inputs, Operator, Site, attention_cost, linear_cost

from .shared.memory import MemoryMixerConfig
from .shared.sdpa import sdpa
from .softmax import softmax_reference

__all__ = ["PVT"]


@dataclass(frozen=True, kw_only=True)
class PVT(MemoryMixerConfig):
    """ratio: side of the patches that become one key, 1 = none. pool: side of the averaged map of PVTv2's linear form.

    pool 0 is the convolution. Its weights start as the mean of a patch (PVT draws them at random), so that a swapped
    layer starts near the keys and values of the host. dwc must be 0: values do not lie on the queries' grid.
    Raises: ConfigError for numbers below 1 (pool: 0), ratio together with pool, or dwc; building, GridError if the
    site's grid is smaller than the pooled map, UnsupportedError for a host with rotary positions.
    """

    ratio: int = 2
    pool: int = 0

    revision = 2  # 2: other initial weights in `regard.lab.tasks`
    card = Card(
        title="Spatial-reduction attention", source="Wang et al. 2021 (PVT), Eq. 2-3; 2022 (PVTv2)",
        formula="softmax(q k_r^T / sqrt(d)) v_r,  k_r, v_r of LN(Conv_{r x r, stride r}(x))",
        complexity="O(N^2 C / r^2 + N C^2)", query_content=True, key_content=True, dynamic="one-step",
        scaling=frozenset({"compression"}), expert_type="MLP of width N / r^2", expert_count="1",
        construction="learned strided projection", topology="all-to-one", conditions="K, V, position",
        prefix="queries, and keys appended to the reduced ones", row_maps=False,  # its columns are not the tokens
    )  # fmt: skip
    samples = ("PVT()", "PVT(ratio=3)", "PVT(pool=1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio < 1 or self.pool < 0:
            raise ConfigError(f"ratio is at least 1 and pool at least 0, not ratio={self.ratio}, pool={self.pool}")
        if self.pool and self.ratio != PVT.ratio:
            raise ConfigError(f"pool={self.pool} gives the number of keys; remove ratio={self.ratio}")

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

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        rows, columns = self.sides(site.grid)
        total = attention_cost(site.grid.tokens, rows * columns + site.grid.extra, site.inner)
        if self.ratio == 1 and not self.pool:
            return total
        side = 1 if self.pool else self.ratio
        return total + linear_cost(rows * columns, side**2 * site.dim, site.dim) + Cost(2 * site.dim, 0)


class PVTOperator(Operator):
    """reduce: the convolution (C, C, r, r), and norm: LayerNorm; None where nothing is reduced."""

    def __init__(self, config: PVT, site: Site) -> None:
        super().__init__()
        self.config = config
        side = 1 if config.pool else config.ratio
        unreduced = side == 1 and not config.pool
        self.reduce = None if unreduced else MeanConv(site.dim, side)
        self.norm = None if unreduced else nn.LayerNorm(site.dim)

    def memory(
        self, x: Float[Tensor, "B N C"], q: Tensor, grid: Grid, plain: bool
    ) -> tuple[Float[Tensor, "B M C"], None]:
        """The reduced tokens, then prefix and suffix tokens."""
        if self.reduce is None or self.norm is None:
            return x, None
        rows, columns = self.config.sides(grid)
        extra, cells = grid.to_map(x)
        if self.config.pool:
            cells = _pool(cells, rows, columns) if plain else F.adaptive_avg_pool2d(cells, (rows, columns))
        side = self.reduce.stride[0]
        cells = F.pad(cells, (0, columns * side - cells.shape[-1], 0, rows * side - cells.shape[-2]))
        tokens = _patches(cells, self.reduce) if plain else self.reduce(cells).flatten(2).mT
        tokens = self.norm(tokens).to(x.dtype)
        tokens = F.gelu(tokens) if self.config.pool else tokens
        return (tokens if not grid.extra else torch.cat([tokens, extra], 1)), None

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        return (softmax_reference if plain else sdpa)(inputs.q, inputs.k, inputs.v)


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
    """The convolution in plain form: every patch as one vector times the matrix of weights."""
    side = conv.stride[0]
    patches = cells.unflatten(2, (-1, side)).unflatten(4, (-1, side))  # (B, C, rows, r, columns, r)
    return torch.einsum("bcyixj,ocij->byxo", patches, conv.weight).flatten(1, 2) + cast(Tensor, conv.bias)


def _pool(cells: Float[Tensor, "B C h w"], rows: int, columns: int) -> Float[Tensor, "B C r c"]:
    """Window i of n averages floor(i h / n) to ceil((i + 1) h / n) - 1."""
    height, width = cells.shape[-2:]
    bands = [cells[..., i * height // rows : -((i + 1) * height // -rows), :].mean(-2) for i in range(rows)]
    image = torch.stack(bands, -2)
    bounds = ((i * width // columns, -((i + 1) * width // -columns)) for i in range(columns))
    return torch.stack([image[..., first:last].mean(-1) for first, last in bounds], -1)
