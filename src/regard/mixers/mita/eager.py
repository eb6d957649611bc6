"""MiTA with its own backward pass, a few heads at a time: the form for eager mode on a CPU.

It saves the inputs, the plan and, where they are small, the attention weights, and recomputes the rest. Training then
takes memory in proportion to N (m + s top) of a few heads only, and the temporaries of a piece stay in the cache. Small
inputs compute all N x M logits (`Dense`), others blocks of queries that share an expert (`Grouped`).
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from regard.core import UnsupportedError
from regard.mixers.shared.native_build import eager_on_cpu, native_enabled
from regard.mixers.shared.precision import without_autocast

from .pieces import PIECE, Grads, Piece, Rule, head_slices, make_piece
from .routing import Blocks, MitaPlan, block_size, lay_out

ALL = 256 * 256
"""Up to this number of logits per head sorting costs more than it saves (benchmarks/mita.py)."""
LONG = 2048 * 2048
"""From this number of logits per head on memory matters more than the time of recomputation, a third."""
LEAN = {"lean-dense": "dense", "lean-grouped": "grouped", "native": "native"}


def lean_form(execution: str, q: Tensor, k: Tensor, bias: Tensor | None, experts: int, once: bool) -> str | None:
    """The form of this file or of `native` that runs, or None for one of `routed`.

    "auto" runs here only in eager mode on the CPU, with a bias that is not trained. It takes compiled code if
    REGARD_NATIVE=1 is set and each query has one expert. It leaves sizes between `ALL` and `LONG` to the grouped form
    of `routed`, which is faster there and saves more; `once` always runs here, since `routed` would compute the logits
    of all heads at a time.
    Raises: UnsupportedError if the requested form cannot run.
    """
    can_run = eager_on_cpu(q) and not (bias is not None and bias.requires_grad)
    requested = LEAN.get(execution)
    if requested and not can_run:
        raise UnsupportedError(
            f'mita: execution="{execution}" runs in eager mode on the CPU, without function transforms and without a '
            'bias that is trained; use "auto"'
        )
    if requested == "grouped" and once:
        raise UnsupportedError('mita: execution="lean-grouped" cannot count shared keys once; use "auto"')
    if requested == "native" and experts > 1:
        raise UnsupportedError(f'mita: execution="native" has one expert per query, not {experts}; use "auto"')
    if requested or execution != "auto" or not can_run:
        return requested
    if experts == 1 and native_enabled():
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
        """The output (g, N, e), the plan, and the tensors to save."""
        piece, rule, m = self.piece, self.piece.rule, self.piece.m
        probe = piece.probe()
        logits = torch.bmm(piece.q, piece.joint.mT)  # (g, N, m + M)
        plan = piece.select(probe, piece.route(logits[..., :m]), plan)
        landmark_weights = piece.softmax(probe)
        values = (
            torch.bmm(landmark_weights, piece.v) if rule.shared else torch.zeros_like(piece.v[:, :1]).expand(-1, m, -1)
        )
        if rule.factor != 1.0:
            logits[..., :m] *= rule.factor
        a = piece.softmax(self._restrict(logits, plan))
        joint = torch.cat([values, piece.v], 1)
        return torch.bmm(a, joint), plan, (a, joint, landmark_weights)

    def _restrict(self, logits: Tensor, plan: MitaPlan) -> Tensor:
        """The logits with -inf outside a query's experts, in place."""
        piece, rule, m = self.piece, self.piece.rule, self.piece.m
        g, _, width = logits.shape
        if rule.experts == 1:  # without a logarithm, which is slow for zeros
            rows = logits.new_full((g, m, width - m), -torch.inf).scatter_(-1, plan.keys, 0.0)
        else:
            rows = logits.new_zeros(g, m, width - m).scatter_(-1, plan.keys, 1.0)
            expert_rows = logits.new_zeros(g, logits.shape[1], m)
            count = expert_rows.scatter_(-1, plan.experts, 1.0) @ rows
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

    def backward(self, grad_out: Tensor, plan: MitaPlan, saved: tuple[Tensor, ...]) -> Grads:
        piece, rule, m = self.piece, self.piece.rule, self.piece.m
        a, joint, landmark_weights = saved
        grad_logits = torch._softmax_backward_data(torch.bmm(grad_out, joint.mT), a, -1, a.dtype)
        if rule.factor != 1.0:
            grad_logits[..., :m] *= rule.factor
        grad_joint_values = torch.bmm(a.mT, grad_out)
        grads = Grads(
            q=torch.bmm(grad_logits, piece.joint),
            v=grad_joint_values[:, m:],
            joint=torch.bmm(grad_logits.mT, piece.q),
            values=grad_joint_values[:, :m] if rule.shared else None,
        )
        return piece.finish(grads, landmark_weights)


