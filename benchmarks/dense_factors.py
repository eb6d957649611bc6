"""The spatial factors as mmcv computes them: all logits from the logits of the axes, a softmax, a product.

A baseline of `factors.py` and `gpu_kernels.py`; Regard itself has only forms that keep less.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


def dense(q, k, v, attn_mask):
    """Attention with all logits at once."""
    return (q @ k.mT).add_(attn_mask).softmax(-1) @ v


def separable(case, *, fused: bool = False):
    """The output for a `forms.Case` without a mask. fused: by fused attention, which needs E1."""
    import torch
    import torch.nn.functional as F

    from regard.mixers.factors import forms

    grid, keys, v = case.grid, case.keys, case.v
    logits = v.new_zeros(*v.shape[:2], grid.tokens, keys.tokens)
    if case.place is not None:
        axes = [part for part, _ in forms.axis_logits(case, lambda table, _: table)]
        cells = axes[0][..., None, :] + (axes[1][..., :, None] if len(axes) == 2 else 0)
        cells = cells.expand(-1, -1, grid.height, grid.width, keys.height, keys.width).flatten(4, 5).flatten(2, 3)
        logits = logits + F.pad(cells, (keys.prefix, keys.suffix, grid.prefix, grid.suffix))
    if case.saliency is not None:
        logits = logits + case.saliency[:, :, None]
    inside = forms.inside_window(grid, keys, case.window, case.stride, v.device, case.query_stride)
    if inside is not None:
        logits = logits.masked_fill(~inside, -torch.inf)
    if case.content is None:
        return logits.softmax(-1).to(v.dtype) @ v
    attend = forms.sdpa if fused else dense
    more = {"scale": 1.0} if fused else {}
    return attend(case.content, case.k, v, attn_mask=logits.to(v.dtype), **more)


@contextmanager
def as_mmcv(*, fused: bool = False) -> Iterator[None]:
    """Within it `factors(..., execution="compressed")` takes the dense form."""
    from regard.mixers.factors import forms

    with mock.patch.object(forms, "compressed", lambda case: separable(case, fused=fused)):
        yield
