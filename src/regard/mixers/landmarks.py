"""Landmarks: a few queries that stand for all, averaged over windows of the grid.

A window is where `adaptive_avg_pool2d` would put it: row i of m_h rows averages floor(i h / m_h) to
ceil((i + 1) h / m_h) - 1, so that windows overlap where m_h does not divide h.
Class and register tokens are never pooled.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core import Grid, GridError

Windows = int | tuple[int, int]


def windows_of(grid: Grid, m: Windows) -> tuple[int, int]:
    """m as (rows, columns) of windows on the grid; a pair is checked, a number is factored by `Grid.factor`.

    Raises: GridError if the grid cannot give them.
    """
    if isinstance(m, int):
        return grid.factor(m)
    rows, columns = m
    if not (1 <= rows <= grid.height and 1 <= columns <= grid.width):
        fits = min(max(rows, 1), grid.height), min(max(columns, 1), grid.width)
        raise GridError(f"{rows}x{columns} landmarks cannot be laid on {grid}; nearest possible: {fits[0]}x{fits[1]}")
    return rows, columns


def pool_matrix(
    grid: Grid,
    m: Windows,
    *,
    start: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Float[Tensor, "m N"]:
    """The averages as a matrix over all tokens: rows sum to 1, columns of extra tokens are 0.

    start: the token where the image begins, None = after the prefix. Raises: GridError as `windows_of`.
    """
    rows, columns = windows_of(grid, m)
    vertical, horizontal = _averages(grid.height, rows, dtype, device), _averages(grid.width, columns, dtype, device)
    start = grid.prefix if start is None else start
    return F.pad(torch.kron(vertical, horizontal), (start, grid.tokens - grid.cells - start))


def pool_landmarks(
    x: Float[Tensor, "B H N d"],
    grid: Grid,
    m: Windows,
    *,
    keep: Bool[Tensor, "B N"] | None = None,
    start: int | None = None,
) -> Float[Tensor, "B H m d"]:
    """Average the cells of x over m windows, an int or (rows, columns); prefix and suffix tokens are left out.

    keep: tokens that count; a window without any gives zeros. start: the token where the image begins, None = after
    the prefix (0 is what MiTA's published code does: it takes the class token for the first pixel).
    Raises: GridError if x does not fit the grid or the grid cannot give m windows; the message has the nearest m.
    """
    grid.check(x)
    rows, columns = windows_of(grid, m)
    if keep is not None:
        matrix = pool_matrix(grid, m, start=start, dtype=x.dtype, device=x.device) * keep[:, None, :].to(x.dtype)
        return (matrix / matrix.sum(-1, keepdim=True).clamp_min(1e-6))[:, None] @ x
    first = grid.prefix if start is None else start
    cells = x[..., first : first + grid.cells, :]
    if grid.height % rows == 0 and grid.width % columns == 0:
        bands = cells.unflatten(-2, (rows, grid.height // rows, grid.width)).mean(-3)  # long rows first: faster
        return bands.unflatten(-2, (columns, grid.width // columns)).mean(-2).flatten(-3, -2)
    if torch.are_deterministic_algorithms_enabled():  # the backward of adaptive pooling is not, on CUDA
        return pool_matrix(grid, m, start=start, dtype=x.dtype, device=x.device) @ x
    image = cells.mT.unflatten(-1, (grid.height, grid.width)).flatten(0, 1)
    return F.adaptive_avg_pool2d(image, (rows, columns)).flatten(-2).mT.unflatten(0, x.shape[:2])


def seen(grid: Grid, m: Windows, keep: Bool[Tensor, "B N"], start: int | None = None) -> Bool[Tensor, "B m"]:
    """True for a landmark whose window has at least one token to keep."""
    matrix = pool_matrix(grid, m, start=start, device=keep.device)
    return keep.to(matrix.dtype) @ matrix.mT > 0


def _averages(size: int, windows: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """(windows, size): row i averages floor(i size / windows) to ceil((i + 1) size / windows) - 1."""
    number = torch.arange(windows, device=device)[:, None]
    place = torch.arange(size, device=device)
    inside = (place >= number * size // windows) & (place < -((number + 1) * size // -windows))
    return inside.to(dtype) / inside.sum(-1, keepdim=True).to(dtype)
