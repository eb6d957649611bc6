"""MiTA's selection as data: the keys of every expert, the experts of every query, and their layout in blocks.

A selection is integers without gradient. It can be plotted, kept for comparisons, and passed to `mita` as plan=.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import Mask, ShapeError, UnsupportedError, hide, operator_function
from regard.mixers.shared.checks import check_heads
from regard.mixers.shared.native import eager_on_cpu
from regard.mixers.shared.precision import upcast, without_autocast
from regard.mixers.shared.stable_sort import stable_sort


class MitaPlan(NamedTuple):
    """keys (B, H, m, top): the keys of expert i. experts (B, H, N, s): the experts of each query, in any order."""

    keys: Int[Tensor, "B H m top"]
    experts: Int[Tensor, "B H N s"]


@operator_function
def mita_plan(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    landmarks: Float[Tensor, "B H m d"],
    top: int,
    *,
    experts: int = 1,
    mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None,
) -> MitaPlan:
    """Each landmark takes its `top` best keys; each query takes its `experts` best landmarks.

    Scores are computed in float32 for half precision. Equal scores are broken arbitrarily. mask: keys that it forbids
    come last (and have weight 0 in `mita`). landmark_keep: landmarks that are False are chosen last.
    Raises: ShapeError for tensors that do not fit, top > M or experts > m; UnsupportedError for other masks.
    """
    check_heads("mita_plan", q=q, k=k, landmarks=landmarks)
    check_counts("mita_plan", k.shape[-2], landmarks.shape[-2], top, experts)
    k = hide(k, mask)
    with torch.no_grad(), without_autocast(q.device):
        probe = upcast(landmarks) @ upcast(k).mT
        bias = key_bias("mita_plan", mask, probe)
        if bias is not None:
            probe = probe * q.shape[-1] ** -0.5 + bias
        return choose(probe, without(upcast(q) @ upcast(landmarks).mT, landmark_keep), top, experts)


def choose(probe: Tensor, route: Tensor, top: int, experts: int) -> MitaPlan:
    """The plan of scores: probe (B, H, m, M) of landmarks with keys, route (B, H, N, m) of queries with landmarks."""
    keys = largest(probe.detach(), top)
    route = route.detach()
    best = route.max(-1, keepdim=True).indices if experts == 1 else route.topk(experts, sorted=False).indices
    return MitaPlan(keys, best)


def largest(scores: Tensor, top: int) -> Tensor:
    """Indices (..., top) of the largest scores (..., M), in any order; NaN counts as the largest.

    In eager mode on the CPU, NumPy's partition finds them two to three times faster than `topk`.
    """
    width = scores.shape[-1]
    if not eager_on_cpu(scores) or scores.dtype not in (torch.float32, torch.float64) or top == width:
        return scores.topk(top, sorted=False).indices
    indices = np.argpartition(scores.numpy(), width - top, axis=-1)[..., width - top :]
    return torch.from_numpy(np.ascontiguousarray(indices))


def check_counts(name: str, keys: int, landmarks: int, top: int, experts: int) -> None:
    """Raises ShapeError unless 1 <= top <= keys and 1 <= experts <= landmarks."""
    if not 1 <= top <= keys:
        raise ShapeError(f"{name}: each expert takes {top} keys and there are {keys}; choose between 1 and {keys}")
    if not 1 <= experts <= landmarks:
        raise ShapeError(
            f"{name}: {experts} experts per query and there are {landmarks} landmarks; choose between 1 and {landmarks}"
        )


def check_plan(plan: MitaPlan, q: Tensor, k: Tensor, landmarks: Tensor, top: int, experts: int) -> None:
    """Check a plan that a caller passes. Raises: ShapeError unless it fits these tensors and numbers."""
    check_chosen("mita: plan.keys", plan.keys, (*landmarks.shape[:3], top), k.shape[-2])
    check_chosen("mita: plan.experts", plan.experts, (*q.shape[:3], experts), landmarks.shape[-2])


def check_chosen(label: str, chosen: Tensor, shape: tuple[int, ...], number: int) -> None:
    """Raises ShapeError unless `chosen` has this shape and, in eager mode on the CPU, indices from 0 to number - 1.

    Elsewhere values are not read: that would break a graph, or wait for the device.
    """
    if tuple(chosen.shape) != shape:
        raise ShapeError(f"{label} has shape {tuple(chosen.shape)}; expected {shape}")
    if eager_on_cpu(chosen) and chosen.numel():
        low, high = (int(end) for end in chosen.aminmax())
        if low < 0 or high >= number:
            raise ShapeError(f"{label} has indices from {low} to {high}; expected 0 to {number - 1}")


def key_bias(name: str, mask: Mask | None, like: Tensor) -> Tensor | None:
    """The bias of the keys' logits, (B | 1, H | 1, 1, M) in the dtype of `like` (B, ..., M); None without a mask.

    Raises: UnsupportedError for a causal mask or a bias with a row per query; ShapeError for another number of keys or
    images.
    """
    if mask is None or not mask.kinds:
        return None
    if mask.causal:
        raise UnsupportedError(f"{name} cannot apply a causal mask: landmarks are averages that see later tokens")
    bias = None
    if mask.bias is not None:
        if mask.bias.shape[-2] != 1:
            raise UnsupportedError(
                f"{name} cannot apply a bias with {mask.bias.shape[-2]} rows: keys are chosen once for all queries; "
                "give a key bias, which has one row"
            )
        if mask.bias.shape[-1] != like.shape[-1]:
            raise ShapeError(f"{name}: Mask.bias has {mask.bias.shape[-1]} keys, the operator has {like.shape[-1]}")
        bias = mask.bias.to(like.dtype)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    allowed = mask.allowed(1, like.shape[-1], like.device, like.shape[0])
    if allowed is None:
        return bias
    zero = like.new_zeros(()) if bias is None else bias
    return torch.where(allowed, zero, -torch.inf)


def without(route: Tensor, landmark_keep: Tensor | None) -> Tensor:
    """Logits of queries with landmarks (B, H, N, m), -inf for landmarks that must not be used."""
    return route if landmark_keep is None else route.masked_fill(~landmark_keep[:, None, None, :], -torch.inf)


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
    mean = max(queries / experts, 1.0)
    return max(8, min(64, 1 << round(math.log2(mean))))


def lay_out(plan: MitaPlan, size: int, bounded: bool) -> Blocks:
    """Group the pairs of a plan by expert.

    bounded: use the largest possible number of blocks instead of the actual one, which only eager mode on the CPU can
    read; blocks beyond the actual number belong to the last expert.
    """
    groups = plan.keys.shape[0] * plan.keys.shape[1]
    total = groups * plan.keys.shape[2]
    device = plan.experts.device
    if not bounded:
        return _lay_out_numpy(plan.experts.numpy().reshape(groups, -1), total, size)
    expert_of_pair = (
        plan.experts.reshape(groups, -1) + plan.keys.shape[2] * torch.arange(groups, device=device)[:, None]
    )
    expert_of_pair = expert_of_pair.flatten()  # (P,)
    ranked, order = stable_sort(expert_of_pair)
    # no operation in place: under `vmap` the plan has one dimension more than a new tensor
    counts = torch.zeros(total, dtype=torch.long, device=device).scatter_add(
        0, expert_of_pair, torch.ones_like(expert_of_pair)
    )
    blocks = (counts + (size - 1)) // size
    ends = blocks.cumsum(0)
    offset = (ends - blocks) * size - (counts.cumsum(0) - counts)  # (total,): from sorted position to row
    rows = torch.arange(expert_of_pair.numel(), device=device) + offset.index_select(0, ranked)
    number = expert_of_pair.numel() // size + min(total, expert_of_pair.numel())
    slot = torch.empty_like(rows).scatter(0, order, rows)
    source = (
        torch.full((number * size,), expert_of_pair.numel() - 1, device=device).scatter(0, rows, order).view(-1, size)
    )
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
