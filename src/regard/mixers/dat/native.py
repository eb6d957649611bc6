"""The position bias of deformable attention in compiled code (native.cpp): only the bias itself takes memory."""

import struct
from ctypes import c_char_p, c_void_p

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import Grid
from regard.mixers.shared.native import kernel
from regard.mixers.shared.native_operator import native_operator, refuse_derivative

_SIZES = struct.Struct("10q")
"""`BiasSizes` of native.cpp: B, H, G, points, h, w, rows, columns, prefix, threads."""


def position_bias_native(
    table: Float[Tensor, "H th tw"], points: Float[Tensor, "B G s 2"], grid: Grid
) -> Float[Tensor, "B H N M"]:
    """The table, made for this grid, sampled at (query - point), in float32 at least.

    N and M count prefix and suffix tokens, whose columns are the last and whose bias is 0. Raises: UnsupportedError
    for a second derivative.
    """
    dtype = torch.promote_types(table.dtype, torch.float32)
    sizes = [grid.height, grid.width, grid.prefix, grid.suffix]
    bias: Tensor = _position_bias(table.to(dtype).contiguous(), points.to(dtype).contiguous(), sizes)
    return bias


def _forward(table: Tensor, points: Tensor, grid: list[int]) -> Tensor:
    """table (H, 2h - 1, 2w - 1), points (B, G, s, 2), contiguous; grid: height, width, prefix, suffix."""
    out = _empty_bias(table, points, grid)
    extra = sum(grid[2:])
    if extra:
        out[:, :, : grid[2]] = 0
        out[:, :, out.shape[2] - grid[3] :] = 0
        out[..., points.shape[2] :] = 0
    _call("forward", table, points, grid, table, points, out)
    return out


def _empty_bias(table: Tensor, points: Tensor, grid: list[int]) -> Tensor:
    height, width, prefix, suffix = grid
    rows, columns = height * width + prefix + suffix, points.shape[2] + prefix + suffix
    return table.new_empty(points.shape[0], table.shape[0], rows, columns)


def _backward(grad: Tensor, table: Tensor, points: Tensor, grid: list[int]) -> tuple[Tensor, Tensor]:
    """The gradients of the table and of the points."""
    to_table = torch.zeros_like(table)
    to_points = points.new_zeros(points.shape[0], table.shape[0], *points.shape[2:])
    _call("backward", table, points, grid, points, table, grad.contiguous(), to_table, to_points)
    return to_table, to_points.unflatten(1, (points.shape[1], -1)).sum(2)


def _empty_gradients(grad: Tensor, table: Tensor, points: Tensor, grid: list[int]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(table), torch.empty_like(points)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    table, points, ctx.grid = inputs
    ctx.save_for_backward(table, points)


def _differentiate(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    return *_position_bias_backward(grad, *ctx.saved_tensors, ctx.grid), None


def _each_sample(operator):  # type: ignore[no-untyped-def]
    """The rule under `vmap`: one call for each sample of the mapped axis, as the table has no axis of the batch."""

    def rule(info, in_dims, *args):  # type: ignore[no-untyped-def]
        calls = [
            operator(
                *(x.select(axis, i) if isinstance(axis, int) else x for x, axis in zip(args, in_dims, strict=True))
            )
            for i in range(info.batch_size)
        ]
        if isinstance(calls[0], Tensor):
            return torch.stack(calls), 0
        return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])

    return rule


_TWICE = "DAT: its compiled kernel cannot be differentiated twice; set REGARD_NATIVE=0"
_position_bias = native_operator(
    "position_bias", _forward, fake=_empty_bias, save=_save, differentiate=_differentiate, rule=_each_sample
)
_position_bias_backward = native_operator(
    "position_bias_backward",
    _backward,
    fake=_empty_gradients,
    differentiate=refuse_derivative(_TWICE),
    rule=_each_sample,
)


def _call(direction: str, table: Tensor, points: Tensor, grid: list[int], *arrays: Tensor) -> None:
    (batch, groups, number, _), (height, width, prefix, suffix) = points.shape, grid
    rows, columns = height * width + prefix + suffix, number + prefix + suffix
    sizes = (batch, table.shape[0], groups, number, height, width, rows, columns, prefix, torch.get_num_threads())
    arguments = (c_char_p, *[c_void_p] * len(arrays))
    function = kernel(f"position_bias_{direction}", table.dtype, arguments)
    function(_SIZES.pack(*sizes), *(array.data_ptr() for array in arrays))
