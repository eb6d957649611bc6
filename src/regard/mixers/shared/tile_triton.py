"""Attention within tiles as a Triton kernel: rows are read and written at their tokens, so nothing is cut or joined.

A query attends to the slots of its tile in its own part, and to further tokens that all tiles share; or, where the keys
of a tile are others than its queries, to those that a table of pairs allows. Forward one kernel; backward one for
queries, which adds up the gradient of the bias, and one for keys. The bias, and tokens that several tiles have as keys,
get their gradients by atomic additions, whose order, and so their last bits, may differ between runs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.core import UnsupportedError

from .precision import upcast_dtype
from .triton_tiles import (
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

SIZE = 64
"""Queries and keys of a step, at most."""


@triton.jit
def _place(tokens, parts, keep, tile, batch, slot, limit, number, length, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Token and part of slots, and whether there is one that counts."""
    inside = slot < limit
    token = tl.load(tokens + tile * length + slot, mask=inside, other=-1)
    part = tl.load(parts + tile * length + slot, mask=inside, other=-2)
    valid = token >= 0
    if MASKED:
        valid = valid & (tl.load(keep + batch.to(tl.int64) * number + token, mask=valid, other=0) != 0)
    return token, part, valid


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    own, near, own_part, near_part, valid, bias, pairs, tile, slot, column, area, length, scale, BIASED: tl.constexpr,
    PAIRED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    logits = tl.dot(own, tl.trans(near), input_precision="ieee", out_dtype=KIND) * scale
    if PAIRED:
        inside = (slot < area)[:, None] & valid[None, :]
        place = (tile * area + slot).to(tl.int64)[:, None] * length + column[None, :]
        entry = tl.load(pairs + place, mask=inside, other=-1)
        allowed = entry >= 0
        if BIASED:
            logits += tl.load(bias + entry, mask=allowed, other=0.0).to(KIND)
    else:
        if BIASED:
            inside = (slot < area)[:, None] & (column < area)[None, :]
            logits += tl.load(bias + slot[:, None] * area + column[None, :], mask=inside, other=0.0).to(KIND)
        allowed = valid[None, :] & ((near_part[None, :] == -1) | (own_part[:, None] == near_part[None, :]))
    return tl.where(allowed, logits, float("-inf"))


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, bias, tokens, parts, queries, pairs, keep, out, lse, q_batch, q_head, q_token, k_batch, k_head, k_token,
    v_batch, v_head, v_token, out_batch, out_head, out_token, heads, number, area, length, entries, stride, scale,
    BIASED: tl.constexpr, PAIRED: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The outputs of a block of queries of a tile, and the logarithms of their sums of weights."""
    head, tile, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    batch, d, e = head // heads, tl.arange(0, D), tl.arange(0, E)
    q, k = first_row(q, head, heads, q_batch, q_head), first_row(k, head, heads, k_batch, k_head)
    v, out = first_row(v, head, heads, v_batch, v_head), first_row(out, head, heads, out_batch, out_head)
    bias += (head % heads).to(tl.int64) * entries
    token, part, live = _place(queries, parts, keep, tile, batch, slot, area, number, stride, False)
    own = load_rows(q, token, q_token, d, live, WIDTH, CAST)
    high, norm, total = tl.full((SIZE,), float("-inf"), KIND), tl.zeros((SIZE,), KIND), tl.zeros((SIZE, E), KIND)
    for start in range(0, length, SIZE):
        column = start + tl.arange(0, SIZE)
        at, near_part, valid = _place(tokens, parts, keep, tile, batch, column, length, number, length, MASKED)
        near = load_rows(k, at, k_token, d, valid, WIDTH, CAST)
        logits = _logits(own, near, part, near_part, valid, bias, pairs, tile, slot, column, area, length, scale,
                         BIASED, PAIRED, KIND)  # fmt: skip
        most = tl.maximum(high, tl.max(logits, 1), propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(most == float("-inf"), 0.0, most)
        weights, old = tl.exp(logits - shift[:, None]), tl.exp(high - shift)
        values = load_rows(v, at, v_token, e, valid, OUT, CAST)
        more = tl.dot(weights.to(CAST), values, input_precision="ieee", out_dtype=KIND)
        total, norm, high = total * old[:, None] + more, norm * old + tl.sum(weights, 1), most
    norm_or_1 = tl.where(norm == 0.0, 1.0, norm)
    store_rows(out, token, out_token, e, live, total / norm_or_1[:, None], OUT)
    ends = tl.where(norm == 0.0, float("-inf"), high + tl.log(norm_or_1))
    tl.store(lse + (head.to(tl.int64) * tl.num_programs(1) + tile) * area + slot, ends, mask=slot < area)


@triton.jit
def _weights(logits, ends):  # type: ignore[no-untyped-def]
    return tl.exp(logits - tl.where(ends == float("-inf"), 0.0, ends)[:, None])


@triton.jit
def _query_gradients(  # type: ignore[no-untyped-def]
    q, k, v, bias, tokens, parts, queries, pairs, keep, out, lse, grad, dq, dbias, delta, q_batch, q_head, q_token,
    k_batch, k_head, k_token, v_batch, v_head, v_token, out_batch, out_head, out_token, grad_batch, grad_head,
    grad_token, dq_batch, dq_head, dq_token, heads, number, area, length, entries, stride, scale,
    LEARNED: tl.constexpr, BIASED: tl.constexpr, PAIRED: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
    OUT: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of queries of a tile, delta = the sum of output times its gradient, and the share of
    the bias's gradient."""
    head, tile, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    batch, d, e = head // heads, tl.arange(0, D), tl.arange(0, E)
    q, k = first_row(q, head, heads, q_batch, q_head), first_row(k, head, heads, k_batch, k_head)
    v, out = first_row(v, head, heads, v_batch, v_head), first_row(out, head, heads, out_batch, out_head)
    grad, dq = first_row(grad, head, heads, grad_batch, grad_head), first_row(dq, head, heads, dq_batch, dq_head)
    shared = (head % heads).to(tl.int64) * entries
    token, part, live = _place(queries, parts, keep, tile, batch, slot, area, number, stride, False)
    row = (head.to(tl.int64) * tl.num_programs(1) + tile) * area + slot
    own = load_rows(q, token, q_token, d, live, WIDTH, CAST)
    outer = load_rows(grad, token, grad_token, e, live, OUT, KIND)
    inner = tl.sum(outer * load_rows(out, token, out_token, e, live, OUT, KIND), 1)
    tl.store(delta + row, inner, mask=slot < area)
    ends, total = tl.load(lse + row, mask=slot < area, other=0.0), tl.zeros((SIZE, D), KIND)
    for start in range(0, length, SIZE):
        column = start + tl.arange(0, SIZE)
        at, near_part, valid = _place(tokens, parts, keep, tile, batch, column, length, number, length, MASKED)
        near, values = load_rows(k, at, k_token, d, valid, WIDTH, CAST), load_rows(v, at, v_token, e, valid, OUT, CAST)
        logits = _logits(own, near, part, near_part, valid, bias + shared, pairs, tile, slot, column, area, length,
                         scale, BIASED, PAIRED, KIND)  # fmt: skip
        change = tl.dot(outer.to(CAST), tl.trans(values), input_precision="ieee", out_dtype=KIND) - inner[:, None]
        change = _weights(logits, ends) * change
        if LEARNED:
            if PAIRED:
                place = (head % heads).to(tl.int64) * tl.num_programs(1) + tile
                place = (place * area + slot)[:, None] * length + column[None, :]
                tl.atomic_add(dbias + place, change, mask=live[:, None] & valid[None, :])
            else:
                inside = live[:, None] & (column < area)[None, :]
                tl.atomic_add(dbias + shared + slot[:, None] * area + column[None, :], change, mask=inside)
        total += tl.dot(change.to(CAST), near, input_precision="ieee", out_dtype=KIND)
    store_rows(dq, token, dq_token, d, live, total * scale, WIDTH)


