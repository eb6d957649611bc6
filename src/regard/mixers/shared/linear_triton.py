"""Linear attention in Triton: features, sums over keys and normalisation without copies, two kernels a pass.

out_i = f(q_i) S / (f(q_i).z + eps), S = sum_j f(k_j)^T v_j, z = sum_j f(k_j). Forward: one pass over keys and values
makes S and z, one over queries the output. Backward: one pass over queries makes their gradients and those of S and z,
one over keys and values the rest. A pass whose heads are too few for a GPU sums its parts in one more launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.core import UnsupportedError

from .precision import upcast
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
"""Tokens of a step, and features of a tile."""
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
def _load_state(state, r, e, KIND: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """S (r, e) and z (r) of a head, or their gradients."""
    inside = (r < WIDTH)[:, None] & (e < OUT)[None, :]
    table = tl.load(state + r[:, None] * OUT + e[None, :], mask=inside, other=0.0).to(KIND)
    return table, tl.load(state + WIDTH * OUT + r, mask=r < WIDTH, other=0.0).to(KIND)


@triton.jit
def _store_state(state, r, e, table, total, WIDTH: tl.constexpr, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = (r < WIDTH)[:, None] & (e < OUT)[None, :]
    tl.store(state + r[:, None] * OUT + e[None, :], table, mask=inside)
    tl.store(state + WIDTH * OUT + r, total, mask=r < WIDTH)


@triton.jit
def _kept(keep, head, heads, token, length, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    valid = token < length
    if MASKED:
        row = keep + (head // heads).to(tl.int64) * length
        valid = valid & (tl.load(row + token, mask=valid, other=0) != 0)
    return valid


@triton.jit
def _sum_keys(  # type: ignore[no-untyped-def]
    k, v, keep, state, k_batch, k_head, k_token, v_batch, v_head, v_token, heads, keys, steps,
    FEATURE: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """S and z of a head, over one part of its keys."""
    head, part = tl.program_id(0), tl.program_id(1)
    r, e = tl.program_id(2) * D + tl.arange(0, D), tl.arange(0, E)
    k, v = first_row(k, head, heads, k_batch, k_head), first_row(v, head, heads, v_batch, v_head)
    table, total = tl.zeros((D, E), KIND), tl.zeros((D,), KIND)
    for step in range(steps):
        token = (part * steps + step) * SIZE + tl.arange(0, SIZE)
        valid = _kept(keep, head, heads, token, keys, MASKED)
        features = _feature(load_rows(k, token, k_token, r, valid, WIDTH, KIND), FEATURE)
        features = tl.where(valid[:, None] & (r < WIDTH)[None, :], features, 0.0)
        values = load_rows(v, token, v_token, e, valid, OUT, CAST)
        table += tl.dot(tl.trans(features).to(CAST), values, input_precision="ieee", out_dtype=KIND)
        total += tl.sum(features, 0)
    number = head.to(tl.int64) * tl.num_programs(1) + part
    _store_state(state + number * (WIDTH * OUT + WIDTH), r, e, table, total, WIDTH, OUT)


@triton.jit
def _read_queries(  # type: ignore[no-untyped-def]
    q, state, out, norm, q_batch, q_head, q_token, out_batch, out_head, out_token, heads, queries, eps,
    FEATURE: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The output of a block of queries, and what it was divided by."""
    head, token, e = tl.program_id(0), tl.program_id(1) * SIZE + tl.arange(0, SIZE), tl.arange(0, E)
    valid = token < queries
    q, out = first_row(q, head, heads, q_batch, q_head), first_row(out, head, heads, out_batch, out_head)
    state += head.to(tl.int64) * (WIDTH * OUT + WIDTH)
    total, divisor = tl.zeros((SIZE, E), KIND), tl.zeros((SIZE,), KIND) + eps
    for start in range(0, WIDTH, D):
        r = start + tl.arange(0, D)
        features = _feature(load_rows(q, token, q_token, r, valid, WIDTH, KIND), FEATURE)
        table, sums = _load_state(state, r, e, KIND, WIDTH, OUT)  # 0 beyond the last feature
        total += tl.dot(features.to(CAST), table.to(CAST), input_precision="ieee", out_dtype=KIND)
        divisor += tl.sum(features * sums[None, :], 1)
    tl.store(norm + head.to(tl.int64) * queries + token, divisor, mask=valid)
    store_rows(out, token, out_token, e, valid, total / tl.where(divisor == 0, 1.0, divisor)[:, None], OUT)


