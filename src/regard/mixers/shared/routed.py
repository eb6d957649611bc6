"""Routed attention: a query attends to shared keys and to those of its experts, in one softmax (MiTA, BRA, MoBA, NSA).

Executions with the same result and different speed and memory. dense: all N x M logits, -inf outside the query's
experts. gather: a copy of its keys for every query. grouped: queries sorted by expert into blocks, one small product
per block, the softmax in the original order. triton and varlen: kernels for GPUs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core import softmax_rows

from .expert_blocks import Blocks, FromBlocks, ToBlocks, block_size, lay_out
from .flat_rows import flat_rows
from .native import eager_on_cpu, in_function_transform
from .precision import product, upcast, upcast_dtype


@dataclass(frozen=True)
class Parts:
    """q (B,H,N,d) times the scale, k (B,H,M,d), v (B,H,M,e).

    keys (B,H,m,top): the keys of each of m experts. experts (B,H,N,s): the experts of each query.
    shared (B,H,N,c) and values (B,H,c,e): logits and values of what all queries attend to (MiTA's landmarks, prefix and
    suffix tokens); None without. bias (B|1,H|1,1,M): added to the logits of keys, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    experts: Tensor
    shared: Tensor | None = None
    values: Tensor | None = None
    bias: Tensor | None = None

    def rows(self, indices: Tensor, per_head: int) -> Tensor:
        """Indices (B, H, ...) within a head of `per_head` entries as flat indices over all heads, (B*H, ...)."""
        return flat_rows(indices, per_head).flatten(0, 1)

    def weights(self, to_keys: Tensor) -> tuple[Tensor | None, Tensor]:
        """One softmax over shared and routed logits, split again, in v's dtype; zeros for a query without any key."""
        logits = to_keys if self.shared is None else torch.cat([self.shared, to_keys], -1)
        a = (logits.softmax(-1) if self.bias is None else softmax_rows(logits)).to(self.v.dtype)
        if self.shared is None:
            return None, a
        m = self.shared.shape[-1]
        return a[..., :m], a[..., m:]

    def finish(self, to_shared: Tensor | None, routed: Tensor) -> Tensor:
        """The routed output plus the shared part."""
        if to_shared is None or self.values is None:
            return routed
        return torch.baddbmm(*(x.flatten(0, 1) for x in (routed, to_shared, self.values))).view(routed.shape)

    def chosen_bias(self) -> Tensor | None:
        """The bias of each expert's keys (B, H, m, top), or None."""
        if self.bias is None:
            return None
        return self.bias.expand(*self.keys.shape[:3], -1).gather(-1, self.keys)


def dense(parts: Parts, *, once: bool = False) -> Tensor:
    """All logits. once: a key that several experts share counts once. Memory O(N M) per head."""
    keys, experts = parts.keys, parts.experts
    dtype = upcast_dtype(parts.q)
    member = parts.q.new_zeros(*keys.shape[:3], parts.k.shape[-2], dtype=dtype).scatter(-1, keys, 1.0)
    m = keys.shape[-2]
    if experts.shape[-1] == 1:
        penalty = member.log().flatten(0, 2).index_select(0, parts.rows(experts[..., 0], m).flatten())
        penalty = penalty.view(*experts.shape[:3], member.shape[-1])
    else:
        chosen = torch.zeros(*experts.shape[:3], m, dtype=dtype, device=member.device)
        count = chosen.scatter_add(-1, experts, torch.ones_like(experts, dtype=dtype)) @ member
        penalty = (count.clamp_(max=1.0) if once else count).log_()
    penalty = penalty if parts.bias is None else penalty + parts.bias
    to_shared, a = parts.weights(upcast(product(parts.q, parts.k.mT)) + penalty)
    return parts.finish(to_shared, a @ parts.v)


