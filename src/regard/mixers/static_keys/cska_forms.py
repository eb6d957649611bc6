"""Three forms of convolutional static keys: a convolution, products of neighbourhoods, or strips of rows.

All compute `cska`, for any activation, and differ in time and memory. A strip saves no logits: they are computed again
in the backward pass. Also here: the plain form window by window, and the parts of a mask.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.core import Grid, Mask
from regard.mixers.shared.tiles import split_tokens

from .grids import windows_on
from .keys import weigh

PATHS = ("auto", "conv", "patches", "lean")
CONV_CELLS = 100
"""Up to this number of patch tokens the convolution is the fastest path."""
LEAN_LOGITS = 2**24
"""From this number of logits on the batch is computed in strips, in training again in the backward pass."""
STRIP = 128
"""Patch tokens in a strip of rows."""


def choose_path(q: Tensor, v: Tensor) -> str:
    """The path for these sizes, from times on a CPU: `benchmarks/static_keys.py`."""
    batch, heads, n, _ = q.shape
    if n <= CONV_CELLS:
        return "conv"
    return "patches" if batch * heads * n * v.shape[-2] < LEAN_LOGITS else "lean"


def convolved_logits(q: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, stride: int = 1) -> Tensor:
    """Logits (B, H, M, N), keys before queries: the output channels of one grouped convolution. No scale."""
    batch, heads, _, width = q.shape
    image = q.mT.reshape(batch, heads * width, grid.height, grid.width)
    logits = F.conv2d(image, weight, bias, stride=stride, padding=weight.shape[-1] // 2, groups=heads)
    return logits.view(batch, heads, len(weight) // heads, logits.shape[-2] * logits.shape[-1])


def by_convolution(
    q: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor, grid: Grid, dense: Tensor | None, activation: str
) -> Tensor:
    """One grouped convolution; its output channels are the keys. q is scaled; dense: a boolean or additive mask."""
    logits = convolved_logits(q, weight, bias, grid)
    if dense is None and activation == "softmax":
        return logits.softmax(2).mT @ v
    return _weigh_masked(logits.mT, dense, activation) @ v


def by_patches(
    q: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor, grid: Grid, dense: Tensor | None, activation: str, *,
    lean: bool,
) -> Tensor:  # fmt: skip
    """The same with heads before the batch, so that each head is one matrix product for the whole batch."""
    heads, kernel = q.shape[1], weight.shape[-1]
    image = q.transpose(0, 1).unflatten(2, (grid.height, grid.width))
    image = F.pad(image, (0, 0, *(kernel // 2,) * 4))
    keys = weight.unflatten(0, (heads, -1)).flatten(3).mT.flatten(2)  # (H, M, k*k*d)
    bias = None if bias is None else bias.view(heads, 1, -1)
    v = v.transpose(0, 1)
    if dense is not None:
        dense = dense.view((1,) * (4 - dense.ndim) + dense.shape).transpose(0, 1)
    rows = min(max(1, STRIP // grid.width), grid.height) if lean else grid.height
    recompute = torch.is_grad_enabled() and rows < grid.height
    out = []
    for first in range(0, grid.height, rows):
        last = min(first + rows, grid.height)
        part = image[:, :, first : last + kernel - 1]
        hidden = dense
        if dense is not None and dense.shape[-2] > 1:
            hidden = dense[..., first * grid.width : last * grid.width, :]
        arguments = (part, keys, bias, v, hidden, kernel, activation)
        out.append(checkpoint(_strip, *arguments, use_reentrant=False) if recompute else _strip(*arguments))
    return (torch.cat(out, 2) if len(out) > 1 else out[0]).transpose(0, 1)


def _strip(
    image: Tensor, keys: Tensor, bias: Tensor | None, v: Tensor, dense: Tensor | None, kernel: int, activation: str
) -> Float[Tensor, "H B n e"]:
    # some rows of the padded map (H, B, rows + k - 1, width + k - 1, d)
    rows, columns = image.shape[2] - kernel + 1, image.shape[3] - kernel + 1
    taps = [image[:, :, i : i + rows, j : j + columns] for i in range(kernel) for j in range(kernel)]
    patches = torch.cat(taps, -1).flatten(1, 3)
    logits = patches @ keys.mT if bias is None else torch.baddbmm(bias, patches, keys.mT)
    logits = logits.unflatten(1, (image.shape[1], rows * columns))
    return _weigh_masked(logits, dense, activation) @ v


def _weigh_masked(logits: Tensor, dense: Tensor | None, activation: str) -> Tensor:
    if dense is None:
        return weigh(logits, activation, masked=False)
    return weigh(logits.masked_fill(~dense, -torch.inf) if dense.dtype == torch.bool else logits + dense, activation)


def one_by_one(
    attention: Callable[..., Tensor], q: Tensor, v: Tensor, filters: tuple[Tensor, Tensor | None],
    grids: tuple[Grid, Grid], windows: tuple[Grid, Grid], mask: Mask | None,
) -> Float[Tensor, "B H cells e"]:  # fmt: skip
    """Each window by itself: its part of the map of queries q, with the filters of its patch tokens.

    attention: as `cska_reference`. filters: weight (H*m, d, k, k) and bias (H*m,) of the m tokens of a window of keys.
    grids, windows: of queries and of keys.
    """
    (weight, bias), (grid, memory), (window, key_window) = filters, grids, windows
    extra, indices = _token_indices(memory, q)
    window_extra, window_indices = _token_indices(key_window, q)
    image = q.unflatten(2, sides(grid))
    out = torch.zeros(*image.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    weight = weight.unflatten(0, (q.shape[1], -1))
    down, across = windows_on(memory, key_window)
    for row in range(down):
        for column in range(across):
            rows, columns = (slice(i * k, (i + 1) * k) for i, k in zip((row, column), sides(window), strict=True))
            part = image[:, :, rows, columns]
            keys = indices[row * key_window.height :, column * key_window.width :]
            keys = keys[: key_window.height, : key_window.width]
            filter_indices = window_indices[: keys.shape[0], : keys.shape[1]].flatten()
            pick, chosen = torch.cat([extra, keys.flatten()]), torch.cat([window_extra, filter_indices])
            attended = attention(
                part.flatten(2, 3), weight[:, chosen].flatten(0, 1),
                None if bias is None else bias.view(q.shape[1], -1)[:, chosen].flatten(), v[:, :, pick],
                Grid(*part.shape[2:4]),
                mask=None if mask is None or mask.keep is None else Mask(keep=mask.keep[:, pick]),
            )  # fmt: skip
            out[:, :, rows, columns] = attended.unflatten(2, part.shape[2:4])
    return out.flatten(2, 3)


def _token_indices(grid: Grid, q: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of prefix and suffix tokens in the sequence, and those of the patch tokens as a map."""
    indices = torch.arange(grid.tokens, device=q.device)
    start, stop = grid.span.start, grid.span.stop
    return torch.cat([indices[:start], indices[stop:]]), indices[start:stop].view(sides(grid))


def sides(grid: Grid) -> tuple[int, int]:
    """(height, width)."""
    return grid.height, grid.width


def rows_of(mask: Mask | None, grid: Grid) -> tuple[Mask | None, Mask | None]:
    """The mask for the queries of prefix and suffix tokens, and the mask for those of patch tokens."""
    if mask is None or not mask.kinds:
        return None, None
    if not grid.extra or mask.bias is None or mask.bias.shape[-2] == 1:
        return mask, mask
    extra, cells = split_tokens(mask.bias, grid)
    return Mask(keep=mask.keep, bias=extra), Mask(keep=mask.keep, bias=cells)
