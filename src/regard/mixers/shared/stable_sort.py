"""A stable sort of integers that gives the same order on every device and in exported graphs."""

import torch
from jaxtyping import Int
from torch import Tensor


def stable_sort(
    numbers: Int[Tensor, "*B N"], below: int | None = None
) -> tuple[Int[Tensor, "*B N"], Int[Tensor, "*B N"]]:
    """The numbers sorted along the last axis, and their indices; equal numbers keep their order.

    below: what all numbers are known to be below, at least 0: a GPU sorts numbers of 16 bits several times faster.
    ONNX has no stable sort: elsewhere the unique keys number * N + index are sorted, which need N times the range.
    """
    if numbers.is_cuda:
        short = numbers.to(torch.int16) if below is not None and below <= 2**15 else numbers
        ranked, order = short.sort(dim=-1, stable=True)
        return ranked.to(numbers.dtype), order
    length = numbers.shape[-1]
    keys = (numbers * length + torch.arange(length, device=numbers.device)).sort(dim=-1).values
    ranked = keys // length
    return ranked, keys - ranked * length  # ONNX has no remainder by a size that is not fixed
