"""Tiles: rectangular groups of grid cells, for mechanisms that route or restrict attention by position.

A tile has a fixed number of slots; where tiles do not divide the grid some slots are empty, and mechanisms mask them.
The tables are computed on the device, without synchronisation with the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import Grid, GridError, Mask

from .sdpa import sdpa

Side = int | tuple[int, int]
"""A side of squares, or (rows, columns)."""


def pair(side: Side) -> tuple[int, int]:
    """(rows, columns)."""
    return (side, side) if isinstance(side, int) else side


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
    counts: tuple[int, int]
    size: tuple[int, int]
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
        (rows, row_part), (columns, column_part) = self.side(0), self.side(1)
        cell = (rows[:, None, :, None] * self.grid.width + columns[None, :, None, :]).flatten(2).flatten(0, 1)
        down, across = row_part[:, None, :, None], column_part[None, :, None, :]
        real = ((down >= 0) & (across >= 0)).flatten(2).flatten(0, 1)
        part = (2 * down + across).flatten(2).flatten(0, 1)
        cell = torch.where(real, cell, 0)
        number = torch.arange(cell.numel(), device=cell.device)
        slot = torch.zeros(self.grid.cells + 1, dtype=torch.long, device=cell.device)
        slot.scatter_(0, torch.where(real, cell, self.grid.cells).flatten(), number)
        return SlotTables(cell, real, part, slot[: self.grid.cells])

    @property
    def number(self) -> int:
        """The number of tiles."""
        return self.counts[0] * self.counts[1]

    @property
    def area(self) -> int:
        """The number of slots of a tile."""
        return self.size[0] * self.size[1]

    @property
    def tile_of_cell(self) -> Int[Tensor, " cells"]:
        """The tile of each cell."""
        return self.tables.slot // self.area

    def cut(self, x: Float[Tensor, "B H cells d"]) -> Float[Tensor, "B H T A d"]:
        """The cells by tile; empty slots hold a copy of the first cell."""
        if self.even:
            (down, across), (rows, columns) = self.counts, self.size
            if self.spread:
                image = x.unflatten(2, (rows, down, columns, across)).permute(0, 1, 3, 5, 2, 4, 6)
                return image.flatten(4, 5).flatten(2, 3)
            image = x.unflatten(2, (down, rows, across, columns))
            return image.transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return x.index_select(2, self.tables.cell.flatten()).unflatten(2, (self.number, self.area))

    def join(self, x: Float[Tensor, "B H T A e"]) -> Float[Tensor, "B H cells e"]:
        """The inverse of `cut`."""
        if self.even:
            image = x.unflatten(3, self.size).unflatten(2, self.counts)
            if self.spread:
                return image.permute(0, 1, 4, 2, 5, 3, 6).flatten(2, 5)
            return image.transpose(3, 4).flatten(2, 5)
        return x.flatten(2, 3).index_select(2, self.tables.slot)


def fixed_size_tiles(
    grid: Grid, size: tuple[int, int], shift: tuple[int, int] = (0, 0), device: torch.device | None = None
) -> Tiles:
    """Tiles of a size (rows, columns); the first one starts `shift` cells from the top left.

    Cells before the shift share the last tile with the cells at the other end, as another part, as in Swin.
    """
    sides = grid.height, grid.width
    counts = -(-sides[0] // size[0]), -(-sides[1] // size[1])
    even = not any(shift) and counts[0] * size[0] == sides[0] and counts[1] * size[1] == sides[1]
    return Tiles(grid, counts, size, even, lambda axis: _tiles_of_size(sides[axis], size[axis], shift[axis], device))


def grid_tiles(grid: Grid, size: tuple[int, int], device: torch.device | None = None) -> Tiles:
    """Tiles of a size (rows, columns) whose cells are spread over the map: ceil(side / size) apart along a side."""
    sides = grid.height, grid.width
    counts = -(-sides[0] // size[0]), -(-sides[1] // size[1])
    even = counts[0] * size[0] == sides[0] and counts[1] * size[1] == sides[1]

    def side(axis: int) -> tuple[Tensor, Tensor]:
        steps = counts[axis] * torch.arange(size[axis], device=device)
        cell = torch.arange(counts[axis], device=device)[:, None] + steps
        inside = cell < sides[axis]
        return torch.where(inside, cell, 0), torch.where(inside, 0, -1)

    return Tiles(grid, counts, size, even, side, spread=True)


def balanced_tiles(grid: Grid, counts: tuple[int, int], device: torch.device | None = None) -> Tiles:
    """`counts` tiles (down, across) whose sides differ by one cell at most.

    Raises: GridError if the grid has fewer rows or columns.
    """
    if not (1 <= counts[0] <= grid.height and 1 <= counts[1] <= grid.width):
        nearest = min(max(counts[0], 1), grid.height), min(max(counts[1], 1), grid.width)
        raise GridError(f"{grid} cannot be divided into {counts[0]}x{counts[1]} regions; nearest possible: {nearest}")
    sides = grid.height, grid.width
    size = -(-sides[0] // counts[0]), -(-sides[1] // counts[1])
    even = counts[0] * size[0] == sides[0] and counts[1] * size[1] == sides[1]
    return Tiles(grid, counts, size, even, lambda axis: _balanced_tiles(sides[axis], counts[axis], device))


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
