"""What is special of a mechanism for some inputs: rows of values over its tokens, or the points that it samples."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .grid import Grid


@dataclass(frozen=True, eq=False)
class View:
    """What each query of the first image has to do with the tokens: a set of them, or a number for each.

    - name: what a row shows, with "its" for the query's: "keys of its expert".
    - rows: (H, R, T) over T tokens; True and False for a set, numbers for a map.
    - row_of: (H, N), the row of each query, where queries share rows; None where query i has row i.
    """

    name: str
    rows: Tensor
    row_of: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Samples:
    """Where the queries of the first image read the map of its patch tokens, between the cells.

    - points: (y, x) in cells, 0 is the centre of the first; by head or group of channels, and by query, or one for all.
    - shares: of each point in what a query reads; 0 for queries that read none.
    - further: shares of prefix and suffix tokens; None where they are never read.
    """

    points: Float[Tensor, "H R P 2"]
    shares: Float[Tensor, "H N P"]
    further: Float[Tensor, "H N E"] | None = None

    def on_tokens(self, grid: Grid) -> Float[Tensor, "H N tokens"]:
        """The share of each token of the grid, on which points lie; what lies beyond its border is lost."""
        shares = self.shares
        cells = shares.new_zeros(*shares.shape[:2], grid.cells)
        for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
            cell = self.points.floor() + self.points.new_tensor(corner)
            near = (1 - (self.points - cell).abs()).prod(-1)  # bilinear
            y, x = cell.long().unbind(-1)
            inside = (y >= 0) & (y < grid.height) & (x >= 0) & (x < grid.width)
            index = y.clamp(0, grid.height - 1) * grid.width + x.clamp(0, grid.width - 1)
            cells.scatter_add_(-1, index.expand(shares.shape), (near * inside).to(shares.dtype) * shares)
        further = shares.new_zeros(*shares.shape[:2], grid.extra) if self.further is None else self.further
        before, after = further.tensor_split((grid.prefix,), -1)
        return torch.cat([before, cells, after], -1)
