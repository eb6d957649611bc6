"""Bilinear sampling at the taps of a deformable convolution in compiled code (deformable_native.cpp)."""

import ctypes
from ctypes import byref, c_long, c_void_p
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import UnsupportedError
from regard.mixers.shared.native_build import native_function

SOURCE = Path(__file__).with_suffix(".cpp")


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, c_long) for name in ("B", "C", "h", "w", "g", "K", "L", "threads"))


def sample_native(
    x: Float[Tensor, "B C h w"], points: Float[Tensor, "B g K hh ww 2"], factors: Tensor | None
) -> Float[Tensor, "B C K L"]:
    """As `sample_maps`, in float32 for half precision. Raises: UnsupportedError without a compiler."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(dtype).permute(0, 2, 3, 1).contiguous()  # (B, h, w, C)
    factors = None if factors is None else factors.flatten(3).to(dtype).contiguous()
    samples: Tensor = Sample.apply(rows, points.flatten(3, 4).to(dtype).contiguous(), factors)  # type: ignore[no-untyped-call]
    return samples.to(x.dtype).permute(0, 3, 2, 1)


class Sample(torch.autograd.Function):
    """rows (B, h, w, C), points (B, g, K, L, 2), factors (B, g, K, L) or None -> (B, L, K, C)."""

    @staticmethod
    def forward(ctx, rows: Tensor, points: Tensor, factors: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, points, factors)
        batch, _, taps, length, _ = points.shape
        out = rows.new_empty(batch, length, taps, rows.shape[3])
        _call("forward", rows, points, factors, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def, override]
        if torch.is_grad_enabled():  # create_graph=True
            raise UnsupportedError(
                'deformable_conv: execution="native" cannot be differentiated twice; use execution="eager"'
            )
        rows, points, factors = ctx.saved_tensors
        grads = torch.zeros_like(rows), torch.empty_like(points), None if factors is None else torch.empty_like(factors)
        _call("backward", rows, points, factors, grad.contiguous(), *grads)
        return grads


def _call(direction: str, rows: Tensor, points: Tensor, *arrays: Tensor | None) -> None:
    (batch, height, width, channels), (_, groups, taps, length, _) = rows.shape, points.shape
    sizes = _Sizes(batch, channels, height, width, groups, taps, length, torch.get_num_threads())
    pointers = (c_void_p(None if array is None else array.data_ptr()) for array in (rows, points, *arrays))
    native_function(SOURCE, f"sample_{direction}", rows.dtype)(byref(sizes), *pointers)
