"""MiTA's routed branch as Triton kernels, for GPUs: a program takes a block of queries that share an expert.

It gathers the expert's keys itself, tile by tile, and goes on with the softmax where the landmarks' part, which is a
few small products in PyTorch, has ended: with its output and its log-sum-exp. Nothing of size N x top is written.
Imported only where it runs, since Triton is not everywhere. Tested in Triton's interpreter; never run on a GPU so far.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.core import UnsupportedError
from regard.mixers.shared.precision import upcast

from .routed import Parts
from .routing import Blocks, block_size, lay_out

LEAST = 16
"""Rows, columns and widths that a product of Triton has at least."""
TILE = 64
"""Keys in a step, at most."""


@triton.jit
def _scores(
    q, k, bias, row, valid, d, WIDTH: tl.constexpr, BIASED: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr
):  # type: ignore[no-untyped-def]
    """(keys of the tile, logits of the block's queries with them); -inf beyond the last key."""
    keys = tl.load(k + row[:, None] * WIDTH + d[None, :], mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)
    keys = keys.to(CAST)
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee", out_dtype=KIND)
    if BIASED:
        logits += tl.load(bias + row, mask=valid, other=0.0).to(KIND)[None, :]
    return keys, tl.where(valid[None, :], logits, float("-inf"))


@triton.jit
def _forward(
    q, k, v, bias, keys, source, real, expert, out, lse,
    heads_keys, landmarks, TOP: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr,
    STEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BIASED: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """out (P, OUT) and lse (P,) hold those of the landmarks, and afterwards those of landmarks and keys."""
    block, rows = tl.program_id(0), tl.arange(0, SIZE)
    query, live = tl.load(source + block * SIZE + rows), tl.load(real + block * SIZE + rows) != 0
    own = tl.load(expert + block)
    d, e = tl.arange(0, D), tl.arange(0, E)
    queries = tl.load(q + query[:, None] * WIDTH + d[None, :], mask=live[:, None] & (d < WIDTH)[None, :], other=0.0)
    queries = queries.to(CAST)
    outs = out + query[:, None] * OUT + e[None, :]
    stored = live[:, None] & (e < OUT)[None, :]
    total = tl.load(outs, mask=stored, other=0.0)
    high = tl.load(lse + query, mask=live, other=0.0)
    norm = tl.where(high == float("-inf"), 0.0, 1.0).to(KIND)
    for start in range(0, TOP, STEP):
        place = start + tl.arange(0, STEP)
        valid = place < TOP
        row = (own // landmarks) * heads_keys + tl.load(keys + own * TOP + place, mask=valid, other=0)
        _, logits = _scores(queries, k, bias, row, valid, d, WIDTH, BIASED, CAST, KIND)
        most = tl.maximum(high, tl.max(logits, 1), propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(most == float("-inf"), 0.0, most)
        weights, old = tl.exp(logits - shift[:, None]), tl.exp(high - shift)
        values = tl.load(v + row[:, None] * OUT + e[None, :], mask=valid[:, None] & (e < OUT)[None, :], other=0.0)
        added = tl.dot(weights.to(CAST), values.to(CAST), input_precision="ieee", out_dtype=KIND)
        total, norm, high = total * old[:, None] + added, norm * old + tl.sum(weights, 1), most
    empty = norm == 0.0
    tl.store(outs, total / tl.where(empty, 1.0, norm)[:, None], mask=stored)
    tl.store(lse + query, tl.where(empty, float("-inf"), high + tl.log(tl.where(empty, 1.0, norm))), mask=live)


@triton.jit
def _backward(
    q, k, v, bias, keys, source, real, expert, lse, delta, grad, dq, dk, dv,
    heads_keys, landmarks, TOP: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr,
    STEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BIASED: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """A query belongs to one block, so dq is stored; keys may belong to several, so dk and dv are added atomically."""
    block, rows = tl.program_id(0), tl.arange(0, SIZE)
    query, live = tl.load(source + block * SIZE + rows), tl.load(real + block * SIZE + rows) != 0
    own = tl.load(expert + block)
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
        row = (own // landmarks) * heads_keys + tl.load(keys + own * TOP + place, mask=valid, other=0)
        expert_keys, logits = _scores(queries, k, bias, row, valid, d, WIDTH, BIASED, CAST, KIND)
        stored = valid[:, None] & (e < OUT)[None, :]
        values = tl.load(v + row[:, None] * OUT + e[None, :], mask=stored, other=0.0).to(CAST)
        weights = tl.exp(logits - norm[:, None])
        change = tl.dot(outer, tl.trans(values), input_precision="ieee", out_dtype=KIND) - mean[:, None]
        change = (weights * change).to(CAST)
        moved += tl.dot(change, expert_keys, input_precision="ieee", out_dtype=KIND)
        to_keys = tl.dot(tl.trans(change), queries, input_precision="ieee", out_dtype=KIND)
        to_values = tl.dot(tl.trans(weights.to(CAST)), outer, input_precision="ieee", out_dtype=KIND)
        tl.atomic_add(dk + row[:, None] * WIDTH + d[None, :], to_keys, mask=valid[:, None] & (d < WIDTH)[None, :])
        tl.atomic_add(dv + row[:, None] * OUT + e[None, :], to_values, mask=stored)
    tl.store(dq + query[:, None] * WIDTH + d[None, :], moved, mask=inside)


class Routed(torch.autograd.Function):
    """q (B,H,N,d) scaled, k, v, shared (B,H,N,m), values (B,H,m,e), bias -> (B,H,N,e), and gradients of all but bias.

    shared and values are None without landmarks. Gradients of keys and values are sums in any order on a GPU.
    """

    @staticmethod
    def forward(ctx, q, k, v, shared, values, bias, keys, blocks: Blocks) -> Tensor:  # type: ignore[no-untyped-def]
        kind = upcast(q).dtype
        if shared is None:
            out, lse = (
                q.new_zeros(*q.shape[:3], v.shape[-1], dtype=kind),
                q.new_full(q.shape[:3], -torch.inf, dtype=kind),
            )
        else:
            lse = shared.logsumexp(-1)
            out = (shared - lse[..., None]).exp() @ values.to(kind)
        out, lse = out.contiguous(), lse.contiguous()
        q, k, v, keys = (x.contiguous() for x in (q, k, v, keys))
        bias = q.new_zeros(1) if bias is None else bias.expand(*k.shape[:2], 1, -1).contiguous()
        options = _options(q, k, v, bias, keys, blocks)
        _forward[(len(blocks.expert),)](q, k, v, bias, keys, *_rows(blocks), out, lse, k.shape[-2], **options)
        ctx.save_for_backward(q, k, v, shared, values, bias, keys, out, lse)
        ctx.blocks = blocks
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, shared, values, bias, keys, out, lse = ctx.saved_tensors
        grad = grad.to(out.dtype).contiguous()
        delta = (grad * out).sum(-1)
        dq = torch.zeros_like(q, dtype=out.dtype)
        dk, dv = (torch.zeros_like(x, dtype=out.dtype) for x in (k, v))
        options = _options(q, k, v, bias, keys, ctx.blocks)
        _backward[(len(ctx.blocks.expert),)](
            q, k, v, bias, keys, *_rows(ctx.blocks), lse, delta, grad, dq, dk, dv, k.shape[-2], **options
        )
        dshared = dvalues = None
        if shared is not None:
            weights = (shared - lse[..., None]).exp()
            dshared = (weights * (grad @ values.mT.to(grad.dtype) - delta[..., None])).to(shared.dtype)
            dvalues = (weights.mT @ grad).to(values.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dshared, dvalues, None, None, None


def triton_routed(parts: Parts) -> Tensor:
    """As the forms of `routed`, by these kernels; for one expert per query and a bias that is not trained.

    Raises: UnsupportedError for others, or without a CUDA device (the interpreter, TRITON_INTERPRET=1, is for tests).
    """
    (keys, experts), shape = parts.plan, parts.q.shape
    if experts.shape[-1] > 1 or (parts.bias is not None and parts.bias.requires_grad):
        raise UnsupportedError('mita: execution="triton" has one expert per query and a fixed bias; use "auto"')
    if not (parts.q.is_cuda or triton.knobs.runtime.interpret):
        raise UnsupportedError(f'mita: execution="triton" needs a CUDA device, not {parts.q.device}; use "auto"')
    size = max(LEAST, block_size(shape[-2], keys.shape[-2]))
    blocks = lay_out(parts.plan, size, bounded=True)
    return Routed.apply(parts.q, parts.k, parts.v, parts.shared, parts.values, parts.bias, keys, blocks)  # type: ignore[no-any-return, no-untyped-call]


def _rows(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    return blocks.source, blocks.real.to(torch.int8), blocks.expert


def _options(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keys: Tensor, blocks: Blocks) -> dict[str, object]:
    top, width, out = keys.shape[-1], q.shape[-1], v.shape[-1]
    kinds = {
        torch.float64: tl.float64,
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }
    cast = kinds[q.dtype]
    if triton.knobs.runtime.interpret and q.dtype is torch.bfloat16:  # whose products the interpreter gets wrong
        cast = tl.float32
    return {
        "landmarks": keys.shape[-2], "TOP": top, "WIDTH": width, "OUT": out, "SIZE": blocks.size,
        "STEP": min(TILE, max(LEAST, triton.next_power_of_2(top))), "D": max(LEAST, triton.next_power_of_2(width)),
        "E": max(LEAST, triton.next_power_of_2(out)), "BIASED": bias.numel() > 1, "CAST": cast,
        "KIND": tl.float64 if q.dtype is torch.float64 else tl.float32,
    }  # fmt: skip
