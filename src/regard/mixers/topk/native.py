"""Exact top-k attention as a compiled kernel (native.cpp): logits of a block of queries at a time, which are not kept.

`torch.ops.regard.topk` and its gradient are operators of `torch.library`, as those of MiTA.
"""

import struct
from ctypes import c_char_p, c_void_p

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.mixers.shared.native import empty_heads, kernel, upcast_rows, views
from regard.mixers.shared.native_operator import native_operator, refuse_derivative

_SIZES = struct.Struct("8qi4xd")
"""`TopKSizes` of native.cpp: B, H, N, M, top, d, e, threads; has_plan; scale."""
_ARGUMENTS = (c_char_p, c_char_p, c_void_p, c_char_p)
"""Sizes, views of inputs, keys of the plan, views of outputs."""


def topk_native(q: Tensor, k: Tensor, v: Tensor, top: int, scale: float, keys: Tensor | None) -> Tensor:
    """q (B,H,N,d), k (B,H,M,d), v (B,H,M,e) -> (B,H,N,e), computed in float32 for half precision.

    keys: a selection (B, H or 1, N, top) to use instead of the best. Raises: UnsupportedError without compiled kernels,
    and for a second derivative.
    """
    out: Tensor = _topk(q, k, v, keys, top, scale)[0]
    return out


def _forward(q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, top: int, scale: float) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, e) and the keys of each query (B, H, N, top), chosen here if `keys` is None."""
    out, chosen = _empty_results(q, k, v, keys, top, scale)
    if keys is not None:
        chosen.copy_(keys.expand_as(chosen))
    inputs = upcast_rows(q, k, v)
    wide = out if out.dtype == inputs[0].dtype else empty_heads(inputs[0], out.shape)
    _call("forward", inputs, chosen, [wide], keys is not None, scale)
    return out if wide is out else out.copy_(wide), chosen


def _empty_results(q, k, v, keys, top, scale):  # type: ignore[no-untyped-def]
    shape = q.shape[:3]
    return empty_heads(v, (*shape, v.shape[-1])), q.new_empty(*shape, top, dtype=torch.int64)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    inputs = upcast_rows(q, k, v, grad)
    wide = [empty_heads(inputs[0], x.shape) for x in (q, k, v)]
    _call("backward", inputs, keys, wide, True, scale)
    grads = [x.to(q.dtype) for x in wide]
    return grads[0], grads[1], grads[2]


def _empty_gradients(grad, q, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(empty_heads(q, x.shape) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, _, _, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, output[1])


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    return *_topk_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


_TWICE = 'topk: the compiled kernel cannot be differentiated twice: use execution="dense" (of a layer: mixer.operator)'
_topk = native_operator("topk", _forward, fake=_empty_results, save=_save, differentiate=_differentiate)
_topk_backward = native_operator(
    "topk_backward", _backward, fake=_empty_gradients, differentiate=refuse_derivative(_TWICE)
)


@register_flop_formula(torch.ops.regard.topk)
def _flops(q, k, v, keys, top, *_, **__) -> int:  # type: ignore[no-untyped-def]
    ranked = k[2] if keys is None else top
    return 2 * q[0] * q[1] * q[2] * (ranked * q[3] + top * v[3])  # type: ignore[no-any-return]


@register_flop_formula(torch.ops.regard.topk_backward)
def _backward_flops(grad, q, k, v, keys, *_, **__) -> int:  # type: ignore[no-untyped-def]
    return 4 * q[0] * q[1] * q[2] * keys[3] * (q[3] + v[3])  # type: ignore[no-any-return]


def _call(
    direction: str, inputs: list[Tensor], keys: Tensor, outputs: list[Tensor], has_plan: bool, scale: float
) -> None:
    q, k, v = inputs[:3]
    sizes = (*q.shape[:3], k.shape[2], keys.shape[3], q.shape[3], v.shape[3])
    kernel(f"topk_{direction}", q.dtype, _ARGUMENTS)(
        _SIZES.pack(*sizes, torch.get_num_threads(), has_plan, scale), views(inputs), keys.data_ptr(), views(outputs)
    )
