"""A stable sort of integers that gives the same order on every device and in exported graphs."""

import torch
from jaxtyping import Int
from torch import Tensor


def stable_sort(numbers: Int[Tensor, "*B N"]) -> tuple[Int[Tensor, "*B N"], Int[Tensor, "*B N"]]:
    """The numbers sorted along the last axis, and their indices; equal numbers keep their order.

    ONNX has no stable sort: this one sorts the unique keys number * N + index, which need N times the range.
    """
    length = numbers.shape[-1]
    keys = (numbers * length + torch.arange(length, device=numbers.device)).sort(dim=-1).values
    return keys // length, keys % length
