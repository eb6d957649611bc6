"""MiTA's Triton kernels against the plain form in float64, outputs and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import CLOSE, DEVICE, EXACT, check_close, draw, elsewhere, here, run_in_interpreter
from operators import check_error
from regard import Grid, Mask, Site, parse
from regard.core import UnsupportedError
from regard.mixers.mita.mita import mita, mita_reference
from regard.mixers.mita.routing import MitaPlan, mita_plan

pytestmark = pytest.mark.untyped
HALVES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = {
    "plain": ((1, 2, 20, 20, 8, 8, 4), 5),
    "odd": ((2, 1, 33, 21, 12, 20, 3), 7),
    "all keys": ((1, 1, 15, 15, 16, 16, 2), 15),
    "several chunks": ((1, 1, 530, 1030, 8, 4, 3), 70),
}
TWO_TILES = ((1, 1, 9, 70, 4, 4, 1), 66)


@elsewhere
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def inputs(shape: tuple[int, ...], dtype: torch.dtype = EXACT) -> list[Tensor]:
    """q, k, v and landmarks for shape (B, H, N, M, d, e, m)."""
    batch, heads, queries, keys, width, out, landmarks = shape
    sizes = ((queries, width), (keys, width), (keys, out), (landmarks, width))
    return draw(*((batch, heads, *size) for size in sizes), dtype=dtype)


def chosen(q: Tensor, k: Tensor, landmarks: Tensor, top: int, experts: int = 1, **options: object) -> MitaPlan:
    """What the kernel chooses: the keys by their bias, the experts by the landmarks that are kept."""
    import regard.mixers.mita.triton_kernels  # noqa: F401

    scale, attend = q.shape[-1] ** -0.5, torch.ops.regard.attend_and_choose
    keys = attend(landmarks.detach(), k.detach(), None, options.get("bias"), top, scale, 1.0, top > 1)[2]
    given = q.detach(), landmarks.detach(), None, options.get("drop")
    return MitaPlan(keys, attend(*given, experts, scale, 1.0, False)[2])


def compare(leaves: list[Tensor], top: int, plan: MitaPlan, given: bool = True, **options: Any) -> None:
    """Outputs and gradients beside those of the plain form. given: whether the kernels get the plan."""
    used = leaves if options.get("branches") != "route" else leaves[:3]
    check_close(
        lambda *x: mita(*x, *leaves[len(x) :], top, plan=plan if given else None, execution="triton", **options),
        lambda *x: mita_reference(*x, *(y.double() for y in leaves[len(x) :]), top, plan=plan, **options),
        used,
    )


@here
@pytest.mark.parametrize("branches", ["both", "route"])
@pytest.mark.parametrize(("shape", "top"), [*SHAPES.values(), TWO_TILES], ids=[*SHAPES, "one landmark, two tiles"])
def test_outputs_and_gradients_with_a_plan(shape: tuple[int, ...], top: int, branches: str) -> None:
    leaves = inputs(shape)
    compare(leaves, top, mita_plan(leaves[0], leaves[1], leaves[3], top), branches=branches)


@here
@pytest.mark.parametrize("branches", ["both", "route"])
@pytest.mark.parametrize(("shape", "top"), SHAPES.values(), ids=list(SHAPES))
def test_outputs_and_gradients_of_what_they_choose(shape: tuple[int, ...], top: int, branches: str) -> None:
    leaves = inputs(shape)
    plan = chosen(leaves[0], leaves[1], leaves[3], top)
    compare(leaves, top, plan, given=False, branches=branches, landmark_scale=0.7)


@here
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("given", [True, False])
def test_lower_precision(dtype: torch.dtype, given: bool) -> None:
    leaves = inputs((1, 2, 40, 40, 16, 16, 4), dtype)
    plan = mita_plan(leaves[0], leaves[1], leaves[3], 9)
    compare(leaves, 9, plan if given else chosen(leaves[0], leaves[1], leaves[3], 9), given)


@here
@pytest.mark.parametrize(("keys", "top"), [(20, 1), (20, 20), (50, 16), (40, 3), (1030, 70)])
@pytest.mark.parametrize("in_registers", [True, False])
def test_the_kernel_chooses_the_largest(
    keys: int, top: int, in_registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN counts as the largest and -inf as a score; what lies beyond the last key is never taken."""
    if not in_registers:
        monkeypatch.setattr("regard.mixers.mita.triton_kernels.IN_REGISTERS", 0)
    q, k, _, landmarks = (x.detach() for x in inputs((2, 1, 19, keys, 8, 8, 16)))
    k[0, 0, 5] = torch.nan
    bias = torch.zeros(2, 1, keys, dtype=EXACT, device=DEVICE)
    bias[1, 0, : keys - 2] = -torch.inf
    scores = landmarks @ k.mT * q.shape[-1] ** -0.5 + bias[:, :, None]
    plan = chosen(q, k, landmarks, top, bias=bias)
    for found in plan.keys.flatten(0, 2):
        assert len(found.unique()) == top
        assert found.max() < keys
    expected = scores.float().topk(top).values
    assert torch.equal(
        scores.float().gather(-1, plan.keys).sort(descending=True).values.nan_to_num(9), expected.nan_to_num(9)
    )
    best = (q @ landmarks.mT).argmax(-1)
    assert torch.equal(plan.experts[..., 0], best)


