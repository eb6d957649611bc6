"""MiTA as a compiled kernel (native.cpp): one head at a time; only inputs and plan are saved.

For bfloat16 its products round to bfloat16 and sum in float32, on processors with AMX; scores that select are exact
products there too.

`torch.ops.regard.mita` and its gradient are operators of `torch.library`, so that `torch.compile`, `torch.export` and
function transforms take them as they take PyTorch's own.
"""

import struct
from collections.abc import Sequence
from ctypes import c_char_p, c_void_p

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.mixers.shared.native import empty_heads, half_products, kernel, upcast_rows, views
from regard.mixers.shared.native_operator import native_operator, refuse_derivative
from regard.mixers.shared.pool_native import add_gradient, pool

from .routing import MitaPlan

_SIZES = struct.Struct("9q4i2d")
"""`Sizes` of native.cpp: B, H, N, M, m, top, d, e, threads; shared, has_plan, half, further; scale, factor."""
_ARGUMENTS = (c_char_p, c_char_p, c_void_p, c_void_p, c_void_p, c_char_p)
"""Sizes, views of inputs, bias or None, keys and experts of the plan, views of outputs."""


def mita_native(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor | Sequence[int], top: int, choices: int, *, shared: bool,
    scale: float, factor: float, bias: Tensor | None, drop: Tensor | None, plan: MitaPlan | None,
) -> Tensor:  # fmt: skip
    """q (B,H,N,d), k (B,H,M,d), v (B,H,M,e), landmarks (B,H,m,d) -> (B,H,N,e), in float32 for half precision.

    landmarks: or windows as in pool_native.py, whose averages of q they are; their gradient is added to that of q, in
    its place.
    top: keys of an expert. choices: experts of a query. shared: whether queries attend to the landmarks too. scale: of
    all logits. factor: of the landmarks' logits, beside scale. bias (B|1,H|1,1,M): of the keys' logits. drop (B,m):
    landmarks that are not used.
    Raises: UnsupportedError without compiled kernels, and for a second derivative.
    """
    given, windows = (landmarks, None) if isinstance(landmarks, Tensor) else (None, landmarks)
    added = _added_bias(q, _number(given, windows), k.shape[2], bias, drop)
    keys, experts = (None, None) if plan is None else plan
    out: Tensor = _mita(q, k, v, given, windows, added, keys, experts, top, shared, scale, factor, choices)[0]
    return out


def _number(landmarks: Tensor | None, windows: Sequence[int] | None) -> int:
    """The number of landmarks, which are given or averages over windows (as in pool_native.py)."""
    return windows[2] * windows[3] if windows is not None else landmarks.shape[2]  # type: ignore[union-attr]


def _added_bias(q: Tensor, m: int, keys: int, bias: Tensor | None, drop: Tensor | None) -> Tensor | None:
    """The bias of the logits of landmarks and keys (B, H, m + M), in float32 or float64, or None."""
    if bias is None and drop is None:
        return None
    added = q.new_zeros(*q.shape[:2], m + keys, dtype=torch.promote_types(q.dtype, torch.float32))
    if drop is not None:
        added[..., :m].masked_fill_(drop[:, None], -torch.inf)
    if bias is not None:
        added[..., m:] = bias[..., 0, :]
    return added


