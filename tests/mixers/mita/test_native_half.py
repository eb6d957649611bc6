"""MiTA's compiled kernel in bfloat16, by each kind of product that this processor has, against float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import needs_kernels
from regard import Mask
from regard.mixers.mita.routing import MitaPlan
from regard.mixers.shared.native import LIBRARY, half_products
from regard.ops import mita, mita_reference

# whether ours are in bfloat16, and what PyTorch's products are held to then
HELD = {False: "AVX512_CORE_BF16", True: ""}
# (queries, keys, landmarks, top, d, e): around the sides of tiles (16, 32) and the length of a row of one (32)
SIZES = [
    (1, 1, 1, 1, 1, 1), (31, 127, 3, 7, 8, 8), (64, 128, 32, 32, 64, 64), (33, 129, 17, 33, 7, 9),
    (65, 300, 5, 300, 3, 17), (200, 40, 1, 40, 33, 1), (97, 97, 97, 1, 40, 5),
]  # fmt: skip


@pytest.fixture(params=HELD, ids=["float32", "tiles"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Each kind of product in turn, skipped where this processor or this installation does not have it."""
    if LIBRARY is None:
        pytest.skip("this installation has no compiled kernels")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", HELD[request.param])
    half_products.cache_clear()
    if half_products(torch.bfloat16) != request.param:
        pytest.skip("this processor, or the compiler of this installation, does not have these products")
    yield request.param
    half_products.cache_clear()


def draw(n: int, keys: int, m: int, d: int, e: int) -> list[Tensor]:
    """q, k, v and landmarks of two samples and heads."""
    torch.manual_seed(0)
    shapes = ((n, d), (keys, d), (keys, e), (m, d))
    return [torch.randn(2, 2, *shape).to(torch.bfloat16).requires_grad_() for shape in shapes]


def plan_of(leaves: list[Tensor], top: int, experts: int = 1) -> MitaPlan:
    """What the kernel chooses."""
    scale = leaves[0].shape[-1] ** -0.5
    return MitaPlan(*torch.ops.regard.mita(*leaves, None, None, None, None, top, True, scale, 1.0, experts)[1:])


def far(found: Tensor, expected: Tensor) -> float:
    """The distance relative to all numbers of a tensor."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-6)).item()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("branches", ["both", "route"])
@pytest.mark.parametrize(("factor", "experts"), [(1.0, 1), (0.6, 1), (0.6, 3)])
@pytest.mark.parametrize("given", [True, False])
def test_outputs_and_gradients(
    level: bool, size: tuple[int, ...], branches: str, factor: float, experts: int, given: bool
) -> None:
    n, keys, m, top, d, e = size
    leaves, experts = draw(n, keys, m, d, e), min(experts, m)
    options = {"branches": branches, "landmark_scale": factor, "experts": experts}
    plan = plan_of(leaves, top, experts)
    out = mita(*leaves, top, plan=plan if given else None, execution="native", **options)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = mita_reference(*exact, top, plan=plan, **options)
    assert far(out, expected) < 6e-3
    ahead, used = torch.randn_like(out), leaves if branches == "both" else leaves[:3]
    found = torch.autograd.grad(out, used, ahead)
    for one, other in zip(found, torch.autograd.grad(expected, exact[: len(used)], ahead.double()), strict=True):
        assert far(one, other) < 2e-2 or other.abs().max() < 1e-2


def test_it_chooses_as_in_float32(level: bool) -> None:
    """Scores are exact products of bfloat16 numbers, for any scale: only their sums round, in float32."""
    leaves = draw(200, 300, 20, 40, 16)
    chosen, wide = plan_of(leaves, 17), plan_of([x.float() for x in leaves], 17)
    same = [(a.sort().values == b.sort().values).float().mean() for a, b in zip(chosen, wide, strict=True)]
    assert min(same) > 0.99


def test_one_key_of_one_expert_is_exact(level: bool) -> None:
    leaves = draw(70, 50, 20, 24, 33)
    plan = plan_of(leaves, 1)
    out = mita(*leaves, 1, branches="route", execution="native")
    rows = plan.keys[..., 0].gather(-1, plan.experts[..., 0])[..., None].expand(-1, -1, -1, 33)
    assert torch.equal(out, leaves[2].gather(2, rows))


def test_masks_and_nan(level: bool) -> None:
    q, k, v, landmarks = (x.detach() for x in draw(40, 50, 6, 16, 16))
    mask = Mask(keep=torch.arange(50).expand(2, -1) < torch.tensor([[7], [50]]))
    out = mita(q, k, v, landmarks, 9, mask=mask, execution="native")
    expected = mita(*(x.float() for x in (q, k, v, landmarks)), 9, mask=mask, execution="grouped")
    assert far(out, expected.double()) < 2e-2
    q[0, 1, 3] = torch.nan
    found = mita(q, k, v, landmarks, 9, mask=mask, execution="native")
    assert found[0, 1, 3].isnan().all()
    found[0, 1], out[0, 1] = 0, 0
    assert torch.equal(found, out)


@needs_kernels
def test_other_types_do_not_round() -> None:
    assert not any(half_products(dtype) for dtype in (torch.float32, torch.float64, torch.float16))
