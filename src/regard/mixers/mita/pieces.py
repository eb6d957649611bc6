"""Some heads of MiTA at a time: their tensors, the selection, and the way back through the landmarks' values."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core import softmax_rows

from .routing import MitaPlan, largest

PIECE = 1 << 18
"""Numbers that the logits of a piece may have: 1 MiB in float32, half of a usual second-level cache."""


@dataclass(frozen=True)
class Rule:
    """The numbers of `mita`.

    once: keys that experts share count once. shared: whether queries attend to the landmarks too. factor: of the
    landmarks' logits. form: "dense", "grouped" or "native".
    """

    top: int
    experts: int
    shared: bool
    factor: float
    scale: float
    once: bool
    form: str


@dataclass
class Piece:
    """Some heads, g of them, in float32 or float64: q (g,N,d), v (g,M,e), landmarks (g,m,d), contiguous.

    joint (g,m+M,d): landmarks and keys, times the scale. bias (g,1,M) of keys and drop (g,1,m) of landmarks, or None.
    """

    rule: Rule
    q: Tensor
    v: Tensor
    landmarks: Tensor
    joint: Tensor
    bias: Tensor | None
    drop: Tensor | None

    @property
    def m(self) -> int:
        return self.landmarks.shape[1]

    @property
    def keys(self) -> Tensor:
        """The scaled keys (g, M, d)."""
        return self.joint[:, self.m :]

    @property
    def masked(self) -> bool:
        """Whether a row of weights may be empty."""
        return self.bias is not None or self.drop is not None

    def softmax(self, logits: Tensor) -> Tensor:
        return softmax_rows(logits) if self.masked else logits.softmax(-1)

    def probe(self) -> Tensor:
        """Logits of landmarks with keys (g, m, M)."""
        logits = torch.bmm(self.landmarks, self.keys.mT)
        return logits if self.bias is None else logits.add_(self.bias)

    def route(self, logits: Tensor) -> Tensor:
        """Logits of queries with landmarks (g, N, m), at -inf for those not to be used."""
        return logits if self.drop is None else logits.masked_fill(self.drop, -torch.inf)

    def select(self, probe: Tensor, route: Tensor, plan: MitaPlan | None) -> MitaPlan:
        if plan is not None:
            return plan
        best = route.max(-1, keepdim=True).indices if self.rule.experts == 1 else None
        return MitaPlan(
            largest(probe, self.rule.top),
            route.topk(self.rule.experts, sorted=False).indices if best is None else best,
        )

    def flat(self, of: Tensor, per: int) -> Tensor:
        """Indices (g, ...) within a head as indices over all heads of the piece."""
        start = per * torch.arange(len(of), device=of.device)
        return of + start.view(-1, *[1] * (of.ndim - 1))

    def finish(self, grads: "Grads", whole: Tensor | None) -> "Grads":
        """Through the landmarks' values to their logits; grads.joint still holds the part of the attention only."""
        m = self.m
        if whole is not None and grads.values is not None:
            ahead = torch.bmm(grads.values, self.v.mT)
            ahead = torch._softmax_backward_data(ahead, whole, -1, whole.dtype)
            grads.v.baddbmm_(whole.mT, grads.values)
            grads.joint[:, m:].baddbmm_(ahead.mT, self.landmarks)
            grads.landmarks = torch.bmm(ahead, self.keys)
        grads.joint.mul_(self.rule.scale)
        first = grads.joint[:, :m]
        grads.landmarks = first if grads.landmarks is None else grads.landmarks.add_(first)
        return grads


@dataclass
class Grads:
    """q, v and joint as in `Piece`; values (g,m,e) of the landmarks' values; landmarks (g,m,d)."""

    q: Tensor
    v: Tensor
    joint: Tensor
    values: Tensor | None
    landmarks: Tensor | None = None


def places(q: Tensor, k: Tensor, landmarks: Tensor, rule: Rule) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and heads: whole samples where several fit into a piece, else some heads of one sample."""
    b, h, n = q.shape[:3]
    m = landmarks.shape[2]
    width = m + (k.shape[2] if rule.form == "dense" else rule.experts * rule.top)
    number = max(1, PIECE // max(n * width, m * k.shape[2]))
    if number >= h:
        step = number // h
        yield from ((slice(i, i + step), slice(0, h)) for i in range(0, b, step))
    else:
        yield from ((slice(i, i + 1), slice(j, j + number)) for i in range(b) for j in range(0, h, number))


def make_piece(
    place: tuple[slice, slice],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Tensor,
    bias: Tensor | None,
    drop: Tensor | None,
    rule: Rule,
) -> Piece:
    kind = torch.promote_types(q.dtype, torch.float32)
    here = [x[place].to(kind).flatten(0, 1).contiguous() for x in (q, v, landmarks)]
    g, m = here[2].shape[:2]
    joint = here[2].new_empty(g, m + k.shape[2], k.shape[3])
    torch.mul(here[2], rule.scale, out=joint[:, :m])
    keys = k[place].to(kind)
    torch.mul(keys, rule.scale, out=joint[:, m:].view(keys.shape))
    shape = (q.shape[0], q.shape[1])
    if bias is not None:
        bias = bias.expand(*shape, -1, -1)[place].flatten(0, 1)
    if drop is not None:
        drop = drop[:, None, None, :].expand(*shape, -1, -1)[place].flatten(0, 1)
    queries, values, landmarks = here
    return Piece(rule, queries, values, landmarks, joint, bias, drop)
