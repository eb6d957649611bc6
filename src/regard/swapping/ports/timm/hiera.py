"""Port of timm's Hiera, whose tokens are ordered by their place inside of mask units, not row by row."""

from typing import Any, ClassVar, cast

from jaxtyping import Float
from timm.models.hiera import MaskUnitAttention
from torch import Tensor, nn

from regard.core import Grid, GridError, Mixer, MixerConfig, Site
from regard.swapping.layer import Port
from regard.swapping.special_mixers import pooled_mixer

from .mobilevit import merged_grid


class TimmHiera(Port):
    """Hiera, in mask units and global; layers that pool their queries take mechanisms that have cross-attention."""

    replaces: ClassVar[tuple[type, ...]] = (MaskUnitAttention,)
    watch = "patch_embed.proj"

    @classmethod
    def query_stride(cls, module: Any) -> int:
        """Tokens that are pooled to one query: 4, or 1 where nothing is pooled."""
        return int(module.q_stride)

    @classmethod
    def splits(cls, module: Any) -> int:
        """How often the tokens of a mask unit, before their pooling, are split by 2 x 2."""
        return (cls.query_stride(module) * int(module.window_size)).bit_length() // 2

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        stride = cls.query_stride(module)
        known = stride in (1, 4) and 4 ** cls.splits(module) == stride * module.window_size
        return "" if known else "its mask units are not squares of 2, 4, 8, ... cells, pooled by 2 x 2"

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        side, tokens = 2 ** cls.splits(module), inputs[0].shape[1]
        if module.use_mask_unit_attn:
            return Grid(side, side)
        grid = merged_grid(cast(Grid, watched), tokens)
        if grid.cells != tokens:
            raise GridError(f"{tokens} tokens are not all cells of {watched}: a global layer needs whole images")
        return grid

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        host: Any = self.host
        side = 2 if self.query_stride(host) > 1 else 1
        return pooled_mixer(super().build_mixer(config, site, shared), host.proj.out_features, (side, side), shared)

    def forward(self, x: Tensor) -> Tensor:
        """The output for tokens in Hiera's order. Raises: GridError for tokens that were dropped in a global layer."""
        host: Any = self.host
        splits = self.splits(host)
        if not host.use_mask_unit_attn:
            return self._mix(x, self.call_grid(host, (x,), self.source.grid(0)), splits)
        side = 2**splits
        units = x.unflatten(1, (side * side, -1)).transpose(1, 2)
        y = self._mix(units.flatten(0, 1), Grid(side, side), splits)
        return y.unflatten(0, units.shape[:2]).transpose(1, 2).flatten(1, 2)

    def _mix(self, x: Tensor, grid: Grid, splits: int) -> Tensor:
        down, across = getattr(self.mixer, "stride", (1, 1))
        y = self.mixer(row_by_row(x, grid, splits), grid)
        return by_offset(y, Grid(grid.height // down, grid.width // across), splits - (down > 1))


def _order(splits: int) -> list[int]:
    """Axes (row, column) of each split of Hiera's tokens, the finest first, in the order rows, then columns."""
    return [*range(2 * splits, -1, -2), *range(2 * splits + 1, 0, -2)]


def row_by_row(x: Float[Tensor, "B N C"], grid: Grid, splits: int) -> Float[Tensor, "B N C"]:
    """Hiera's tokens, split `splits` times by 2 x 2, the finest offsets first, in the order of a map."""
    sides = (*(2,) * (2 * splits), grid.height >> splits, grid.width >> splits)
    axes = [axis + 1 for axis in _order(splits)]
    return x.unflatten(1, sides).permute(0, *axes, len(axes) + 1).flatten(1, -2)


def by_offset(x: Float[Tensor, "B N C"], grid: Grid, splits: int) -> Float[Tensor, "B N C"]:
    """The inverse of `row_by_row`."""
    twos, order = (2,) * splits, _order(splits)
    axes = [order.index(axis) + 1 for axis in range(len(order))]
    sides = (grid.height >> splits, *twos, grid.width >> splits, *twos)
    return x.unflatten(1, sides).permute(0, *axes, len(axes) + 1).flatten(1, -2)


PORTS: tuple[type[Port], ...] = (TimmHiera,)
