"""What the Triton kernels share: sizes of tiles, number types, and where they may run."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.core import UnsupportedError

from .native import in_function_transform

LEAST = 16
"""Rows, columns and widths that a product of Triton has at least."""
KINDS = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on the CPU: TRITON_INTERPRET=1 when Triton was imported."""


def width_of(length: int) -> int:
    """The side of a tile for a length: a power of two, at least `LEAST`."""
    return max(LEAST, triton.next_power_of_2(length))


def cast_of(x: Tensor) -> object:
    """The type in which products read x; float32 for the bfloat16 of the interpreter, whose products are wrong."""
    return tl.float32 if INTERPRETED and x.dtype is torch.bfloat16 else KINDS[x.dtype]


def check_runs(x: Tensor) -> None:
    """Raises: UnsupportedError unless the interpreter runs or x is on a CUDA device and not in float64, whose products
    Triton does not compile for every GPU; and in function transforms.
    """
    if not (x.is_cuda or INTERPRETED):
        raise UnsupportedError(f'execution="triton" needs a CUDA device, not {x.device}; use "auto"')
    if x.dtype is torch.float64 and not INTERPRETED:
        raise UnsupportedError('execution="triton" has no float64 on a GPU; use "auto"')
    if in_function_transform():
        raise UnsupportedError('execution="triton" runs without function transforms such as vmap; use "auto"')


@triton.jit
def first_row(x, head, heads, s_batch, s_head):  # type: ignore[no-untyped-def]
    """Where a head's rows begin."""
    return x + (head // heads).to(tl.int64) * s_batch + (head % heads).to(tl.int64) * s_head


@triton.jit
def load_rows(rows, token, s_token, column, valid, WIDTH: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    at = token.to(tl.int64)[:, None] * s_token + column[None, :]
    return tl.load(rows + at, mask=valid[:, None] & (column < WIDTH)[None, :], other=0.0).to(KIND)


@triton.jit
def store_rows(rows, token, s_token, column, valid, x, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = token.to(tl.int64)[:, None] * s_token + column[None, :]
    tl.store(rows + at, x, mask=valid[:, None] & (column < WIDTH)[None, :])


@triton.jit
def add_rows(rows, token, s_token, column, valid, x, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Atomically, where several programs add to a row."""
    at = token.to(tl.int64)[:, None] * s_token + column[None, :]
    tl.atomic_add(rows + at, x, mask=valid[:, None] & (column < WIDTH)[None, :])


def heads_last(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """An empty (B, H, N, width) whose heads can be joined without a copy."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], width, dtype=dtype).transpose(1, 2)


def strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def dense(x: Tensor) -> Tensor:
    """x with its rows in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()
