"""Tiles: the cells of a grid in rectangular groups, for mechanisms that route or restrict attention by place.

A tile has a fixed number of slots; where tiles do not divide the grid some slots are empty, and mechanisms mask them.
The tables are computed on the device from arithmetic, so nothing waits for the host.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import Grid, GridError


class Tables(NamedTuple):
    """cell (T, A): the cell in a slot, 0 in empty ones. real (T, A): slots that are not empty. part (T, A): slots of
    one tile with different numbers are not neighbours on the image (a shift wraps around). slot (cells,): the flat
    slot of each cell.
    """

    cell: Int[Tensor, "T A"]
    real: Bool[Tensor, "T A"]
    part: Int[Tensor, "T A"]
    slot: Int[Tensor, " cells"]


@dataclass
class Tiles:
    """T tiles of A slots over h x w cells. counts: tiles (down, across); size: slots of a tile (rows, columns).

    even: no slot is empty and nothing wraps around; then cells are cut and joined without a table.
    """

    grid: Grid
    counts: tuple[int, int]
    size: tuple[int, int]
    even: bool
    side: Callable[[int], tuple[Tensor, Tensor]]
    """Cell and part of every slot along one side (0: rows), both (T, size); the part of an empty slot is -1."""

    _tables: Tables | None = field(default=None, init=False, repr=False)

    @property
    def tables(self) -> Tables:
        """Where the cells are; made when it is first asked for."""
        if self._tables is None:
            self._tables = self._lay()
        return self._tables

    def _lay(self) -> Tables:
        (rows, row_part), (columns, column_part) = self.side(0), self.side(1)
        cell = (rows[:, None, :, None] * self.grid.width + columns[None, :, None, :]).flatten(2).flatten(0, 1)
        down, across = row_part[:, None, :, None], column_part[None, :, None, :]
        real = ((down >= 0) & (across >= 0)).flatten(2).flatten(0, 1)
        part = (2 * down + across).flatten(2).flatten(0, 1)
        cell = torch.where(real, cell, 0)
        number = torch.arange(cell.numel(), device=cell.device)
        slot = torch.zeros(self.grid.cells + 1, dtype=torch.long, device=cell.device)
        slot.scatter_(0, torch.where(real, cell, self.grid.cells).flatten(), number)
        return Tables(cell, real, part, slot[: self.grid.cells])

    @property
    def number(self) -> int:
        """How many tiles."""
        return self.counts[0] * self.counts[1]

    @property
    def area(self) -> int:
        """Slots of a tile."""
        return self.size[0] * self.size[1]

    @property
    def owner(self) -> Int[Tensor, " cells"]:
        """The tile of each cell."""
        return self.tables.slot // self.area

    def cut(self, x: Float[Tensor, "B H cells d"]) -> Float[Tensor, "B H T A d"]:
        """Cells in tiles; empty slots hold a copy of the first cell."""
        if self.even:
            (down, across), (rows, columns) = self.counts, self.size
            image = x.unflatten(2, (down, rows, across, columns))
            return image.transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return x.index_select(2, self.tables.cell.flatten()).unflatten(2, (self.number, self.area))

    def join(self, x: Float[Tensor, "B H T A e"]) -> Float[Tensor, "B H cells e"]:
        """The inverse of `cut`."""
        if self.even:
            image = x.unflatten(3, self.size).unflatten(2, self.counts)
            return image.transpose(3, 4).flatten(2, 5)
        return x.flatten(2, 3).index_select(2, self.tables.slot)


def sized(
    grid: Grid, size: tuple[int, int], shift: tuple[int, int] = (0, 0), device: torch.device | None = None
) -> Tiles:
    """Tiles of a size (rows, columns), the first of them begun `shift` cells from the top left.

    What lies before the shift shares the last tile with what lies at the other end, in another part, as in Swin.
    """
    sides = grid.height, grid.width
    counts = -(-sides[0] // size[0]), -(-sides[1] // size[1])
    even = not any(shift) and counts[0] * size[0] == sides[0] and counts[1] * size[1] == sides[1]
    return Tiles(grid, counts, size, even, lambda axis: _sized(sides[axis], size[axis], shift[axis], device))


def balanced(grid: Grid, counts: tuple[int, int], device: torch.device | None = None) -> Tiles:
    """A number of tiles (down, across) whose sides differ by one cell at most.

    Raises: GridError if the grid has fewer rows or columns than that.
    """
    if not (1 <= counts[0] <= grid.height and 1 <= counts[1] <= grid.width):
        fits = min(max(counts[0], 1), grid.height), min(max(counts[1], 1), grid.width)
        raise GridError(
            f"{counts[0]}x{counts[1]} regions cannot be laid on {grid}; nearest possible: ({fits[0]}, {fits[1]})"
        )
    sides = grid.height, grid.width
    size = -(-sides[0] // counts[0]), -(-sides[1] // counts[1])
    even = counts[0] * size[0] == sides[0] and counts[1] * size[1] == sides[1]
    return Tiles(grid, counts, size, even, lambda axis: _balanced(sides[axis], counts[axis], device))


def _sized(cells: int, size: int, shift: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Cell and part of every slot along one side, (T, size); the part of an empty slot is -1."""
    number = -(-cells // size)
    place = torch.arange(number * size, device=device).view(number, size)
    ahead = place + shift
    wrapped = place - (number * size - shift)  # the slots at the end that hold the cells before the shift
    inside, before = ahead < cells, (wrapped >= 0) & (wrapped < cells)
    cell = torch.where(inside, ahead, torch.where(before, wrapped, 0))
    return cell, torch.where(inside, 0, torch.where(before, 1, -1))


def _balanced(cells: int, number: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """The same for tiles whose sides differ by one at most: tile i begins at cell i * cells // number."""
    tile = torch.arange(number, device=device)[:, None]
    start, stop = tile * cells // number, (tile + 1) * cells // number
    cell = start + torch.arange(-(-cells // number), device=device)
    return torch.where(cell < stop, cell, 0), torch.where(cell < stop, 0, -1)


def split_tokens(x: Float[Tensor, "... N d"], grid: Grid) -> tuple[Float[Tensor, "... E d"], Float[Tensor, "... n d"]]:
    """Extra tokens (prefix, then suffix) and cells."""
    if not grid.extra:
        return x[..., :0, :], x
    first, last = x[..., : grid.prefix, :], x[..., grid.prefix + grid.cells :, :]
    extra = torch.cat([first, last], -2) if grid.prefix and grid.suffix else first if grid.prefix else last
    return extra, x[..., grid.span, :]


def join_tokens(
    extra: Float[Tensor, "... E e"], cells: Float[Tensor, "... n e"], grid: Grid
) -> Float[Tensor, "... N e"]:
    """The inverse of `split_tokens`."""
    if not grid.extra:
        return cells
    return torch.cat([extra[..., : grid.prefix, :], cells, extra[..., grid.prefix :, :]], -2)


def split_keep(keep: Bool[Tensor, "B N"], grid: Grid) -> tuple[Bool[Tensor, "B E"], Bool[Tensor, "B n"]]:
    """The same for what of a padding mask concerns extra tokens and cells."""
    return torch.cat([keep[:, : grid.prefix], keep[:, grid.prefix + grid.cells :]], 1), keep[:, grid.span]


def cell_ids(of_cells: Int[Tensor, " cells"], grid: Grid, extra: int = -1) -> Int[Tensor, " N"]:
    """A number for every token: that of its cell, and `extra` for extra tokens."""
    ids = torch.full((grid.tokens,), extra, dtype=torch.long, device=of_cells.device)
    ids[grid.span] = of_cells
    return ids
