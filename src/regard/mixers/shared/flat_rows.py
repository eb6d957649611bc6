"""Indices within a head as rows over all heads of a batch, which one gather reads."""

import torch
from jaxtyping import Int
from torch import Tensor

from .kept import kept


def flat_rows(indices: Int[Tensor, "B H ..."], entries: int) -> Int[Tensor, "B H ..."]:
    """indices within the `entries` rows of each head, plus the rows of all heads before."""
    batch, heads = indices.shape[:2]
    return indices + _starts(batch * heads, entries, indices.device).view(batch, heads, *[1] * (indices.ndim - 2))


@kept
def _starts(heads: int, entries: int, device: torch.device) -> Int[Tensor, " heads"]:
    return entries * torch.arange(heads, device=device)
