"""Means of patch tokens over windows of the grid as a compiled kernel (pool_native.cpp).

windows, in all functions: the first token of the image, its columns, the numbers of rows and columns of windows, then
begin and end of each row of windows, and of each column.
"""

import struct
from collections.abc import Sequence
from ctypes import c_char_p, c_int

import torch
from torch import Tensor

from .native import empty_heads, kernel, views
from .native_operator import native_operator

_SIZES = struct.Struct("9q")
"""`PoolSizes` of pool_native.cpp: B, H, N, d, first, width, rows, columns, threads."""
_ARGUMENTS = (c_char_p, c_char_p, c_char_p, c_char_p, c_int)
_FORWARD, _GRADIENT, _ADDED = range(3)


def pool(x: Tensor, windows: Sequence[int]) -> Tensor:
    """x (B, H, N, d) -> means (B, H, m, d), summed in float32 for half precision; without gradient."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out = wide.new_empty(*x.shape[:2], windows[2] * windows[3], x.shape[3])
    _call(wide if wide.stride(-1) == 1 else wide.contiguous(), out, windows, _FORWARD)
    return out.to(x.dtype)


def add_gradient(to_x: Tensor, grad: Tensor, windows: Sequence[int]) -> None:
    """Add the gradient of x, from that of its means (B, H, m, d), to a tensor (B, H, N, d) of the same dtype."""
    _call(to_x, grad, windows, _ADDED)


def _empty_means(x, windows):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:2], windows[2] * windows[3], x.shape[3])


def _backward(grad: Tensor, tokens: int, windows: Sequence[int]) -> Tensor:
    """The gradient of x, which has `tokens` tokens."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
    out = empty_heads(wide, (*grad.shape[:2], tokens, grad.shape[3]))
    _call(out, wide, windows, _GRADIENT)
    return out.to(grad.dtype)


def _empty_gradient(grad, tokens, windows):  # type: ignore[no-untyped-def]
    return empty_heads(grad, (*grad.shape[:2], tokens, grad.shape[3]))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.tokens, ctx.windows = inputs[0].shape[2], inputs[1]


def _differentiate(ctx, grad):  # type: ignore[no-untyped-def]
    return _pool_backward(grad, ctx.tokens, ctx.windows), None


def _save_windows(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.windows = inputs[2]


def _differentiate_gradient(ctx, grad):  # type: ignore[no-untyped-def]
    return pool_native(grad, ctx.windows), None, None


pool_native = native_operator("pool", pool, fake=_empty_means, save=_save, differentiate=_differentiate)
_pool_backward = native_operator(
    "pool_backward", _backward, fake=_empty_gradient, save=_save_windows, differentiate=_differentiate_gradient
)


def _call(x: Tensor, y: Tensor, windows: Sequence[int], step: int) -> None:
    sizes = _SIZES.pack(*x.shape, *windows[:4], torch.get_num_threads())
    edges = struct.pack(f"{len(windows) - 4}q", *windows[4:])
    kernel("pool", x.dtype, _ARGUMENTS)(sizes, edges, views([x]), views([y]), step)