def gather(parts: Parts) -> Tensor:
    """The keys and values of each query, copied. Memory O(N s top d) per head."""
    if not parts.q.shape[0]:
        return dense(parts)
    keys, experts, shape = parts.keys, parts.experts, parts.q.shape
    choices = parts.rows(experts, keys.shape[-2]).flatten()  # (B*H*N*s,)
    ids = parts.rows(keys, parts.k.shape[-2]).flatten(0, 1).index_select(0, choices).flatten()
    queries = parts.q.reshape(-1, shape[-1], 1)
    gathered_keys = parts.k.reshape(-1, shape[-1]).index_select(0, ids).view(queries.shape[0], -1, shape[-1])
    to_keys = upcast(product(gathered_keys, queries)).view(*shape[:3], -1)
    bias = parts.chosen_bias()
    if bias is not None:
        to_keys = to_keys + bias.flatten(0, 2).index_select(0, choices).view(to_keys.shape)
    to_shared, a = parts.weights(to_keys)
    width = parts.v.shape[-1]
    values = parts.v.reshape(-1, width).index_select(0, ids).view(queries.shape[0], -1, width)
    routed = torch.bmm(a.reshape(queries.shape[0], 1, -1), values).view(*shape[:3], width)
    return parts.finish(to_shared, routed)


def grouped(parts: Parts) -> Tensor:
    """Blocks of queries that share an expert, and a softmax in the original order. Memory O(N (m + s top)) per head.

    In eager mode on the CPU the number of blocks is read from the plan; under torch.compile, function transforms and on
    other devices it is the largest possible one, so that nothing waits for the device.
    """
    if not parts.q.shape[0]:
        return dense(parts)
    keys, experts, shape = parts.keys, parts.experts, parts.q.shape
    bounded = not (eager_on_cpu(parts.q) and eager_on_cpu(experts))
    blocks = lay_out(experts, keys.shape[-2], block_size(shape[-2] * experts.shape[-1], keys.shape[-2]), bounded)
    ids = parts.rows(keys, parts.k.shape[-2]).flatten()
    queries = _to_blocks(parts.q.reshape(-1, shape[-1]), blocks, experts.shape[-1])  # (X, size, d)
    expert_keys = _of_experts(parts.k, ids, blocks, keys.shape[-1])  # (X, top, d)
    to_keys = upcast(_from_blocks(product(queries, expert_keys.mT), blocks)).view(*experts.shape, -1)  # (B,H,N,s,top)
    bias = parts.chosen_bias()
    if bias is not None:
        choices = parts.rows(experts, keys.shape[-2]).flatten()
        to_keys = to_keys + bias.flatten(0, 2).index_select(0, choices).view(to_keys.shape)
    to_shared, a = parts.weights(to_keys.flatten(-2))
    weights = _to_blocks(a.reshape(-1, keys.shape[-1]), blocks, 1)  # (X, size, top)
    expert_values = _of_experts(parts.v, ids, blocks, keys.shape[-1])  # (X, top, e)
    routed = _from_blocks(torch.bmm(weights, expert_values), blocks).view(*experts.shape, -1)  # (B, H, N, s, e)
    return parts.finish(to_shared, routed[..., 0, :] if experts.shape[-1] == 1 else routed.sum(-2))


def _to_blocks(x: Tensor, blocks: Blocks, choices: int) -> Tensor:
    if in_function_transform():  # which does not support the backward passes of `ToBlocks` and `FromBlocks`
        rows = x.index_select(0, blocks.source // choices)
    else:
        rows = ToBlocks.apply(x, blocks.source, blocks.slot, choices)  # type: ignore[no-untyped-call]
    return rows.view(-1, blocks.size, x.shape[-1])


def _from_blocks(y: Tensor, blocks: Blocks) -> Tensor:
    if in_function_transform():
        return y.flatten(0, 1).index_select(0, blocks.slot)
    rows: Tensor = FromBlocks.apply(y.flatten(0, 1), blocks.source, blocks.slot, blocks.real)  # type: ignore[no-untyped-call]
    return rows


def _of_experts(x: Tensor, ids: Tensor, blocks: Blocks, top: int) -> Tensor:
    """The rows of x (B, H, M, c) that belong to each block's expert, (X, top, c): gathered by expert, then by block."""
    width = x.shape[-1]
    chosen = x.reshape(-1, width).index_select(0, ids).view(-1, top * width)
    return chosen.index_select(0, blocks.expert).view(-1, top, width)
