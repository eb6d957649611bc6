"""MiTA as a compiled kernel against the plain form; skipped where the installation has no kernels."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import (
    check_once,
    check_rounded,
    check_strides,
    check_threads,
    check_vmap,
    needs_kernels,
    opcheck,
    runs_kernel,
)
from operators import check_error, check_heads_apart, check_same
from regard import Grid, Mask, MiTA, Site
from regard.core import ShapeError, UnsupportedError
from regard.mixers.mita.routing import MitaPlan
from regard.mixers.shared.native import native_enabled
from regard.ops import PooledQueries, mita, mita_plan, mita_reference, pool_landmarks
from regard.testing.subject import gap

pytestmark = needs_kernels


def draw(n: int, keys: int, m: int, d: int = 8, e: int = 8, seed: int = 0) -> list[Tensor]:
    """q, k, v and landmarks of two samples and heads, in float64."""
    torch.manual_seed(seed)
    shapes = ((n, d), (keys, d), (keys, e), (m, d))
    return [torch.randn(2, 2, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


# (queries, keys, landmarks, top, d, e): around the sizes of blocks (32), chunks (128) and vectors (8 in float64)
SIZES = [
    (1, 1, 1, 1, 1, 1),
    (31, 127, 3, 7, 8, 8),
    (32, 128, 8, 8, 16, 16),
    (33, 129, 9, 9, 7, 9),
    (65, 300, 5, 300, 3, 17),
    (200, 40, 1, 40, 33, 1),
    (97, 97, 97, 1, 8, 5),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("branches", ["both", "route"])
@pytest.mark.parametrize(("factor", "experts"), [(1.0, 1), (0.6, 1), (0.6, 2), (1.0, 5)])
def test_it_equals_the_plain_form(size: tuple[int, ...], branches: str, factor: float, experts: int) -> None:
    n, keys, m, top, d, e = size
    inputs = draw(n, keys, m, d, e)
    options = {"branches": branches, "landmark_scale": factor, "experts": min(experts, m)}
    fast = mita(*inputs, top, execution="native", **options)
    check_same(fast, mita_reference(*inputs, top, **options), inputs, 1e-13, 1e-12)


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_float32_is_as_exact_as_the_plain_form(spread: float, experts: int) -> None:
    """Logits up to thousands: weights down to exact zeros."""
    inputs = [x.detach() for x in draw(150, 150, 9, 16, 16)]
    inputs[0] *= spread
    plan = mita_plan(inputs[0], inputs[1], inputs[3], 20, experts=experts)
    options = {"plan": plan, "experts": experts}
    exact = mita_reference(*inputs, 20, **options)
    single = [x.float() for x in inputs]
    own = gap(mita_reference(*single, 20, **options).double(), exact)
    assert gap(mita(*single, 20, execution="native", **options).double(), exact) <= 4 * own + 1e-6


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_the_same_plan(dtype: torch.dtype, experts: int) -> None:
    half = [x.detach().to(dtype).requires_grad_() for x in draw(50, 40, 6, 16, 16)]
    plan = mita_plan(*(half[i].detach() for i in (0, 1, 3)), 9, experts=experts)
    whole = [x.detach().double().requires_grad_() for x in half]
    exact = mita_reference(*whole, 9, plan=plan, experts=experts)
    check_rounded(mita(*half, 9, plan=plan, experts=experts, execution="native"), half, exact, whole, 1e-2, 2e-2)


def test_inputs_may_have_any_strides() -> None:
    check_strides(
        lambda *x: mita(*x, 5, execution="native"), lambda *x: mita_reference(*x, 5),
        lambda q: (pool_landmarks(q, Grid(5, 6), 6),),
    )  # fmt: skip


def test_threads_change_no_bit() -> None:
    inputs = [x.detach().float().requires_grad_() for x in draw(600, 600, 8, 64, 64)]  # of four heads
    for experts in (1, 2):
        check_threads(lambda *x, s=experts: mita(*x, 60, experts=s, execution="native"), inputs)


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("branches", ["both", "route"])
def test_padding_bias_and_left_out_landmarks(branches: str, experts: int) -> None:
    inputs = draw(20, 24, 6)
    keep = torch.arange(24).expand(2, -1) < torch.tensor([[13], [4]])
    used = torch.tensor([[True] * 6, [True, False, True, True, False, True]])
    bias = torch.randn(2, 1, 24, dtype=torch.float64)
    for mask, left in ((Mask(keep=keep), None), (Mask(bias=bias), used), (Mask(keep=keep, bias=bias), used)):
        options = {"branches": branches, "mask": mask, "landmark_keep": left, "experts": experts}
        fast = mita(*inputs, 9, execution="native", **options)
        check_same(fast, mita_reference(*inputs, 9, **options), inputs, 1e-13, 1e-12)


@pytest.mark.parametrize("experts", [1, 3])
def test_queries_to_which_nothing_is_left_get_zeros(experts: int) -> None:
    inputs = draw(20, 24, 6)
    keep = torch.tensor([[True], [False]]).expand(-1, 24)
    options = {"mask": Mask(keep=keep), "landmark_keep": keep[:, :6], "execution": "native", "experts": experts}
    out = mita(*inputs, 5, **options)
    assert not out[1].any()
    assert out[0].all()
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(not grad[1].any() and grad.isfinite().all() for grad in grads)


def test_what_is_not_finite_stays_in_its_head() -> None:
    *inputs, landmarks = draw(24, 24, 6)
    for experts in (1, 3):
        check_heads_apart(lambda *x, s=experts: mita(*x, landmarks.detach(), 5, experts=s, execution="native"), inputs)


def test_an_unknown_score_is_chosen_and_seen() -> None:
    """NaN counts as the largest, so that it does not hide where only chosen keys are attended to."""
    inputs = [x.detach() for x in draw(24, 24, 6)]
    inputs[1][0, 1, 7] = math.nan
    for form in ("dense", "native"):
        out = mita(*inputs, 5, branches="route", execution=form)
        assert out[0, 1].isnan().all()
        assert out.isnan().sum() == out[0, 1].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_chooses_what_topk_chooses(dtype: torch.dtype) -> None:
    """With v = one-hot positions the weights of a route-only output show the keys that were chosen."""
    torch.manual_seed(0)
    for keys, top in product((5, 130, 400), (1, 4, 5)):
        q, k = torch.randn(1, 1, 3, 6, dtype=dtype), torch.randn(1, 1, keys, 6, dtype=dtype)
        out = mita(q, k, torch.eye(keys, dtype=dtype)[None, None], q, top, branches="route", scale=0.1,
                   execution="native")  # fmt: skip
        plan = mita_plan(q, k, q, top)
        wanted = torch.zeros_like(out).scatter(-1, plan.keys.gather(2, plan.experts.expand(-1, -1, -1, top)), 1.0)
        assert torch.equal(out > 0, wanted > 0)


def test_equal_scores_keep_exactly_top_keys_the_first_of_them() -> None:
    q, v = torch.ones(1, 1, 2, 4), torch.eye(9)[None, None]
    k = torch.tensor([0.0, 1, 1, -1, 1, 1, 0, 1, 2])[None, None, :, None].expand(-1, -1, -1, 4)
    out = mita(q, k, v, q[:, :, :1], 3, branches="route", execution="native")
    assert [set(row.nonzero()[:, 0].tolist()) for row in out[0, 0]] == [{1, 2, 8}] * 2


def test_a_given_plan_is_used_and_checked() -> None:
    inputs = draw(20, 24, 6)
    plan = mita_plan(inputs[0], inputs[1], inputs[3], 5)
    other = MitaPlan(plan.keys.flip(2), torch.full_like(plan.experts, 2))
    out = mita(*inputs, 5, plan=other, execution="native")
    assert gap(out, mita_reference(*inputs, 5, plan=other)) < 1e-13
    for bad in (MitaPlan(plan.keys + 20, plan.experts), MitaPlan(plan.keys, plan.experts - 6)):
        check_error(ShapeError, "has indices from .*; expected 0 to", mita, *inputs, 5, plan=bad, execution="native")


def test_what_it_cannot_do_is_refused() -> None:
    inputs = draw(20, 24, 6)
    union = {"experts": 2, "duplicates": "union", "execution": "native"}
    check_error(UnsupportedError, "shared keys once", mita, *inputs, 5, **union)
    bias = torch.zeros(24, dtype=torch.float64, requires_grad=True)
    trained = {"mask": Mask(bias=bias[None, None, None]), "execution": "native"}
    check_error(UnsupportedError, "does not train a bias", mita, *inputs, 5, **trained)
    check_once(mita(*inputs, 5, execution="native"), inputs[0])


def test_function_transforms() -> None:
    inputs = [x.detach() for x in draw(20, 24, 6)]
    check_vmap(lambda *x, execution: mita(*x, 5, execution=execution), lambda *x: mita_reference(*x, 5), inputs)
    with pytest.raises(UnsupportedError, match="without torch.func.grad"):
        torch.func.grad(lambda q: mita(q, *inputs[1:], 5, execution="native").sum())(inputs[0])


# As an operator of PyTorch


@pytest.mark.untyped
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("given", "experts"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_opcheck(dtype: torch.dtype, given: bool, experts: int) -> None:
    inputs = [x.detach().to(dtype).requires_grad_() for x in draw(12, 15, 3)]
    plan = mita_plan(*(inputs[i].detach() for i in (0, 1, 3)), 4, experts=experts) if given else (None, None)
    bias = torch.randn(2, 2, 3 + 15, dtype=torch.promote_types(dtype, torch.float32))
    options = (bias, *plan, 4, True, 0.3, 1.0, experts)
    opcheck("mita", *inputs, None, *options)
    windows = [0, 4, 1, 3, 0, 3, 0, 2, 1, 3, 2, 4]  # of 12 queries as 3 x 4 cells
    opcheck("mita", *inputs[:3], None, windows, *options)


@pytest.mark.parametrize("branches", ["both", "route"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("grid", "m", "policy", "start"),
    [
        (Grid(6, 5, 2, 1), 6, "adaptive", None),
        (Grid(7, 4), (3, 3), "partition", None),
        (Grid(4, 4, 1), 4, "adaptive", 0),
        (Grid(1, 9), 9, "adaptive", None),
    ],
)
def test_pooling_inside_equals_pooling_before(
    grid: Grid, m: int | tuple[int, int], policy: str, start: int | None, dtype: torch.dtype, branches: str
) -> None:
    """Both give the same plan, the same output and the same gradients, also with keys of another length."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8).to(dtype).requires_grad_() for n in (grid.tokens, 11, 11))
    pooled = PooledQueries(grid, m, start, policy)
    before = pool_landmarks(q, grid, m, start=start, policy=policy)
    results = []
    for landmarks in (pooled, before):
        out = mita(q, k, v, landmarks, 4, branches=branches, execution="native")
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    exact = dtype is torch.float64
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(*results, strict=True):
        assert gap(one.double(), other.double()) <= (1e-13 if exact else 1e-2) * other.abs().max().item()


