"""The sum over taps of dynamic convolution in Triton, against the plain form in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interpreter import EXACT, check_close, draw, elsewhere, here, run_in_interpreter
from regard.core import UnsupportedError
from regard.mixers.convolutions.dynamic import dynamic_conv_reference
from regard.mixers.convolutions.sampling import margins

pytestmark = pytest.mark.untyped
CASES = {  # (B, g, c, h, w), sides, causal
    "square": ((2, 2, 8, 6, 5), (3, 3), False), "wide": ((1, 3, 5, 4, 9), (1, 5), False),
    "tall": ((3, 1, 20, 7, 3), (5, 1), False), "causal": ((2, 2, 4, 1, 23), (1, 4), True),
    "one channel": ((2, 4, 1, 5, 5), (3, 5), False), "many positions": ((1, 1, 70, 17, 9), (3, 3), False),
}  # fmt: skip


@elsewhere
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def drawn(name: str, dtype: torch.dtype = EXACT) -> tuple[list[Tensor], tuple[int, int], bool]:
    (batch, groups, channels, *size), sides, causal = CASES[name]
    taps = sides[0] * sides[1]
    x, kernels = draw((batch, groups * channels, *size), (batch, groups, taps, *size), dtype=dtype)
    return [x, kernels], sides, causal


def run(x: Tensor, kernels: Tensor, sides: tuple[int, int], causal: bool) -> Tensor:
    from regard.mixers.convolutions.dynamic_triton import sum_taps

    maps = x.unflatten(1, (kernels.shape[1], -1))
    return sum_taps(F.pad(maps, margins(sides, 1, causal)), kernels, sides).flatten(1, 2)


def plain(x: Tensor, kernels: Tensor, sides: tuple[int, int], causal: bool) -> Tensor:
    return dynamic_conv_reference(x, kernels, groups=kernels.shape[1], size=sides, causal=causal)


@here
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str) -> None:
    leaves, sides, causal = drawn(name)
    check_close(lambda *x: run(*x, sides, causal), lambda *x: plain(*x, sides, causal), leaves)


@here
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    leaves, sides, causal = drawn("square", dtype)
    check_close(lambda *x: run(*x, sides, causal), lambda *x: plain(*x, sides, causal), leaves)


@here
def test_no_image() -> None:
    x, kernels = draw((0, 4, 5, 5), (0, 2, 9, 5, 5))
    assert run(x, kernels, (3, 3), False).shape == x.shape


@here
def test_the_operators_keep_the_rules_of_pytorch() -> None:
    import regard.mixers.convolutions.dynamic_triton  # noqa: F401

    padded, kernels = draw((2, 2, 3, 6, 7), (2, 2, 9, 4, 5))
    torch.library.opcheck(torch.ops.regard.sum_taps, (padded, kernels, 3, 3))


@here
def test_no_second_derivative() -> None:
    leaves, sides, causal = drawn("square")
    out = run(*leaves, sides, causal)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated twice"):
        first.sum().backward()