@triton.jit
def _query_gradients(  # type: ignore[no-untyped-def]
    q, state, out, norm, grad, dq, dstate, q_batch, q_head, q_token, out_batch, out_head, out_token,
    grad_batch, grad_head, grad_token, dq_batch, dq_head, dq_token, heads, queries, steps,
    FEATURE: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The gradients of a part of the queries, and its share of those of S and z."""
    head, part = tl.program_id(0), tl.program_id(1)
    r, e = tl.program_id(2) * D + tl.arange(0, D), tl.arange(0, E)
    q, out = first_row(q, head, heads, q_batch, q_head), first_row(out, head, heads, out_batch, out_head)
    grad, dq = first_row(grad, head, heads, grad_batch, grad_head), first_row(dq, head, heads, dq_batch, dq_head)
    table, sums = _load_state(state + head.to(tl.int64) * (WIDTH * OUT + WIDTH), r, e, KIND, WIDTH, OUT)
    to_table, to_sums = tl.zeros((D, E), KIND), tl.zeros((D,), KIND)
    for step in range(steps):
        token = (part * steps + step) * SIZE + tl.arange(0, SIZE)
        valid = token < queries
        divisor = tl.load(norm + head.to(tl.int64) * queries + token, mask=valid, other=1.0)
        safe = tl.where(divisor == 0, 1.0, divisor)
        outer = load_rows(grad, token, grad_token, e, valid, OUT, KIND) / safe[:, None]
        to_divisor = -tl.sum(outer * load_rows(out, token, out_token, e, valid, OUT, KIND), 1)
        to_divisor = tl.where(divisor == 0, 0.0, to_divisor)
        x = load_rows(q, token, q_token, r, valid, WIDTH, KIND)
        features = tl.where((r < WIDTH)[None, :], _feature(x, FEATURE), 0.0)
        change = tl.dot(outer.to(CAST), tl.trans(table).to(CAST), input_precision="ieee", out_dtype=KIND)
        change += to_divisor[:, None] * sums[None, :]
        store_rows(dq, token, dq_token, r, valid, change * _slope(x, FEATURE), WIDTH)
        to_table += tl.dot(tl.trans(features).to(CAST), outer.to(CAST), input_precision="ieee", out_dtype=KIND)
        to_sums += tl.sum(features * to_divisor[:, None], 0)
    number = head.to(tl.int64) * tl.num_programs(1) + part
    _store_state(dstate + number * (WIDTH * OUT + WIDTH), r, e, to_table, to_sums, WIDTH, OUT)


@triton.jit
def _key_gradients(  # type: ignore[no-untyped-def]
    k, v, keep, dstate, dk, dv, k_batch, k_head, k_token, v_batch, v_head, v_token, dk_batch, dk_head, dk_token,
    dv_batch, dv_head, dv_token, heads, keys, FEATURE: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
    OUT: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values; 0 for hidden keys."""
    head, token, e = tl.program_id(0), tl.program_id(1) * SIZE + tl.arange(0, SIZE), tl.arange(0, E)
    valid = _kept(keep, head, heads, token, keys, MASKED)
    k, v = first_row(k, head, heads, k_batch, k_head), first_row(v, head, heads, v_batch, v_head)
    dk, dv = first_row(dk, head, heads, dk_batch, dk_head), first_row(dv, head, heads, dv_batch, dv_head)
    dstate += head.to(tl.int64) * (WIDTH * OUT + WIDTH)
    values, to_values = load_rows(v, token, v_token, e, valid, OUT, CAST), tl.zeros((SIZE, E), KIND)
    for start in range(0, WIDTH, D):
        r = start + tl.arange(0, D)
        x = load_rows(k, token, k_token, r, valid, WIDTH, KIND)
        features = tl.where(valid[:, None], _feature(x, FEATURE), 0.0)
        table, sums = _load_state(dstate, r, e, KIND, WIDTH, OUT)
        change = tl.dot(values, tl.trans(table).to(CAST), input_precision="ieee", out_dtype=KIND) + sums[None, :]
        change = tl.where(valid[:, None], change * _slope(x, FEATURE), 0.0)
        store_rows(dk, token, dk_token, r, token < keys, change, WIDTH)
        to_values += tl.dot(features.to(CAST), table.to(CAST), input_precision="ieee", out_dtype=KIND)
    store_rows(dv, token, dv_token, e, token < keys, to_values, OUT)


def _options(q: Tensor, v: Tensor, feature: str) -> dict[str, Any]:
    kind, width, out = upcast(q).dtype, q.shape[-1], v.shape[-1]
    half = v.dtype is torch.bfloat16 and not INTERPRETED  # in float16 a long sum would overflow
    return {
        "FEATURE": FEATURES[feature], "WIDTH": width, "OUT": out, "SIZE": SIZE, "D": min(SIZE, width_of(width)),
        "E": width_of(out), "CAST": KINDS[torch.bfloat16 if half else kind], "KIND": KINDS[kind],
    }  # fmt: skip


def _sums(x: Tensor, v: Tensor, tokens: int, options: dict[str, Any]) -> tuple[Tensor, tuple[int, int, int], int]:
    """For a pass that sums over tokens: an empty state by head and part, its programs, and steps of a part."""
    heads, blocks = x.shape[0] * x.shape[1], triton.cdiv(options["WIDTH"], options["D"])
    parts = max(1, min(triton.cdiv(PROGRAMS, heads * blocks), triton.cdiv(tokens, SHORTEST)))
    steps = triton.cdiv(triton.cdiv(tokens, parts), SIZE)
    state = x.new_empty(heads, parts, options["WIDTH"] * (options["OUT"] + 1), dtype=upcast(x).dtype)
    return state, (heads, parts, blocks), steps


def _joined(state: Tensor) -> Tensor:
    return state[:, 0] if state.shape[1] == 1 else state.sum(1)


@torch.library.custom_op("regard::linear_product", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, eps: float, feature: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B,H,N,e), its divisors (B,H,N), S and z of each head (B*H, r (e + 1)). keep: (B,M) int8."""
    options, mask = _options(q, v, feature), q if keep is None else keep
    out, norm, state = _empty(q, k, v)
    if not out.numel():
        return out, norm, state
    state, programs, steps = _sums(k, v, k.shape[2], options)
    sizes = *strides(k, v), k.shape[1], k.shape[2], steps
    _sum_keys[programs](k, v, mask, state, *sizes, MASKED=keep is not None, **options)
    state, blocks = _joined(state), (programs[0], triton.cdiv(q.shape[2], SIZE))
    _read_queries[blocks](q, state, out, norm, *strides(q, out), q.shape[1], q.shape[2], eps, **options)
    return out, norm, state


@_forward.register_fake
def _empty(q, k, v, *_):  # type: ignore[no-untyped-def]
    state = q.new_empty(q.shape[0] * q.shape[1], q.shape[-1] * (v.shape[-1] + 1), dtype=upcast(q).dtype)
    return heads_last(q, v.shape[-1], v.dtype), q.new_empty(q.shape[:3], dtype=upcast(q).dtype), state


@torch.library.custom_op("regard::linear_product_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, out: Tensor, norm: Tensor, state: Tensor,
    feature: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    options, mask = _options(q, v, feature), q if keep is None else keep
    dq, dk, dv = _empty_gradients(grad, q, k, v)
    if not out.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    dstate, programs, steps = _sums(q, v, q.shape[2], options)
    sizes = *strides(q, out, grad, dq), q.shape[1], q.shape[2], steps
    _query_gradients[programs](q, state, out, norm, grad, dq, dstate, *sizes, **options)
    blocks, sizes = (programs[0], triton.cdiv(k.shape[2], SIZE)), (*strides(k, v, dk, dv), k.shape[1], k.shape[2])
    _key_gradients[blocks](k, v, mask, _joined(dstate), dk, dv, *sizes, MASKED=keep is not None, **options)
    return dq, dk, dv


@_backward.register_fake
def _empty_gradients(grad, q, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(heads_last(x, x.shape[-1], x.dtype) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, _, ctx.feature = inputs
    ctx.set_materialize_grads(False)  # no zeros for divisors and state
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad, *_):  # type: ignore[no-untyped-def]
    if grad is None:
        return (None,) * 6
    grads = torch.ops.regard.linear_product_backward(dense(grad), *ctx.saved_tensors, ctx.feature)
    return *grads, None, None, None


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise UnsupportedError('the Triton kernel cannot be differentiated twice: use execution="products"')


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)


def linear_product(
    q: Tensor, k: Tensor, v: Tensor, eps: float, feature: str = "identity", keep: Tensor | None = None
) -> Tensor:
    """Linear attention (B,H,N,e) in the dtype of v, with gradients.

    q (B,H,N,r), k (B,H,M,r), v (B,H,M,e) with e <= 128, with any strides. feature: of `FEATURES`. keep: (B,M), False
    for hidden keys. A query whose divisor is 0 gets zeros.
    Raises: UnsupportedError for wider values, in function transforms, for float64 on a GPU, or without a CUDA device
    (the interpreter, TRITON_INTERPRET=1, is for tests).
    """
    check_runs(q)
    if v.shape[-1] > 128:
        raise UnsupportedError(f'execution="triton" has values of at most 128 channels a head, not {v.shape[-1]}')
    rows = [dense(x) for x in (q, k, v)]
    mask = None if keep is None else keep.to(torch.int8).contiguous()
    result: Tensor = torch.ops.regard.linear_product(*rows, mask, eps, feature)[0]
    return result
