"""MiTA as Triton kernels: landmarks attend to keys and choose some, queries attend to landmarks and choose a few.

Landmarks are few and keys many: programs take chunks of keys and write their scores and parts of the values, and then
one program for each landmark puts the parts together and finds the best keys, by the bits of their scores. Queries are
many and landmarks few: a program takes a block of queries, and no score is written; for each further expert of a query
it computes the scores again. Routed attention follows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.core import UnsupportedError
from regard.mixers.shared.precision import upcast_dtype
from regard.mixers.shared.routed_triton import routed_from
from regard.mixers.shared.triton_tiles import (
    KINDS,
    add_rows,
    cast_of,
    check_runs,
    dense,
    first_row,
    heads_last,
    load_rows,
    store_rows,
    strides,
    width_of,
)

ROWS = 64
"""Rows and columns of a tile, at most."""
CHUNK = 512
"""Keys of a program that scores them, and queries of one that adds up gradients of the keys."""
IN_REGISTERS = 32768
"""Scores of a landmark among which one program finds the best; PyTorch does it beyond that."""


@triton.jit
def _sort_key(scores):  # type: ignore[no-untyped-def]
    """Whole numbers of 32 bits in the order of the scores; NaN is the largest."""
    bits = scores.to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(scores != scores, 0x7FFFFFFF, bits)


@triton.jit
def _score(
    q, k, v, bias, scores, parts, lse, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    heads, queries, keys, scale, WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    LENGTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BIASED: tl.constexpr, VALUED: tl.constexpr,
    CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """scale q.k + bias of a chunk of keys, and the part of the attention output, with its log-sum-exp, of the chunk."""
    chunk, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    live, d, e = row < queries, tl.arange(0, D), tl.arange(0, E)
    at, k = head * queries + row, first_row(k, head, heads, k_batch, k_head)
    own = load_rows(first_row(q, head, heads, q_batch, q_head), row, q_token, d, live, WIDTH, CAST)
    if VALUED:
        v = first_row(v, head, heads, v_batch, v_head)
    high = tl.full((SIZE,), float("-inf"), KIND)
    norm, total = tl.zeros((SIZE,), KIND), tl.zeros((SIZE, E), KIND)
    for start in range(0, LENGTH, STEP):
        column = chunk * LENGTH + start + tl.arange(0, STEP)
        valid = column < keys
        near = load_rows(k, column, k_token, d, valid, WIDTH, CAST)
        logits = tl.dot(own, tl.trans(near), input_precision="ieee", out_dtype=KIND) * scale
        if BIASED:
            logits += tl.load(bias + head * keys + column, mask=valid, other=0.0).to(KIND)[None, :]
        tl.store(scores + at[:, None] * keys + column[None, :], logits, mask=live[:, None] & valid[None, :])
        if VALUED:
            logits = tl.where(valid[None, :], logits, float("-inf"))
            most = tl.maximum(high, tl.max(logits, 1), propagate_nan=tl.PropagateNan.ALL)
            shift = tl.where(most == float("-inf"), 0.0, most)
            weights, old = tl.exp(logits - shift[:, None]), tl.exp(high - shift)
            values = load_rows(v, column, v_token, e, valid, OUT, CAST)
            more = tl.dot(weights.to(CAST), values, input_precision="ieee", out_dtype=KIND)
            total, norm, high = total * old[:, None] + more, norm * old + tl.sum(weights, 1), most
    if VALUED:
        norm_or_1 = tl.where(norm == 0.0, 1.0, norm)
        part = at * tl.num_programs(0) + chunk
        tl.store(
            parts + part[:, None] * OUT + e[None, :], total / norm_or_1[:, None], live[:, None] & (e < OUT)[None, :]
        )
        tl.store(lse + part, tl.where(norm == 0.0, float("-inf"), high + tl.log(norm_or_1)), mask=live)


@triton.jit
def _choose(
    scores, parts, partial, out, lse, chosen, out_batch, out_head, out_token, heads, queries, keys, chunks,
    TOP: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, E: tl.constexpr,
    VALUED: tl.constexpr, CHOOSING: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The output of a row from those of its chunks, and the TOP keys with the best scores, in the order of the keys."""
    row = tl.program_id(0).to(tl.int64)
    if VALUED:
        chunk, e = tl.arange(0, CHUNKS), tl.arange(0, E)
        ends = tl.load(partial + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
        most = tl.max(ends, 0)
        shift = tl.where(most == float("-inf"), 0.0, most)
        weights = tl.exp(ends - shift)
        norm = tl.sum(weights, 0)
        norm_or_1 = tl.where(norm == 0.0, 1.0, norm)
        inside = (chunk < chunks)[:, None] & (e < OUT)[None, :]
        each = tl.load(parts + (row * chunks + chunk)[:, None] * OUT + e[None, :], mask=inside, other=0.0)
        total = tl.sum(each * weights[:, None], 0) / norm_or_1
        out = first_row(out, row // queries, heads, out_batch, out_head)
        tl.store(out + row % queries * out_token + e, total, mask=e < OUT)
        tl.store(lse + row, tl.where(norm == 0.0, float("-inf"), shift + tl.log(norm_or_1)))
    if CHOOSING:
        column = tl.arange(0, BLOCK)
        valid = column < keys
        order = _sort_key(tl.load(scores + row * keys + column, mask=valid, other=0.0))
        order = tl.where(valid, order, -2147483648)
        least = tl.where(tl.sum((order >= 0).to(tl.int32), 0) >= TOP, 0, -2147483648)
        bit = 30
        while bit >= 0:  # the largest number that TOP scores reach, bit by bit, or one that no other score reaches
            higher = least + (1 << bit)
            count = tl.sum((order >= higher).to(tl.int32), 0)
            least = tl.where(count >= TOP, higher, least)
            bit = tl.where(count == TOP, -1, bit - 1)
        above, equal = order > least, (order == least) & valid
        room = TOP - tl.sum(above.to(tl.int32), 0)
        taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(chosen + row * TOP + place, column.to(tl.int64), mask=taken)


@triton.jit
def _attend_and_choose(
    q, k, v, bias, out, lse, chosen, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    out_batch, out_head, out_token, heads, queries, keys, scale, factor,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr,
    STEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BIASED: tl.constexpr, VALUED: tl.constexpr,
    CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Row i of head g: its CHOICES best keys by scale q.k + bias, and softmax(factor scale q.k + bias) v."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    live, d, e = row < queries, tl.arange(0, D), tl.arange(0, E)
    at, k = head * queries + row, first_row(k, head, heads, k_batch, k_head)
    own = load_rows(first_row(q, head, heads, q_batch, q_head), row, q_token, d, live, WIDTH, CAST)
    if VALUED:
        v, out = first_row(v, head, heads, v_batch, v_head), first_row(out, head, heads, out_batch, out_head)
    high = tl.full((SIZE,), float("-inf"), KIND)
    norm, total = tl.zeros((SIZE,), KIND), tl.zeros((SIZE, E), KIND)
    last = tl.full((SIZE,), 2**63 - 1, tl.int64)  # the key that was chosen before: score, then number
    for choice in tl.static_range(CHOICES):
        best = tl.full((SIZE,), -(2**63) + 1, tl.int64)
        for start in range(0, keys, STEP):
            column = start + tl.arange(0, STEP)
            valid = column < keys
            near = load_rows(k, column, k_token, d, valid, WIDTH, CAST)
            logits = tl.dot(own, tl.trans(near), input_precision="ieee", out_dtype=KIND) * scale
            added = tl.zeros((STEP,), KIND)
            if BIASED:
                added = tl.load(bias + head * keys + column, mask=valid, other=0.0).to(KIND)
            both = (_sort_key(logits + added[None, :]).to(tl.int64) << 32) | column.to(tl.int64)[None, :]
            further = valid[None, :] & (both < last[:, None])
            best = tl.maximum(best, tl.max(tl.where(further, both, -(2**63) + 1), 1))
            if VALUED and choice == 0:
                logits = tl.where(valid[None, :], logits * factor + added[None, :], float("-inf"))
                most = tl.maximum(high, tl.max(logits, 1), propagate_nan=tl.PropagateNan.ALL)
                shift = tl.where(most == float("-inf"), 0.0, most)
                weights, old = tl.exp(logits - shift[:, None]), tl.exp(high - shift)
                values = load_rows(v, column, v_token, e, valid, OUT, CAST)
                more = tl.dot(weights.to(CAST), values, input_precision="ieee", out_dtype=KIND)
                total, norm, high = total * old[:, None] + more, norm * old + tl.sum(weights, 1), most
        tl.store(chosen + at * CHOICES + choice, best & 0xFFFFFFFF, mask=live)
        last = best
    if VALUED:
        norm_or_1 = tl.where(norm == 0.0, 1.0, norm)
        store_rows(out, row, out_token, e, live, total / norm_or_1[:, None], OUT)
        tl.store(lse + at, tl.where(norm == 0.0, float("-inf"), high + tl.log(norm_or_1)), mask=live)


@triton.jit
def _attend_backward(
    q, k, v, bias, lse, delta, grad, dq, dk, dv, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head,
    v_token, grad_batch, grad_head, grad_token, dq_batch, dq_head, dq_token, dk_batch, dk_head, dk_token, dv_batch,
    dv_head, dv_token, heads, queries, keys, scale, factor,
    WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    LENGTH: tl.constexpr, ALL_KEYS: tl.constexpr, ALL_QUERIES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BIASED: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """A program has a tile of keys and a chunk of queries. What several programs find is added atomically.

    ALL_KEYS, ALL_QUERIES: whether one tile or chunk has them all.
    """
    head = tl.program_id(2).to(tl.int64)
    column, d, e = tl.program_id(0) * STEP + tl.arange(0, STEP), tl.arange(0, D), tl.arange(0, E)
    q, k, v = (first_row(q, head, heads, q_batch, q_head), first_row(k, head, heads, k_batch, k_head),
               first_row(v, head, heads, v_batch, v_head))  # fmt: skip
    grad, dq = first_row(grad, head, heads, grad_batch, grad_head), first_row(dq, head, heads, dq_batch, dq_head)
    dk, dv = first_row(dk, head, heads, dk_batch, dk_head), first_row(dv, head, heads, dv_batch, dv_head)
    valid = column < keys
    near = load_rows(k, column, k_token, d, valid, WIDTH, CAST)
    values = load_rows(v, column, v_token, e, valid, OUT, CAST)
    added = tl.zeros((STEP,), KIND)
    if BIASED:
        added = tl.load(bias + head * keys + column, mask=valid, other=0.0).to(KIND)
    to_keys, to_values = tl.zeros((STEP, D), KIND), tl.zeros((STEP, E), KIND)
    for start in range(0, LENGTH, SIZE):
        row = tl.program_id(1) * LENGTH + start + tl.arange(0, SIZE)
        live = row < queries
        at = head * queries + row
        own = load_rows(q, row, q_token, d, live, WIDTH, CAST)
        outer = load_rows(grad, row, grad_token, e, live, OUT, CAST)
        norm = tl.load(lse + at, mask=live, other=0.0)
        norm = tl.where(norm == float("-inf"), 0.0, norm)
        logits = tl.dot(own, tl.trans(near), input_precision="ieee", out_dtype=KIND) * (scale * factor)
        logits = tl.where(valid[None, :] & live[:, None], logits + added[None, :], float("-inf"))
        weights = tl.exp(logits - norm[:, None])
        change = tl.dot(outer, tl.trans(values), input_precision="ieee", out_dtype=KIND)
        change -= tl.load(delta + at, mask=live, other=0.0)[:, None]
        change = (weights * change * (scale * factor)).to(CAST)
        to_keys += tl.dot(tl.trans(change), own, input_precision="ieee", out_dtype=KIND)
        to_values += tl.dot(tl.trans(weights.to(CAST)), outer, input_precision="ieee", out_dtype=KIND)
        moved = tl.dot(change, near, input_precision="ieee", out_dtype=KIND)
        if ALL_KEYS:
            store_rows(dq, row, dq_token, d, live, moved, WIDTH)
        else:
            add_rows(dq, row, dq_token, d, live, moved, WIDTH)
    if ALL_QUERIES:
        store_rows(dk, column, dk_token, d, valid, to_keys, WIDTH)
        store_rows(dv, column, dv_token, e, valid, to_values, OUT)
    else:
        add_rows(dk, column, dk_token, d, valid, to_keys, WIDTH)
        add_rows(dv, column, dv_token, e, valid, to_values, OUT)


def mita_triton(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, top: int, experts: int, *, shared: bool, scale: float,
    factor: float, bias: Tensor | None, drop: Tensor | None,
) -> Tensor:  # fmt: skip
    """MiTA; arguments as those of `mita_native`, without a plan.

    Scores that select are compared in float32, in float64 too.
    Raises: UnsupportedError for a bias that is trained, and as `routed_triton.routed_from`.
    """
    check_runs(q)
    dropped = None
    if drop is not None:
        none = q.new_zeros(*q.shape[:2], landmarks.shape[-2], dtype=upcast_dtype(q))
        dropped = none.masked_fill(drop[:, None], -torch.inf)
    row = None if bias is None else bias[..., 0, :].expand(*k.shape[:2], -1).contiguous()
    q, k, v, landmarks = (dense(x) for x in (q, k, v, landmarks))
    attend = torch.ops.regard.attend_and_choose
    values, _, keys = attend(landmarks, k, v if shared else None, row, top, scale, 1.0, top > 1)
    out, lse, chosen = attend(q, landmarks, values if shared else None, dropped, experts, scale, factor, False)
    return routed_from(q, k, v, bias, keys, chosen, (out, lse) if shared else None, scale)


@torch.library.custom_op("regard::attend_and_choose", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, top: int, scale: float, factor: float, in_chunks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B,H,N,e) and lse (B,H,N) of attention, and the `top` best keys (B,H,N,top).

    bias (B,H,M), contiguous. v None: only chooses, and out and lse are empty. factor: of the logits of attention alone.
    in_chunks: for many keys, of which programs take chunks; factor must be 1.
    """
    out, lse, chosen = _empty(q, k, v, bias, top, scale, factor, in_chunks)
    values = q if v is None else v
    given, options = (q, k, values, q if bias is None else bias), {**_tiles(q, k, v, bias), "VALUED": v is not None}
    if not in_chunks:
        grid = (triton.cdiv(q.shape[-2], options["SIZE"]), q.shape[0] * q.shape[1])
        sizes = *strides(q, k, values, out), q.shape[1], q.shape[-2], k.shape[-2]
        _attend_and_choose[grid](*given, out, lse, chosen, *sizes, scale, factor, CHOICES=top, **options)
        return out, lse, chosen
    keys, kind = k.shape[-2], upcast_dtype(q)
    chunks = triton.cdiv(keys, CHUNK)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    scores = q.new_empty(*q.shape[:3], keys, dtype=torch.float32)
    parts = q.new_empty(rows, chunks, options["OUT"], dtype=kind)
    partial = q.new_empty(rows, chunks, dtype=kind)
    programs = chunks, triton.cdiv(q.shape[-2], options["SIZE"]), q.shape[0] * q.shape[1]
    sizes = q.shape[1], q.shape[-2], keys
    laid = strides(q, k, values)
    _score[programs](*given, scores, parts, partial, *laid, *sizes, scale, LENGTH=CHUNK, **options)
    inside = keys <= IN_REGISTERS
    _choose[(rows,)](
        scores, parts, partial, out, lse, chosen, *strides(out), *sizes, chunks, TOP=top, OUT=options["OUT"],
        BLOCK=width_of(keys), CHUNKS=triton.next_power_of_2(chunks), E=options["E"], VALUED=v is not None,
        CHOOSING=inside, num_warps=4 if keys <= 8192 else 8,
    )  # fmt: skip
    return out, lse, chosen if inside else scores.topk(top).indices


def keys_of_tile(keys: int, bytes_of_number: int) -> int:
    """Keys of a tile in the backward pass; more fit into shared memory in half precision."""
    return min(2 * ROWS if bytes_of_number == 2 else ROWS, width_of(keys))


def _tiles(q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None) -> dict[str, Any]:
    width = 0 if v is None else v.shape[-1]
    return {
        "WIDTH": q.shape[-1], "OUT": width, "SIZE": min(ROWS, width_of(q.shape[-2])),
        "STEP": min(ROWS, width_of(k.shape[-2])), "D": width_of(q.shape[-1]), "E": width_of(width),
        "BIASED": bias is not None, "CAST": cast_of(q), "KIND": KINDS[upcast_dtype(q)],
    }  # fmt: skip


@_attend.register_fake
def _empty(q, k, v, bias, top, *_):  # type: ignore[no-untyped-def]
    lead = q.shape[:3] if v is not None else (0, 0, 0)
    return (
        q.new_empty(0, 0, 0, 0) if v is None else heads_last(q, v.shape[-1], q.dtype),
        q.new_empty(lead, dtype=upcast_dtype(q)),
        q.new_empty(*q.shape[:3], top, dtype=torch.int64),
    )


@torch.library.custom_op("regard::attend_backward", mutates_args=())
def _backward(
    grad: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v. delta (B,H,N): the products of grad and the output, less the gradient of lse."""
    options = _tiles(q, k, v, bias)
    options["STEP"] = keys_of_tile(k.shape[-2], q.element_size())
    grid = triton.cdiv(k.shape[-2], options["STEP"]), triton.cdiv(q.shape[-2], CHUNK), q.shape[0] * q.shape[1]
    all_keys, all_queries = (programs == 1 for programs in grid[:2])

    def gradient(x: Tensor, stored: bool) -> Tensor:
        return heads_last(x, x.shape[-1], x.dtype) if stored else heads_last(x, x.shape[-1], lse.dtype).zero_()

    dq, dk, dv = gradient(q, all_keys), gradient(k, all_queries), gradient(v, all_queries)
    _attend_backward[grid](
        q, k, v, q if bias is None else bias, lse, delta, grad, dq, dk, dv,
        *strides(q, k, v, grad, dq, dk, dv), q.shape[1], q.shape[-2], k.shape[-2], scale, factor,
        LENGTH=min(CHUNK, triton.cdiv(q.shape[-2], options["SIZE"]) * options["SIZE"]), ALL_KEYS=all_keys,
        ALL_QUERIES=all_queries, num_warps=8, **options,
    )  # fmt: skip
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@_backward.register_fake
def _empty_gradients(grad, delta, lse, q, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(heads_last(x, x.shape[-1], x.dtype) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bias, _, ctx.scale, ctx.factor, _ = inputs
    ctx.set_materialize_grads(False)  # no zeros for what was chosen
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, bias, *output[:2])


def _differentiate(ctx, grad, to_lse, _):  # type: ignore[no-untyped-def]
    q, k, v, bias, out, lse = ctx.saved_tensors
    if v is None or grad is to_lse is None:
        return (None,) * 8
    grad = torch.zeros_like(out) if grad is None else dense(grad)
    delta = torch.ops.regard.row_products(grad, out, None if to_lse is None else to_lse.contiguous())
    grads = torch.ops.regard.attend_backward(grad, delta, lse, q, k, v, bias, ctx.scale, ctx.factor)
    return *grads, None, None, None, None, None


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise UnsupportedError('execution="triton" cannot be differentiated twice; use "dense", "gather" or "grouped"')


_attend.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)
