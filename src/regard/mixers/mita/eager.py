"""MiTA with its own backward pass, a few heads at a time: what PyTorch in eager mode runs on a CPU.

Saved are the inputs, the plan and, where they are small, the attention weights; all else is made again from them. So
training takes memory in proportion to N (m + s top) of a few heads only, and the temporaries of a piece stay in the
cache. Small inputs compute all N x M logits (`Dense`), others blocks of queries that share an expert (`Grouped`).
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from regard.core import UnsupportedError
from regard.mixers.shared.native_build import eager_on_cpu, native_wanted
from regard.mixers.shared.precision import exact_products

from .pieces import PIECE, Grads, Piece, Rule, make_piece, places
from .routing import Blocks, MitaPlan, block_size, lay_out

ALL = 256 * 256
"""Up to so many logits a head, sorting costs more than it saves; measured with benchmarks/mita.py."""
LONG = 2048 * 2048
"""From so many logits a head, memory counts more than the third of the time that making things again takes."""
LEAN = {"lean-dense": "dense", "lean-grouped": "grouped", "native": "native"}


def lean_form(execution: str, q: Tensor, k: Tensor, bias: Tensor | None, experts: int, once: bool) -> str | None:
    """The form of `Rule` that runs, or None where a plain one does: it is asked for, or "auto" in eager mode on the CPU
    with a bias that is not trained.

    "auto" takes compiled code where the environment asks for it and a query has one expert. Else it leaves sizes
    between `ALL` and `LONG` to the plain grouped form, which is faster there and keeps more; `once` stays here, since
    the plain form would make the logits of all heads at a time.

    Raises: UnsupportedError if a form was asked for and cannot run.
    """
    able = eager_on_cpu(q) and not (bias is not None and bias.requires_grad)
    named = LEAN.get(execution)
    if named and not able:
        raise UnsupportedError(
            f'mita: execution="{execution}" runs in eager mode on the CPU, without function transforms and without a '
            'bias that is trained; use "auto"'
        )
    if named == "grouped" and once:
        raise UnsupportedError('mita: execution="lean-grouped" cannot count shared keys once; use "auto"')
    if named == "native" and experts > 1:
        raise UnsupportedError(f'mita: execution="native" has one expert a query, not {experts}; use "auto"')
    if named or execution != "auto" or not able:
        return named
    if experts == 1 and native_wanted():
        return "native"
    size = q.shape[-2] * k.shape[-2]
    if once or size <= ALL:
        return "dense"
    return "grouped" if size >= LONG else None


class Dense:
    """All N x (m + M) logits of a piece."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece

    def forward(self, plan: MitaPlan | None) -> tuple[Tensor, MitaPlan, tuple[Tensor, ...]]:
        """The output (g, N, e), the plan, and what the backward needs."""
        piece, rule, m = self.piece, self.piece.rule, self.piece.m
        probe = piece.probe()
        logits = torch.bmm(piece.q, piece.joint.mT)  # (g, N, m + M)
        plan = piece.select(probe, piece.route(logits[..., :m]), plan)
        whole = piece.softmax(probe)
        values = torch.bmm(whole, piece.v) if rule.shared else torch.zeros_like(piece.v[:, :1]).expand(-1, m, -1)
        if rule.factor != 1.0:
            logits[..., :m] *= rule.factor
        a = piece.softmax(self._restrict(logits, plan))
        joint = torch.cat([values, piece.v], 1)
        return torch.bmm(a, joint), plan, (a, joint, whole)

    def _restrict(self, logits: Tensor, plan: MitaPlan) -> Tensor:
        """Everything outside a query's experts at -inf."""
        piece, rule, m = self.piece, self.piece.rule, self.piece.m
        g, _, width = logits.shape
        if rule.experts == 1:  # the logarithm of zero is slow
            rows = logits.new_full((g, m, width - m), -torch.inf).scatter_(-1, plan.keys, 0.0)
        else:
            rows = logits.new_zeros(g, m, width - m).scatter_(-1, plan.keys, 1.0)
            chosen = logits.new_zeros(g, logits.shape[1], m)
            count = chosen.scatter_(-1, plan.experts, 1.0) @ rows
            rows = (count.clamp_(max=1.0) if rule.once else count).log_()
        if piece.bias is not None:
            rows += piece.bias
        first = logits.new_zeros(g, 1, m) if rule.shared else logits.new_full((g, 1, m), -torch.inf)
        if piece.drop is not None:
            first = first.masked_fill(piece.drop, -torch.inf)
        rows = torch.cat([first.expand(-1, rows.shape[1], -1), rows], -1)
        if rule.experts == 1:
            rows = rows.view(-1, width).index_select(0, piece.flat(plan.experts, m).flatten()).view(logits.shape)
        return logits.add_(rows)

    def backward(self, ahead: Tensor, plan: MitaPlan, saved: tuple[Tensor, ...]) -> Grads:
        piece, rule, m = self.piece, self.piece.rule, self.piece.m
        a, joint, whole = saved
        slope = torch._softmax_backward_data(torch.bmm(ahead, joint.mT), a, -1, a.dtype)
        if rule.factor != 1.0:
            slope[..., :m] *= rule.factor
        made = torch.bmm(a.mT, ahead)
        grads = Grads(
            q=torch.bmm(slope, piece.joint),
            v=made[:, m:],
            joint=torch.bmm(slope.mT, piece.q),
            values=made[:, :m] if rule.shared else None,
        )
        return piece.finish(grads, whole)


