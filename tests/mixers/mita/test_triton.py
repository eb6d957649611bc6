"""MiTA's Triton kernels against the plain form, in Triton's interpreter, or on a GPU where there is one.

The interpreter is chosen when Triton is imported, so these tests run in a process of their own.
"""

import os
import subprocess
import sys

import pytest
import torch

from regard import Grid, Mask, Site, parse
from regard.core import UnsupportedError
from regard.mixers.mita.mita import mita, mita_reference
from regard.mixers.mita.routing import MitaPlan, mita_plan

pytestmark = pytest.mark.untyped
HERE = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
here = pytest.mark.skipif(not HERE, reason="runs in a process with TRITON_INTERPRET=1")
CLOSE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.skipif(HERE, reason="this is that process")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-3000:]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and landmarks for shape (B, H, N, M, d, e, m)."""
    batch, heads, queries, keys, width, out, landmarks = shape
    torch.manual_seed(0)
    sizes = ((queries, width), (keys, width), (keys, out), (landmarks, width))
    return [torch.randn(batch, heads, *size, dtype=dtype, device=DEVICE).requires_grad_() for size in sizes]


def compare(leaves: list[torch.Tensor], top: int, plan: MitaPlan, **options: object) -> None:
    """Outputs and gradients beside those of the plain form in float64."""
    out = mita(*leaves, top, plan=plan, execution="triton", **options)  # type: ignore[arg-type]
    used = leaves if options.get("branches") != "route" else leaves[:3]
    grad = torch.randn_like(out)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = mita_reference(*exact, top, plan=plan, **options)  # type: ignore[arg-type]
    close = CLOSE[leaves[0].dtype]
    assert torch.allclose(out.double(), expected, rtol=close, atol=close)
    found = torch.autograd.grad(out, used, grad)
    for one, other in zip(found, torch.autograd.grad(expected, exact[: len(used)], grad.double()), strict=True):
        assert torch.allclose(one.double(), other, rtol=close, atol=close)


@here
@pytest.mark.parametrize("branches", ["both", "route"])
@pytest.mark.parametrize(
    ("shape", "top"),
    [
        ((1, 2, 20, 20, 8, 8, 4), 5),
        ((2, 1, 33, 21, 12, 20, 3), 7),
        ((1, 1, 18, 18, 16, 16, 2), 18),
        ((1, 1, 9, 70, 4, 4, 1), 66),
    ],
    ids=["plain", "odd", "all keys", "one landmark, two tiles"],
)  # fmt: skip
def test_outputs_and_gradients(shape: tuple[int, ...], top: int, branches: str) -> None:
    leaves = inputs(shape)
    compare(leaves, top, mita_plan(leaves[0], leaves[1], leaves[3], top), branches=branches)


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_lower_precision(dtype: torch.dtype) -> None:
    leaves = inputs((1, 2, 40, 40, 16, 16, 4), dtype)
    compare(leaves, 9, mita_plan(leaves[0], leaves[1], leaves[3], 9))


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
def test_masks_and_queries_without_a_key() -> None:
    leaves = inputs((2, 2, 20, 20, 8, 8, 4))
    bias = torch.randn(2, 2, 1, 20, dtype=torch.float64, device=DEVICE)
    for mask in (Mask(bias=bias), Mask(keep=torch.arange(20, device=DEVICE).expand(2, -1) < 3)):
        plan = mita_plan(leaves[0], leaves[1], leaves[3], 5, mask=mask)
        compare(leaves, 5, plan, mask=mask)
        compare(leaves, 5, plan, mask=mask, branches="route")
    none = Mask(keep=torch.zeros(2, 20, dtype=torch.bool, device=DEVICE))
    assert not mita(*leaves, 5, mask=none, branches="route", execution="triton").any()


@here
def test_nan_stays_in_its_head() -> None:
    q, k, v, landmarks = (leaf.detach() for leaf in inputs((1, 2, 20, 20, 8, 8, 4)))
    plan, clean = mita_plan(q, k, landmarks, 5), mita(q, k, v, landmarks, 5)
    q[0, 1, 3] = torch.nan
    out = mita(q, k, v, landmarks, 5, plan=plan, execution="triton")
    assert out[0, 1, 3].isnan().all()
    assert torch.allclose(out[:, 0], clean[:, 0])


@here
def test_a_layer_with_prefix_tokens_on_a_rectangle() -> None:
    grid = Grid(4, 6, 1)
    torch.manual_seed(0)
    layer = parse("MiTA(m=6, k=5)").build(Site(16, 2, grid)).double().to(DEVICE)
    x = torch.randn(2, grid.tokens, 16, dtype=torch.float64, device=DEVICE)
    expected = layer.reference(x, grid)
    layer.operator.execution = "triton"
    assert torch.allclose(layer(x, grid), expected, rtol=0, atol=1e-12)


@here
def test_what_the_kernels_cannot_do_is_refused() -> None:
    leaves = inputs((1, 1, 12, 12, 8, 8, 4))
    trained = Mask(bias=torch.zeros(1, 1, 1, 12, dtype=torch.float64, device=DEVICE, requires_grad=True))
    for options in ({"experts": 2}, {"mask": trained}):
        with pytest.raises(UnsupportedError, match='use "auto"'):
            mita(*leaves, 5, execution="triton", **options)


@pytest.mark.skipif(HERE, reason="here they run")
def test_without_a_gpu_they_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r'needs (a CUDA device|the package).*use "auto"'):
        mita(*inputs((1, 1, 12, 12, 8, 8, 4)), 5, execution="triton")
