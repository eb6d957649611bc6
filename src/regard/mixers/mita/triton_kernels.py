"""MiTA on a GPU: attention that also chooses, as a Triton kernel, twice, and then routed attention.

Landmarks attend to all keys, which gives their values, and choose the best ones; queries attend to landmarks and choose
the best one. Scores are computed once for both and are never stored; the chosen keys so far stay in registers, sorted.
The backward pass of both is a few products in PyTorch. Tested in Triton's interpreter; never run on a GPU so far.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.mixers.shared.precision import upcast
from regard.mixers.shared.routed_triton import routed_from, softmax_of
from regard.mixers.shared.triton_tiles import KINDS, LEAST, cast_of, check_runs, width_of

ROWS = 64
"""Queries of a program, at most."""


@triton.jit
def _best(logits, column, valid, best, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The best of each row so far and of a tile: numbers of 64 bits, the order of a score and then its column.

    They are kept in rising order, and those of a tile are sorted to fall: the larger of each two are the best of both.
    """
    bits = logits.to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(logits != logits, 0x7FFFFFFF, bits)  # NaN is the largest
    ordered = (bits.to(tl.int64) << 32) | column.to(tl.int64)[None, :]
    ordered = tl.where(valid[None, :], ordered, -(2**63) + 1)
    if TOP == 1:
        best = tl.maximum(best, tl.max(ordered, 1)[:, None])
    else:
        best = tl.sort(tl.maximum(best, tl.sort(ordered, descending=True)))
    return best


