"""Factors by FlexAttention: its forward pass without compilation on a CPU, its gradients by a twin and on a GPU."""

import pytest
import torch
from torch import Tensor

import factor_inputs
from operators import check_error
from regard import Grid, Mask
from regard.core import UnsupportedError
from regard.mixers.factors.factors import factors, factors_reference
from regard.mixers.factors.flex import flex_inputs
from regard.mixers.factors.forms import Case
from regard.mixers.factors.inputs import sort_terms

pytestmark = pytest.mark.untyped  # the score functions are compiled
TERMS = ["1111", "1100", "1001", "0110", "0001", "0010", "0000"]
GRIDS = {"rectangle": Grid(4, 6), "prefix and suffix": Grid(5, 3, 2, 1), "a row": Grid(1, 9, 1)}


def inputs(grid: Grid, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[dict, dict]:
    """q, k and v, and the other arguments, which get gradients."""
    made, rest = factor_inputs.inputs("", grid, batch=2, e=5)

    def moved(x: Tensor) -> Tensor:
        return x.to(device, dtype).requires_grad_()

    tables = tuple(map(moved, rest["tables"]))
    rest = {"grid": grid, "tables": tables, "u": moved(rest["u"]), "t": moved(rest["t"]), "scale": 0.7}
    return {name: moved(x) for name, x in made.items()}, rest


def twin(case: Case) -> Tensor:
    """What FlexAttention computes, over all pairs: the same score and the same keys that are kept."""
    q, k, v, score, keep = flex_inputs(case)
    pairs = [
        torch.arange(n, device=v.device).view([-1 if axis == own else 1 for axis in range(4)])
        for own, n in enumerate((*q.shape[:3], k.shape[2]))
    ]
    logits = score(q @ k.mT, *pairs)
    if keep is not None:
        logits = logits.masked_fill(~keep(*pairs), -torch.inf)
    return (logits.softmax(-1) @ v)[..., : case.v.shape[-1]]


def masks(grid: Grid) -> list[Mask | None]:
    keep = torch.arange(grid.tokens).expand(2, -1) < torch.tensor([[grid.tokens - 2], [3]])
    bias = torch.randn(2, grid.tokens, grid.tokens, dtype=torch.float64)
    return [None, Mask(keep=keep), Mask(bias=bias), Mask(causal=True)]


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
@pytest.mark.parametrize("terms", TERMS)
def test_forward_is_the_reference(terms: str, grid: Grid) -> None:
    made, rest = inputs(grid)
    with torch.no_grad():
        for window in (0, 3):
            for mask in masks(grid) if not window else [None]:
                found = factors(**made, **rest, terms=terms, window=window, mask=mask, execution="flex")
                expected = factors_reference(**made, **rest, terms=terms, window=window, mask=mask)
                assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_strides_and_keys_on_another_grid() -> None:
    made, rest = inputs(Grid(6, 4, 1))
    coarse = Grid(3, 2, 1)
    picked = torch.tensor([0, 1, 3, 9, 11, 17, 19])
    few = {"q": made["q"], "k": made["k"][:, :, picked], "v": made["v"][:, :, picked]}
    with torch.no_grad():
        for window in (0, 3):
            options = {"terms": "1111", "key_grid": coarse, "stride": 2, "window": window}
            found = factors(**few, **rest, **options, execution="flex")
            assert torch.allclose(found, factors_reference(**few, **rest, **options), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("terms", TERMS[:5])
def test_gradients_of_the_same_score(terms: str, window: int) -> None:
    grid = GRIDS["prefix and suffix"]
    made, rest = inputs(grid)
    q, k, v = made.values()
    used = [(q, terms[:2]), (k, terms[0] + terms[2]), (v, "1"), (rest["u"], terms[2]), (rest["t"], terms[3])]
    leaves = [x for x, on in used if "1" in on]
    leaves += rest["tables"] if "1" in terms[1] + terms[3] else []
    case = sort_terms(q, k, v, terms, grid, grid, rest["tables"], rest["u"], rest["t"], 0.7, window, 1, 1, None, None)
    found = torch.autograd.grad(twin(case).square().sum(), leaves)
    expected = factors_reference(**made, **rest, terms=terms, window=window).square().sum()
    for one, other in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("terms", TERMS[:5])
def test_on_a_gpu(terms: str, window: int) -> None:
    made, rest = inputs(GRIDS["prefix and suffix"], torch.float32, "cuda")
    leaves = [*made.values(), *rest["tables"]]
    found, expected = (
        form(**made, **rest, terms=terms, window=window, **more)
        for form, more in ((factors, {"execution": "flex"}), (factors_reference, {}))
    )
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
    grads = (torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) for out in (found, expected))
    for one, other in zip(*grads, strict=True):
        assert one is other is None or torch.allclose(one, other, rtol=1e-2, atol=1e-2)


def test_gradients_on_a_cpu_are_refused() -> None:
    made, rest = inputs(Grid(2, 3))
    said = r'gradients on CUDA only.*use "auto"'
    check_error(UnsupportedError, said, factors, **made, **rest, terms="1111", execution="flex")
