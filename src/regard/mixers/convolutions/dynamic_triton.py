"""The sum over taps of dynamic convolution in Triton: one kernel for the forward pass, two for the backward pass.

A program computes a tile of channels and positions of one group of one image, tap after tap, in float32 at least. All
tensors are contiguous; `padded` (B, g, c, h + rows - 1, w + columns - 1), `kernels` (B, g, rows * columns, h, w).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.core import UnsupportedError
from regard.mixers.shared.precision import upcast_dtype
from regard.mixers.shared.triton_tiles import KINDS, check_runs

TILE = 4096
"""Numbers in a tile: channels times positions."""


@triton.jit
def _positions(start, POSITIONS: tl.constexpr, width, total):  # type: ignore[no-untyped-def]
    at = start * POSITIONS + tl.arange(0, POSITIONS)
    return at, at // width, at % width, at < total


@triton.jit
def _sum_taps(  # type: ignore[no-untyped-def]
    padded, kernels, out, channels, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    at, y, x, inside = _positions(tl.program_id(1), POSITIONS, width, height * width)
    group, c = tl.program_id(0).to(tl.int64), tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    there, wide = (c < channels)[:, None] & inside[None, :], width + COLUMNS - 1
    source = padded + (group * channels + c)[:, None] * ((height + ROWS - 1) * wide)
    weights = kernels + group * ROWS * COLUMNS * height * width + at
    total = tl.zeros([CHANNELS, POSITIONS], KIND)
    for tap in range(ROWS * COLUMNS):
        i, j = tap // COLUMNS, tap % COLUMNS
        weight = tl.load(weights + tap * height * width, mask=inside, other=0.0).to(KIND)
        value = tl.load(source + ((y + i) * wide + x + j)[None, :], mask=there, other=0.0).to(KIND)
        total += weight[None, :] * value
    tl.store(out + (group * channels + c)[:, None] * (height * width) + at[None, :], total, mask=there)


@triton.jit
def _padded_gradient(  # type: ignore[no-untyped-def]
    grad, kernels, out, channels, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    wide = width + COLUMNS - 1
    size = (height + ROWS - 1) * wide
    at, row, column, inside = _positions(tl.program_id(1), POSITIONS, wide, size)
    group, c = tl.program_id(0).to(tl.int64), tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    source = grad + (group * channels + c)[:, None] * (height * width)
    weights = kernels + group * ROWS * COLUMNS * height * width
    total = tl.zeros([CHANNELS, POSITIONS], KIND)
    for tap in range(ROWS * COLUMNS):
        y, x = row - tap // COLUMNS, column - tap % COLUMNS
        valid = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        weight = tl.load(weights + (tap * height + y) * width + x, mask=valid, other=0.0).to(KIND)
        there = (c < channels)[:, None] & valid[None, :]
        value = tl.load(source + (y * width + x)[None, :], mask=there, other=0.0).to(KIND)
        total += weight[None, :] * value
    there = (c < channels)[:, None] & inside[None, :]
    tl.store(out + (group * channels + c)[:, None] * size + at[None, :], total, mask=there)


@triton.jit
def _kernels_gradient(  # type: ignore[no-untyped-def]
    padded, grad, out, channels, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    at, y, x, inside = _positions(tl.program_id(1), POSITIONS, width, height * width)
    group, c, wide = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS), width + COLUMNS - 1
    there = (c < channels)[:, None] & inside[None, :]
    own = tl.load(grad + (group * channels + c)[:, None] * (height * width) + at[None, :], mask=there, other=0.0)
    own = own.to(KIND)
    source = padded + (group * channels + c)[:, None] * ((height + ROWS - 1) * wide)
    target = out + group * ROWS * COLUMNS * height * width + at
    for tap in range(ROWS * COLUMNS):
        i, j = tap // COLUMNS, tap % COLUMNS
        value = tl.load(source + ((y + i) * wide + x + j)[None, :], mask=there, other=0.0).to(KIND)
        tl.store(target + tap * height * width, tl.sum(value * own, 0), mask=inside)


def _launch(kernel: Any, x: Tensor, y: Tensor, out: Tensor, maps: Tensor, most: int, *sides: int) -> None:
    """maps (B, g, c, h, w) has the sizes. most: channels of a tile."""
    if not out.numel():
        return
    channels, positions = maps.shape[2], out.shape[3] * out.shape[4]
    wide = triton.next_power_of_2(min(channels, most))
    along = min(triton.next_power_of_2(positions), max(16, TILE // wide))
    programs = maps.shape[0] * maps.shape[1], triton.cdiv(positions, along), triton.cdiv(channels, wide)
    kernel[programs](
        x, y, out, *maps.shape[2:], ROWS=sides[0], COLUMNS=sides[1], CHANNELS=wide, POSITIONS=along,
        KIND=KINDS[upcast_dtype(x)],
    )  # fmt: skip


@torch.library.custom_op("regard::sum_taps", mutates_args=())
def _forward(padded: Tensor, kernels: Tensor, rows: int, columns: int) -> Tensor:
    """(B, g, c, h, w)."""
    out = _empty(padded, kernels)
    _launch(_sum_taps, padded, kernels, out, out, 64, rows, columns)
    return out


@_forward.register_fake
def _empty(padded, kernels, *_):  # type: ignore[no-untyped-def]
    return padded.new_empty(*padded.shape[:3], *kernels.shape[3:])


@torch.library.custom_op("regard::sum_taps_backward", mutates_args=())
def _backward(grad: Tensor, padded: Tensor, kernels: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The gradients of padded and kernels."""
    to_padded, to_kernels = torch.empty_like(padded), torch.empty_like(kernels)
    _launch(_padded_gradient, grad, kernels, to_padded, grad, 64, rows, columns)
    _launch(_kernels_gradient, padded, grad, to_kernels, grad, grad.shape[2], rows, columns)
    return to_padded, to_kernels


@_backward.register_fake
def _empty_gradients(grad, padded, kernels, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(padded), torch.empty_like(kernels)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    padded, kernels, *ctx.sides = inputs
    ctx.save_for_backward(padded, kernels)


def _differentiate(ctx, grad):  # type: ignore[no-untyped-def]
    return *torch.ops.regard.sum_taps_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.sides), None, None


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise UnsupportedError("dynamic convolution cannot be differentiated twice on a GPU")


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)


def sum_taps(padded: Tensor, kernels: Tensor, sides: tuple[int, int]) -> Tensor:
    """The sum over taps, with gradients.

    Raises: UnsupportedError in function transforms, for float64 on a GPU, or without a CUDA device (the interpreter,
    TRITON_INTERPRET=1, is for tests).
    """
    check_runs(padded)
    result: Tensor = torch.ops.regard.sum_taps(padded.contiguous(), kernels.contiguous(), *sides)
    return result