def test_its_work_is_counted_as_that_of_the_gathered_form() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs = draw(20, 24, 6, d=8, e=4)
    for branches, experts in (("both", 1), ("route", 1), ("both", 3)):
        counts = {}
        for form in ("native", "gather"):
            with FlopCounterMode(display=False) as counter:
                mita(*inputs, 5, experts=experts, branches=branches, execution=form).sum().backward()
            counts[form] = counter.get_total_flops()
        assert counts["native"] == counts["gather"]


# When it runs


def test_auto_takes_it_unless_the_environment_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(20, 24, 6)

    def taken(**options: Any) -> bool:
        return runs_kernel("mita", lambda: mita(*inputs, 5, **options))

    for value, wanted in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv("REGARD_NATIVE", value)
        assert native_enabled() == taken() == wanted
    monkeypatch.delenv("REGARD_NATIVE")
    assert taken()
    assert taken(experts=2)
    assert not taken(experts=2, duplicates="union")


def test_a_layer_trains_in_half_precision() -> None:
    torch.manual_seed(0)
    layer, x = MiTA(m=4, k=5).build(Site(32, 2, Grid(4, 6))), torch.randn(3, 24, 32)
    grads = []
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = layer(x, Grid(4, 6))
        grads.append(torch.autograd.grad(out.float().square().sum(), list(layer.parameters())))
    for exact, rounded in zip(*grads, strict=True):  # a rounded score may choose another key
        assert (rounded - exact).norm() < 0.1 * exact.norm()
