"""Operator functions beside their plain forms: masks, gradients, other widths, half precision, function transforms.

The contract of `regard.testing` runs layers, whose queries and keys are of the same tokens; here their numbers differ.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from operators import check_error, check_heads_apart, check_hidden, check_same, check_transforms, draw_qkv
from regard import Grid, Mask, UnsupportedError, ops
from regard.mixers.nystrom import segment_means
from regard.mixers.performer import orthogonal_features
from regard.ops import bra_plan, mita_plan, moba_plan, pool_landmarks, topk_plan
from regard.testing.subject import gap

F64 = torch.float64
GRIDS = (Grid(4, 6, 2), Grid(3, 5, 1, 2), Grid(8, 7), Grid(1, 12))
FORMS = ("dense", "gather", "grouped")
MITA = ((1, 1, 1, "both"), (4, 5, 1, "both"), (4, 5, 2, "route"), (4, 12, 3, "both"), (1, 12, 1, "route"))
"""Landmarks, keys of each, experts of a query and branches of MiTA."""
WITHOUT_POSITIONS = ("softmax", "linear", "flatten", "polaformer", "inline", "performer", "topk")


@dataclass(frozen=True)
class Case:
    """An operator function and what it is called with. plan: what tensors choose, for half precision."""

    name: str
    inputs: tuple[Tensor, ...]
    after: tuple[Any, ...]
    options: dict[str, Any]
    execution: str
    plan: Callable[..., Any] | None

    def fast(self, *tensors: Tensor, **options: Any) -> Tensor:
        execution = {"execution": self.execution} if self.execution else {}
        return getattr(ops, self.name)(*tensors, *self.after, **(self.options | execution | options))

    def plain(self, *tensors: Tensor, **options: Any) -> Tensor:
        return getattr(ops, f"{self.name}_reference")(*tensors, *self.after, **(self.options | options))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def case(
    name: str, inputs: tuple[Tensor, ...], *after: Any, execution: str = "", plan: Any = None, **options: Any
) -> Case:
    """The case of an operator function of `regard.ops`, called with inputs, which get gradients, and further values."""
    return Case(name, tuple(x.requires_grad_() for x in inputs), after, options, execution, plan)


def without_values(plan: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *more: Tensor, **options: Any) -> Any:
    """A plan, which depends on queries, keys and what follows the values."""
    return plan(q, k, *more, **options)


def without_grid() -> Iterator[Case]:
    for feature in ("elu", "relu", torch.exp):
        yield case("linear", draw_qkv(), feature=feature)
    for over in ("channels", "head"):
        for power in (1.0, 3.0, 4.5):
            spread = torch.rand(2, 1, 8, dtype=F64) + 0.3
            yield case("flatten", draw_qkv(), over=over, power=power, spread=spread)
    for d, e in ((8, 8), (7, 7), (5, 1), (1, 4)):
        yield case("polaformer", (*draw_qkv(d=d, e=e), 3 * torch.rand(2, 1, d, dtype=F64) + 1))
    for scale in (None, 1.0):
        yield case("inline", draw_qkv(), scale=scale)
        yield case("softmax", draw_qkv(), scale=scale)
    for kernel in ("softmax", "relu"):
        for eps in (0.0, 1e-6, 0.1):
            yield case("performer", (*draw_qkv(), orthogonal_features(24, 8, dtype=F64)), kernel=kernel, eps=eps)
    for groups in (1, 2):
        yield case("linformer", (*draw_qkv(), draw(groups, 4, 9), draw(groups, 4, 9)))
    for landmark_keep in (None, torch.tensor([[True, False, True, True]] * 3)):
        for iterations, start in ((1, "matrix"), (6, "matrix"), (6, "batch"), (None, "matrix")):
            q, k, v = draw_qkv()
            landmarks = (segment_means(q, 4)[0], segment_means(k, 4)[0])
            options = {"iterations": iterations, "start": start, "landmark_keep": landmark_keep}
            yield case("nystrom", (q, k, v, *landmarks), scale=0.4, **options)
        for biases in ({}, {"collect_bias": draw(2, 4, 9), "read_bias": draw(2, 13, 4)}):
            yield case("agent", (*draw_qkv(), draw(3, 2, 4, 8)), scale=0.3, landmark_keep=landmark_keep, **biases)
    for form in ("dense", "gather"):
        for top, rank in ((1, 0), (5, 0), (9, 0), (1, 3), (5, 3)):
            plan = partial(without_values, lambda q, k, top: topk_plan(q @ k.mT, top), top=top) if rank == 0 else None
            yield case("topk", draw_qkv(), top, rank=rank, scale=0.4, execution=form, plan=plan)


def on_grids() -> Iterator[Case]:
    for grid in GRIDS:
        inputs = partial(draw_qkv, grid.tokens, grid.tokens)
        m, number = (4, 4) if grid.height == 1 else ((2, 3), 6)
        mixing = torch.rand(number + bool(grid.extra), number + bool(grid.extra), dtype=F64)
        for normalize in ("correct", "none"):
            yield case("mhla", (*inputs(), mixing), grid, m, normalize=normalize)
        for regions, top in ((2, 1), (2, 3), ((2, 4), 5), ((1, 3), 2)) if grid.height > 1 else (((1, 3), 2),):
            plan = partial(without_values, bra_plan, grid=grid, regions=regions, top=top)
            yield case("bra", inputs(), grid, regions, top, scale=0.4, plan=plan)
        for size, shift in ((2, 0), (2, 1), ((2, 3), (0, 2)), (4, 3), ((3, 1), (1, 0))):
            rows, columns = (size, size) if isinstance(size, int) else size
            for options in ({"table": draw(2, 2 * rows - 1, 2 * columns - 1)}, {"scale": 0.4}):
                yield case("window", inputs(), grid, size, shift=shift, **options)
                if not shift:
                    yield case("window", inputs(), grid, size, pattern="grid", **options)
        for along in ("rows", "columns", "both", "sum", "cross"):
            yield case("axial", inputs(), grid, along, scale=0.4)
        for stripe in (1, 2, 3, 7):
            yield case("cswin", inputs(), grid, stripe, scale=0.4)
        for border, side in (("shift", 5), ("cut", 3), ("blocks", 3)):
            for options in ({"table": draw(2, side, side)}, {"scale": 0.4, "dilation": 2}):
                yield case("neighbourhood", inputs(), grid, 3, border=border, **options)
        for form in FORMS:
            for m, top, experts, branches in MITA:
                q, k, v = inputs()
                options = {"experts": experts, "branches": branches}
                plan = partial(without_values, mita_plan, top=top, experts=experts)
                landmarks = pool_landmarks(q, grid, m)
                yield case("mita", (q, k, v, landmarks), top, landmark_scale=0.6, execution=form, plan=plan, **options)
            for block, top, own in (((2, 3), 2, True), (5, 1, False), (4, 3, True)):
                plan = partial(without_values, moba_plan, grid=grid, block=block, top=top, own=own)
                yield case("moba", inputs(), grid, block, top, own=own, execution=form, plan=plan)
            for block, top, width, group in (((2, 3), 2, 3, 1), (5, 1, 5, 2), (4, 3, 1, 1)):
                gates = torch.rand(3, 2, grid.tokens, 3, dtype=F64)
                yield case("nsa", (*inputs(), gates), grid, block, top, width, group=group, execution=form)


with torch.random.fork_rng():
    torch.manual_seed(0)
    CASES = [*without_grid(), *on_grids()]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def tolerance(expected: Tensor) -> float:
    return 1e-11 * max(1.0, expected.abs().max().item())


def padding(keys: int) -> Tensor:
    """Some keys of two images, and all of the third, are hidden."""
    keep = torch.ones(3, keys, dtype=torch.bool)
    keep[0, -7:], keep[1, ::3], keep[2] = False, False, False
    return keep


@every_case
def test_fast_and_plain_form_agree(case: Case) -> None:
    for mask in (None, Mask(keep=padding(case.inputs[1].shape[2]))):
        fast, plain = case.fast(*case.inputs, mask=mask), case.plain(*case.inputs, mask=mask)
        check_same(fast, plain, case.inputs, tolerance(plain), 1e3 * tolerance(plain))


@every_case
def test_hidden_keys_may_hold_anything_and_without_keys_there_are_zeros(case: Case) -> None:
    q, k, v, *more = case.inputs
    keep = torch.arange(k.shape[2]).expand(3, -1) < 5
    for run in (case.fast, case.plain):
        hidden = partial(run, mask=Mask(keep=keep))
        if q.shape[2] == k.shape[2]:
            check_hidden(lambda q, k, v, run=hidden: run(q, k, v, *more), (k, v), keep, queries=q)
        else:
            check_hidden(lambda k, v, run=hidden: run(q, k, v, *more), (k, v), keep)
        assert not run(*case.inputs, mask=Mask(keep=torch.zeros_like(keep))).any()


CAUSAL = ("softmax", "topk")
FIRST = {case.name: case for case in reversed(CASES) if case.name not in CAUSAL}


@pytest.mark.parametrize("name", FIRST)
def test_a_causal_mask_is_refused(name: str) -> None:
    for form in (FIRST[name].fast, FIRST[name].plain):
        check_error(
            UnsupportedError, f"{name} cannot apply a causal mask", form, *FIRST[name].inputs, mask=Mask(causal=True)
        )


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in WITHOUT_POSITIONS and case.after != (9,)],
    ids=lambda case: case.name,
)
def test_hidden_keys_are_as_if_they_were_not_there(case: Case) -> None:
    """Where there is no grid, no parameter for each key, and no choice of as many keys as are left."""
    q, k, v, *more = case.inputs
    keep = torch.arange(9).expand(3, -1) < 5
    assert gap(case.fast(*case.inputs, mask=Mask(keep=keep)), case.fast(q, k[:, :, :5], v[:, :, :5], *more)) < 1e-11


HALVES = [(case, torch.bfloat16) for case in CASES]
HALVES += [(case, torch.float16) for case in {(case.name, case.execution): case for case in CASES}.values()]


@pytest.mark.parametrize(("case", "dtype"), HALVES, ids=lambda value: getattr(value, "name", str(value)))
def test_half_precision(case: Case, dtype: torch.dtype) -> None:
    low = [x.detach().to(dtype) for x in case.inputs]
    plan = {} if case.plan is None else {"plan": case.plan(*(x.double() for x in low))}
    exact = case.plain(*(x.double() for x in low), **plan)
    biases = {name: x.to(dtype) for name, x in case.options.items() if getattr(x, "dtype", None) == F64}
    out = case.fast(*low, **biases, **plan)
    assert out.dtype == dtype
    assert gap(out.double(), exact) < 0.05 * max(1.0, exact.abs().max().item())


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("name", ["moba", "nsa"])
def test_attention_to_blocks_of_keys_in_function_transforms_and_beside_what_is_not_finite(name: str, form: str) -> None:
    """Blocks that divide the grid and blocks that do not."""

    def run(grid: Grid, block: Any, *tensors: Tensor) -> Tensor:
        window = (3,) if name == "nsa" else ()
        return getattr(ops, name)(*tensors, grid, block, 2, *window, execution=form)

    for check, grid, block in (
        (check_transforms, Grid(12, 14, 1), (4, 7)),
        (check_transforms, Grid(12, 13), 9),
        (check_heads_apart, Grid(4, 6, 2), (2, 3)),
        (check_heads_apart, Grid(3, 5, 1, 2), 4),
    ):
        gates = (torch.rand(3, 2, grid.tokens, 3, dtype=F64),) if name == "nsa" else ()
        check(partial(run, grid, block), (*draw_qkv(grid.tokens, grid.tokens), *gates))
