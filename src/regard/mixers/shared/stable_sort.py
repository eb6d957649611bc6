"""The order of whole numbers, the same on every device and in every exported graph."""

import torch
from jaxtyping import Int
from torch import Tensor


def in_order(numbers: Int[Tensor, "*B N"]) -> tuple[Int[Tensor, "*B N"], Int[Tensor, "*B N"]]:
    """The numbers sorted along the last axis, and where each stood; equal ones keep their order.

    A stable sort by unique keys (number, place), which need N times the range: ONNX has no stable sort.
    """
    length = numbers.shape[-1]
    keys = (numbers * length + torch.arange(length, device=numbers.device)).sort(dim=-1).values
    return keys // length, keys % length
