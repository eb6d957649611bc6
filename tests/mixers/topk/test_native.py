"""Top-k attention as a compiled kernel against the plain form; skipped where the installation has no kernels."""

import math

import pytest
import torch
from torch import Tensor

from kernels import check_once, check_rounded, check_strides, check_threads, check_vmap, needs_kernels, opcheck
from operators import check_error, check_heads_apart, check_same
from regard import Mask
from regard.core import UnsupportedError
from regard.mixers.topk.topk import TopKPlan
from regard.ops import topk, topk_plan, topk_reference
from regard.testing.subject import gap

pytestmark = needs_kernels


def draw(n: int, keys: int, d: int = 8, e: int = 8, seed: int = 0) -> list[Tensor]:
    """q, k and v of two samples and heads, in float64."""
    torch.manual_seed(seed)
    shapes = ((n, d), (keys, d), (keys, e))
    return [torch.randn(2, 2, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def native(*inputs: Tensor, top: int = 5, **options: object) -> Tensor:
    return topk(*inputs, top, execution="native", **options)  # type: ignore[arg-type]


# (queries, keys, top, d, e): around blocks (32), chunks (128), vectors (8 in float64) and groups of maxima
SIZES = [
    (1, 1, 1, 1, 1),
    (31, 127, 7, 8, 8),
    (32, 128, 8, 16, 16),
    (33, 129, 9, 7, 9),
    (65, 300, 300, 3, 17),
    (20, 40, 40, 33, 1),
    (97, 1000, 1, 8, 5),
    (40, 1025, 25, 64, 40),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
def test_it_equals_the_plain_form(size: tuple[int, ...], given: bool) -> None:
    n, keys, top, d, e = size
    inputs = draw(n, keys, d, e)
    plan = topk_plan(torch.rand(2, 1, n, keys), top) if given else None
    fast = native(*inputs, top=top, plan=plan, scale=-0.7)
    check_same(fast, topk_reference(*inputs, top, plan=plan, scale=-0.7), inputs, 1e-13, 1e-12)


@pytest.mark.slow
def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(native, draw(13, 11, 4, 5, seed=3))


@pytest.mark.parametrize("keys", [30, 700])
def test_equal_logits_keep_exactly_top_keys_the_first_of_them(keys: int) -> None:
    q, v = torch.ones(1, 1, 2, 4), torch.eye(keys)[None, None]
    k = torch.zeros(1, 1, keys, 4)
    assert [row.nonzero()[:, 0].tolist() for row in native(q, k, v)[0, 0]] == [[0, 1, 2, 3, 4]] * 2
    k[..., [7, 11, 20, 29], :] = 1
    assert [row.nonzero()[:, 0].tolist() for row in native(q, k, v)[0, 0]] == [[0, 7, 11, 20, 29]] * 2


@pytest.mark.parametrize("keys", [24, 700])
def test_what_is_not_finite_is_seen_and_stays_in_its_head(keys: int) -> None:
    if keys == 24:  # each key is chosen by a query
        check_heads_apart(native, draw(24, keys))
    inputs = [x.detach() for x in draw(24, keys)]
    inputs[1][0, 1, keys - 2] = math.nan
    out = native(*inputs)
    assert out[0, 1].isnan().all()
    assert out.isnan().sum() == out[0, 1].numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_precisions_with_the_same_plan(dtype: torch.dtype) -> None:
    single = [x.detach().to(dtype).requires_grad_() for x in draw(50, 40, 16, 16)]
    exact_inputs = [x.detach().double().requires_grad_() for x in single]
    plan = topk_plan(torch.rand(2, 2, 50, 40), 9)
    exact, out = topk_reference(*exact_inputs, 9, plan=plan), native(*single, top=9, plan=plan)
    allowed = 1e-6 if dtype == torch.float32 else 2e-2
    check_rounded(out, single, exact, exact_inputs, allowed, allowed)


def test_inputs_may_have_any_strides() -> None:
    check_strides(native, lambda *x: topk_reference(*x, 5))


def test_threads_change_no_bit() -> None:
    inputs = [x.detach().float().requires_grad_() for x in draw(400, 400, 64, 64)]  # of four heads
    check_threads(lambda *x: native(*x, top=60), inputs)


def test_what_it_cannot_do_is_refused_and_auto_takes_another_form() -> None:
    inputs = draw(20, 24)
    for options, reason in (({"mask": Mask(causal=True)}, "masks"), ({"rank": 3}, "Spark")):
        check_error(UnsupportedError, f"has no {reason}", native, inputs[0][:, :, :24], *inputs[1:], **options)
    assert gap(topk(*inputs, 5, rank=3), topk_reference(*inputs, 5, rank=3)) < 1e-13
    check_once(native(*inputs), inputs[0])


def test_function_transforms() -> None:
    inputs = [x.detach() for x in draw(20, 24)]
    check_vmap(lambda *x, execution: topk(*x, 5, execution=execution), lambda *x: topk_reference(*x, 5), inputs)


@pytest.mark.untyped
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
def test_opcheck(dtype: torch.dtype, given: bool) -> None:
    inputs = [x.detach().to(dtype).requires_grad_() for x in draw(12, 15)]
    opcheck("topk", *inputs, topk_plan(torch.rand(2, 1, 12, 15), 4).keys if given else None, 4, 0.3)


@pytest.mark.parametrize("plan", [None, TopKPlan(torch.arange(5).expand(2, 2, 20, 5))])
def test_its_work_is_counted(plan: TopKPlan | None) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        native(*draw(20, 24, d=8, e=4), plan=plan).sum().backward()
    ranked = 24 if plan is None else 5
    assert counter.get_total_flops() == 2 * 4 * 20 * (ranked * 8 + 5 * 4) + 4 * 4 * 20 * 5 * (8 + 4)
