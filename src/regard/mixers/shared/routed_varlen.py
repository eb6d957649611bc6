"""Routed attention by PyTorch's attention for sequences of any length: an expert and its queries are one sequence.

On CUDA, in half precision. Keys are copied by expert, and experts with few queries fill a part of a tile only, which
the kernels of `routed_triton` avoid. The gradient of the log-sum-exp, which PyTorch's operator drops, is not needed:
its backward pass gets the output and the log-sum-exp of the whole softmax, from which it computes weights again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import UnsupportedError

from .native import in_function_transform
from .precision import upcast
from .routed import Parts


class Sequences(NamedTuple):
    """Where sequences start among all queries and keys (int32, one more than sequences), and the longest of both."""

    queries: Tensor
    keys: Tensor
    longest: tuple[int, int]


class Varlen:
    """PyTorch's operators, with one head. A twin of it in plain PyTorch tests what is around them without a GPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Sequences) -> tuple[Tensor, Tensor]:
        """Output (P, e) and log-sum-exp (P,) of queries (P, d) with keys (K, d) and values (K, e), scale 1."""
        result = torch.ops.aten._flash_attention_forward(
            q[:, None], k[:, None], v[:, None], at.queries, at.keys, *at.longest, 0.0, False, False, scale=1.0
        )
        return result[0][:, 0], result[1].flatten()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, for the output and log-sum-exp of the whole softmax."""
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        rows = (x[:, None].contiguous() for x in (grad, q, k, v, out))
        grads = torch.ops.aten._flash_attention_backward(
            *rows, lse[None], at.queries, at.keys, *at.longest, 0.0, False, seed, seed, scale=1.0
        )
        dq, dk, dv = (x[:, 0] for x in grads)
        return dq, dk, dv


class Merged(torch.autograd.Function):
    """Attention of sequences, merged with another part of the softmax of each query: its output and log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v, start_out, start_lse, at: Sequences, kernel: Varlen) -> Tensor:  # type: ignore[no-untyped-def]
        out, lse = kernel.forward(q, k, v, at)
        total = torch.logaddexp(start_lse, lse)
        merged = (start_lse - total).exp()[:, None] * start_out + (lse - total).exp()[:, None] * upcast(out)
        ctx.save_for_backward(q, k, v, start_out, start_lse, merged, total)
        ctx.at, ctx.kernel = at, kernel
        return merged

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, start_out, start_lse, merged, total = ctx.saved_tensors
        grads = ctx.kernel.backward(grad.to(q.dtype), q, k, v, merged.to(q.dtype), total, ctx.at)
        share = (start_lse - total).exp()
        to_lse = share * (grad * (start_out - merged)).sum(-1)
        return *grads, share[:, None] * grad, to_lse, None, None


def varlen(parts: Parts, kernel: Varlen | None = None) -> Tensor:
    """As the forms of `routed`, for one expert per query without a bias. kernel: a twin of PyTorch's operators.

    Raises: UnsupportedError for several experts, a bias, another device than CUDA, float32, or function transforms.
    """
    keys, experts, (b, h, n, width) = parts.keys, parts.experts, parts.q.shape
    if experts.shape[-1] > 1 or parts.bias is not None:
        raise UnsupportedError('execution="varlen" has one expert per query and no mask or bias; use "auto"')
    half = parts.q.dtype in (torch.float16, torch.bfloat16)
    if kernel is None and not (parts.q.is_cuda and half) or in_function_transform():
        raise UnsupportedError(
            f'execution="varlen" needs a CUDA device, half precision and no function transform, not {parts.q.dtype} on '
            f'{parts.q.device}; use "auto"'
        )
    m, top = keys.shape[-2:]
    ids = parts.rows(experts[..., 0], m).flatten()
    order = ids.argsort(stable=True)
    ends = torch.zeros(b * h * m, dtype=torch.long, device=ids.device).scatter_add(0, ids, torch.ones_like(ids))
    starts = torch.nn.functional.pad(ends.cumsum(0), (1, 0)).int()
    at = Sequences(starts, torch.arange(0, b * h * m * top + 1, top, dtype=torch.int32, device=ids.device), (n, top))
    chosen = parts.rows(keys, parts.k.shape[-2]).flatten()
    expert_keys, values = (x.reshape(-1, x.shape[-1]).index_select(0, chosen) for x in (parts.k, parts.v))
    queries = parts.q.reshape(-1, width).index_select(0, order)
    if parts.shared is None or parts.values is None:
        out = upcast(parts.v.new_zeros(len(order), parts.v.shape[-1]))
        lse = out.new_full((len(order),), -torch.inf)
    else:
        weights = parts.shared.softmax(-1).to(parts.values.dtype)
        out = upcast(weights @ parts.values).flatten(0, 2).index_select(0, order)
        lse = parts.shared.logsumexp(-1).flatten().index_select(0, order)
    merged: Tensor = Merged.apply(queries, expert_keys, values, out, lse, at, kernel or Varlen())  # type: ignore[no-untyped-call]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return merged.index_select(0, back).view(b, h, n, -1).to(parts.q.dtype)
