"""Maps of channels, of their patch tokens and of the heads of these; prefix and suffix tokens are on no map."""

from dataclasses import replace
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor

from regard.core import Grid, heads


def map_of(x: Float[Tensor, "B N C"], grid: Grid) -> Float[Tensor, "B C h w"]:
    """Patch tokens as a map, a view."""
    return x.mT.unflatten(-1, (grid.height, grid.width))


def tokens_of(x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B N C"]:
    """The inverse of `map_of`."""
    return x.flatten(2).mT


def heads_of_map(x: Float[Tensor, "B C h w"], count: int) -> Float[Tensor, "B H N d"]:
    """A map as the heads of its patch tokens."""
    return heads(tokens_of(x), count)


def map_of_heads(y: Float[Tensor, "B H N d"], grid: Grid) -> Float[Tensor, "B C h w"]:
    """The inverse of `heads_of_map`."""
    return cast(Tensor, y.mT.flatten(1, 2).unflatten(-1, (grid.height, grid.width)))


def pooled_grid(grid: Grid, pool: Any) -> Grid:
    """The grid after a convolution or pooling without dilation in all its axes, or after None."""
    if pool is None:
        return grid
    numbers = zip(pool.kernel_size, pool.stride, pool.padding, strict=True)
    axes = ("depth", "height", "width")[-len(pool.kernel_size) :]
    sides = {
        axis: (getattr(grid, axis) + 2 * padding - kernel) // stride + 1
        for axis, (kernel, stride, padding) in zip(axes, numbers, strict=True)
    }
    return replace(grid, **sides)