@triton.jit
def _key_gradients(  # type: ignore[no-untyped-def]
    q, k, v, bias, tokens, parts, queries, pairs, keep, lse, grad, delta, dk, dv, common, q_batch, q_head, q_token,
    k_batch, k_head, k_token, v_batch, v_head, v_token, grad_batch, grad_head, grad_token, dk_batch, dk_head, dk_token,
    dv_batch, dv_head, dv_token, heads, number, area, length, entries, stride, scale, BIASED: tl.constexpr,
    PAIRED: tl.constexpr, MASKED: tl.constexpr,
    WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values of a tile; those of tokens that all tiles share are added to
    `common` (B*H, length - area, WIDTH + OUT), those of pairs to dk and dv."""
    head, tile, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    batch, d, e = head // heads, tl.arange(0, D), tl.arange(0, E)
    q, k = first_row(q, head, heads, q_batch, q_head), first_row(k, head, heads, k_batch, k_head)
    v, grad = first_row(v, head, heads, v_batch, v_head), first_row(grad, head, heads, grad_batch, grad_head)
    dk, dv = first_row(dk, head, heads, dk_batch, dk_head), first_row(dv, head, heads, dv_batch, dv_head)
    bias += (head % heads).to(tl.int64) * entries
    at, near_part, valid = _place(tokens, parts, keep, tile, batch, column, length, number, length, MASKED)
    near, values = load_rows(k, at, k_token, d, valid, WIDTH, CAST), load_rows(v, at, v_token, e, valid, OUT, CAST)
    to_keys, to_values = tl.zeros((SIZE, D), KIND), tl.zeros((SIZE, E), KIND)
    for start in range(0, area, SIZE):
        slot = start + tl.arange(0, SIZE)
        token, part, live = _place(queries, parts, keep, tile, batch, slot, area, number, stride, False)
        row = (head.to(tl.int64) * tl.num_programs(1) + tile) * area + slot
        ends, inner = tl.load(lse + row, mask=live, other=0.0), tl.load(delta + row, mask=live, other=0.0)
        own = load_rows(q, token, q_token, d, live, WIDTH, CAST)
        outer = load_rows(grad, token, grad_token, e, live, OUT, CAST)
        logits = _logits(own, near, part, near_part, valid, bias, pairs, tile, slot, column, area, length, scale,
                         BIASED, PAIRED, KIND)  # fmt: skip
        weights = tl.where(live[:, None], _weights(logits, ends), 0.0)
        to_values += tl.dot(tl.trans(weights).to(CAST), outer, input_precision="ieee", out_dtype=KIND)
        change = tl.dot(outer, tl.trans(values), input_precision="ieee", out_dtype=KIND) - inner[:, None]
        to_keys += tl.dot(tl.trans(weights * change).to(CAST), own, input_precision="ieee", out_dtype=KIND)
    mine = (column < area) & (at >= 0)
    if PAIRED:
        add_rows(dk, at, dk_token, d, valid, to_keys * scale, WIDTH)
        add_rows(dv, at, dv_token, e, valid, to_values, OUT)
    else:
        store_rows(dk, at, dk_token, d, mine, to_keys * scale, WIDTH)
        store_rows(dv, at, dv_token, e, mine, to_values, OUT)
    if not PAIRED and length > area:
        shared = (column >= area) & (column < length)
        place = (head.to(tl.int64) * (length - area) + column - area)[:, None] * (WIDTH + OUT)
        tl.atomic_add(common + place + d[None, :], to_keys * scale, mask=shared[:, None] & (d < WIDTH)[None, :])
        tl.atomic_add(common + place + WIDTH + e[None, :], to_values, mask=shared[:, None] & (e < OUT)[None, :])


Tables = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""tokens, parts, queries and pairs of `tile_attention`."""


def _options(q: Tensor, v: Tensor, bias: Tensor | None, keep: Tensor | None, pairs: Tensor | None) -> dict[str, Any]:
    return {
        "BIASED": bias is not None, "MASKED": keep is not None, "PAIRED": pairs is not None, "WIDTH": q.shape[-1],
        "OUT": v.shape[-1], "D": width_of(q.shape[-1]), "E": width_of(v.shape[-1]), "CAST": cast_of(v),
        "KIND": KINDS[upcast_dtype(q)],
    }  # fmt: skip


def _given(
    q: Tensor, bias: Tensor | None, tokens: Tensor, parts: Tensor | None, queries: Tensor | None, pairs: Tensor | None,
    keep: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """What the kernels get beside the rows; another tensor in the place of one that is not given and not read."""
    own = tokens if queries is None else queries
    return [q if bias is None else bias, tokens, tokens if parts is None else parts, own,
            tokens if pairs is None else pairs, q if keep is None else keep]  # fmt: skip


def _sizes(
    q: Tensor, bias: Tensor | None, tokens: Tensor, queries: Tensor | None, area: int
) -> tuple[tuple[int, int], int, tuple[int, ...]]:
    """Heads of all images and tiles, slots of a step, and what the kernels get of the sizes."""
    step, entries = min(SIZE, width_of(area)), 0 if bias is None else bias[0].numel()
    stride = tokens.shape[1] if queries is None else area
    sizes = q.shape[1], q.shape[2], area, tokens.shape[1], entries, stride
    return (q.shape[0] * q.shape[1], len(tokens)), step, sizes


@torch.library.custom_op("regard::tile_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, tokens: Tensor, parts: Tensor | None, queries: Tensor | None,
    pairs: Tensor | None, keep: Tensor | None, area: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output (B,H,N,e), 0 for tokens that are no queries, and the logarithms of the sums of weights (B*H,T,A)."""
    out, lse = _empty(q, k, v, bias, tokens, parts, queries, pairs, keep, area)
    if tokens.shape[1] > area:
        out.zero_()
    heads, step, sizes = _sizes(q, bias, tokens, queries, area)
    if out.numel():
        given, options = _given(q, bias, tokens, parts, queries, pairs, keep), _options(q, v, bias, keep, pairs)
        _attend[(*heads, triton.cdiv(area, step))](
            q, k, v, *given, out, lse, *strides(q, k, v, out), *sizes, scale, SIZE=step, **options
        )
    return out, lse


@_forward.register_fake
def _empty(q, k, v, bias, tokens, parts, queries, pairs, keep, area, *_):  # type: ignore[no-untyped-def]
    lse = q.new_empty(q.shape[0] * q.shape[1], len(tokens), area, dtype=upcast_dtype(q))
    return heads_last(q, v.shape[-1], v.dtype), lse


@torch.library.custom_op("regard::tile_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, tokens: Tensor, parts: Tensor | None,
    queries: Tensor | None, pairs: Tensor | None, keep: Tensor | None, out: Tensor, lse: Tensor, area: int,
    scale: float, learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, and of the bias, which is empty unless it is learned."""
    dq, dk, dv, dbias = _empty_gradients(grad, q, k, v, bias, tokens, parts, queries, pairs, keep, out, lse, area,
                                         scale, learned)  # fmt: skip
    heads, step, sizes = _sizes(q, bias, tokens, queries, area)
    dbias.zero_()
    if not out.numel():
        return dq.zero_(), dk.zero_(), dv.zero_(), dbias
    extra, delta = tokens.shape[1] - area if pairs is None else 0, torch.empty_like(lse)
    common = lse.new_zeros(heads[0], extra, q.shape[-1] + v.shape[-1]) if extra else lse
    of_pairs = lse.new_zeros(q.shape[1], pairs.numel()) if learned and pairs is not None else dbias
    if pairs is not None:
        dq, dk, dv = dq.zero_(), *(heads_last(x, x.shape[-1], lse.dtype).zero_() for x in (k, v))
    given, options = _given(q, bias, tokens, parts, queries, pairs, keep), _options(q, v, bias, keep, pairs)
    _query_gradients[(*heads, triton.cdiv(area, step))](
        q, k, v, *given, out, lse, grad, dq, of_pairs, delta, *strides(q, k, v, out, grad, dq), *sizes, scale,
        LEARNED=learned, SIZE=step, **options,
    )  # fmt: skip
    _key_gradients[(*heads, triton.cdiv(tokens.shape[1], step))](
        q, k, v, *given, lse, grad, delta, dk, dv, common, *strides(q, k, v, grad, dk, dv), *sizes, scale, SIZE=step,
        **options,
    )  # fmt: skip
    if pairs is not None and learned:
        dbias.index_add_(1, pairs.flatten().clamp_min(0), of_pairs)  # 0 where a query may not attend
    if extra:
        at, shared = tokens[0, area:].long(), common.unflatten(0, q.shape[:2])
        dq[:, :, at] = 0.0
        dk[:, :, at], dv[:, :, at] = (part.to(q.dtype) for part in shared.split([q.shape[-1], v.shape[-1]], -1))
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbias


@_backward.register_fake
def _empty_gradients(grad, q, k, v, bias, tokens, parts, queries, pairs, keep, out, lse, area, scale, learned):  # type: ignore[no-untyped-def]
    dbias = lse.new_empty(bias.shape if learned else (0,))
    return *(heads_last(x, x.shape[-1], x.dtype) for x in (q, k, v)), dbias


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.area, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    if grad is None:
        return (None,) * 11
    learned, saved = ctx.needs_input_grad[3], ctx.saved_tensors
    *grads, dbias = torch.ops.regard.tile_attention_backward(dense(grad), *saved, ctx.area, ctx.scale, learned)
    return *grads, dbias.to(saved[3].dtype) if learned else None, *[None] * 7


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise UnsupportedError('the Triton kernel cannot be differentiated twice: use execution="tiles"')


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)


def tile_attention(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, area: int, *, bias: Tensor | None = None,
    keep: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale q k^T + bias) v within tiles, (B,H,N,e) in the dtype of v, with gradients; N is the number of keys.

    q, k (B,H,N,d), v (B,H,N,e) with d, e <= 128, any strides. tables, int32: (tokens, parts, None, None), (T, A + E):
    the token of each of the A = `area` slots of a tile, -1 for none, and its part; then E tokens, part -1, which are
    keys of all queries, and no queries: their rows are 0. Or (tokens, None, queries, pairs): the keys (T, L) of a tile,
    its queries (T, A), -1 for none, and for each pair (T, A, L) the entry of the bias, -1 where the query may not
    attend. bias: (H, A, A), of slots, or (H, entries). keep (B,N): False for hidden keys; a query without a key gets
    zeros. scale: None = d^-0.5.
    Raises: UnsupportedError for wider heads, and as `check_runs`.
    """
    check_runs(q)
    if max(q.shape[-1], v.shape[-1]) > 128:
        raise UnsupportedError(
            f'execution="triton" has heads of at most 128 channels, not {max(q.shape[-1], v.shape[-1])}'
        )
    mask = None if keep is None else keep.to(torch.int8).contiguous()
    rows = [dense(x) for x in (q, k, v)]
    shared = None if bias is None else bias.contiguous()
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    result: Tensor = torch.ops.regard.tile_attention(*rows, shared, *tables, mask, area, factor)[0]
    return result