def _forward(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor | None, windows: Sequence[int] | None, bias: Tensor | None,
    keys: Tensor | None, experts: Tensor | None, top: int, shared: bool, scale: float, factor: float, choices: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output (B, H, N, e) and the plan, chosen here if `keys` and `experts` are None."""
    given = q, k, v, landmarks, windows, bias, keys, experts, top
    out, chosen_keys, chosen_experts = _empty_results(*given, shared, scale, factor, choices)
    inputs = upcast_rows(q, k, v, _landmarks(q, landmarks, windows))
    has_plan = keys is not None and experts is not None
    if has_plan:
        chosen_keys.copy_(keys)
        chosen_experts.copy_(experts)
    wide = out if out.dtype == inputs[0].dtype else empty_heads(inputs[0], out.shape)
    options = (shared, has_plan, half_products(q.dtype), scale, factor)
    _call("forward", inputs, bias, (chosen_keys, chosen_experts), [wide], options)
    return out if wide is out else out.copy_(wide), chosen_keys, chosen_experts


def _landmarks(q: Tensor, landmarks: Tensor | None, windows: Sequence[int] | None) -> Tensor:
    return pool(q, windows) if windows is not None else landmarks  # type: ignore[return-value]


def _empty_results(q, k, v, landmarks, windows, bias, keys, experts, top, shared, scale, factor, choices):  # type: ignore[no-untyped-def]
    b, h, n = q.shape[:3]
    return (
        empty_heads(v, (b, h, n, v.shape[-1])), q.new_empty(b, h, _number(landmarks, windows), top, dtype=torch.int64),
        q.new_empty(b, h, n, choices, dtype=torch.int64),
    )  # fmt: skip


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor | None, windows: Sequence[int] | None,
    bias: Tensor | None, keys: Tensor, experts: Tensor, shared: bool, scale: float, factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and landmarks; that of landmarks that were pooled is empty."""
    inputs = upcast_rows(q, k, v, _landmarks(q, landmarks, windows), grad)
    wide = [empty_heads(inputs[0], x.shape) for x in inputs[:4]]
    options = (shared, True, half_products(q.dtype), scale, factor)
    _call("backward", inputs, bias, (keys, experts), wide, options)
    if windows is not None:
        add_gradient(wide[0], wide[3], windows)
        wide[3] = wide[3].new_empty(0)
    grads = [x.to(q.dtype) for x in wide]
    return grads[0], grads[1], grads[2], grads[3]


def _empty_gradients(grad, q, k, v, landmarks, *_):  # type: ignore[no-untyped-def]
    pooled = q.new_empty(0) if landmarks is None else empty_heads(q, landmarks.shape)
    return *(empty_heads(q, x.shape) for x in (q, k, v)), pooled


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, landmarks, ctx.windows, bias, _, _, _, *ctx.options, _ = inputs
    _, keys, experts = output
    ctx.mark_non_differentiable(keys, experts)
    ctx.save_for_backward(q, k, v, landmarks, bias, keys, experts)


def _differentiate(ctx, grad, *_):  # type: ignore[no-untyped-def]
    q, k, v, landmarks, *chosen = ctx.saved_tensors
    grads = _mita_backward(grad, q, k, v, landmarks, ctx.windows, *chosen, *ctx.options)
    return *grads[:3], None if landmarks is None else grads[3], *[None] * 9


_TWICE = 'mita: the compiled kernel cannot be differentiated twice: use execution="dense" (of a layer: mixer.operator)'
_mita = native_operator("mita", _forward, fake=_empty_results, save=_save, differentiate=_differentiate)
_mita_backward = native_operator(
    "mita_backward", _backward, fake=_empty_gradients, differentiate=refuse_derivative(_TWICE)
)


@register_flop_formula(torch.ops.regard.mita)
def _flops(q, k, v, landmarks, windows, bias, keys, experts, top, shared, scale, factor, choices, **_) -> int:  # type: ignore[no-untyped-def]
    m = windows[2] * windows[3] if landmarks is None else landmarks[2]
    return 2 * (_landmark_macs(q, k, v, m, shared) + _routed_macs(q, v, top * choices))


@register_flop_formula(torch.ops.regard.mita_backward)
def _backward_flops(grad, q, k, v, landmarks, windows, bias, keys, experts, shared, *_, **__) -> int:  # type: ignore[no-untyped-def]
    shared_macs = _landmark_macs(q, k, v, keys[2], True) if shared else 0  # nothing is learned through the selection
    return 4 * (shared_macs + _routed_macs(q, v, keys[3] * experts[3]))


def _landmark_macs(q: Sequence[int], k: Sequence[int], v: Sequence[int], m: int, shared: bool) -> int:
    return q[0] * q[1] * m * (k[2] + q[2]) * (q[3] + (v[3] if shared else 0))


def _routed_macs(q: Sequence[int], v: Sequence[int], top: int) -> int:
    return q[0] * q[1] * q[2] * top * (q[3] + v[3])


def _call(
    direction: str, inputs: list[Tensor], bias: Tensor | None, plan: tuple[Tensor, Tensor], outputs: list[Tensor],
    options: tuple[bool, bool, bool, float, float],
) -> None:  # fmt: skip
    """options: shared, has_plan, half, scale, factor of `_Sizes`."""
    q, k, v, landmarks = inputs[:4]
    keys, experts = plan
    sizes = (*q.shape[:3], k.shape[2], landmarks.shape[2], keys.shape[3], q.shape[3], v.shape[3])
    kernel(f"mita_{direction}", q.dtype, _ARGUMENTS)(
        _SIZES.pack(*sizes, torch.get_num_threads(), *options[:3], experts.shape[3] - 1, *options[3:]), views(inputs),
        None if bias is None else bias.data_ptr(), keys.data_ptr(), experts.data_ptr(), views(outputs),
    )  # fmt: skip
