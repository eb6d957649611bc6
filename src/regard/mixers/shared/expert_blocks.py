"""Queries grouped by the expert that they chose, in blocks of equal size: the layout of routed attention."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from regard.core.tensors import is_open

from .flat_rows import flat_rows
from .stable_sort import stable_sort


@dataclass(frozen=True)
class Blocks:
    """P = B*H*N*s pairs (query, choice), sorted by expert and padded to blocks of `size` rows; X blocks.

    source (X * size,): the pair of each row; rows without one point at the first pair of their block, and those of a
    block without any at a pair of its head, since NaN times 0 is NaN and must stay in its head. slot (P,): the row of
    each pair. expert (X,): the expert of each block, among B*H*m. real (X * size, 1): 1 for rows with a pair, else 0.
    """

    size: int
    source: Tensor
    slot: Tensor
    expert: Tensor
    real: Tensor


def block_size(queries: int, experts: int) -> int:
    """Rows of a block, near the mean number of queries of an expert: a power of two from 8 to 64."""
    if is_open(queries):
        return 16
    mean = max(queries / experts, 1.0)
    return max(8, min(64, 1 << round(math.log2(mean))))


def lay_out(choice: Int[Tensor, "B H N s"], experts: int, size: int, bounded: bool) -> Blocks:
    """Group the pairs by expert. choice: the experts of each query. experts: of a head.

    bounded: use the largest possible number of blocks instead of the actual one, which only eager mode on the CPU can
    read; blocks beyond the actual number belong to the last expert.
    """
    groups = choice.shape[0] * choice.shape[1]
    total = groups * experts
    device = choice.device
    if not bounded:
        return _lay_out_numpy(choice.numpy().reshape(groups, -1), total, size)
    expert_of_pair = flat_rows(choice, experts).flatten()  # (P,)
    ranked, order = stable_sort(expert_of_pair, total)
    # no operation in place: under `vmap` the plan has one dimension more than a new tensor
    counts = torch.zeros(total, dtype=torch.long, device=device)
    counts = counts.scatter_add(0, expert_of_pair, torch.ones_like(expert_of_pair))
    blocks = (counts + (size - 1)) // size
    ends = blocks.cumsum(0)
    offset = (ends - blocks) * size - (counts.cumsum(0) - counts)  # (total,): from sorted position to row
    rows = torch.arange(expert_of_pair.numel(), device=device) + offset.index_select(0, ranked)
    number = expert_of_pair.numel() // size + torch.sym_min(total, expert_of_pair.numel())
    slot = torch.empty_like(rows).scatter(0, order, rows)
    source = torch.full((number * size,), expert_of_pair.numel() - 1, device=device)
    source = source.scatter(0, rows, order).view(-1, size)
    real = torch.zeros(number * size, dtype=torch.bool, device=device).scatter(0, rows, True).view(-1, size)
    source = torch.where(real, source, source[:, :1])  # a block is filled from its first row on
    expert = torch.full((number,), total - 1, device=device).scatter(0, rows // size, ranked)
    return Blocks(size, source.flatten(), slot, expert, real.view(-1, 1))


def _lay_out_numpy(experts: np.ndarray, total: int, size: int) -> Blocks:
    """The same in NumPy, whose calls on some thousand integers cost a fraction of PyTorch's."""
    groups = len(experts)
    dtype = np.int16 if total <= np.iinfo(np.int16).max else np.int64  # NumPy sorts 16 bits by radix
    expert_of_pair = (experts + (total // groups) * np.arange(groups)[:, None]).ravel()
    order = expert_of_pair.astype(dtype).argsort(kind="stable")
    counts = np.bincount(expert_of_pair, minlength=total)
    blocks = (counts + (size - 1)) // size
    number = int(blocks.sum())
    offset = (blocks.cumsum() - blocks) * size - (counts.cumsum() - counts)
    rows = np.arange(expert_of_pair.size) + offset.repeat(counts)
    slot, source, real = np.empty_like(rows), np.empty(number * size, np.int64), np.zeros((number * size, 1), np.bool_)
    slot[order], source[rows], real[rows] = rows, order, True
    source = np.where(real.reshape(number, size), source.reshape(number, size), source[::size, None]).ravel()
    return Blocks(size, *map(torch.from_numpy, (source, slot, np.arange(total).repeat(blocks), real)))


class ToBlocks(torch.autograd.Function):
    """Rows of queries (R, c) to rows of blocks (X * size, c); the backward is a gather, not a scatter.

    Rows without a pair are copies of another row and must have a zero gradient, as `FromBlocks` gives them.
    """

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, slot: Tensor, choices: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slot)
        ctx.choices = choices
        return x.index_select(0, source if choices == 1 else source // choices)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        (slot,) = ctx.saved_tensors
        rows = grad.index_select(0, slot)
        return (rows if ctx.choices == 1 else rows.unflatten(0, (-1, ctx.choices)).sum(1)), None, None, None


class FromBlocks(torch.autograd.Function):
    """Rows of blocks (X * size, c) to pairs (P, c); the backward gives zero to rows without a pair."""

    @staticmethod
    def forward(ctx, y: Tensor, source: Tensor, slot: Tensor, real: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(source, real)
        return y.index_select(0, slot)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        source, real = ctx.saved_tensors
        return grad.index_select(0, source) * real, None, None, None
