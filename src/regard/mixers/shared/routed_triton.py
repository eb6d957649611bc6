"""Routed attention as Triton kernels, for GPUs: a program takes a block of queries that share an expert.

It gathers the expert's keys itself, tile by tile, and goes on with the softmax where the shared part, which is computed
before it, has ended: with its output and its log-sum-exp. Nothing of size N x top is written. Imported only where it
runs, since Triton is not everywhere."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.core import UnsupportedError

from .expert_blocks import block_size, lay_out
from .precision import upcast
from .routed import Parts
from .triton_tiles import KINDS, LEAST, cast_of, check_runs, width_of

TILE = 64
"""Keys in a step, at most."""


@triton.jit
def _scores(
    q, k, bias, row, valid, d, scale, WIDTH: tl.constexpr, BIASED: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr
):  # type: ignore[no-untyped-def]
    """(keys of the tile, logits of the block's queries with them); -inf beyond the last key."""
    keys = tl.load(k + row[:, None] * WIDTH + d[None, :], mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)
    keys = keys.to(CAST)
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee", out_dtype=KIND) * scale
    if BIASED:
        logits += tl.load(bias + row, mask=valid, other=0.0).to(KIND)[None, :]
    return keys, tl.where(valid[None, :], logits, float("-inf"))


@triton.jit
def _forward(
    q, k, v, bias, keys, source, real, expert, begin, begin_lse, out, lse,
    heads_keys, experts, scale, CHOICES: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    SIZE: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BIASED: tl.constexpr,
    CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """out (P, OUT) and lse (P,) of the pairs. One choice: they go on from begin and begin_lse, those of the start."""
    block, rows = tl.program_id(0), tl.arange(0, SIZE)
    pair, live = tl.load(source + block * SIZE + rows), tl.load(real + block * SIZE + rows) != 0
    query, own = pair // CHOICES, tl.load(expert + block)
    d, e = tl.arange(0, D), tl.arange(0, E)
    queries = tl.load(q + query[:, None] * WIDTH + d[None, :], mask=live[:, None] & (d < WIDTH)[None, :], other=0.0)
    queries = queries.to(CAST)
    outs = pair[:, None] * OUT + e[None, :]
    stored = live[:, None] & (e < OUT)[None, :]
    total, high = tl.zeros((SIZE, E), KIND), tl.full((SIZE,), float("-inf"), KIND)
    if CHOICES == 1:
        total = tl.load(begin + outs, mask=stored, other=0.0).to(KIND)
        high = tl.load(begin_lse + pair, mask=live, other=0.0)
    norm = tl.where(high == float("-inf"), 0.0, 1.0).to(KIND)
    for start in range(0, TOP, STEP):
        place = start + tl.arange(0, STEP)
        valid = place < TOP
        row = (own // experts) * heads_keys + tl.load(keys + own * TOP + place, mask=valid, other=0)
        _, logits = _scores(queries, k, bias, row, valid, d, scale, WIDTH, BIASED, CAST, KIND)
        most = tl.maximum(high, tl.max(logits, 1), propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(most == float("-inf"), 0.0, most)
        weights, old = tl.exp(logits - shift[:, None]), tl.exp(high - shift)
        values = tl.load(v + row[:, None] * OUT + e[None, :], mask=valid[:, None] & (e < OUT)[None, :], other=0.0)
        added = tl.dot(weights.to(CAST), values.to(CAST), input_precision="ieee", out_dtype=KIND)
        total, norm, high = total * old[:, None] + added, norm * old + tl.sum(weights, 1), most
    empty = norm == 0.0
    tl.store(out + outs, total / tl.where(empty, 1.0, norm)[:, None], mask=stored)
    tl.store(lse + pair, tl.where(empty, float("-inf"), high + tl.log(tl.where(empty, 1.0, norm))), mask=live)


@triton.jit
def _backward(
    q, k, v, bias, keys, source, real, expert, lse, delta, grad, dq, dk, dv,
    heads_keys, experts, scale, CHOICES: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    SIZE: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BIASED: tl.constexpr,
    CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """A pair belongs to one block, so its dq is stored; keys may belong to several, so dk and dv are added atomically.

    lse, delta and grad are of queries, lse over the whole softmax.
    """
    block, rows = tl.program_id(0), tl.arange(0, SIZE)
    pair, live = tl.load(source + block * SIZE + rows), tl.load(real + block * SIZE + rows) != 0
    query, own = pair // CHOICES, tl.load(expert + block)
    d, e = tl.arange(0, D), tl.arange(0, E)
    inside, within = live[:, None] & (d < WIDTH)[None, :], live[:, None] & (e < OUT)[None, :]
    queries = tl.load(q + query[:, None] * WIDTH + d[None, :], mask=inside, other=0.0).to(CAST)
    outer = tl.load(grad + query[:, None] * OUT + e[None, :], mask=within, other=0.0).to(CAST)
    norm = tl.load(lse + query, mask=live, other=0.0)
    norm = tl.where(norm == float("-inf"), 0.0, norm)
    mean = tl.load(delta + query, mask=live, other=0.0)
    moved = tl.zeros((SIZE, D), KIND)
    for start in range(0, TOP, STEP):
        place = start + tl.arange(0, STEP)
        valid = place < TOP
        row = (own // experts) * heads_keys + tl.load(keys + own * TOP + place, mask=valid, other=0)
        expert_keys, logits = _scores(queries, k, bias, row, valid, d, scale, WIDTH, BIASED, CAST, KIND)
        stored = valid[:, None] & (e < OUT)[None, :]
        values = tl.load(v + row[:, None] * OUT + e[None, :], mask=stored, other=0.0).to(CAST)
        weights = tl.exp(logits - norm[:, None])
        change = tl.dot(outer, tl.trans(values), input_precision="ieee", out_dtype=KIND) - mean[:, None]
        change = (weights * change * scale).to(CAST)
        moved += tl.dot(change, expert_keys, input_precision="ieee", out_dtype=KIND)
        to_keys = tl.dot(tl.trans(change), queries, input_precision="ieee", out_dtype=KIND)
        to_values = tl.dot(tl.trans(weights.to(CAST)), outer, input_precision="ieee", out_dtype=KIND)
        tl.atomic_add(dk + row[:, None] * WIDTH + d[None, :], to_keys, mask=valid[:, None] & (d < WIDTH)[None, :])
        tl.atomic_add(dv + row[:, None] * OUT + e[None, :], to_values, mask=stored)
    tl.store(dq + pair[:, None] * WIDTH + d[None, :], moved, mask=inside)


@triton.jit
def _row_products(x, y, out, rows, WIDTH: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    row, e = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE), tl.arange(0, E)
    at, inside = row[:, None] * WIDTH + e[None, :], (row < rows)[:, None] & (e < WIDTH)[None, :]
    products = tl.load(x + at, mask=inside, other=0.0).to(KIND) * tl.load(y + at, mask=inside, other=0.0).to(KIND)
    tl.store(out + row, tl.sum(products, 1), mask=row < rows)


@torch.library.custom_op("regard::row_products", mutates_args=())
def _products(x: Tensor, y: Tensor) -> Tensor:
    """(B,H,N): the products of the rows of two contiguous tensors (B,H,N,e), in float32 for half precision."""
    out = _empty_products(x, y)
    size = max(1, 4096 // width_of(x.shape[-1]))
    _row_products[(triton.cdiv(out.numel(), size),)](
        x, y, out, out.numel(), WIDTH=x.shape[-1], SIZE=size, E=width_of(x.shape[-1]), KIND=KINDS[out.dtype]
    )
    return out


@_products.register_fake
def _empty_products(x, y):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[:-1], dtype=upcast(x).dtype)


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
    blocks = lay_out(experts, keys.shape[-2], size, bounded=True)
    kind = upcast(q).dtype
    if start is None:
        start = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -torch.inf, dtype=kind)
    out, lse = start[0].to(q.dtype).contiguous(), start[1].to(kind).contiguous()
    q, k, v, keys = (x.contiguous() for x in (q, k, v, keys))
    row = None if bias is None else bias.expand(*k.shape[:2], 1, -1).contiguous()
    layout = blocks.source, blocks.real.to(torch.int8), blocks.expert
    result: Tensor = torch.ops.regard.routed(q, k, v, row, keys, *layout, out, lse, experts.shape[-1], scale)[0]
    return result


@torch.library.custom_op("regard::routed", mutates_args=())
def _attend_routed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor, source: Tensor, real: Tensor, expert: Tensor,
    start_out: Tensor, start_lse: Tensor, choices: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output (B,H,N,e) and the log-sum-exp (B,H,N), from those of the start; all contiguous."""
    if choices == 1:
        out, lse = torch.empty_like(start_out), torch.empty_like(start_lse)
    else:
        out = start_lse.new_empty(*start_out.shape[:3], choices, start_out.shape[-1])
        lse = start_lse.new_empty(*start_lse.shape, choices)
    options = _options(q, v, keys, source, expert, bias, choices, scale)
    none = q.new_zeros(1) if bias is None else bias
    begin = start_out, start_lse
    _forward[(len(expert),)](q, k, v, none, keys, source, real, expert, *begin, out, lse, k.shape[-2], **options)
    if choices == 1:
        return out, lse
    parts = torch.cat([start_lse[..., None], lse], -1)
    total = torch.where(parts.isneginf().all(-1), -torch.inf, parts.logsumexp(-1))
    weights = softmax_of(parts, total)
    merged = weights[..., :1] * start_out + (weights[..., 1:, None] * out).sum(-2)
    return merged.to(q.dtype).contiguous(), total


@_attend_routed.register_fake
def _empty(q, k, v, bias, keys, source, real, expert, start_out, start_lse, *_):  # type: ignore[no-untyped-def]
    return start_out.new_empty(start_out.shape), start_lse.new_empty(start_lse.shape)


@torch.library.custom_op("regard::routed_backward", mutates_args=())
def _routed_backward(
    grad: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor,
    source: Tensor, real: Tensor, expert: Tensor, choices: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    dq = q.new_empty(*q.shape[:3], choices, q.shape[-1], dtype=q.dtype if choices == 1 else lse.dtype)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    none = q.new_zeros(1) if bias is None else bias
    _backward[(len(expert),)](
        q, k, v, none, keys, source, real, expert, lse, delta, grad, dq, dk, dv, k.shape[-2],
        **_options(q, v, keys, source, expert, bias, choices, scale),
    )  # fmt: skip
    dq = dq[..., 0, :] if choices == 1 else dq.sum(-2).to(q.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_routed_backward.register_fake
def _empty_gradients(grad, delta, lse, q, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, start_out, start_lse, ctx.choices, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, start_out, start_lse, *output)


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    *tensors, start_out, start_lse, out, lse = ctx.saved_tensors
    grad = grad.contiguous()
    delta = torch.ops.regard.row_products(grad, out)
    grads = torch.ops.regard.routed_backward(grad, delta, lse, *tensors, ctx.choices, ctx.scale)
    share = softmax_of(start_lse[..., None], lse)
    to_lse = share[..., 0] * (torch.ops.regard.row_products(grad, start_out) - delta)
    return *grads, *[None] * 5, (grad * share).to(start_out.dtype), to_lse, None, None


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise UnsupportedError(
        'the Triton kernel cannot be differentiated twice: set layer.mixer.operator.execution = "dense"'
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
        "KIND": KINDS[upcast(q).dtype],
    }  # fmt: skip
