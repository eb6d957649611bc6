"""Landmarks: a few queries that represent all queries, by default averages over windows of the grid.

Adaptive windows are those of `adaptive_avg_pool2d`: row i of m_h rows averages floor(i h / m_h) to
ceil((i + 1) h / m_h) - 1, so that windows overlap where m_h does not divide h. Windows of a partition end at
floor((i + 1) h / m_h) - 1 and do not overlap. Class and register tokens are not pooled.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core import ConfigError, Grid, GridError, only_kept, operator_function
from regard.core.tensors import is_open
from regard.core.validation import is_whole, plain_number, short_repr

from .native import runs_native
from .pool_native import pool_native

Windows = int | tuple[int, int] | tuple[int, int, int]
"""A number, (rows, columns), or (frames, rows, columns) on a grid with several frames."""
POLICIES = ("adaptive", "partition")


def landmark_count(m: Windows) -> int:
    """The number of landmarks of m. Raises: ConfigError unless all its numbers are at least 1."""
    sides = m if isinstance(m, tuple) else (m,)
    if min(sides) < 1:
        raise ConfigError(f"m is at least 1, a number or (rows, columns), not {m}")
    return math.prod(sides)


def landmark_windows(grid: Grid, m: Windows) -> tuple[int, ...]:
    """m as windows along each of `grid.sides`; a tuple is checked, a number is factored by `Grid.factor`.

    Raises: GridError if the grid has fewer rows or columns; ConfigError for a tuple that is not of whole numbers, one
    for each side.
    """
    sides = grid.sides
    if not isinstance(m, tuple):
        if is_open(*sides):
            raise GridError(f"m={m}: its rows and columns depend on the shape of the image; write m=(rows, columns)")
        return grid.factor(m)
    counts: tuple[int, ...] = plain_number(m)
    if len(counts) != len(sides) or not all(map(is_whole, counts)):
        form = "(rows, columns)" if len(sides) == 2 else "(frames, rows, columns)"
        raise ConfigError(f"m is a whole number or {form}, not {short_repr(m)}")
    if not all(1 <= count <= side for count, side in zip(counts, sides, strict=True)):
        possible = (min(max(count, 1), side) for count, side in zip(counts, sides, strict=True))
        given, nearest = ("x".join(map(str, each)) for each in (counts, possible))
        raise GridError(f"{given} landmarks cannot be laid on {grid}; nearest possible: {nearest}")
    return counts


def pool_matrix(
    grid: Grid, m: Windows, *, start: int | None = None, policy: str = "adaptive", dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Float[Tensor, "m N"]:  # fmt: skip
    """The averages as a matrix over all tokens: rows sum to 1, columns of prefix and suffix tokens are 0.

    start: the first token of the image, None = after the prefix. policy: "adaptive" or "partition" windows.
    Raises: GridError and ConfigError as `pool_landmarks`.
    """
    first, *counts = _place(grid, m, start, policy)
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    for size, number in zip(grid.sides, counts, strict=True):
        along = _averages(size, number, policy, dtype, device)
        both = matrix[:, None, :, None] * along[None, :, None, :]  # torch.kron would fix sizes that are open
        matrix = both.flatten(0, 1).flatten(1, 2)
    return F.pad(matrix, (first, grid.extra - first))


@dataclass(frozen=True)
class PooledQueries:
    """Landmarks that are `pool_landmarks` of the queries, as the other arguments of it: nothing is computed yet.

    Given to `mita` instead of landmarks, a compiled kernel pools them itself, with less time and memory.
    """

    grid: Grid
    m: Windows
    start: int | None = None
    policy: str = "adaptive"

    @property
    def of_clip(self) -> bool:
        """Whether the grid has several frames, which a compiled kernel does not pool."""
        return isinstance(self.grid, Grid) and self.grid.depth > 1

    def of(self, q: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H m d"]:
        """The landmarks. Raises: GridError and ConfigError as `pool_landmarks`."""
        return pool_landmarks(q, self.grid, self.m, start=self.start, policy=self.policy)

    def windows(self) -> list[int]:
        """The windows for `pool_native`. Raises: GridError and ConfigError as `pool_landmarks`."""
        grid, (first, rows, columns) = self.grid, _place(self.grid, self.m, self.start, self.policy)
        edges = (*_edges(grid.height, rows, self.policy), *_edges(grid.width, columns, self.policy))
        return [first, grid.width, rows, columns, *edges]


@operator_function(depth=True)
def pool_landmarks(
    x: Float[Tensor, "B H N d"], grid: Grid, m: Windows, *, keep: Bool[Tensor, "B N"] | None = None,
    start: int | None = None, policy: str = "adaptive",
) -> Float[Tensor, "B H m d"]:  # fmt: skip
    """Average the patch tokens of x over m windows: a number, (rows, columns) or (frames, rows, columns).

    keep: tokens that count; a window without any gives zeros. start: the first token of the image, None = after the
    prefix (0 as in MiTA's published code, which takes the class token for the first patch token). policy: "adaptive"
    windows overlap where they do not divide the grid, those of a "partition" do not.
    Raises: GridError if x does not fit the grid, the grid cannot be divided into m windows (with the nearest m), or no
    image starts at this token; ConfigError for values of another kind.
    """
    grid.check(x)
    first, *counts = _place(grid, m, start, policy)
    if keep is not None:
        x = only_kept(x, keep)
        matrix = pool_matrix(grid, m, start=start, policy=policy, dtype=x.dtype, device=x.device)
        matrix = matrix * keep[:, None, :].to(x.dtype)
        return (matrix / matrix.sum(-1, keepdim=True).clamp_min(1e-6))[:, None] @ x
    cells = x[..., first : first + grid.cells, :]
    if grid.depth > 1:
        frames = cells.unflatten(-2, (grid.depth, -1)).flatten(1, 2)  # (B, H * depth, h * w, d)
        pooled = pool_landmarks(frames, grid.frame, (counts[1], counts[2]), policy=policy)
        edges, pooled = _edges(grid.depth, counts[0], policy), pooled.unflatten(1, (-1, grid.depth))
        parts = [pooled[:, :, begin:end].mean(2) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        return torch.cat(parts, 2)
    rows, columns = counts
    if runs_native("pool_landmarks", "auto", x):
        return cast(Tensor, pool_native(x, PooledQueries(grid, m, start, policy).windows()))
    if is_open(grid.height, grid.width):
        return pool_matrix(grid, m, start=start, policy=policy, dtype=x.dtype, device=x.device) @ x
    if grid.height % rows == 0 and grid.width % columns == 0:
        bands = cells.unflatten(-2, (rows, grid.height // rows, grid.width)).mean(-3)  # long rows first: faster
        return bands.unflatten(-2, (columns, grid.width // columns)).mean(-2).flatten(-3, -2)
    if policy == "partition":
        bands = _parts(cells.unflatten(-2, (grid.height, grid.width)), -3, rows)
        return _parts(bands, -2, columns).flatten(-3, -2)
    if torch.are_deterministic_algorithms_enabled():  # the backward of adaptive pooling is not, on CUDA
        return pool_matrix(grid, m, start=start, dtype=x.dtype, device=x.device) @ x
    image = cells.mT.unflatten(-1, (grid.height, grid.width)).flatten(0, 1)
    return F.adaptive_avg_pool2d(image, (rows, columns)).flatten(-2).mT.unflatten(0, x.shape[:2])


def nonempty_landmarks(
    grid: Grid, m: Windows, keep: Bool[Tensor, "B N"], start: int | None = None, policy: str = "adaptive"
) -> Bool[Tensor, "B m"]:
    """True for landmarks whose window has at least one token that is kept."""
    matrix = pool_matrix(grid, m, start=start, policy=policy, device=keep.device)
    return keep.to(matrix.dtype) @ matrix.mT > 0


def _place(grid: Grid, m: Windows, start: int | None, policy: str) -> tuple[int, ...]:
    """The first token of the image, and the windows along its sides. Raises: as `pool_landmarks`."""
    if not isinstance(grid, Grid):
        raise ConfigError(f"landmarks are pooled on a Grid, such as Grid(14, 14, prefix=1), not {short_repr(grid)}")
    if policy not in POLICIES:
        raise ConfigError(f'windows are "adaptive" or a "partition", not {short_repr(policy)}')
    counts = landmark_windows(grid, m)
    if start is None:
        return grid.prefix, *counts
    if type(start) is not int or not 0 <= start <= grid.extra:
        raise GridError(f"the image of {grid} can start at token 0 to {grid.extra}, not {short_repr(start)}")
    return start, *counts


def _edges(size: int, windows: int, policy: str) -> list[int]:
    """Begin and end of each window of an axis, one after the other."""
    inside = 0 if policy == "partition" else windows - 1  # adaptive windows end at the next whole number
    return [edge for i in range(windows) for edge in (i * size // windows, ((i + 1) * size + inside) // windows)]


def _averages(size: int, windows: int, policy: str, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """(windows, size): row i averages floor(i size / windows) to the end of its window."""
    number = torch.arange(windows, device=device)[:, None]
    index = torch.arange(size, device=device)
    ends = (number + 1) * size // windows if policy == "partition" else -((number + 1) * size // -windows)
    inside = (index >= number * size // windows) & (index < ends)
    return inside.to(dtype) / inside.sum(-1, keepdim=True).to(dtype)


def _parts(x: Tensor, axis: int, windows: int) -> Tensor:
    """Means over parts of an axis that do not overlap."""
    size = x.shape[axis]
    edges = [i * size // windows for i in range(windows + 1)]
    lengths = [end - begin for begin, end in zip(edges, edges[1:], strict=False)]
    return torch.stack([part.mean(axis) for part in x.split(lengths, axis)], axis)
