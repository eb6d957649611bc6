"""Bilinear sampling at the taps of a deformable convolution in compiled code (deformable_native.cpp)."""

import struct
from ctypes import c_char_p, c_void_p

import torch
from jaxtyping import Float
from torch import Tensor

from regard.mixers.shared.native import kernel
from regard.mixers.shared.native_operator import native_operator, refuse_derivative

_SIZES = struct.Struct("8q")
"""`Sizes` of deformable_native.cpp: B, C, h, w, g, K, L, threads."""


def sample_native(
    x: Float[Tensor, "B C h w"], points: Float[Tensor, "B g K hh ww 2"], factors: Tensor | None
) -> Float[Tensor, "B C K L"]:
    """As `sample_maps`, in float32 for half precision. Raises: UnsupportedError without compiled kernels."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(dtype).permute(0, 2, 3, 1).contiguous()  # (B, h, w, C)
    factors = None if factors is None else factors.flatten(3).to(dtype).contiguous()
    samples: Tensor = _sample(rows, points.flatten(3, 4).to(dtype).contiguous(), factors)
    return samples.to(x.dtype).permute(0, 3, 2, 1)


def _forward(rows: Tensor, points: Tensor, factors: Tensor | None) -> Tensor:
    """rows (B, h, w, C), points (B, g, K, L, 2), factors (B, g, K, L) or None, contiguous -> (B, L, K, C)."""
    out = _empty_samples(rows, points, factors)
    _call("forward", rows, points, factors, out)
    return out


def _empty_samples(rows: Tensor, points: Tensor, factors: Tensor | None) -> Tensor:
    batch, _, taps, length, _ = points.shape
    return rows.new_empty(batch, length, taps, rows.shape[3])


def _backward(grad: Tensor, rows: Tensor, points: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, points and factors; that of None is empty."""
    grads = _empty_gradients(grad, rows, points, factors)
    _call("backward", rows, points, factors, grad.contiguous(), grads[0].zero_(), grads[1],
          None if factors is None else grads[2])  # fmt: skip
    return grads


def _empty_gradients(
    grad: Tensor, rows: Tensor, points: Tensor, factors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    weights = rows.new_empty(0) if factors is None else torch.empty_like(factors)
    return torch.empty_like(rows), torch.empty_like(points), weights


def _differentiate(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    rows, points, factors = ctx.saved_tensors  # read once, as checkpointing wants it
    grad_rows, grad_points, grad_factors = _sample_backward(grad, rows, points, factors)
    return grad_rows, grad_points, None if factors is None else grad_factors


_TWICE = 'deformable_conv: execution="native" cannot be differentiated twice; use execution="eager"'
_sample = native_operator(
    "deformable_sample", _forward, fake=_empty_samples, differentiate=_differentiate,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)  # fmt: skip
_sample_backward = native_operator(
    "deformable_sample_backward", _backward, fake=_empty_gradients, differentiate=refuse_derivative(_TWICE)
)


def _call(direction: str, rows: Tensor, points: Tensor, *arrays: Tensor | None) -> None:
    (batch, height, width, channels), (_, groups, taps, length, _) = rows.shape, points.shape
    sizes = _SIZES.pack(batch, channels, height, width, groups, taps, length, torch.get_num_threads())
    pointers = [None if array is None else array.data_ptr() for array in (rows, points, *arrays)]
    kernel(f"sample_{direction}", rows.dtype, (c_char_p, *[c_void_p] * len(pointers)))(sizes, *pointers)
