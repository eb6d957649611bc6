"""The four factors by PyTorch's FlexAttention: position logits are added in the kernel, windows skip blocks of keys.

On CUDA it is compiled at the first call, which takes seconds. On a CPU it runs uncompiled and without gradients, which
is for tests. Position logits of an axis are numbers (B, H, N, side), of which the kernel reads those of its keys.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Grid, UnsupportedError

from .forms import Case, axis_logits

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Keep = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 128
"""Queries, and keys, of a block that is skipped where no pair of it is in a window."""
LEAST = 16
"""The smallest width of a head that the kernel takes."""


class Flex(NamedTuple):
    """Inputs of `flex_attention` with scale 1. score, keep: of (logit,) image, head, query and key, as tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    score: Score
    keep: Keep | None


def flex(case: Case) -> Tensor:
    """Attention (B, H, N, e) by FlexAttention.

    Raises: UnsupportedError for gradients on another device than CUDA.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, score, keep = flex_inputs(case)
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *_captured_tensors(case)))
    if not v.is_cuda and needed:
        raise UnsupportedError(f'execution="flex" has gradients on CUDA only, not on {v.device}; use "auto"')
    batch, _, rows, _ = q.shape
    blocks = None
    if keep is not None:
        images = batch if case.mask.kinds else None
        blocks = create_block_mask(keep, images, None, rows, k.shape[-2], device=v.device, BLOCK_SIZE=BLOCK)
    if not v.is_cuda:
        q, k, v = q.detach(), k.detach(), v.detach()
    run = _compile_attention() if v.is_cuda else flex_attention
    return cast(Tensor, run(q, k, v, score_mod=score, block_mask=blocks, scale=1.0))[..., : case.v.shape[-1]]


@cache
def _compile_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_inputs(case: Case) -> Flex:
    """The content terms as a product, the others as a score, window and mask as what is kept."""
    v, keys = case.v, case.keys
    lead = v.shape[:2]
    if case.content is None:
        q, k = v.new_zeros(*lead, case.grid.tokens, LEAST), v.new_zeros(*lead, keys.tokens, LEAST)
    else:
        q, k = (_wide(x) for x in (case.content, cast(Tensor, case.k)))
    added = [_axis(logits, case, number) for number, logits in enumerate(_logits(case))]
    saliency, bias = case.saliency, case.mask.bias
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape).expand(*lead, case.grid.tokens, keys.tokens)

    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for logits, place in added:
            logit = logit + logits[b, h, i, place[j]]
        if saliency is not None:
            logit = logit + saliency[b, h, j]
        return logit if bias is None else logit + bias[b, h, i, j]

    return Flex(q, k, _wide(v), score, _keep(case))


def _captured_tensors(case: Case) -> list[Tensor]:
    return [x for x in (case.place, case.x, case.y, case.saliency, case.mask.bias) if x is not None]


def _wide(x: Tensor) -> Tensor:
    return F.pad(x, (0, LEAST - x.shape[-1])) if x.shape[-1] < LEAST else x


def _logits(case: Case) -> list[Tensor]:
    return [] if case.place is None else [logits for logits, _ in axis_logits(case, lambda table, _: table)]


def _axis(logits: Tensor, case: Case, number: int) -> tuple[Tensor, Tensor]:
    """(B, H, N, side + 1) with 0 in the last column, and the column of each key: the last for one without a place.

    number: 0 for x, 1 for y.
    """
    grid, keys = case.grid, case.keys
    cells = logits.expand(*case.v.shape[:2], grid.height, grid.width, -1).flatten(2, 3)
    padded = F.pad(cells, (0, 1, grid.prefix, grid.suffix))
    y, x = _places(keys, padded.device)
    side = keys.height if number else keys.width
    return padded, torch.where(x < 0, side, y if number else x)


def _places(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each token, -1 for prefix and suffix tokens."""
    cell = torch.arange(grid.tokens, device=device) - grid.prefix
    inside = (cell >= 0) & (cell < grid.cells)
    row, column = cell.div(grid.width, rounding_mode="floor"), cell.remainder(grid.width)
    return torch.where(inside, row, -1), torch.where(inside, column, -1)


def _keep(case: Case) -> Keep | None:
    """True for keys in the window of a query that the mask allows; None if that is all."""
    causal, padding, reach = case.mask.causal, case.mask.keep, case.window // 2
    if not (causal or padding is not None or case.window):
        return None
    (y, x), (key_y, key_x) = (_places(grid, case.v.device) for grid in (case.grid, case.keys))

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = j >= 0
        if case.window:
            down = (case.stride * key_y[j] - case.query_stride * y[i]).abs() <= reach
            across = (case.stride * key_x[j] - case.query_stride * x[i]).abs() <= reach
            kept = kept & (down & across | (y[i] < 0) | (key_y[j] < 0))
        if causal:
            kept = kept & (j <= i)
        return kept if padding is None else kept & padding.expand(len(case.v), -1)[b, j]

    return keep