@here
def test_ragged_and_empty_experts() -> None:
    """All queries of one head at one expert, more than a block has rows; those of the other at the last."""
    leaves = inputs((1, 2, 70, 12, 8, 8, 5))
    plan = mita_plan(leaves[0], leaves[1], leaves[3], 4)
    experts = torch.zeros_like(plan.experts)
    experts[:, 1] = 4
    experts[:, 1, 3] = 2
    compare(leaves, 4, MitaPlan(plan.keys, experts))


@here
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("branches", ["both", "route"])
@pytest.mark.parametrize("experts", [2, 5])
def test_several_experts(branches: str, experts: int, given: bool) -> None:
    """Also all of the landmarks, and more landmarks than a tile has."""
    for shape in ((2, 1, 30, 21, 8, 12, 5), (1, 1, 20, 12, 8, 8, 70)):
        leaves = inputs(shape)
        plan = (mita_plan if given else chosen)(leaves[0], leaves[1], leaves[3], 4, experts=experts)
        options = {"experts": experts, "branches": branches, "landmark_scale": 0.7}
        compare(leaves, 4, plan, given, **options)


@here
def test_the_experts_of_a_query_are_its_best_landmarks_each_once() -> None:
    q, k, _, landmarks = (x.detach() for x in inputs((2, 1, 19, 20, 8, 8, 7)))
    landmarks[0, 0, 2] = landmarks[0, 0, 5]  # equal scores
    drop = torch.zeros(2, 1, 7, dtype=EXACT, device=DEVICE)
    drop[1, 0, :6] = -torch.inf  # fewer than three are left
    found = chosen(q, k, landmarks, 3, experts=3, drop=drop).experts
    scores = q @ landmarks.mT + drop[:, :, None]
    best = scores.topk(3).values
    assert torch.allclose(scores.gather(-1, found).sort(descending=True).values, best)
    assert all(len(row.unique()) == 3 for row in found.flatten(0, 2))


@here
@pytest.mark.parametrize("given", [True, False])
def test_masks_and_queries_without_a_key(given: bool) -> None:
    leaves = inputs((2, 1, 20, 20, 8, 8, 4))
    bias = torch.randn(2, 1, 1, 20, dtype=EXACT, device=DEVICE)
    keep = torch.arange(20, device=DEVICE).expand(2, -1) < 3
    hidden = torch.zeros(2, 1, 20, dtype=EXACT, device=DEVICE).masked_fill(~keep[:, None], -torch.inf)
    for mask, row, branches in ((Mask(bias=bias), bias[..., 0, :], "both"), (Mask(keep=keep), hidden, "route")):
        plan = mita_plan(leaves[0], leaves[1], leaves[3], 5, mask=mask)
        plan = plan if given else chosen(leaves[0], leaves[1], leaves[3], 5, bias=row)
        compare(leaves, 5, plan, given, mask=mask, branches=branches)
    none = Mask(keep=torch.zeros(2, 20, dtype=torch.bool, device=DEVICE))
    assert not mita(*leaves, 5, mask=none, branches="route", execution="triton").any()


