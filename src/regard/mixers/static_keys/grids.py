"""Static keys on other grids: resampling, and windows of the trained grid over a larger one."""

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.core import Grid, GridError, Mask, UnsupportedError
from regard.core.tensors import is_open
from regard.mixers.shared.tiles import join_tokens, split_tokens


def same_cells(a: Grid, b: Grid) -> bool:
    """Whether two grids have the same sides."""
    same = a.height == b.height and a.width == b.width  # Dynamo cannot compare whole grids
    return same and a.depth == b.depth


def resample(keys: Float[Tensor, "H cells d"], old: Grid, new: Grid) -> Float[Tensor, "H cells2 d"]:
    """Keys on the grid `old` resampled to `new`, bicubic and antialiased; computed in float32 or better."""
    if not is_open(new.height, new.width) and same_cells(old, new):
        return keys
    dtype = torch.promote_types(keys.dtype, torch.float32)
    rows, columns = (_bicubic(a, b, dtype, keys.device) for a, b in ((old.height, new.height), (old.width, new.width)))
    image = rows @ keys.mT.unflatten(-1, (old.depth, old.height, old.width)).to(dtype) @ columns.mT
    if old.depth != new.depth:
        image = (_bicubic(old.depth, new.depth, dtype, keys.device) @ image.flatten(-2)).unflatten(-1, image.shape[-2:])
    return image.flatten(-3).mT.to(keys.dtype)


def former_grid(cells: int, new: Grid) -> Grid | None:
    """The grid of `cells` patch tokens with the frames of `new` and square, or of its aspect ratio; None if not exactly
    one is."""
    cells, left = divmod(cells, new.depth)
    sides = [(side, cells // side) for side in range(1, cells + 1) if cells % side == 0 and not left]
    grids = [(h, w) for h, w in sides if h == w or h * new.width == w * new.height]
    return Grid(*grids[0], depth=new.depth) if len(grids) == 1 else None


def _bicubic(old: int, new: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "new old"]:
    """The weights of `F.interpolate(mode="bicubic", antialias=True)` along an axis, also for a size that is open."""
    scale = old / new
    x = torch.arange(old, dtype=dtype, device=device) + 0.5
    centre = (torch.arange(new, dtype=dtype, device=device)[:, None] + 0.5) * scale
    far = (x - centre).abs() / cast(float, torch.sym_max(scale, 1.0))
    near = (1.5 * far - 2.5) * far * far + 1
    weights = torch.where(far < 1, near, (((2.5 - 0.5 * far) * far - 4) * far + 2) * (far < 2))
    return weights / weights.sum(-1, keepdim=True)


def repeat_window(keys: Float[Tensor, "H M d"], window: Grid, grid: Grid) -> Float[Tensor, "H M2 d"]:
    """The keys of a window's patch tokens repeated over a grid from its upper left corner; the others stay."""
    extra, cells = split_tokens(keys, window)
    down, across = windows_on(grid, window)
    image = cells.unflatten(1, (window.height, window.width)).repeat(1, down, across, 1)
    return join_tokens(extra, image[:, : grid.height, : grid.width].flatten(1, 2), grid)


def windows_on(grid: Grid, window: Grid) -> tuple[int, int]:
    """The number of windows that cover a grid, in a column and in a row; the last ones may reach beyond the grid."""
    return -(-grid.height // window.height), -(-grid.width // window.width)


def split_windows(x: Float[Tensor, "B H c d"], grid: Grid, window: Grid) -> Float[Tensor, "BW H w d"]:
    """Patch tokens in windows, which become part of the batch (batch first); zeros beyond the grid."""
    down, across = windows_on(grid, window)
    low, right = down * window.height - grid.height, across * window.width - grid.width
    image = x.unflatten(2, (grid.height, grid.width))
    if low or right:
        image = F.pad(image, (0, 0, 0, right, 0, low))
    image = image.unflatten(3, (across, window.width)).unflatten(2, (down, window.height))
    return image.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)


def join_windows(x: Float[Tensor, "BW H w d"], grid: Grid, window: Grid) -> Float[Tensor, "B H c d"]:
    """The inverse of `split_windows`; what lies beyond the grid is dropped."""
    down, across = windows_on(grid, window)
    image = x.unflatten(2, (window.height, window.width)).unflatten(0, (x.shape[0] // (down * across), down, across))
    image = image.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)
    return image[:, :, : grid.height, : grid.width].flatten(2, 3)


def in_windows(
    q: Tensor, v: Tensor, grids: tuple[Grid, Grid], windows: tuple[Grid, Grid], mask: Mask | None
) -> tuple[Tensor, Tensor, Mask | None]:
    """Patch tokens of q (B, H, cells, d) and all of v in windows, and the mask that hides keys beyond the grid.

    grids and windows: of queries and of keys. Every window also has the values of all prefix and suffix tokens.
    Raises: GridError if queries and keys have different numbers of windows, UnsupportedError for masks but padding.
    """
    (grid, memory), (window, key_window) = grids, windows
    if windows_on(grid, window) != windows_on(memory, key_window):
        raise GridError(
            f"queries and keys have different numbers of windows: {window.height}x{window.width} on {grid} for "
            f"queries, {key_window.height}x{key_window.width} on {memory} for keys; use resize='interpolate'"
        )
    if mask is not None and mask.kinds - {"padding"}:
        raise UnsupportedError(
            f"windows of static keys cannot apply a {' or '.join(sorted(mask.kinds - {'padding'}))} mask on another "
            "grid than the trained one (they can: padding); use resize='interpolate'"
        )
    extra, cells = split_tokens(v, memory)
    down, across = windows_on(memory, key_window)
    values = join_tokens(extra.repeat_interleave(down * across, 0), split_windows(cells, memory, key_window), memory)
    keep = None if mask is None else mask.keep
    ragged = memory.height % key_window.height or memory.width % key_window.width
    if keep is None and ragged:
        keep = torch.ones(v.shape[0], memory.tokens, dtype=torch.bool, device=v.device)
    if keep is None:
        return split_windows(q, grid, window), values, None
    extra_keep, cell_keep = split_tokens(keep[:, None, :, None].to(v.dtype), memory)
    inside = split_windows(cell_keep, memory, key_window)
    inside = join_tokens(extra_keep.repeat_interleave(down * across, 0), inside, memory)
    return split_windows(q, grid, window), values, Mask(keep=inside[:, 0, :, 0] > 0)
