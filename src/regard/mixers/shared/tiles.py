"""Tiles: rectangular groups of grid cells, for mechanisms that route or restrict attention by position.

On a grid with several frames they are boxes: each pair (down, across) here is then a triple that begins with frames.

A tile has a fixed number of slots; where tiles do not divide the grid some slots are empty, and mechanisms mask them.
The tables are computed on the device, without synchronisation with the CPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import ConfigError, Grid, GridError, Mask

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
    index of the slot of each cell.
    """

    cell: Int[Tensor, "T A"]
    real: Bool[Tensor, "T A"]
    part: Int[Tensor, "T A"]
    slot: Int[Tensor, " cells"]


@dataclass
class Tiles:
    """T tiles of A slots over h x w cells. counts: tiles (down, across). size: slots of a tile (rows, columns).

    even: no slot is empty and nothing wraps around; cells are then cut and joined by reshaping, without a table.
    spread: the cells of a tile are not neighbours, but as far apart as there are tiles.
    """

    grid: Grid
    counts: tuple[int, ...]
    size: tuple[int, ...]
    even: bool
    side: Callable[[int], tuple[Tensor, Tensor]]
    """Cell and part of every slot along one side (0: rows), both (T, size); the part of an empty slot is -1."""

    spread: bool = False
    _tables: SlotTables | None = field(default=None, init=False, repr=False)

    @property
    def tables(self) -> SlotTables:
        """The positions of the cells, computed at the first use."""
        if self._tables is None:
            self._tables = self._build_tables()
        return self._tables

    def _build_tables(self) -> SlotTables:
        cell, part = self.side(0)
        real = part >= 0
        for axis, length in enumerate(self.grid.sides[1:], start=1):
            along, part_along = self.side(axis)
            cell = join_sides(cell * length, along)
            real = join_sides(real.long(), (part_along >= 0).long()) == 2
            part = join_sides(2 * part, part_along)
        cell = torch.where(real, cell, 0)
        number = torch.arange(cell.numel(), device=cell.device)
        slot = torch.zeros(self.grid.cells + 1, dtype=torch.long, device=cell.device)
        slot.scatter_(0, torch.where(real, cell, self.grid.cells).flatten(), number)
        return SlotTables(cell, real, part, slot[: self.grid.cells])

    @property
    def _axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of cells (B, H, ..., d) with two axes for each side: those of the tiles, and those of their slots."""
        first, second = (tuple(range(start, start + 2 * len(self.size), 2)) for start in (2, 3))
        return (second, first) if self.spread else (first, second)

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
        return self.tables.slot // self.area

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


def fixed_size_tiles(
    grid: Grid, size: tuple[int, ...], shift: tuple[int, ...] = (), device: torch.device | None = None
) -> Tiles:
    """Tiles of a size (rows, columns); the first one starts `shift` cells from the top left.

    Cells before the shift share the last tile with the cells at the other end, as another part, as in Swin.
    """
    sides, first = grid.sides, shift or (0,) * len(size)
    counts = parts_of(sides, size)
    even = not any(first) and _fits(sides, counts, size)
    return Tiles(grid, counts, size, even, lambda axis: _tiles_of_size(sides[axis], size[axis], first[axis], device))


def grid_tiles(grid: Grid, size: tuple[int, ...], device: torch.device | None = None) -> Tiles:
    """Tiles of a size (rows, columns) whose cells are spread over the map: ceil(side / size) apart along a side."""
    sides = grid.sides
    counts = parts_of(sides, size)
    even = _fits(sides, counts, size)

    def side(axis: int) -> tuple[Tensor, Tensor]:
        steps = counts[axis] * torch.arange(size[axis], device=device)
        cell = torch.arange(counts[axis], device=device)[:, None] + steps
        inside = cell < sides[axis]
        return torch.where(inside, cell, 0), torch.where(inside, 0, -1)

    return Tiles(grid, counts, size, even, side, spread=True)


def balanced_tiles(grid: Grid, counts: tuple[int, ...], device: torch.device | None = None) -> Tiles:
    """`counts` tiles (down, across) whose sides differ by one cell at most.

    Raises: GridError if the grid has fewer rows or columns.
    """
    sides = grid.sides
    if not all(1 <= count <= side for count, side in zip(counts, sides, strict=True)):
        nearest = tuple(min(max(count, 1), side) for count, side in zip(counts, sides, strict=True))
        given = "x".join(map(str, counts))
        raise GridError(f"{grid} cannot be divided into {given} regions; nearest possible: {nearest}")
    size = parts_of(sides, counts)
    even = _fits(sides, counts, size)
    return Tiles(grid, counts, size, even, lambda axis: _balanced_tiles(sides[axis], counts[axis], device))


def parts_of(sides: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    """How many parts of this size cover each side."""
    return tuple(-(-side // length) for side, length in zip(sides, size, strict=True))


def _fits(sides: tuple[int, ...], counts: tuple[int, ...], size: tuple[int, ...]) -> bool:
    return all(count * length == side for side, count, length in zip(sides, counts, size, strict=True))


def join_sides(first: Tensor, second: Tensor) -> Tensor:
    """(T, A) and (U, B) of two sides as their sums (T U, A B)."""
    return (first[:, None, :, None] + second[None, :, None, :]).flatten(2).flatten(0, 1)


def _tiles_of_size(cells: int, size: int, shift: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Cell and part of every slot along one side, (T, size); the part of an empty slot is -1."""
    number = -(-cells // size)
    index = torch.arange(number * size, device=device).view(number, size)
    ahead = index + shift
    wrapped = index - (number * size - shift)  # the slots at the end that hold the cells before the shift
    inside, before = ahead < cells, (wrapped >= 0) & (wrapped < cells)
    cell = torch.where(inside, ahead, torch.where(before, wrapped, 0))
    return cell, torch.where(inside, 0, torch.where(before, 1, -1))


def _balanced_tiles(cells: int, number: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """The same for tiles whose sides differ by one at most: tile i starts at cell i * cells // number."""
    tile = torch.arange(number, device=device)[:, None]
    start, stop = tile * cells // number, (tile + 1) * cells // number
    cell = start + torch.arange(-(-cells // number), device=device)
    return torch.where(cell < stop, cell, 0), torch.where(cell < stop, 0, -1)


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