@triton.jit
def _attend_and_choose(
    q, k, v, bias, out, lse, chosen,
    queries, keys, scale, factor, TOP: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr,
    STEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BIASED: tl.constexpr, VALUED: tl.constexpr,
    CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Row i of head g: its best TOP keys by scale q.k + bias, and softmax(factor scale q.k + bias) v."""
    head = tl.program_id(1)
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    live, d, e = row < queries, tl.arange(0, D), tl.arange(0, E)
    at = head * queries + row
    own = tl.load(q + at[:, None] * WIDTH + d[None, :], mask=live[:, None] & (d < WIDTH)[None, :], other=0.0).to(CAST)
    high = tl.full((SIZE,), float("-inf"), KIND)
    norm, total = tl.zeros((SIZE,), KIND), tl.zeros((SIZE, E), KIND)
    best = tl.full((SIZE, 1 if TOP == 1 else STEP), -(2**63) + 1, tl.int64)
    for start in range(0, keys, STEP):
        column = start + tl.arange(0, STEP)
        valid = column < keys
        place = head * keys + column
        near = tl.load(k + place[:, None] * WIDTH + d[None, :], mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)
        logits = tl.dot(own, tl.trans(near.to(CAST)), input_precision="ieee", out_dtype=KIND) * scale
        added = tl.zeros((STEP,), KIND)
        if BIASED:
            added = tl.load(bias + place, mask=valid, other=0.0).to(KIND)
        best = _best(logits + added[None, :], column, valid, best, TOP)
        if VALUED:
            logits = tl.where(valid[None, :], logits * factor + added[None, :], float("-inf"))
            most = tl.maximum(high, tl.max(logits, 1), propagate_nan=tl.PropagateNan.ALL)
            shift = tl.where(most == float("-inf"), 0.0, most)
            weights, old = tl.exp(logits - shift[:, None]), tl.exp(high - shift)
            values = tl.load(v + place[:, None] * OUT + e[None, :], mask=valid[:, None] & (e < OUT)[None, :], other=0.0)
            more = tl.dot(weights.to(CAST), values.to(CAST), input_precision="ieee", out_dtype=KIND)
            total, norm, high = total * old[:, None] + more, norm * old + tl.sum(weights, 1), most
    if VALUED:
        norm_or_1 = tl.where(norm == 0.0, 1.0, norm)
        tl.store(out + at[:, None] * OUT + e[None, :], total / norm_or_1[:, None], live[:, None] & (e < OUT)[None, :])
        tl.store(lse + at, tl.where(norm == 0.0, float("-inf"), high + tl.log(norm_or_1)), mask=live)
    if TOP == 1:
        tl.store(chosen + at, tl.max(best, 1) & 0xFFFFFFFF, mask=live)
    else:
        rank = tl.arange(0, STEP) - (STEP - TOP)
        tl.store(chosen + at[:, None] * TOP + rank[None, :], best & 0xFFFFFFFF, live[:, None] & (rank >= 0)[None, :])


def mita_triton(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, top: int, *, shared: bool, scale: float, factor: float,
    bias: Tensor | None, drop: Tensor | None,
) -> Tensor:  # fmt: skip
    """MiTA with one expert per query; arguments as those of `mita_native`, without a plan.

    top: a few hundred at most, since the keys of some landmarks are sorted in registers.
    Scores that select are compared in float32, in float64 too.
    Raises: UnsupportedError for a bias that is trained, and as `routed_triton.routed_from`.
    """
    check_runs(q)
    none = q.new_zeros(q.shape[0], q.shape[1], landmarks.shape[-2], dtype=upcast(q).dtype)
    dropped = None if drop is None else none.masked_fill(drop[:, None], -torch.inf)
    row = None if bias is None else bias[..., 0, :].expand(*k.shape[:2], -1).contiguous()
    q, k, v, landmarks = (x.contiguous() for x in (q, k, v, landmarks))
    attend = torch.ops.regard.attend_and_choose
    values, _, keys = attend(landmarks, k, v if shared else None, row, top, scale, 1.0)
    out, lse, experts = attend(q, landmarks, values.to(v.dtype) if shared else None, dropped, 1, scale, factor)
    return routed_from(q * scale, k, v, bias, keys, experts, (out, lse) if shared else None)


@torch.library.custom_op("regard::attend_and_choose", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, top: int, scale: float, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B,H,N,e) and lse (B,H,N) of attention, and the `top` best keys (B,H,N,top), for contiguous tensors.

    bias (B,H,M). v None: only chooses, and out and lse are empty. factor: of the logits of attention alone.
    """
    out, lse, chosen = _empty(q, k, v, bias, top, scale, factor)
    size = min(ROWS if top == 1 else LEAST, width_of(q.shape[-2]))
    width = 0 if v is None else v.shape[-1]
    step = width_of(min(ROWS, k.shape[-2])) if top == 1 else width_of(top)
    grid = (triton.cdiv(q.shape[-2], size), q.shape[0] * q.shape[1])
    _attend_and_choose[grid](
        q, k, q if v is None else v, q if bias is None else bias, out, lse, chosen, q.shape[-2], k.shape[-2], scale,
        factor, TOP=top, WIDTH=q.shape[-1], OUT=width, SIZE=size, STEP=step, D=width_of(q.shape[-1]),
        E=width_of(width), BIASED=bias is not None, VALUED=v is not None, CAST=cast_of(q), KIND=KINDS[upcast(q).dtype],
    )  # fmt: skip
    return out, lse, chosen


@_attend.register_fake
def _empty(q, k, v, bias, top, scale, factor):  # type: ignore[no-untyped-def]
    kind = upcast(q).dtype
    lead = q.shape[:3] if v is not None else (0, 0, 0)
    return (
        q.new_empty(*lead, 0 if v is None else v.shape[-1], dtype=kind),
        q.new_empty(lead, dtype=kind),
        q.new_empty(*q.shape[:3], top, dtype=torch.int64),
    )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bias, _, ctx.scale, ctx.factor = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, bias, *output[:2])


def _differentiate(ctx, grad, to_lse, _):  # type: ignore[no-untyped-def]
    q, k, v, bias, out, lse = ctx.saved_tensors
    if v is None:
        return (None,) * 7
    logits = upcast(q) @ upcast(k).mT * (ctx.scale * ctx.factor)
    weights = softmax_of(logits if bias is None else logits + bias[..., None, :], lse)
    change = grad @ upcast(v).mT - (grad * out).sum(-1, keepdim=True)
    change = weights * (change if to_lse is None else change + to_lse[..., None]) * (ctx.scale * ctx.factor)
    dq, dk, dv = change @ upcast(k), change.mT @ upcast(q), weights.mT @ grad
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)
