"""Routed attention as Triton kernels, for GPUs: a program takes a block of queries that share an expert.

It gathers the expert's keys itself, tile by tile, and goes on with the softmax where the shared part, which is computed
before it, has ended: with its output and its log-sum-exp. Nothing of size N x top is written. One kernel lays the
queries out in blocks before. Imported only where it runs, since Triton is not everywhere."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.core import UnsupportedError

from .expert_blocks import block_size, lay_out
from .precision import upcast_dtype
from .routed import Parts
from .triton_tiles import (
    KINDS,
    LEAST,
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

TILE = 64
"""Keys in a step, at most."""
MOST_EXPERTS, COUNTED = 512, 8192
"""Experts of a head that `_lay_out` takes, and pairs of a query and an expert that it compares at once."""


@triton.jit
def _experts_of(choice, start, pairs, e, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(pairs of the tile, whether they are there, 1 where a pair is of an expert)."""
    pair = start + tl.arange(0, TILE)
    valid = pair < pairs
    chosen = tl.load(choice + pair, mask=valid, other=-1)
    return pair, valid, (chosen[:, None] == e[None, :]).to(tl.int32)


@triton.jit
def _lay_out(  # type: ignore[no-untyped-def]
    choice, source, expert, pairs, blocks, experts, M: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """A head's pairs (query, choice) by expert, in blocks of SIZE rows: count, then place in the order of the pairs."""
    head, e = tl.program_id(0).to(tl.int64), tl.arange(0, M)
    choice, source = choice + head * pairs, source + head * blocks * SIZE
    count = tl.zeros((M,), tl.int32)
    for start in range(0, pairs, TILE):
        _, _, one = _experts_of(choice, start, pairs, e, TILE)
        count += tl.sum(one, 0)
    own = (count + SIZE - 1) // SIZE
    ends = tl.cumsum(own, 0)
    for start in range(0, blocks, TILE):
        block = start + tl.arange(0, TILE)
        owner = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1)
        owner = head * experts + tl.minimum(owner, experts - 1)
        tl.store(expert + head * blocks + block, owner, mask=block < blocks)
    row = (ends - own) * SIZE  # the next row of each expert
    for start in range(0, pairs, TILE):
        pair, valid, one = _experts_of(choice, start, pairs, e, TILE)
        place = tl.sum(one * (row[None, :] + tl.cumsum(one, 0) - 1), 1)
        tl.store(source + place, head * pairs + pair, mask=valid)
        row += tl.sum(one, 0)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q, k, k_token, bias, row, valid, d, scale, WIDTH: tl.constexpr, BIASED: tl.constexpr, CAST: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """(keys of the tile, logits of the block's queries with them); -inf beyond the last key."""
    keys = load_rows(k, row, k_token, d, valid, WIDTH, CAST)
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee", out_dtype=KIND) * scale
    if BIASED:
        logits += tl.load(bias + row, mask=valid, other=0.0).to(KIND)[None, :]
    return keys, tl.where(valid[None, :], logits, float("-inf"))