class Grouped:
    """Blocks of queries that share an expert; softmax in the natural order."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece

    def forward(self, plan: MitaPlan | None) -> tuple[Tensor, MitaPlan, tuple[Tensor, ...]]:
        """The output (g, N, e), the plan, and what the backward needs where that is small."""
        piece, rule = self.piece, self.piece.rule
        probe, route = piece.probe(), torch.bmm(piece.q, piece.joint[:, : piece.m].mT)
        plan = piece.select(probe, piece.route(route), plan)
        blocks = self._blocks(plan)
        whole, values, a = self._weights(plan, blocks, probe, route)
        routed = a[..., -rule.experts * rule.top :].reshape(-1, rule.top)
        out = a.new_empty(blocks.source.numel(), piece.v.shape[-1])
        chosen = self._of_experts(piece.v, plan)
        for rows, own in _ranges(blocks, chosen):
            weights = routed.index_select(0, blocks.source[rows])
            torch.bmm(
                weights.view(own.shape[0], -1, rule.top), own, out=out[rows].view(own.shape[0], -1, out.shape[-1])
            )
        out = self._natural(out, blocks)
        if values is not None:
            out.baddbmm_(a[..., : piece.m], values)
        small = a.shape[-1] <= 2 * piece.q.shape[-1]
        return out, plan, (a, whole) if small else ()

    def _blocks(self, plan: MitaPlan) -> Blocks:
        pairs = self.piece.q.shape[1] * self.piece.rule.experts
        return lay_out(MitaPlan(plan.keys[None], plan.experts[None]), block_size(pairs, self.piece.m), False)

    def _of_experts(self, x: Tensor, plan: MitaPlan) -> Tensor:
        """Rows of x (g, M, c) of every expert, (g m, top, c)."""
        ids = self.piece.flat(plan.keys, x.shape[1]).flatten()
        return x.reshape(-1, x.shape[-1]).index_select(0, ids).view(-1, self.piece.rule.top, x.shape[-1])

    def _natural(self, x: Tensor, blocks: Blocks) -> Tensor:
        """Rows of blocks (X size, c) summed over the experts of each query, (g, N, c)."""
        shape = (len(self.piece.q), self.piece.q.shape[1], self.piece.rule.experts, x.shape[-1])
        rows = x.index_select(0, blocks.slot).view(shape)
        return rows[..., 0, :] if shape[2] == 1 else rows.sum(-2)

    def _weights(
        self, plan: MitaPlan, blocks: Blocks, probe: Tensor, route: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Weights of the keys for landmarks (g, m, M), the landmarks' values, and weights (g, N, [m +] s top)."""
        piece, rule = self.piece, self.piece.rule
        queries = piece.q.view(-1, piece.q.shape[-1])
        logits = queries.new_empty(blocks.source.numel(), rule.top)
        for rows, own in _ranges(blocks, self._of_experts(piece.keys, plan)):
            near = queries.index_select(0, self._query(blocks, rows)).view(own.shape[0], -1, own.shape[-1])
            torch.bmm(near, own.mT, out=logits[rows].view(own.shape[0], -1, rule.top))
        routed = logits.index_select(0, blocks.slot)
        if piece.bias is not None:
            bias = piece.bias.expand(-1, piece.m, -1).gather(-1, plan.keys).view(-1, rule.top)
            routed += bias.index_select(0, piece.flat(plan.experts, piece.m).flatten())
        routed = routed.view(*route.shape[:2], -1)
        whole = piece.softmax(probe)
        if not rule.shared:
            return whole, None, piece.softmax(routed)
        first = piece.route(route if rule.factor == 1.0 else route * rule.factor)
        return whole, torch.bmm(whole, piece.v), piece.softmax(torch.cat([first, routed], -1))

    def _query(self, blocks: Blocks, rows: slice) -> Tensor:
        source = blocks.source[rows]
        return source if self.piece.rule.experts == 1 else source // self.piece.rule.experts

    def backward(self, ahead: Tensor, plan: MitaPlan, saved: tuple[Tensor, ...]) -> Grads:
        piece, rule, m = self.piece, self.piece.rule, self.piece.m
        blocks = self._blocks(plan)
        if saved:
            a, whole = saved
            values = torch.bmm(whole, piece.v) if rule.shared else None
        else:
            route = torch.bmm(piece.q, piece.joint[:, :m].mT)
            whole, values, a = self._weights(plan, blocks, piece.probe(), route)
        given = ahead.reshape(-1, ahead.shape[-1])
        chosen = self._of_experts(piece.v, plan)
        slope = a.new_empty(blocks.source.numel(), rule.top)
        for rows, own in _ranges(blocks, chosen):
            near = given.index_select(0, self._query(blocks, rows)).view(own.shape[0], -1, own.shape[-1])
            torch.bmm(near, own.mT, out=slope[rows].view(own.shape[0], -1, rule.top))
        slope = slope.index_select(0, blocks.slot).view(*a.shape[:2], -1)
        if values is not None:
            slope = torch.cat([torch.bmm(ahead, values.mT), slope], -1)
        slope = torch._softmax_backward_data(slope, a, -1, a.dtype)
        grads = self._through_experts(a, slope, given, plan, blocks)
        if values is not None:
            first = slope[..., :m] if rule.factor == 1.0 else slope[..., :m] * rule.factor
            grads.q.baddbmm_(first, piece.joint[:, :m])
            grads.joint[:, :m].baddbmm_(first.mT, piece.q)
            grads.values = torch.bmm(a[..., :m].mT, ahead)
        return piece.finish(grads, whole)

    def _through_experts(self, a: Tensor, slope: Tensor, given: Tensor, plan: MitaPlan, blocks: Blocks) -> Grads:
        """Gradients of the routed logits and values: to q, and by expert to its keys and values."""
        piece, rule = self.piece, self.piece.rule
        queries = piece.q.view(-1, piece.q.shape[-1])
        weights, slopes = (x[..., -rule.experts * rule.top :].reshape(-1, rule.top) for x in (a, slope))
        chosen = self._of_experts(piece.keys, plan)
        to_q = a.new_empty(blocks.source.numel(), queries.shape[-1])
        to_keys = torch.zeros_like(chosen)
        to_values = a.new_zeros(len(chosen), rule.top, given.shape[-1])
        for rows, own in _ranges(blocks, chosen):
            source, ids, real = blocks.source[rows], self._query(blocks, rows), blocks.real[rows]
            shape = (own.shape[0], -1, rule.top)
            slopes_here = slopes.index_select(0, source).mul_(real).view(shape)
            weights_here = weights.index_select(0, source).mul_(real).view(shape)
            near = queries.index_select(0, ids).view(own.shape[0], -1, own.shape[-1])
            torch.bmm(slopes_here, own, out=to_q[rows].view(near.shape))
            expert = blocks.expert[rows.start // blocks.size : rows.stop // blocks.size]
            to_keys.index_add_(0, expert, torch.bmm(slopes_here.mT, near))
            near = given.index_select(0, ids).view(own.shape[0], -1, given.shape[-1])
            to_values.index_add_(0, expert, torch.bmm(weights_here.mT, near))
        ids = piece.flat(plan.keys, piece.v.shape[1]).flatten()
        grad_v, grad_joint = torch.zeros_like(piece.v), torch.zeros_like(piece.joint)
        grad_v.view(-1, grad_v.shape[-1]).index_add_(0, ids, to_values.flatten(0, 1))
        ids = piece.flat(plan.keys + piece.m, piece.joint.shape[1]).flatten()
        grad_joint.view(-1, grad_joint.shape[-1]).index_add_(0, ids, to_keys.flatten(0, 1))
        return Grads(self._natural(to_q, blocks), grad_v, grad_joint, None)


def _ranges(blocks: Blocks, chosen: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of some blocks at a time, and the rows (x, top, c) of their experts."""
    number = max(1, PIECE // 2 // (chosen.shape[1] * chosen.shape[2]))
    flat = chosen.view(len(chosen), -1)
    for start in range(0, blocks.expert.numel(), number):
        expert = blocks.expert[start : start + number]
        rows = slice(start * blocks.size, (start + len(expert)) * blocks.size)
        yield rows, flat.index_select(0, expert).view(-1, *chosen.shape[1:])


class Lean(torch.autograd.Function):
    """q, k, v, landmarks (B, H, ...) -> (B, H, N, e). Raises: UnsupportedError if the gradient is to have a graph."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        landmarks: Tensor,
        bias: Tensor | None,
        drop: Tensor | None,
        plan: MitaPlan | None,
        rule: Rule,
    ) -> Tensor:
        b, h, n = q.shape[:3]
        out = q.new_empty(b, n, h, v.shape[-1]).transpose(1, 2)  # as the heads are merged afterwards
        parts, saved = [], []
        trained = any(ctx.needs_input_grad)
        with exact_products(q.device):
            for place in places(q, k, landmarks, rule):
                form = _form(make_piece(place, q, k, v, landmarks, bias, drop, rule))
                given = None if plan is None else MitaPlan(*(x[place].flatten(0, 1) for x in plan))
                made, used, kept = form.forward(given)
                out[place] = made.view(out[place].shape)
                if trained:
                    parts.append((place, len(kept)))
                    saved += [*used, *kept]
        if trained:
            ctx.save_for_backward(q, k, v, landmarks, bias, drop, *saved)
            ctx.places, ctx.rule = parts, rule
        return out

    @staticmethod
    def backward(ctx, ahead: Tensor):  # type: ignore[no-untyped-def, override]
        if torch.is_grad_enabled():  # create_graph=True; `once_differentiable` would drop terms without a word
            raise UnsupportedError(
                'mita: the lean forms cannot be differentiated twice; use execution="dense", "gather" or "grouped"'
            )
        q, k, v, landmarks, bias, drop, *saved = ctx.saved_tensors
        saved = iter(saved)
        grads = [torch.empty_like(x) for x in (q, k, v, landmarks)]
        with exact_products(q.device):
            for place, number in ctx.places:
                plan = MitaPlan(next(saved), next(saved))
                kept = tuple(next(saved) for _ in range(number))
                piece = make_piece(place, q, k, v, landmarks, bias, drop, ctx.rule)
                given = ahead[place].flatten(0, 1).to(piece.q.dtype)
                made = _form(piece).backward(given, plan, kept)
                parts = (made.q, made.joint[:, piece.m :], made.v, cast(Tensor, made.landmarks))
                for grad, part in zip(grads, parts, strict=True):
                    grad[place] = (
                        part.view(grad[place].shape) if part.is_contiguous() else part.reshape(grad[place].shape)
                    )
        return *grads, None, None, None, None


def _form(piece: Piece) -> Dense | Grouped:
    return Dense(piece) if piece.rule.form == "dense" else Grouped(piece)
