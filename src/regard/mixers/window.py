"""Window attention with shifts and a table of relative positions (Swin, Liu et al. 2021, Eq. 3-4).

The grid is divided into size x size windows; tokens of a window attend to each other. With a shift, the first window
starts `shift` cells from the top left; cells before it share windows with the other end of the grid, without attention
between the two. Where windows do not divide the grid they are smaller at the bottom and right: the published code pads
them with zero tokens and lets queries attend to the padding; here queries attend to tokens only.
In MaxViT's grid attention (Tu et al. 2022) a window is spread over the whole map instead: along each side its
`size` cells are ceil(side / size) apart, and the last are missing where this does not divide the side.
Prefix and suffix tokens are in no window: they attend to all tokens and all attend to them, without a position bias.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import Card, ConfigError, Cost, Grid, Inputs, ShapeError, Site, operator_function
from regard.core.mask import Mask, hide, softmax_rows

from .shared import tiles as tiling
from .shared.bias_table import BiasTableOperator
from .shared.checks import padding_only
from .shared.executions import TILED
from .shared.heads import HeadMixerConfig
from .shared.kept import kept
from .shared.routed_attention import names_triton
from .shared.sdpa import sdpa
from .shared.tiles import Side, Tiles

__all__ = ["Window", "window", "window_reference"]

Pattern = Literal["block", "grid"]


@operator_function(depth=True)
def window_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, size: Side, *,
    shift: Side = 0, pattern: Pattern = "block", table: Float[Tensor, "H ..."] | None = None,
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax over all keys; those in another window are at -inf. Cell y is in window (y - shift) // size, and in the
    pattern "grid" in window y modulo ceil(height / size).
    """
    mask = padding_only("window", mask)
    k, v = hide(k, mask), hide(v, mask)
    sizes, shifts = tiling.along_sides(size, grid), tiling.along_sides(shift, grid, 0)
    places = list(_places(grid.sides, q.device))  # of each cell along each side
    if pattern == "grid":
        steps = tiling.parts_of(grid.sides, sizes)  # from a cell to the next of its window
        windows = [place % step for place, step in zip(places, steps, strict=True)]
        places = [place // step for place, step in zip(places, steps, strict=True)]
    else:
        windows = [(place - first) // length for place, first, length in zip(places, shifts, sizes, strict=True)]
    number = torch.stack(windows)
    together = (number[:, :, None] == number[:, None]).all(0)  # (cells, cells)
    cells = q.new_zeros(()).expand(q.shape[1], grid.cells, grid.cells)
    if table is not None:  # offsets are outside of it only between different windows
        offsets = [
            (place[:, None] - place + length - 1).clamp(0, 2 * length - 2)
            for place, length in zip(places, sizes, strict=True)
        ]
        index: tuple[slice | Tensor, ...] = (slice(None), *offsets)
        cells = table[index]
    bias = tiling.pad_pairs(cells.masked_fill(~together, -torch.inf), grid)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return softmax_rows(mask.add_to(logits)).to(v.dtype) @ v


@operator_function(depth=True)
def window(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, size: Side, *,
    shift: Side = 0, pattern: Pattern = "block", table: Float[Tensor, "H ..."] | None = None,
    scale: float | None = None, mask: Mask | None = None, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Attention within windows of `size` cells (a side, or (rows, columns)), the first of which starts at `shift`.

    Windows are of one frame, unless size is (frames, rows, columns).
    pattern: "grid" spreads the cells of a window over the map. table (H, 2 rows - 1, 2 columns - 1), with several
    frames (H, 2 frames - 1, ...): added logits by offset within the window, entry (query - key + size - 1). scale: None
    = d^-0.5. mask: padding only; a query without any key gives zeros. A window as large as the grid, or larger, gives
    softmax attention. execution: "tiles" are cut, for PyTorch's fused attention; "triton", for GPUs, reads them in
    place; or "auto", today tiles.
    Raises: ShapeError, GridError for tensors that do not fit; UnsupportedError for other masks or an execution that
    cannot run here, ConfigError for an unknown one.
    """
    grid.check(q)
    mask = padding_only("window", mask)
    k, v = hide(k, mask), hide(v, mask)
    sizes, shifts = tiling.along_sides(size, grid), tiling.along_sides(shift, grid, 0)
    _check_sizes(sizes, shifts, pattern, len(grid.sides))
    if table is not None and tuple(table.shape) != (expected := _table_shape(q.shape[1], sizes)):
        raise ShapeError(f"window: table has shape {tuple(table.shape)}; expected {expected}")
    size, shifts, table = _within(grid.sides, sizes, shifts, pattern, table)
    spread = pattern == "grid"
    tiles = tiling.grid_tiles(grid, size, q.device) if spread else tiling.fixed_size_tiles(grid, size, shifts, q.device)
    if names_triton(TILED, "tiles", execution, q):
        return _in_place(q, k, v, tiles, grid, table, scale, mask)
    (_, q_cells), (k_extra, k_cells), (v_extra, v_cells) = (tiling.split_tokens(x, grid) for x in (q, k, v))
    keys, values = _with_extra(tiles.cut(k_cells), k_extra), _with_extra(tiles.cut(v_cells), v_extra)
    bias = _logit_bias(tiles, table, mask, grid, q)
    queries = tiles.cut(q_cells)  # (B, H, T, A, d)
    if bias is not None:  # (B | 1, H | 1, T, A | 1, A + E)
        bias = bias.expand(*q.shape[:2], *bias.shape[2:]).flatten(0, 1)
    out = sdpa(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), attn_mask=bias, scale=scale)
    cells = tiles.join(out.unflatten(0, q.shape[:2]))
    return tiling.join_global_tokens(cells, q, k, v, grid, scale, mask)


def _in_place(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, grid: Grid, table: Tensor | None, scale: float | None, mask: Mask
) -> Tensor:
    """By the Triton kernel, imported where it runs, since Triton is not everywhere."""
    from .shared.tile_triton import tile_attention

    bias = None if table is None else _offsets(table, tiles.size)
    tables = *_token_tables(tiles, grid), None, None
    out = tile_attention(q, k, v, tables, tiles.area, bias=bias, keep=mask.keep, scale=scale)
    return tiling.join_global_tokens(out[..., grid.span, :] if grid.extra else out, q, k, v, grid, scale, mask)


@kept
def _token_tables(tiles: Tiles, grid: Grid) -> tuple[Tensor, Tensor]:
    """Token and part of each slot, then of prefix and suffix tokens, whose part is -1: both (T, A + E)."""
    cell, real, part, *_ = tiles.tables
    extra, _ = tiling.split_tokens(torch.arange(grid.tokens, device=cell.device)[:, None], grid)
    tokens = torch.cat([torch.where(real, cell + grid.prefix, -1), extra.mT.expand(tiles.number, -1)], 1)
    parts = torch.nn.functional.pad(part, (0, grid.extra), value=-1)
    return tokens.int(), parts.int()


def _table_shape(heads: int, size: tuple[int, ...]) -> tuple[int, ...]:
    """Of a bias for each offset within a window."""
    return (heads, *(2 * length - 1 for length in size))


def _places(sides: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """For each side, the place of every cell (cells,) along it, row by row."""
    along = [torch.arange(side, device=device) for side in sides]
    return tuple(place.flatten() for place in torch.meshgrid(*along, indexing="ij"))


def _within(
    sides: tuple[int, ...], size: tuple[int, ...], shift: tuple[int, ...], pattern: Pattern, table: Tensor | None
) -> tuple[tuple[int, ...], tuple[int, ...], Tensor | None]:
    """Size, shift and table of windows that are not larger than the grid, with the same attention.

    A window larger than the grid has slots that no cell can be in, and its table offsets that no two cells have. A
    shift beyond the grid parts nothing. In the pattern "grid" only as many cells are kept as the largest window has.
    """
    least = tuple(min(length, side) for length, side in zip(size, sides, strict=True))
    if pattern == "grid":
        least = tiling.parts_of(sides, tiling.parts_of(sides, least))
    first = tuple(by if by < side else 0 for by, side in zip(shift, sides, strict=True))
    if table is not None and least != size:
        table = table[:, *(slice(old - new, old + new - 1) for old, new in zip(size, least, strict=True))]
    return least, first, table


def _with_extra(tiles: Tensor, extra: Tensor) -> Tensor:
    """Prefix and suffix tokens (B, H, E, d) appended to the slots of every window (B, H, T, A, d)."""
    if not extra.shape[-2]:
        return tiles
    return torch.cat([tiles, extra[:, :, None].expand(-1, -1, tiles.shape[2], -1, -1)], -2)


def _logit_bias(tiles: Tiles, table: Tensor | None, mask: Mask, grid: Grid, like: Tensor) -> Tensor | None:
    """A bias of the logits, or without a table a mask of allowed keys: (B | 1, H | 1, T, A | 1, A + E)."""
    allowed = None if tiles.even else _in_one_part(tiles, grid.extra)
    if mask.keep is not None:
        extra, cells = tiling.split_keep(mask.keep, grid)
        keep = torch.cat([cells[:, tiles.tables.cell], extra[:, None].expand(-1, tiles.number, -1)], -1)
        keep = keep[:, None, :, None]
        allowed = keep if allowed is None else allowed & keep
    if table is None:
        return allowed
    bias = _offsets(table, tiles.size).to(like.dtype)  # (H, A, A)
    bias = torch.nn.functional.pad(bias, (0, grid.extra))[None, :, None]
    if allowed is None:
        return bias.expand(-1, -1, tiles.number, -1, -1)
    return torch.where(allowed, bias, -torch.inf)


@kept
def _in_one_part(tiles: Tiles, extra: int) -> Tensor:
    """Whether a query may attend to a key of its window, and to prefix and suffix tokens: (1, 1, T, A, A + E)."""
    _, real, part, *_ = tiles.tables
    same = (part[:, :, None] == part[:, None]) & real[:, None]  # (T, A, A)
    same = same | ~real[:, :, None]  # the query of an empty slot keeps keys, so that no row is empty; it is not used
    return torch.nn.functional.pad(same, (0, extra), value=True)[None, None]


def _offsets(table: Tensor, size: tuple[int, ...]) -> Tensor:
    """The table's entry for every pair of slots, (H, A, A)."""
    return table.flatten(1).index_select(1, _entries(size, table.device)).unflatten(1, (math.prod(size), -1))


@kept
def _entries(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Which entry of the flat table belongs to every pair of slots, (A A,)."""
    index = torch.zeros(1, 1, dtype=torch.long, device=device)
    for place, length in zip(_places(size, device), size, strict=True):
        index = index * (2 * length - 1) + place[:, None] - place + length - 1
    return index.flatten()


def _check_sizes(size: tuple[int, ...], shift: tuple[int, ...], pattern: Pattern, sides: int) -> None:
    if len(size) != sides or len(shift) != sides or min(size) < 1:
        raise ConfigError(
            f"a window has at least 1x1 cells: give a side or (rows, columns), not size={size}, shift={shift}"
        )
    if not all(0 <= o < s for o, s in zip(shift, size, strict=True)):
        raise ConfigError(f"a shift is at least 0 and below the window's side, not shift={shift} for size={size}")
    if pattern == "grid" and any(shift):
        raise ConfigError(f'windows of the pattern "grid" have no shift; give shift=0, not shift={shift}')


@dataclass(frozen=True, kw_only=True)
class Window(HeadMixerConfig):
    """size: side of a window, or (rows, columns). shift: where the first window starts (Swin: alternately 0 and 3).
    On clips windows are of one frame, unless both are (frames, rows, columns).

    pattern: "block", or "grid" for windows that are spread over the map (MaxViT: alternately, both of size 7).
    table: whether to add a learned bias by relative position, (2 size - 1)^2 numbers per head. It starts at 0, so that
    it does not change a swapped layer (Swin starts it with standard deviation 0.02). scale: None = d^-0.5.
    Raises: ConfigError for a size below 1, a shift that is not below the size, or one of the pattern "grid".
    """

    size: int | tuple[int, int] | tuple[int, int, int] = 7
    shift: int | tuple[int, int] | tuple[int, int, int] = 0
    table: bool = True
    scale: float | None = None
    pattern: Pattern = "block"

    card = Card(
        title="Window attention", source="Liu et al. 2021 (Swin), Eq. 3-4",
        formula="softmax(q K_w^T / sqrt(d) + B) V_w,  w = the query's window", complexity="O(N w^2 C)",
        query_content=True, key_content=True, relative_position=True, dynamic="one-step",
        scaling=frozenset({"routing"}), expert_type="MLP of width w^2", expert_count="N / w^2",
        construction="locality prior", topology="N/w^2 x w^2-to-one", conditions="position",
        prefix="global: attend to all tokens and are attended by all; in no window",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    samples = (
        "Window(size=3)", "Window(size=(2, 4), shift=(1, 2))", "Window(size=2, shift=1, table=False, dwc=3)",
        'Window(size=(2, 3), pattern="grid")',
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        size = tiling.pair(self.size)
        shift = (self.shift,) * len(size) if isinstance(self.shift, int) else self.shift
        _check_sizes(size, shift, self.pattern, len(size))

    def operator(self, site: Site) -> "WindowOperator":
        return WindowOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """All slots of all windows, and prefix and suffix tokens; "paper" counts 2 N w^2 C for the patch tokens."""
        grid, size = site.grid, tiling.along_sides(self.size, site.grid)
        params = math.prod(_table_shape(site.heads, size)) if self.table else 0
        if accounting == "paper":
            return Cost(params, 2 * grid.cells * math.prod(size) * site.inner)
        size, _, _ = _within(grid.sides, size, (0,) * len(size), self.pattern, None)
        area = math.prod(size)
        slots = math.prod(tiling.parts_of(grid.sides, size)) * area
        return Cost(params, 2 * (slots * (area + grid.extra) + grid.extra * grid.tokens) * site.inner)


class WindowOperator(BiasTableOperator):
    """table (H, 2 rows - 1, 2 columns - 1), or None. execution: see `window`."""

    def __init__(self, config: Window, site: Site, execution: str = "auto") -> None:
        super().__init__(_table_shape(site.heads, tiling.along_sides(config.size, site.grid)), config.table)
        self.config, self.execution = config, execution

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form = window_reference if plain else partial(window, execution=self.execution)
        config, q = self.config, inputs.q
        return form(
            *(q, inputs.k, inputs.v, inputs.grid, config.size), shift=config.shift, pattern=config.pattern,
            table=self.table_like(q), scale=config.scale, mask=inputs.mask,
        )  # fmt: skip
