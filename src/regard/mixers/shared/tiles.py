"""Tiles: rectangular groups of grid cells, for mechanisms that route or restrict attention by position.

On a grid with several frames they are boxes: each pair (down, across) here is then a triple that begins with frames.

A tile has a fixed number of slots; where tiles do not divide the grid some slots are empty, and mechanisms mask them.
The tables are computed on the device, without synchronisation with the CPU, and kept.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from regard.core import ConfigError, Grid, GridError, Mask

from .kept import kept
from .sdpa import sdpa

Side = int | tuple[int, ...]
"""A side of squares, (rows, columns), or (frames, rows, columns)."""


def pair(side: Side) -> tuple[int, ...]:
    """(rows, columns), or the triple that is given."""
    return (side, side) if isinstance(side, int) else side


def along_sides(side: Side, grid: Grid, frames: int = 1) -> tuple[int, ...]:
    """A number for each side of the grid; `frames` where it has several and only (rows, columns) are given.

    Raises: ConfigError for more numbers.
    """
    numbers, sides = pair(side), len(grid.sides)
    numbers = (frames, *numbers) if len(numbers) == 2 < sides else numbers
    if len(numbers) != sides:
        raise ConfigError(f"{side} are {len(numbers)} numbers for the {sides} sides of {grid}")
    return numbers


class SlotTables(NamedTuple):
    """cell (T, A): the cell in a slot, 0 in empty slots. real (T, A): slots that are not empty. part (T, A): slots of
    one tile with different numbers are not neighbours in the image (a shift wraps around). slot (cells,): the flat
    index of the slot of each cell. tile (cells,): the tile of each cell.
    """

    cell: Int[Tensor, "T A"]
    real: Bool[Tensor, "T A"]
    part: Int[Tensor, "T A"]
    slot: Int[Tensor, " cells"]
    tile: Int[Tensor, " cells"]


@dataclass(frozen=True)
class Tiles:
    """T tiles of A slots over h x w cells. counts: tiles (down, across). size: slots of a tile (rows, columns).

    kind: "size": all tiles have their size, and the first starts `shift` cells from the top left; "balanced": their
    sides differ by one cell at most; "spread": the cells of a tile are as far apart as there are tiles.
    """

    grid: Grid
    counts: tuple[int, ...]
    size: tuple[int, ...]
    kind: Literal["size", "balanced", "spread"]
    shift: tuple[int, ...]
    device: torch.device | None

    @property
    def even(self) -> bool:
        """Whether no slot is empty and nothing wraps around: cells are then cut and joined by reshaping."""
        fits = (n * size == side for side, n, size in zip(self.grid.sides, self.counts, self.size, strict=True))
        return not any(self.shift) and all(fits)

    @property
    def tables(self) -> SlotTables:
        """The positions of the cells."""
        return _tables(self)

    def side(self, axis: int) -> tuple[Tensor, Tensor]:
        """Cell and part of every slot along one side (0: rows), both (T, size); the part of an empty slot is -1."""
        cells, number, size = self.grid.sides[axis], self.counts[axis], self.size[axis]
        tile, slot = torch.arange(number, device=self.device)[:, None], torch.arange(size, device=self.device)
        if self.kind == "size":
            ahead = tile * size + slot + self.shift[axis]
            wrapped = ahead - number * size  # the slots at the end that hold the cells before the shift
            inside, before = ahead < cells, (wrapped >= 0) & (wrapped < cells)
            cell = torch.where(inside, ahead, torch.where(before, wrapped, 0))
            return cell, torch.where(inside, 0, torch.where(before, 1, -1))
        if self.kind == "spread":
            cell, inside = tile + number * slot, tile + number * slot < cells
        else:
            cell = tile * cells // number + slot
            inside = cell < (tile + 1) * cells // number
        return torch.where(inside, cell, 0), torch.where(inside, 0, -1)

    @property
    def _axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of cells (B, H, ..., d) with two axes for each side: those of the tiles, and those of their slots."""
        first, second = (tuple(range(start, start + 2 * len(self.size), 2)) for start in (2, 3))
        return (second, first) if self.kind == "spread" else (first, second)

    @property
    def number(self) -> int:
        """The number of tiles."""
        return math.prod(self.counts)

    @property
    def area(self) -> int:
        """The number of slots of a tile."""
        return math.prod(self.size)

    @property
    def tile_of_cell(self) -> Int[Tensor, " cells"]:
        """The tile of each cell."""
        return self.tables.tile

    def cut(self, x: Float[Tensor, "B H cells d"]) -> Float[Tensor, "B H T A d"]:
        """The cells by tile; empty slots hold a copy of the first cell."""
        if self.even:
            tiles, slots = self._axes
            sides = [0] * (len(tiles) + len(slots))
            for axes, numbers in ((tiles, self.counts), (slots, self.size)):
                for axis, number in zip(axes, numbers, strict=True):
                    sides[axis - 2] = number
            image = x.unflatten(2, sides).permute(0, 1, *tiles, *slots, len(sides) + 2)
            return image.flatten(2 + len(tiles), -2).flatten(2, 1 + len(tiles))
        return x.index_select(2, self.tables.cell.flatten()).unflatten(2, (self.number, self.area))

    def join(self, x: Float[Tensor, "B H T A e"]) -> Float[Tensor, "B H cells e"]:
        """The inverse of `cut`."""
        if self.even:
            tiles, slots = self._axes
            order = [0] * (len(tiles) + len(slots))
            for position, axis in enumerate((*tiles, *slots)):
                order[axis - 2] = position + 2
            image = x.unflatten(3, self.size).unflatten(2, self.counts)
            return image.permute(0, 1, *order, len(order) + 2).flatten(2, -2)
        return x.flatten(2, 3).index_select(2, self.tables.slot)


