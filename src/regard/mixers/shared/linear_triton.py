"""Linear attention in Triton: features, sums over keys and normalisation without copies.

The keys of a block of tokens have the sums S = sum_j f(k_j)^T v_j, z = sum_j f(k_j) and c = sum_j v_j; a query's output
is (f(q) S + c) / (f(q).z + eps), with the sums of its block. One pass over keys and values makes the sums, one over
queries reads them, and one each goes back; what lies between, such as a mixture of blocks, is left to PyTorch. A pass
whose heads are too few for a GPU adds up its parts in one more launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.core import UnsupportedError

from .precision import upcast_dtype
from .triton_tiles import (
    INTERPRETED,
    KINDS,
    check_runs,
    dense,
    first_row,
    heads_last,
    load_rows,
    store_rows,
    strides,
    width_of,
)  # fmt: skip

FEATURES = {"identity": 0, "elu": 1, "relu": 2}
SIZE = 64
"""Tokens of a step, and features of a tile, at most."""
PROGRAMS, SHORTEST = 264, 256
"""Programs that a pass over sums has at least, where each then has so many tokens: twice the processors of an H100."""


@triton.jit
def _feature(x, KIND_OF: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND_OF == 1:
        x = tl.where(x > 0, x + 1, tl.exp(x))
    if KIND_OF == 2:
        x = tl.where(x <= 0, 0.0, x) + 1e-6
    return x


@triton.jit
def _slope(x, KIND_OF: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND_OF == 0:
        return x * 0 + 1
    if KIND_OF == 1:
        return tl.where(x > 0, 1.0, tl.exp(x))
    return tl.where(x <= 0, x * 0, 1.0)


@triton.jit
def _load_sums(sums, r, e, KIND: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """S (r, e), z (r) and c (e) of a block, or their gradients."""
    inside = (r < WIDTH)[:, None] & (e < OUT)[None, :]
    table = tl.load(sums + r[:, None] * OUT + e[None, :], mask=inside, other=0.0).to(KIND)
    total = tl.load(sums + WIDTH * OUT + r, mask=r < WIDTH, other=0.0).to(KIND)
    return table, total, tl.load(sums + WIDTH * OUT + WIDTH + e, mask=e < OUT, other=0.0).to(KIND)


@triton.jit
def _store_sums(sums, r, e, table, total, constant, WIDTH: tl.constexpr, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = (r < WIDTH)[:, None] & (e < OUT)[None, :]
    tl.store(sums + r[:, None] * OUT + e[None, :], table, mask=inside)
    tl.store(sums + WIDTH * OUT + r, total, mask=r < WIDTH)
    tl.store(sums + WIDTH * OUT + WIDTH + e, constant, mask=e + tl.program_id(2) * OUT < OUT)


@triton.jit
def _place(table, keep, head, heads, block, slot, length, tokens, INDEXED: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens in slots of a block, where there is one, and where it counts."""
    token, inside = slot, slot < length
    if INDEXED:
        token = tl.load(table + block * length + slot, mask=inside, other=-1)
        inside = token >= 0
    valid = inside
    if MASKED:
        valid = inside & (tl.load(keep + (head // heads).to(tl.int64) * tokens + token, mask=inside, other=0) != 0)
    return token, inside, valid


@triton.jit
def _sum_keys(  # type: ignore[no-untyped-def]
    k, v, keep, shift, table, sums, k_batch, k_head, k_token, v_batch, v_head, v_token, heads, tokens, length, steps,
    FEATURE: tl.constexpr, MASKED: tl.constexpr, SHIFTED: tl.constexpr, INDEXED: tl.constexpr, WIDTH: tl.constexpr,
    OUT: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The sums over a block of keys, or over one part of all."""
    head, part = tl.program_id(0), tl.program_id(1)
    r, e = tl.program_id(2) * D + tl.arange(0, D), tl.arange(0, E)
    k, v = first_row(k, head, heads, k_batch, k_head), first_row(v, head, heads, v_batch, v_head)
    product, total, constant = tl.zeros((D, E), KIND), tl.zeros((D,), KIND), tl.zeros((E,), KIND)
    first = 0 if INDEXED else part * steps
    for step in range(steps):
        slot = (first + step) * SIZE + tl.arange(0, SIZE)
        token, _, valid = _place(table, keep, head, heads, part, slot, length, tokens, INDEXED, MASKED)
        x = load_rows(k, token, k_token, r, valid, WIDTH, KIND)
        if SHIFTED:
            x -= tl.load(shift + head.to(tl.int64) * WIDTH + r, mask=r < WIDTH, other=0.0).to(KIND)[None, :]
        features = tl.where(valid[:, None] & (r < WIDTH)[None, :], _feature(x, FEATURE), 0.0)
        values = load_rows(v, token, v_token, e, valid, OUT, CAST)
        product += tl.dot(tl.trans(features).to(CAST), values, input_precision="ieee", out_dtype=KIND)
        total += tl.sum(features, 0)
        constant += tl.sum(values.to(KIND), 0)
    number = head.to(tl.int64) * tl.num_programs(1) + part
    _store_sums(sums + number * (WIDTH * OUT + WIDTH + OUT), r, e, product, total, constant, WIDTH, OUT)


@triton.jit
def _read_queries(  # type: ignore[no-untyped-def]
    q, sums, table, out, norm, q_batch, q_head, q_token, out_batch, out_head, out_token, heads, tokens, length, blocks,
    programs, eps, FEATURE: tl.constexpr, DIVIDED: tl.constexpr, CONSTANT: tl.constexpr, INDEXED: tl.constexpr,
    WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """The outputs of some queries of a block, and what they were divided by."""
    head, block, e = tl.program_id(0), tl.program_id(1) // programs, tl.arange(0, E)
    slot = tl.program_id(1) % programs * SIZE + tl.arange(0, SIZE)
    token, valid, _ = _place(table, q, head, heads, block, slot, length, tokens, INDEXED, False)
    q, out = first_row(q, head, heads, q_batch, q_head), first_row(out, head, heads, out_batch, out_head)
    sums += (head.to(tl.int64) * blocks + block) * (WIDTH * OUT + WIDTH + OUT)
    result, divisor = tl.zeros((SIZE, E), KIND), tl.zeros((SIZE,), KIND) + eps
    for start in range(0, WIDTH, D):
        r = start + tl.arange(0, D)
        features = _feature(load_rows(q, token, q_token, r, valid, WIDTH, KIND), FEATURE)
        product, total, constant = _load_sums(sums, r, e, KIND, WIDTH, OUT)  # 0 beyond the last feature
        result += tl.dot(features.to(CAST), product.to(CAST), input_precision="ieee", out_dtype=KIND)
        if DIVIDED:
            divisor += tl.sum(features * total[None, :], 1)
        if CONSTANT and start == 0:
            result += constant[None, :]
    if DIVIDED:
        tl.store(norm + head.to(tl.int64) * tokens + token, divisor, mask=valid)
        result = result / tl.where(divisor == 0, 1.0, divisor)[:, None]
    store_rows(out, token, out_token, e, valid, result, OUT)


@triton.jit
def _query_gradients(  # type: ignore[no-untyped-def]
    q, sums, table, out, norm, grad, dq, dsums, q_batch, q_head, q_token, out_batch, out_head, out_token, grad_batch,
    grad_head, grad_token, dq_batch, dq_head, dq_token, heads, tokens, length, steps, FEATURE: tl.constexpr,
    DIVIDED: tl.constexpr, CONSTANT: tl.constexpr, INDEXED: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The gradients of the queries of a block, or of one part of all, and their share of those of the sums."""
    head, part = tl.program_id(0), tl.program_id(1)
    r, e = tl.program_id(2) * D + tl.arange(0, D), tl.arange(0, E)
    q, out = first_row(q, head, heads, q_batch, q_head), first_row(out, head, heads, out_batch, out_head)
    grad, dq = first_row(grad, head, heads, grad_batch, grad_head), first_row(dq, head, heads, dq_batch, dq_head)
    number = head.to(tl.int64) * tl.num_programs(1) + part
    block = number if INDEXED else head.to(tl.int64)
    product, total, constant = _load_sums(sums + block * (WIDTH * OUT + WIDTH + OUT), r, e, KIND, WIDTH, OUT)
    to_product, to_total, to_constant = tl.zeros((D, E), KIND), tl.zeros((D,), KIND), tl.zeros((E,), KIND)
    first = 0 if INDEXED else part * steps
    for step in range(steps):
        slot = (first + step) * SIZE + tl.arange(0, SIZE)
        token, valid, _ = _place(table, q, head, heads, part, slot, length, tokens, INDEXED, False)
        outer = load_rows(grad, token, grad_token, e, valid, OUT, KIND)
        x = load_rows(q, token, q_token, r, valid, WIDTH, KIND)
        features = tl.where((r < WIDTH)[None, :], _feature(x, FEATURE), 0.0)
        if DIVIDED:
            divisor = tl.load(norm + head.to(tl.int64) * tokens + token, mask=valid, other=1.0)
            outer = outer / tl.where(divisor == 0, 1.0, divisor)[:, None]
            to_divisor = -tl.sum(outer * load_rows(out, token, out_token, e, valid, OUT, KIND), 1)
            to_divisor = tl.where(divisor == 0, 0.0, to_divisor)
        change = tl.dot(outer.to(CAST), tl.trans(product).to(CAST), input_precision="ieee", out_dtype=KIND)
        if DIVIDED:
            change += to_divisor[:, None] * total[None, :]
            to_total += tl.sum(features * to_divisor[:, None], 0)
        store_rows(dq, token, dq_token, r, valid, change * _slope(x, FEATURE), WIDTH)
        to_product += tl.dot(tl.trans(features).to(CAST), outer.to(CAST), input_precision="ieee", out_dtype=KIND)
        if CONSTANT:
            to_constant += tl.sum(outer, 0)
    _store_sums(dsums + number * (WIDTH * OUT + WIDTH + OUT), r, e, to_product, to_total, to_constant, WIDTH, OUT)


@triton.jit
def _key_gradients(  # type: ignore[no-untyped-def]
    k, v, keep, shift, table, dsums, dk, dv, k_batch, k_head, k_token, v_batch, v_head, v_token, dk_batch, dk_head,
    dk_token, dv_batch, dv_head, dv_token, heads, tokens, length, blocks, programs, FEATURE: tl.constexpr,
    MASKED: tl.constexpr, SHIFTED: tl.constexpr, INDEXED: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The gradients of some keys and values of a block; 0 for hidden keys."""
    head, block, e = tl.program_id(0), tl.program_id(1) // programs, tl.arange(0, E)
    slot = tl.program_id(1) % programs * SIZE + tl.arange(0, SIZE)
    token, inside, valid = _place(table, keep, head, heads, block, slot, length, tokens, INDEXED, MASKED)
    k, v = first_row(k, head, heads, k_batch, k_head), first_row(v, head, heads, v_batch, v_head)
    dk, dv = first_row(dk, head, heads, dk_batch, dk_head), first_row(dv, head, heads, dv_batch, dv_head)
    dsums += (head.to(tl.int64) * blocks + block) * (WIDTH * OUT + WIDTH + OUT)
    values, to_values = load_rows(v, token, v_token, e, valid, OUT, CAST), tl.zeros((SIZE, E), KIND)
    for start in range(0, WIDTH, D):
        r = start + tl.arange(0, D)
        x = load_rows(k, token, k_token, r, valid, WIDTH, KIND)
        if SHIFTED:
            x -= tl.load(shift + head.to(tl.int64) * WIDTH + r, mask=r < WIDTH, other=0.0).to(KIND)[None, :]
        features = tl.where(valid[:, None], _feature(x, FEATURE), 0.0)
        product, total, constant = _load_sums(dsums, r, e, KIND, WIDTH, OUT)
        change = tl.dot(values, tl.trans(product).to(CAST), input_precision="ieee", out_dtype=KIND) + total[None, :]
        store_rows(dk, token, dk_token, r, inside, tl.where(valid[:, None], change * _slope(x, FEATURE), 0.0), WIDTH)
        to_values += tl.dot(features.to(CAST), product.to(CAST), input_precision="ieee", out_dtype=KIND)
        if start == 0:
            to_values += tl.where(valid[:, None], constant[None, :], 0.0)
    store_rows(dv, token, dv_token, e, inside, to_values, OUT)


class _Pass:
    """How kernels pass over tokens: all in one block, or those of the blocks of a table."""

    def __init__(self, x: Tensor, width: int, table: Tensor | None, dtype: torch.dtype, feature: str) -> None:
        """x (B,H,N,r): queries or keys. width, dtype: of the values."""
        kind, self.heads, self.tokens = upcast_dtype(x), x.shape[0] * x.shape[1], x.shape[2]
        self.blocks, self.length = (1, x.shape[2]) if table is None else table.shape
        half = dtype is torch.bfloat16 and not INTERPRETED  # in float16 a long sum would overflow
        self.size = SIZE if table is None else min(SIZE, width_of(self.length))
        self.options: dict[str, Any] = {
            "FEATURE": FEATURES[feature], "INDEXED": table is not None, "WIDTH": x.shape[-1], "OUT": width,
            "SIZE": self.size, "D": min(SIZE, width_of(x.shape[-1])), "E": width_of(width),
            "CAST": KINDS[torch.bfloat16 if half else kind], "KIND": KINDS[kind],
        }  # fmt: skip
        self.programs = triton.cdiv(self.length, self.size)
        """Of a pass that sums nothing, for each block."""

    def sums(self, x: Tensor) -> tuple[Tensor, tuple[int, int, int], int]:
        """For a pass that sums: empty sums of each part, the programs, and steps of a part."""
        columns = triton.cdiv(self.options["WIDTH"], self.options["D"])
        parts = max(1, min(triton.cdiv(PROGRAMS, self.heads * columns), triton.cdiv(self.length, SHORTEST)))
        parts = self.blocks if self.options["INDEXED"] else parts
        steps = self.programs if self.options["INDEXED"] else triton.cdiv(triton.cdiv(self.length, parts), self.size)
        shape = self.heads, parts, width_of_sums(self.options["WIDTH"], self.options["OUT"])
        return x.new_empty(shape, dtype=upcast_dtype(x)), (self.heads, parts, columns), steps

    def joined(self, sums: Tensor) -> Tensor:
        """(B*H, blocks, ...) from those of parts."""
        return sums if sums.shape[1] == self.blocks else sums.sum(1, keepdim=True)


def width_of_sums(features: int, width: int) -> int:
    """Numbers of S, z and c, one after another."""
    return features * width + features + width


def _sums_like(k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
    blocks = 1 if table is None else len(table)
    shape = k.shape[0] * k.shape[1], blocks, width_of_sums(k.shape[-1], v.shape[-1])
    return k.new_empty(shape, dtype=upcast_dtype(k))


@torch.library.custom_op("regard::linear_sums", mutates_args=())
def _sums(
    k: Tensor, v: Tensor, keep: Tensor | None, shift: Tensor | None, table: Tensor | None, feature: str
) -> Tensor:
    """The sums over keys (B*H, blocks, r e + r + e). keep: (B,M) int8. shift: (B,H,r)."""
    if not v.numel() or not k.numel():
        return _sums_like(k, v, table).zero_()
    over = _Pass(k, v.shape[-1], table, v.dtype, feature)
    sums, programs, steps = over.sums(k)
    others = [k if x is None else x for x in (keep, shift, table)]
    sizes = *strides(k, v), k.shape[1], over.tokens, over.length, steps
    flags = {"MASKED": keep is not None, "SHIFTED": shift is not None}
    _sum_keys[programs](k, v, *others, sums, *sizes, **flags, **over.options)
    return over.joined(sums)


@_sums.register_fake
def _(k, v, keep, shift, table, feature):  # type: ignore[no-untyped-def]
    return _sums_like(k, v, table)


@torch.library.custom_op("regard::linear_sums_backward", mutates_args=())
def _sums_backward(
    grad: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, shift: Tensor | None, table: Tensor | None, feature: str
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v."""
    dk, dv = (heads_last(x, x.shape[-1], x.dtype) for x in (k, v))
    if not v.numel() or not k.numel():
        return dk.zero_(), dv.zero_()
    over = _Pass(k, v.shape[-1], table, v.dtype, feature)
    others = [k if x is None else x for x in (keep, shift, table)]
    sizes = *strides(k, v, dk, dv), k.shape[1], over.tokens, over.length, over.blocks, over.programs
    flags = {"MASKED": keep is not None, "SHIFTED": shift is not None}
    _key_gradients[(over.heads, over.blocks * over.programs)](
        k, v, *others, grad, dk, dv, *sizes, **flags, **over.options
    )
    return dk, dv


@_sums_backward.register_fake
def _(grad, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(heads_last(x, x.shape[-1], x.dtype) for x in (k, v))


@torch.library.custom_op("regard::linear_outputs", mutates_args=())
def _outputs(
    q: Tensor, sums: Tensor, table: Tensor | None, width: int, dtype: torch.dtype, feature: str, eps: float,
    divided: bool, constant: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs (B,H,N,e), and their divisors (B,H,N) where they are divided."""
    out, norm = _empty_outputs(q, width, dtype, divided)
    if not out.numel():
        return out, norm
    over = _Pass(q, width, table, dtype, feature)
    sizes = *strides(q, out), q.shape[1], over.tokens, over.length, over.blocks, over.programs
    flags = {"DIVIDED": divided, "CONSTANT": constant}
    _read_queries[(over.heads, over.blocks * over.programs)](
        q, sums, q if table is None else table, out, norm, *sizes, eps, **flags, **over.options
    )
    return out, norm


def _empty_outputs(q: Tensor, width: int, dtype: torch.dtype, divided: bool) -> tuple[Tensor, Tensor]:
    return heads_last(q, width, dtype), q.new_empty(q.shape[:3] if divided else (0,), dtype=upcast_dtype(q))


@_outputs.register_fake
def _(q, sums, table, width, dtype, feature, eps, divided, constant):  # type: ignore[no-untyped-def]
    return _empty_outputs(q, width, dtype, divided)


@torch.library.custom_op("regard::linear_outputs_backward", mutates_args=())
def _outputs_backward(
    grad: Tensor, q: Tensor, sums: Tensor, table: Tensor | None, out: Tensor, norm: Tensor, feature: str,
    divided: bool, constant: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of q and of the sums."""
    dq = heads_last(q, q.shape[-1], q.dtype)
    if not out.numel() or not q.numel():
        return dq.zero_(), torch.zeros_like(sums)
    over = _Pass(q, out.shape[-1], table, out.dtype, feature)
    dsums, programs, steps = over.sums(q)
    sizes = *strides(q, out, grad, dq), q.shape[1], over.tokens, over.length, steps
    flags = {"DIVIDED": divided, "CONSTANT": constant}
    _query_gradients[programs](
        q, sums, q if table is None else table, out, norm, grad, dq, dsums, *sizes, **flags, **over.options
    )
    return dq, over.joined(dsums)


@_outputs_backward.register_fake
def _(grad, q, sums, *_):  # type: ignore[no-untyped-def]
    return heads_last(q, q.shape[-1], q.dtype), torch.empty_like(sums)


def _save_sums(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.feature = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_sums(ctx, grad):  # type: ignore[no-untyped-def]
    dk, dv = torch.ops.regard.linear_sums_backward(grad.contiguous(), *ctx.saved_tensors, ctx.feature)
    return dk, dv, None, None, None, None


def _save_outputs(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, sums, table, _, _, ctx.feature, _, *ctx.flags = inputs
    ctx.set_materialize_grads(False)  # no zeros for divisors
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, sums, table, *output)


def _differentiate_outputs(ctx, grad, _):  # type: ignore[no-untyped-def]
    if grad is None:
        return (None,) * 9
    grads = torch.ops.regard.linear_outputs_backward(dense(grad), *ctx.saved_tensors, ctx.feature, *ctx.flags)
    return *grads, *[None] * 7


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise UnsupportedError('the Triton kernel cannot be differentiated twice: use execution="products"')


_sums.register_autograd(_differentiate_sums, setup_context=_save_sums)
_outputs.register_autograd(_differentiate_outputs, setup_context=_save_outputs)
_sums_backward.register_autograd(_refuse)
_outputs_backward.register_autograd(_refuse)


def sum_keys(
    k: Tensor, v: Tensor, feature: str = "identity", *, keep: Tensor | None = None, shift: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sums S, z, c of each block of keys, (B*H, blocks, r e + r + e) in float32 at least, with gradients.

    k (B,H,M,r), v (B,H,M,e) with e <= 128, with any strides. feature: of `FEATURES`. keep (B,M): False for hidden keys.
    shift (B,H,r): subtracted from the keys first; it gets no gradient. table (blocks, A), int32: the tokens of each
    block, each token once, -1 for none; None = one block of all.
    Raises: UnsupportedError for wider values, in function transforms, for float64 on a GPU, or without a CUDA device
    (the interpreter, TRITON_INTERPRET=1, is for tests).
    """
    check_runs(k)
    if v.shape[-1] > 128:
        raise UnsupportedError(f'execution="triton" has values of at most 128 channels a head, not {v.shape[-1]}')
    mask = None if keep is None else keep.to(torch.int8).contiguous()
    moved = None if shift is None else shift.detach().contiguous()
    result: Tensor = torch.ops.regard.linear_sums(dense(k), dense(v), mask, moved, table, feature)
    return result


def read_queries(
    q: Tensor, sums: Tensor, v: Tensor, feature: str = "identity", *, eps: float | None = None, constant: bool = False,
    table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The outputs of queries q (B,H,N,r) with the sums of their blocks: (B,H,N,e) in the dtype of v, with gradients.

    sums: as of `sum_keys`. eps: added to the divisor f(q).z; None = not divided. A query whose divisor is 0 is not
    divided. constant: whether c is added. table: blocks of queries.
    """
    flags = 0.0 if eps is None else eps, eps is not None, constant
    rows = dense(q), sums.contiguous(), table
    result: Tensor = torch.ops.regard.linear_outputs(*rows, v.shape[-1], v.dtype, feature, *flags)[0]
    return result


def linear_product(
    q: Tensor, k: Tensor, v: Tensor, eps: float, feature: str = "identity", keep: Tensor | None = None
) -> Tensor:
    """Linear attention (B,H,N,e) in the dtype of v, with gradients; arguments as of the two passes."""
    return read_queries(q, sum_keys(k, v, feature, keep=keep), v, feature, eps=eps)
