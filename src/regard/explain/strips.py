"""Frames of a clip side by side, as pictures show them; an image is a strip of one frame."""

import math

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from regard.core import Grid


def strip(grid: Grid) -> Grid:
    """The grid with its frames side by side: height x (depth * width) cells."""
    return Grid(grid.height, grid.depth * grid.width, grid.prefix, grid.suffix) if grid.depth != 1 else grid


def token_at(grid: Grid, cell: tuple[int, int]) -> int:
    """The index of the token at (row, column) of the strip."""
    frame, column = divmod(cell[1], grid.width)
    return grid.prefix + (frame * grid.height + cell[0]) * grid.width + column


def strip_order(grid: Grid) -> Tensor:
    """The index of each token of the strip among the tokens of the grid; prefix and suffix tokens stay."""
    cells = on_strip(torch.arange(grid.cells), grid).flatten() + grid.prefix
    others = torch.arange(grid.tokens)
    return torch.cat([others[: grid.prefix], cells, others[grid.prefix + grid.cells :]])


def on_strip(cells: Shaped[Tensor, "*B cells"], grid: Grid) -> Shaped[Tensor, "*B height width"]:
    """Values of patch tokens on the strip."""
    return cells.unflatten(-1, (grid.depth, grid.height, grid.width)).movedim(-3, -2).flatten(-2)


def strip_picture(
    picture: UInt8[np.ndarray, "height width channels"], image: Tensor, depth: int
) -> UInt8[np.ndarray, "height strip colours"]:
    """The picture of an image as it is; of a clip `depth` of its frames side by side.

    picture: with the channels of all frames (`regard.images.clips`). image: as the model expects it, (C, H, W), or
    (C, frames, H, W), or (frames, C, H, W).
    """
    if image.ndim == 3:
        return picture
    every = np.split(picture, picture.shape[-1] // (3 if 3 in image.shape[:2] else 1), -1)
    return np.concatenate([every[math.floor((part + 0.5) * len(every) / depth)] for part in range(depth)], 1)