class Grouped:
    """Blocks of queries that share an expert; the softmax is taken in the original order."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece

    def forward(self, plan: MitaPlan | None) -> tuple[Tensor, MitaPlan, tuple[Tensor, ...]]:
        """The output (g, N, e), the plan, and the tensors to save where these are small."""
        piece, rule = self.piece, self.piece.rule
        probe, route = piece.probe(), torch.bmm(piece.q, piece.joint[:, : piece.m].mT)
        plan = piece.select(probe, piece.route(route), plan)
        blocks = self._blocks(plan)
        landmark_weights, values, a = self._weights(plan, blocks, probe, route)
        routed = a[..., -rule.experts * rule.top :].reshape(-1, rule.top)
        out = a.new_empty(blocks.source.numel(), piece.v.shape[-1])
        expert_rows = self._of_experts(piece.v, plan)
        for rows, chosen in _ranges(blocks, expert_rows):
            weights = routed.index_select(0, blocks.source[rows])
            torch.bmm(
                weights.view(chosen.shape[0], -1, rule.top),
                chosen,
                out=out[rows].view(chosen.shape[0], -1, out.shape[-1]),
            )
        out = self._natural(out, blocks)
        if values is not None:
            out.baddbmm_(a[..., : piece.m], values)
        small = a.shape[-1] <= 2 * piece.q.shape[-1]
        return out, plan, (a, landmark_weights) if small else ()

    def _blocks(self, plan: MitaPlan) -> Blocks:
        pairs = self.piece.q.shape[1] * self.piece.rule.experts
        return lay_out(MitaPlan(plan.keys[None], plan.experts[None]), block_size(pairs, self.piece.m), False)

    def _of_experts(self, x: Tensor, plan: MitaPlan) -> Tensor:
        """The rows of x (g, M, c) that belong to every expert, (g m, top, c)."""
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
        for rows, chosen in _ranges(blocks, self._of_experts(piece.keys, plan)):
            gathered = queries.index_select(0, self._query(blocks, rows)).view(chosen.shape[0], -1, chosen.shape[-1])
            torch.bmm(gathered, chosen.mT, out=logits[rows].view(chosen.shape[0], -1, rule.top))
        routed = logits.index_select(0, blocks.slot)
        if piece.bias is not None:
            bias = piece.bias.expand(-1, piece.m, -1).gather(-1, plan.keys).view(-1, rule.top)
            routed += bias.index_select(0, piece.flat(plan.experts, piece.m).flatten())
        routed = routed.view(*route.shape[:2], -1)
        landmark_weights = piece.softmax(probe)
        if not rule.shared:
            return landmark_weights, None, piece.softmax(routed)
        first = piece.route(route if rule.factor == 1.0 else route * rule.factor)
        return landmark_weights, torch.bmm(landmark_weights, piece.v), piece.softmax(torch.cat([first, routed], -1))

    def _query(self, blocks: Blocks, rows: slice) -> Tensor:
        source = blocks.source[rows]
        return source if self.piece.rule.experts == 1 else source // self.piece.rule.experts

    def backward(self, grad_out: Tensor, plan: MitaPlan, saved: tuple[Tensor, ...]) -> Grads:
        piece, rule, m = self.piece, self.piece.rule, self.piece.m
        blocks = self._blocks(plan)
        if saved:
            a, landmark_weights = saved
            values = torch.bmm(landmark_weights, piece.v) if rule.shared else None
        else:
            route = torch.bmm(piece.q, piece.joint[:, :m].mT)
            landmark_weights, values, a = self._weights(plan, blocks, piece.probe(), route)
        grad_rows = grad_out.reshape(-1, grad_out.shape[-1])
        expert_rows = self._of_experts(piece.v, plan)
        grad_logits = a.new_empty(blocks.source.numel(), rule.top)
        for rows, chosen in _ranges(blocks, expert_rows):
            gathered = grad_rows.index_select(0, self._query(blocks, rows)).view(chosen.shape[0], -1, chosen.shape[-1])
            torch.bmm(gathered, chosen.mT, out=grad_logits[rows].view(chosen.shape[0], -1, rule.top))
        grad_logits = grad_logits.index_select(0, blocks.slot).view(*a.shape[:2], -1)
        if values is not None:
            grad_logits = torch.cat([torch.bmm(grad_out, values.mT), grad_logits], -1)
        grad_logits = torch._softmax_backward_data(grad_logits, a, -1, a.dtype)
        grads = self._expert_grads(a, grad_logits, grad_rows, plan, blocks)
        if values is not None:
            first = grad_logits[..., :m] if rule.factor == 1.0 else grad_logits[..., :m] * rule.factor
            grads.q.baddbmm_(first, piece.joint[:, :m])
            grads.joint[:, :m].baddbmm_(first.mT, piece.q)
            grads.values = torch.bmm(a[..., :m].mT, grad_out)
        return piece.finish(grads, landmark_weights)

    def _expert_grads(self, a: Tensor, grad_logits: Tensor, grad_rows: Tensor, plan: MitaPlan, blocks: Blocks) -> Grads:
        """Gradients of q, v and the keys through the routed branch."""
        piece, rule = self.piece, self.piece.rule
        queries = piece.q.view(-1, piece.q.shape[-1])
        weights, pair_grads = (x[..., -rule.experts * rule.top :].reshape(-1, rule.top) for x in (a, grad_logits))
        expert_rows = self._of_experts(piece.keys, plan)
        grad_q = a.new_empty(blocks.source.numel(), queries.shape[-1])
        grad_keys = torch.zeros_like(expert_rows)
        grad_values = a.new_zeros(len(expert_rows), rule.top, grad_rows.shape[-1])
        for rows, chosen in _ranges(blocks, expert_rows):
            source, ids, real = blocks.source[rows], self._query(blocks, rows), blocks.real[rows]
            shape = (chosen.shape[0], -1, rule.top)
            block_grads = pair_grads.index_select(0, source).mul_(real).view(shape)
            block_weights = weights.index_select(0, source).mul_(real).view(shape)
            gathered = queries.index_select(0, ids).view(chosen.shape[0], -1, chosen.shape[-1])
            torch.bmm(block_grads, chosen, out=grad_q[rows].view(gathered.shape))
            expert = blocks.expert[rows.start // blocks.size : rows.stop // blocks.size]
            grad_keys.index_add_(0, expert, torch.bmm(block_grads.mT, gathered))
            gathered = grad_rows.index_select(0, ids).view(chosen.shape[0], -1, grad_rows.shape[-1])
            grad_values.index_add_(0, expert, torch.bmm(block_weights.mT, gathered))
        ids = piece.flat(plan.keys, piece.v.shape[1]).flatten()
        grad_v, grad_joint = torch.zeros_like(piece.v), torch.zeros_like(piece.joint)
        grad_v.view(-1, grad_v.shape[-1]).index_add_(0, ids, grad_values.flatten(0, 1))
        ids = piece.flat(plan.keys + piece.m, piece.joint.shape[1]).flatten()
        grad_joint.view(-1, grad_joint.shape[-1]).index_add_(0, ids, grad_keys.flatten(0, 1))
        return Grads(self._natural(grad_q, blocks), grad_v, grad_joint, None)


def _ranges(blocks: Blocks, expert_rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the rows of a few blocks, and the keys or values (x, top, c) of the experts of these blocks."""
    number = max(1, PIECE // 2 // (expert_rows.shape[1] * expert_rows.shape[2]))
    flat = expert_rows.view(len(expert_rows), -1)
    for start in range(0, blocks.expert.numel(), number):
        expert = blocks.expert[start : start + number]
        rows = slice(start * blocks.size, (start + len(expert)) * blocks.size)
        yield rows, flat.index_select(0, expert).view(-1, *expert_rows.shape[1:])


class Lean(torch.autograd.Function):
    """q, k, v, landmarks (B, H, ...) -> (B, H, N, e). Raises: UnsupportedError for a second derivative."""

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
        with without_autocast(q.device):
            for part in head_slices(q, k, landmarks, rule):
                form = _form(make_piece(part, q, k, v, landmarks, bias, drop, rule))
                part_plan = None if plan is None else MitaPlan(*(x[part].flatten(0, 1) for x in plan))
                part_out, part_plan, tensors = form.forward(part_plan)
                out[part] = part_out.view(out[part].shape)
                if trained:
                    parts.append((part, len(tensors)))
                    saved += [*part_plan, *tensors]
        if trained:
            ctx.save_for_backward(q, k, v, landmarks, bias, drop, *saved)
            ctx.parts, ctx.rule = parts, rule
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def, override]
        if torch.is_grad_enabled():  # create_graph=True; `once_differentiable` would drop terms silently
            raise UnsupportedError(
                'mita: the lean forms cannot be differentiated twice; use execution="dense", "gather" or "grouped"'
            )
        q, k, v, landmarks, bias, drop, *saved = ctx.saved_tensors
        saved = iter(saved)
        grads = [torch.empty_like(x) for x in (q, k, v, landmarks)]
        with without_autocast(q.device):
            for part, number in ctx.parts:
                plan = MitaPlan(next(saved), next(saved))
                tensors = tuple(next(saved) for _ in range(number))
                piece = make_piece(part, q, k, v, landmarks, bias, drop, ctx.rule)
                result = _form(piece).backward(grad_out[part].flatten(0, 1).to(piece.q.dtype), plan, tensors)
                values = (
                    result.q,
                    result.joint[:, piece.m :],
                    result.v,
                    cast(Tensor, result.landmarks),
                )
                for grad, value in zip(grads, values, strict=True):
                    grad[part] = value.reshape(grad[part].shape)
        return *grads, None, None, None, None


def _form(piece: Piece) -> Dense | Grouped:
    return Dense(piece) if piece.rule.form == "dense" else Grouped(piece)
