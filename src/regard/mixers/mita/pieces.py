"""A few heads of MiTA at a time: their tensors, the selection, and the gradient through the landmarks' values."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core import softmax_rows

from .routing import MitaPlan, choose

PIECE = 1 << 18
"""The largest number of logits of a piece: 1 MiB in float32, half of a usual second-level cache."""


@dataclass(frozen=True)
class Rule:
    """The options of `mita`.

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
        return choose(probe, route, self.rule.top, self.rule.experts)

    def flat(self, indices: Tensor, per_head: int) -> Tensor:
        """Indices (g, ...) within a head as indices over all heads of the piece."""
        start = per_head * torch.arange(len(indices), device=indices.device)
        return indices + start.view(-1, *[1] * (indices.ndim - 1))

    def finish(self, grads: "Grads", landmark_weights: Tensor | None) -> "Grads":
        """Add the gradient through the values of the landmarks; before, grads.joint is that of the queries alone."""
        m = self.m
        if landmark_weights is not None and grads.values is not None:
            grad_probe = torch.bmm(grads.values, self.v.mT)
            grad_probe = torch._softmax_backward_data(grad_probe, landmark_weights, -1, landmark_weights.dtype)
            grads.v.baddbmm_(landmark_weights.mT, grads.values)
            grads.joint[:, m:].baddbmm_(grad_probe.mT, self.landmarks)
            grads.landmarks = torch.bmm(grad_probe, self.keys)
        grads.joint.mul_(self.rule.scale)
        direct = grads.joint[:, :m]
        grads.landmarks = direct if grads.landmarks is None else grads.landmarks.add_(direct)
        return grads


@dataclass
class Grads:
    """Gradients of q, v and joint of a `Piece`, of the landmarks' values (g,m,e) and of the landmarks (g,m,d)."""

    q: Tensor
    v: Tensor
    joint: Tensor
    values: Tensor | None
    landmarks: Tensor | None = None


def head_slices(q: Tensor, k: Tensor, landmarks: Tensor, rule: Rule) -> Iterator[tuple[slice, slice]]:
    """Slices (batch, heads): whole samples where several fit into a piece, else some heads of one sample."""
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
    part: tuple[slice, slice],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Tensor,
    bias: Tensor | None,
    drop: Tensor | None,
    rule: Rule,
) -> Piece:
    """The piece of some heads. part: one of `head_slices`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, values, probes = (x[part].to(dtype).flatten(0, 1).contiguous() for x in (q, v, landmarks))
    g, m = probes.shape[:2]
    joint = probes.new_empty(g, m + k.shape[2], k.shape[3])
    torch.mul(probes, rule.scale, out=joint[:, :m])
    keys = k[part].to(dtype)
    torch.mul(keys, rule.scale, out=joint[:, m:].view(keys.shape))
    if bias is not None:
        bias = bias.expand(*q.shape[:2], -1, -1)[part].flatten(0, 1)
    if drop is not None:
        drop = drop[:, None, None, :].expand(*q.shape[:2], -1, -1)[part].flatten(0, 1)
    return Piece(rule, queries, values, probes, joint, bias, drop)