@triton.jit
def _forward(
    q, k, v, bias, keys, source, expert, begin, begin_lse, out, lse, q_batch, q_head, q_token, k_batch, k_head,
    k_token, v_batch, v_head, v_token, begin_batch, begin_head, begin_token, out_batch, out_head, out_token, heads,
    pairs, heads_keys, experts, scale, CHOICES: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    SIZE: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BIASED: tl.constexpr,
    CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """out and lse of the pairs. One choice: they go on from begin and begin_lse, those of the start."""
    block, rows = tl.program_id(0), tl.arange(0, SIZE)
    if tl.load(source + block * SIZE) < 0:  # a block is filled from its first row on
        return
    pair = tl.load(source + block * SIZE + rows)
    live, own = pair >= 0, tl.load(expert + block)
    head, d, e = own // experts, tl.arange(0, D), tl.arange(0, E)
    local = pair - head * pairs
    q, k = first_row(q, head, heads, q_batch, q_head), first_row(k, head, heads, k_batch, k_head)
    v, out = first_row(v, head, heads, v_batch, v_head), first_row(out, head, heads, out_batch, out_head)
    bias += head * heads_keys
    queries = load_rows(q, local // CHOICES, q_token, d, live, WIDTH, CAST)
    total, high = tl.zeros((SIZE, E), KIND), tl.full((SIZE,), float("-inf"), KIND)
    if CHOICES == 1:
        begin = first_row(begin, head, heads, begin_batch, begin_head)
        total = load_rows(begin, local, begin_token, e, live, OUT, KIND)
        high = tl.load(begin_lse + pair, mask=live, other=0.0)
    norm = tl.where(high == float("-inf"), 0.0, 1.0).to(KIND)
    for start in range(0, TOP, STEP):
        place = start + tl.arange(0, STEP)
        valid = place < TOP
        row = tl.load(keys + own * TOP + place, mask=valid, other=0)
        _, logits = _scores(queries, k, k_token, bias, row, valid, d, scale, WIDTH, BIASED, CAST, KIND)
        most = tl.maximum(high, tl.max(logits, 1), propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(most == float("-inf"), 0.0, most)
        weights, old = tl.exp(logits - shift[:, None]), tl.exp(high - shift)
        values = load_rows(v, row, v_token, e, valid, OUT, CAST)
        added = tl.dot(weights.to(CAST), values, input_precision="ieee", out_dtype=KIND)
        total, norm, high = total * old[:, None] + added, norm * old + tl.sum(weights, 1), most
    empty = norm == 0.0
    store_rows(out, local, out_token, e, live, total / tl.where(empty, 1.0, norm)[:, None], OUT)
    tl.store(lse + pair, tl.where(empty, float("-inf"), high + tl.log(tl.where(empty, 1.0, norm))), mask=live)


@triton.jit
def _backward(
    q, k, v, bias, keys, source, expert, lse, delta, grad, dq, dk, dv, q_batch, q_head, q_token, k_batch, k_head,
    k_token, v_batch, v_head, v_token, grad_batch, grad_head, grad_token, dq_batch, dq_head, dq_token, dk_batch,
    dk_head, dk_token, dv_batch, dv_head, dv_token, heads, pairs, heads_keys, experts, scale,
    CHOICES: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    SIZE: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BIASED: tl.constexpr,
    CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """A pair belongs to one block, so its dq is stored; keys may belong to several, so dk and dv are added atomically.

    lse, delta and grad are of queries, lse over the whole softmax.
    """
    block, rows = tl.program_id(0), tl.arange(0, SIZE)
    if tl.load(source + block * SIZE) < 0:  # a block is filled from its first row on
        return
    pair = tl.load(source + block * SIZE + rows)
    live, query, own = pair >= 0, pair // CHOICES, tl.load(expert + block)
    head, d, e = own // experts, tl.arange(0, D), tl.arange(0, E)
    local = pair - head * pairs
    q, k = first_row(q, head, heads, q_batch, q_head), first_row(k, head, heads, k_batch, k_head)
    v, grad = first_row(v, head, heads, v_batch, v_head), first_row(grad, head, heads, grad_batch, grad_head)
    dk, dv = first_row(dk, head, heads, dk_batch, dk_head), first_row(dv, head, heads, dv_batch, dv_head)
    dq, bias = first_row(dq, head, heads, dq_batch, dq_head), bias + head * heads_keys
    queries = load_rows(q, local // CHOICES, q_token, d, live, WIDTH, CAST)
    outer = load_rows(grad, local // CHOICES, grad_token, e, live, OUT, CAST)
    norm = tl.load(lse + query, mask=live, other=0.0)
    norm = tl.where(norm == float("-inf"), 0.0, norm)
    mean = tl.load(delta + query, mask=live, other=0.0)
    moved = tl.zeros((SIZE, D), KIND)
    for start in range(0, TOP, STEP):
        place = start + tl.arange(0, STEP)
        valid = place < TOP
        row = tl.load(keys + own * TOP + place, mask=valid, other=0)
        expert_keys, logits = _scores(queries, k, k_token, bias, row, valid, d, scale, WIDTH, BIASED, CAST, KIND)
        values = load_rows(v, row, v_token, e, valid, OUT, CAST)
        weights = tl.exp(logits - norm[:, None])
        change = tl.dot(outer, tl.trans(values), input_precision="ieee", out_dtype=KIND) - mean[:, None]
        change = (weights * change * scale).to(CAST)
        moved += tl.dot(change, expert_keys, input_precision="ieee", out_dtype=KIND)
        to_keys = tl.dot(tl.trans(change), queries, input_precision="ieee", out_dtype=KIND)
        to_values = tl.dot(tl.trans(weights.to(CAST)), outer, input_precision="ieee", out_dtype=KIND)
        add_rows(dk, row, dk_token, d, valid, to_keys, WIDTH)
        add_rows(dv, row, dv_token, e, valid, to_values, OUT)
    store_rows(dq, local, dq_token, d, live, moved, WIDTH)


@triton.jit
def _row_products(  # type: ignore[no-untyped-def]
    grad, out, to_lse, delta, grad_batch, grad_head, grad_token, out_batch, out_head, out_token, heads, queries,
    LESS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    head, row, e = tl.program_id(1), tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, E)
    valid, at = row < queries, head.to(tl.int64) * queries + row
    grad, out = first_row(grad, head, heads, grad_batch, grad_head), first_row(out, head, heads, out_batch, out_head)
    outer = load_rows(grad, row, grad_token, e, valid, WIDTH, KIND)
    products = tl.sum(outer * load_rows(out, row, out_token, e, valid, WIDTH, KIND), 1)
    if LESS:
        products -= tl.load(to_lse + at, mask=valid, other=0.0)
    tl.store(delta + at, products, mask=valid)


@triton.jit
def _start_gradients(  # type: ignore[no-untyped-def]
    grad, out, lse, start_out, start_lse, delta, to_out, to_lse, grad_batch, grad_head, grad_token, out_batch, out_head,
    out_token, start_batch, start_head, start_token, to_batch, to_head, to_token, heads, queries, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, E: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    head, row, e = tl.program_id(1), tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, E)
    valid, at = row < queries, head.to(tl.int64) * queries + row
    grad, out = first_row(grad, head, heads, grad_batch, grad_head), first_row(out, head, heads, out_batch, out_head)
    start_out = first_row(start_out, head, heads, start_batch, start_head)
    outer = load_rows(grad, row, grad_token, e, valid, WIDTH, KIND)
    mean = tl.sum(outer * load_rows(out, row, out_token, e, valid, WIDTH, KIND), 1)
    begin = tl.load(start_lse + at, mask=valid, other=float("-inf"))
    end = tl.load(lse + at, mask=valid, other=0.0)
    share = tl.exp(begin - tl.where(end == float("-inf"), 0.0, end))  # 0 for a query without any key
    own = tl.sum(outer * load_rows(start_out, row, start_token, e, valid, WIDTH, KIND), 1)
    tl.store(delta + at, mean, mask=valid)
    to_out = first_row(to_out, head, heads, to_batch, to_head)
    store_rows(to_out, row, to_token, e, valid, outer * share[:, None], WIDTH)
    tl.store(to_lse + at, share * (own - mean), mask=valid)


def _rows_of(x: Tensor) -> tuple[tuple[int, int], tuple[int, int], dict[str, object]]:
    """For a kernel that goes over the rows of x (B,H,N,e): its programs, its last sizes, and its options."""
    size = min(max(1, 4096 // width_of(x.shape[-1])), width_of(x.shape[2]))
    options = {"WIDTH": x.shape[-1], "SIZE": size, "E": width_of(x.shape[-1]), "KIND": KINDS[upcast_dtype(x)]}
    return (triton.cdiv(x.shape[2], size), x.shape[0] * x.shape[1]), (x.shape[1], x.shape[2]), options


@torch.library.custom_op("regard::row_products", mutates_args=())
def _products(grad: Tensor, out: Tensor, to_lse: Tensor | None) -> Tensor:
    """delta (B,H,N): the products of the rows of two tensors (B,H,N,e), less the gradient of lse (B,H,N).

    In float32 for half precision.
    """
    delta, (programs, sizes, options) = _empty_products(grad), _rows_of(grad)
    less = grad if to_lse is None else to_lse
    if delta.numel():
        laid = strides(grad, out)
        _row_products[programs](grad, out, less, delta, *laid, *sizes, LESS=to_lse is not None, **options)
    return delta


@_products.register_fake
def _empty_products(grad, *_):  # type: ignore[no-untyped-def]
    return grad.new_empty(grad.shape[:-1], dtype=upcast_dtype(grad))


@torch.library.custom_op("regard::start_gradients", mutates_args=())
def _of_start(
    grad: Tensor, out: Tensor, lse: Tensor, start_out: Tensor, start_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """delta (B,H,N) of the whole softmax, and the gradients of start_out and start_lse."""
    results, (programs, sizes, options) = _empty_start(grad, out, lse, start_out, start_lse), _rows_of(grad)
    if lse.numel():
        laid = strides(grad, out, start_out, results[1])
        _start_gradients[programs](grad, out, lse, start_out, start_lse, *results, *laid, *sizes, **options)
    return results


@_of_start.register_fake
def _empty_start(grad, out, lse, start_out, start_lse):  # type: ignore[no-untyped-def]
    to_out = heads_last(start_out, start_out.shape[-1], start_out.dtype)
    return torch.empty_like(lse), to_out, torch.empty_like(start_lse)


def triton_routed(parts: Parts) -> Tensor:
    """As the forms of `routed`, by these kernels, for a bias that is not trained.

    Raises: UnsupportedError for one that is, in function transforms, or without a CUDA device (the interpreter,
    TRITON_INTERPRET=1, is for tests).
    """
    start = None
    if parts.shared is not None and parts.values is not None:
        lse = torch.where(parts.shared.isneginf().all(-1), -torch.inf, parts.shared.logsumexp(-1))
        start = softmax_of(parts.shared, lse).to(parts.v.dtype) @ parts.values, lse
    return routed_from(parts.q, parts.k, parts.v, parts.bias, parts.keys, parts.experts, start, 1.0)


def softmax_of(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse), zeros for rows without any weight."""
    return (logits - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()


def routed_from(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor, experts: Tensor,
    start: tuple[Tensor, Tensor] | None, scale: float,
) -> Tensor:  # fmt: skip
    """Routed attention that goes on from start: output (B,H,N,e) and log-sum-exp (B,H,N) of the shared part, or None.

    scale: of the products of queries and keys. Others as in `Parts`. Gradients of keys and values are sums in any order
    on a GPU. Raises: as `triton_routed`.
    """
    check_runs(q)
    if bias is not None and bias.requires_grad:
        raise UnsupportedError('execution="triton" has a fixed bias, this one is trained; use "auto"')
    size = max(LEAST, block_size(q.shape[-2] * experts.shape[-1], keys.shape[-2]))
    layout = lay_out_pairs(experts, keys.shape[-2], size)
    kind = upcast_dtype(q)
    if start is None:
        start = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -torch.inf, dtype=kind)
    out, lse = dense(start[0].to(q.dtype)), start[1].to(kind).contiguous()
    q, k, v, keys = dense(q), dense(k), dense(v), keys.contiguous()
    row = None if bias is None else bias.expand(*k.shape[:2], 1, -1).contiguous()
    result: Tensor = torch.ops.regard.routed(q, k, v, row, keys, *layout, out, lse, experts.shape[-1], scale)[0]
    return result


def lay_out_pairs(experts: Tensor, number: int, size: int) -> tuple[Tensor, Tensor]:
    """Pairs (query, choice) by expert: of each row of each block the pair, or -1, and of each block the expert, among
    B*H*number. experts (B,H,N,s): of each query. size: rows of a block. As `expert_blocks.lay_out`, by one kernel.
    """
    if number <= MOST_EXPERTS:
        laid: tuple[Tensor, Tensor] = torch.ops.regard.lay_out(experts.contiguous(), number, size)
        return laid
    blocks = lay_out(experts, number, size, bounded=True)
    return torch.where(blocks.real[:, 0], blocks.source, -1), blocks.expert


@torch.library.custom_op("regard::lay_out", mutates_args=())
def _lay_out_pairs(experts: Tensor, number: int, size: int) -> tuple[Tensor, Tensor]:
    source, expert = _empty_layout(experts, number, size)
    source.fill_(-1)
    heads, pairs = experts.shape[0] * experts.shape[1], experts.shape[2] * experts.shape[3]
    if heads:
        wide = width_of(number)
        _lay_out[(heads,)](
            experts, source, expert, pairs, len(expert) // heads, number, M=wide, SIZE=size,
            TILE=max(LEAST, COUNTED // wide),
        )  # fmt: skip
    return source, expert


@_lay_out_pairs.register_fake
def _empty_layout(experts, number, size):  # type: ignore[no-untyped-def]
    pairs = experts.shape[2] * experts.shape[3]
    blocks = experts.shape[0] * experts.shape[1] * (pairs // size + torch.sym_min(number, pairs))
    return experts.new_empty(blocks * size), experts.new_empty(blocks)


@torch.library.custom_op("regard::routed", mutates_args=())
def _attend_routed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor, source: Tensor, expert: Tensor,
    start_out: Tensor, start_lse: Tensor, choices: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output (B,H,N,e) and the log-sum-exp (B,H,N), from those of the start."""
    if choices == 1:
        out, lse = _empty(q, k, v, bias, keys, source, expert, start_out, start_lse)
    else:
        out = start_lse.new_empty(*start_out.shape[:2], start_out.shape[2] * choices, start_out.shape[-1])
        lse = start_lse.new_empty(*start_lse.shape, choices)
    options = _options(q, v, keys, source, expert, bias, choices, scale)
    sizes = *strides(q, k, v, start_out, out), q.shape[1], q.shape[2] * choices, k.shape[-2]
    given = q, k, v, q if bias is None else bias, keys, source, expert, start_out, start_lse
    _forward[(len(expert),)](*given, out, lse, *sizes, **options)
    if choices == 1:
        return out, lse
    out = out.unflatten(2, (-1, choices))
    parts = torch.cat([start_lse[..., None], lse], -1)
    total = torch.where(parts.isneginf().all(-1), -torch.inf, parts.logsumexp(-1))
    weights = softmax_of(parts, total)
    merged = weights[..., :1] * start_out + (weights[..., 1:, None] * out).sum(-2)
    return heads_last(q, v.shape[-1], q.dtype).copy_(merged), total


@_attend_routed.register_fake
def _empty(q, k, v, bias, keys, source, expert, start_out, start_lse, *_):  # type: ignore[no-untyped-def]
    return heads_last(q, v.shape[-1], q.dtype), start_lse.new_empty(start_lse.shape)


@torch.library.custom_op("regard::routed_backward", mutates_args=())
def _routed_backward(
    grad: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor,
    source: Tensor, expert: Tensor, choices: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    dq, dk, dv = (heads_last(x, x.shape[-1], lse.dtype) for x in (q, k, v))
    pairs = q.shape[2] * choices
    if choices == 1:
        dq = heads_last(q, q.shape[-1], q.dtype)
    else:
        dq = lse.new_empty(*q.shape[:2], pairs, q.shape[-1])
    _backward[(len(expert),)](
        q, k, v, q if bias is None else bias, keys, source, expert, lse, delta, grad, dq, dk.zero_(), dv.zero_(),
        *strides(q, k, v, grad, dq, dk, dv), q.shape[1], pairs, k.shape[-2],
        **_options(q, v, keys, source, expert, bias, choices, scale),
    )  # fmt: skip
    if choices > 1:
        dq = heads_last(q, q.shape[-1], q.dtype).copy_(dq.unflatten(2, (-1, choices)).sum(-2))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_routed_backward.register_fake
def _empty_gradients(grad, delta, lse, q, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(heads_last(x, x.shape[-1], x.dtype) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, start_out, start_lse, ctx.choices, ctx.scale = inputs
    ctx.set_materialize_grads(False)  # no zeros for lse
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, start_out, start_lse, *output)


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    *tensors, start_out, start_lse, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 11
    grad = dense(grad)
    delta, *to_start = torch.ops.regard.start_gradients(grad, out, lse, start_out, start_lse)
    grads = torch.ops.regard.routed_backward(grad, delta, lse, *tensors, ctx.choices, ctx.scale)
    return *grads, *[None] * 4, *to_start, None, None


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise UnsupportedError(
        'the Triton kernel cannot be differentiated twice: use execution="dense" (of a layer: mixer.operator)'
    )


_attend_routed.register_autograd(_differentiate, setup_context=_save)
_routed_backward.register_autograd(_refuse)


def _options(
    q: Tensor, v: Tensor, keys: Tensor, source: Tensor, expert: Tensor, bias: Tensor | None, choices: int, scale: float
) -> dict[str, object]:
    top, width, out = keys.shape[-1], q.shape[-1], v.shape[-1]
    return {
        "experts": keys.shape[-2], "scale": scale, "CHOICES": choices, "TOP": top, "WIDTH": width, "OUT": out,
        "SIZE": len(source) // len(expert), "STEP": min(TILE, width_of(top)), "D": width_of(width),
        "E": width_of(out), "BIASED": bias is not None, "CAST": cast_of(q),
        "KIND": KINDS[upcast_dtype(q)],
    }  # fmt: skip