@here
def test_landmarks_that_are_not_used() -> None:
    leaves = inputs((2, 1, 20, 20, 8, 8, 4))
    keep = torch.tensor([[True, False, True, True], [False, True, False, False]], device=DEVICE)
    drop = torch.zeros(2, 1, 4, dtype=EXACT, device=DEVICE).masked_fill(~keep[:, None], -torch.inf)
    plan = chosen(leaves[0], leaves[1], leaves[3], 5, drop=drop)
    assert (plan.experts[1] == 1).all()
    compare(leaves, 5, plan, given=False, landmark_keep=keep)


@here
@pytest.mark.parametrize("given", [True, False])
def test_nan_stays_in_its_head(given: bool) -> None:
    q, k, v, landmarks = (leaf.detach() for leaf in inputs((1, 2, 20, 20, 8, 8, 4)))
    plan, clean = mita_plan(q, k, landmarks, 5), mita(q, k, v, landmarks, 5)
    q[0, 1, 3] = torch.nan
    out = mita(q, k, v, landmarks, 5, plan=plan if given else None, execution="triton")
    assert out[0, 1, 3].isnan().all()
    assert torch.allclose(out[:, 0], clean[:, 0])


@here
def test_a_layer_with_prefix_tokens_on_a_rectangle() -> None:
    grid = Grid(4, 6, 1)
    torch.manual_seed(0)
    layer = parse("MiTA(m=6, k=5)").build(Site(16, 2, grid)).to(DEVICE, EXACT)
    x = torch.randn(2, grid.tokens, 16, dtype=EXACT, device=DEVICE)
    expected = layer.reference(x, grid)
    layer.operator.execution = "triton"
    assert torch.allclose(layer(x, grid), expected, rtol=0, atol=CLOSE[EXACT])


@here
def test_their_operators_are_registered_properly() -> None:
    """Shape functions and gradients, which `torch.compile` relies on."""
    import regard.mixers.mita.triton_kernels  # noqa: F401

    q, k, v, landmarks = inputs((1, 2, 20, 20, 8, 8, 4), torch.float32)
    torch.library.opcheck(torch.ops.regard.attend_and_choose, (landmarks, k, v, None, 5, 0.3, 1.0, True))
    torch.library.opcheck(torch.ops.regard.attend_and_choose, (q, landmarks, None, None, 2, 0.3, 1.0, False))
    compiled = torch.compile(lambda *leaves: mita(*leaves, 5, execution="triton"), backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(q, k, v, landmarks), mita(q, k, v, landmarks, 5), atol=CLOSE[torch.float32])


@here
def test_what_the_kernels_cannot_do_is_refused() -> None:
    leaves = inputs((1, 1, 12, 12, 8, 8, 4))
    trained = Mask(bias=torch.zeros(1, 1, 1, 12, dtype=EXACT, device=DEVICE, requires_grad=True))
    for given in (None, mita_plan(leaves[0], leaves[1], leaves[3], 5)):
        check_error(UnsupportedError, 'use "auto"', mita, *leaves, 5, execution="triton", mask=trained, plan=given)
    with pytest.raises(UnsupportedError, match="function transforms"):
        torch.func.vmap(lambda *heads: mita(*heads, 5, execution="triton"))(*(x[None] for x in leaves))
    (grad,) = torch.autograd.grad(mita(*leaves, 5, execution="triton").sum(), leaves[0], create_graph=True)
    check_error(UnsupportedError, "twice", torch.autograd.grad, grad.sum(), leaves[0])


@elsewhere
def test_without_a_gpu_they_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r'needs (a CUDA device|the package).*use "auto"'):
        mita(*inputs((1, 1, 12, 12, 8, 8, 4)), 5, execution="triton")