@kept
def _tables(tiles: Tiles) -> SlotTables:
    cell, part = tiles.side(0)
    real = part >= 0
    for axis, length in enumerate(tiles.grid.sides[1:], start=1):
        along, part_along = tiles.side(axis)
        cell = join_sides(cell * length, along)
        real = join_sides(real.long(), (part_along >= 0).long()) == 2
        part = join_sides(2 * part, part_along)
    cell = torch.where(real, cell, 0)
    number = torch.arange(cell.numel(), device=cell.device)
    slot = torch.zeros(tiles.grid.cells + 1, dtype=torch.long, device=cell.device)
    slot.scatter_(0, torch.where(real, cell, tiles.grid.cells).flatten(), number)
    slot = slot[: tiles.grid.cells]
    return SlotTables(cell, real, part, slot, slot // tiles.area)


def fixed_size_tiles(
    grid: Grid, size: tuple[int, ...], shift: tuple[int, ...] = (), device: torch.device | None = None
) -> Tiles:
    """Tiles of a size (rows, columns); the first one starts `shift` cells from the top left.

    Cells before the shift share the last tile with the cells at the other end, as another part, as in Swin.
    """
    return Tiles(grid, parts_of(grid.sides, size), size, "size", shift or (0,) * len(size), device)


def grid_tiles(grid: Grid, size: tuple[int, ...], device: torch.device | None = None) -> Tiles:
    """Tiles of a size (rows, columns) whose cells are spread over the map: ceil(side / size) apart along a side."""
    return Tiles(grid, parts_of(grid.sides, size), size, "spread", (0,) * len(size), device)


def balanced_tiles(grid: Grid, counts: tuple[int, ...], device: torch.device | None = None) -> Tiles:
    """`counts` tiles (down, across) whose sides differ by one cell at most.

    Raises: GridError if the grid has fewer rows or columns.
    """
    sides = grid.sides
    if not all(1 <= count <= side for count, side in zip(counts, sides, strict=True)):
        nearest = tuple(min(max(count, 1), side) for count, side in zip(counts, sides, strict=True))
        given = "x".join(map(str, counts))
        raise GridError(f"{grid} cannot be divided into {given} regions; nearest possible: {nearest}")
    return Tiles(grid, counts, parts_of(sides, counts), "balanced", (0,) * len(counts), device)


def parts_of(sides: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    """How many parts of this size cover each side."""
    return tuple(-(-side // length) for side, length in zip(sides, size, strict=True))


def join_sides(first: Tensor, second: Tensor) -> Tensor:
    """(T, A) and (U, B) of two sides as their sums (T U, A B)."""
    return (first[:, None, :, None] + second[None, :, None, :]).flatten(2).flatten(0, 1)


def split_tokens(x: Float[Tensor, "... N d"], grid: Grid) -> tuple[Float[Tensor, "... E d"], Float[Tensor, "... n d"]]:
    """Prefix and suffix tokens, in one tensor, and patch tokens."""
    if not grid.extra:
        return x[..., :0, :], x
    first, last = x[..., : grid.prefix, :], x[..., grid.prefix + grid.cells :, :]
    extra = torch.cat([first, last], -2) if grid.prefix and grid.suffix else first if grid.prefix else last
    return extra, x[..., grid.span, :]


def join_tokens(
    extra: Float[Tensor, "... E e"] | None, cells: Float[Tensor, "... n e"], grid: Grid
) -> Float[Tensor, "... N e"]:
    """The inverse of `split_tokens`. extra: None where the grid has no prefix or suffix tokens."""
    if extra is None or not grid.extra:
        return cells
    return torch.cat([extra[..., : grid.prefix, :], cells, extra[..., grid.prefix :, :]], -2)


def split_keep(keep: Bool[Tensor, "B N"], grid: Grid) -> tuple[Bool[Tensor, "B E"], Bool[Tensor, "B n"]]:
    """`split_tokens` for a padding mask."""
    return torch.cat([keep[:, : grid.prefix], keep[:, grid.prefix + grid.cells :]], 1), keep[:, grid.span]


def cell_ids(of_cells: Int[Tensor, " cells"], grid: Grid, extra: int = -1) -> Int[Tensor, " N"]:
    """A number for every token: that of its cell, and `extra` for prefix and suffix tokens."""
    ids = torch.full((grid.tokens,), extra, dtype=torch.long, device=of_cells.device)
    ids[grid.span] = of_cells
    return ids


def pad_pairs(pairs: Shaped[Tensor, "... n n"], grid: Grid) -> Shaped[Tensor, "... N N"]:
    """Which pairs of patch tokens are allowed, or their biases, for all tokens: True or 0 with others."""
    return F.pad(pairs, 2 * (grid.prefix, grid.suffix), value=pairs.dtype == torch.bool)


def join_global_tokens(
    cells: Float[Tensor, "B H n e"], q: Tensor, k: Tensor, v: Tensor, grid: Grid, scale: float | None, mask: Mask
) -> Float[Tensor, "B H N e"]:
    """The outputs of the patch tokens with those of prefix and suffix tokens, whose queries attend to all keys.

    q, k and v (B, H, N, d | d | e) are all tokens.
    """
    if not grid.extra:
        return cells
    extra = split_tokens(q, grid)[0]
    return join_tokens(sdpa(extra, k, v, attn_mask=mask.dense(extra, k.shape[-2]), scale=scale), cells, grid)
