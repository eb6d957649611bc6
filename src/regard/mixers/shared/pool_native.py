"""Means of patch tokens over windows of the grid as a compiled kernel (pool_native.cpp)."""

import struct
from collections.abc import Sequence
from ctypes import c_char_p, c_int

import torch
from torch import Tensor

from .native import batch_rule, empty_heads, kernel, views

_SIZES = struct.Struct("9q")
"""`PoolSizes` of pool_native.cpp: B, H, N, d, first, width, rows, columns, threads."""
_ARGUMENTS = (c_char_p, c_char_p, c_char_p, c_char_p, c_int)


@torch.library.custom_op("regard::pool", mutates_args=(), device_types="cpu")
def pool_native(x: Tensor, first: int, width: int, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """x (B, H, N, d) -> (B, H, m, d), summed in float32 for half precision.

    first: the first token of the image. width: its columns. rows, columns: begin and end of each window, one after the
    other.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out = wide.new_empty(*x.shape[:2], len(rows) * len(columns) // 4, x.shape[3])
    _call(wide if wide.stride(-1) == 1 else wide.contiguous(), out, first, width, (rows, columns), backward=False)
    return out.to(x.dtype)


@pool_native.register_fake
def _(x, first, width, rows, columns):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:2], len(rows) * len(columns) // 4, x.shape[3])


@torch.library.custom_op("regard::pool_backward", mutates_args=(), device_types="cpu")
def _backward(grad: Tensor, tokens: int, first: int, width: int, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """The gradient of x, which has `tokens` tokens."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
    out = empty_heads(wide, (*grad.shape[:2], tokens, grad.shape[3]))
    _call(out, wide, first, width, (rows, columns), backward=True)
    return out.to(grad.dtype)


@_backward.register_fake
def _(grad, tokens, *_):  # type: ignore[no-untyped-def]
    return empty_heads(grad, (*grad.shape[:2], tokens, grad.shape[3]))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, *ctx.options = inputs
    ctx.tokens = x.shape[2]


pool_native.register_autograd(
    lambda ctx, grad: (_backward(grad, ctx.tokens, *ctx.options), *[None] * 4), setup_context=_save
)
_backward.register_autograd(
    lambda ctx, grad: (pool_native(grad, *ctx.options), *[None] * 5),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "options", inputs[2:]),
)
for _operator in (pool_native, _backward):
    _operator.register_vmap(batch_rule(_operator))


def _call(
    x: Tensor, y: Tensor, first: int, width: int, windows: tuple[Sequence[int], Sequence[int]], *, backward: bool
) -> None:
    edges = [edge for pairs in windows for edge in pairs]
    sizes = _SIZES.pack(*x.shape, first, width, *(len(pairs) // 2 for pairs in windows), torch.get_num_threads())
    kernel("pool", x.dtype, _ARGUMENTS)(
        sizes, struct.pack(f"{len(edges)}q", *edges), views([x]), views([y]), int(backward)
    )
