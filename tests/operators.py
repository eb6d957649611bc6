"""Checks of operator functions on tensors (batch, heads, tokens, width), of layers and of errors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.core import Grid, Mixer
from regard.testing.subject import gap

Run = Callable[..., Tensor]


def check_error(
    error: type[Exception], message: str, call: Callable[..., object], /, *args: Any, **kwargs: Any
) -> None:
    """The call raises this error, with a message in which the pattern `message` occurs."""
    with pytest.raises(error, match=message):
        call(*args, **kwargs)


def count_flops(run: Callable[..., object], *args: Any) -> int:
    """Floating-point operations of `run(*args)`, two for each product, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        run(*args)
    return counter.get_total_flops()


def draw_qkv(n: int = 13, m: int = 9, d: int = 8, e: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q (3, 2, n, d), k (3, 2, m, d) and v (3, 2, m, e), normally distributed."""
    return [torch.randn(3, 2, *shape, dtype=dtype) for shape in ((n, d), (m, d), (m, e))]


def draw_on(grid: Grid) -> list[Tensor]:
    """q, k and v of a grid's tokens in float64, of widths 8, 8 and 6, with gradients; the same each time."""
    torch.manual_seed(0)
    return [x.requires_grad_() for x in draw_qkv(grid.tokens, grid.tokens, e=6)]


def check_gradients(fast: Tensor, plain: Tensor, inputs: Sequence[Tensor], tolerance: float = 1e-11) -> None:
    """The gradients of two outputs, for one random gradient of the output, are finite and equal."""
    output_gradient = torch.randn_like(plain)
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    grads = (torch.autograd.grad(out, inputs, output_gradient, **options) for out in (fast, plain))
    for actual, expected in zip(*grads, strict=True):
        assert gap(actual, expected) < tolerance
        assert actual.isfinite().all()


def check_same(
    fast: Tensor, plain: Tensor, inputs: Sequence[Tensor], tolerance: float = 1e-12, gradients: float = 1e-11
) -> None:
    """Two outputs are equal within a tolerance, and their gradients within another."""
    assert gap(fast, plain) < tolerance
    check_gradients(fast, plain, inputs, gradients)


def check_transforms(run: Run, inputs: Sequence[Tensor]) -> None:
    """`torch.func`: gradients of a batch and of each image, and a directional derivative, equal those of autograd."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    argnums = tuple(range(len(inputs)))
    out = run(*inputs)
    expected = torch.autograd.grad(out.square().sum(), inputs)
    inputs = [x.detach() for x in inputs]

    def batch_loss(*inputs: Tensor) -> Tensor:
        return run(*inputs).square().sum()

    def image_loss(*image: Tensor) -> Tensor:
        return batch_loss(*(x[None] for x in image))

    per_image = torch.vmap(torch.func.grad(image_loss, argnums))(*inputs)
    for grads in (torch.func.grad(batch_loss, argnums)(*inputs), per_image):
        assert max(gap(a, b) for a, b in zip(grads, expected, strict=True)) < 1e-10
    assert gap(torch.vmap(lambda *image: run(*(x[None] for x in image))[0])(*inputs), out) < 1e-12
    direction = [torch.randn_like(x) for x in inputs]
    _, slope = torch.func.jvp(batch_loss, tuple(inputs), tuple(direction))
    expected_slope = sum((x * grad).sum() for x, grad in zip(direction, expected, strict=True))
    assert abs(slope - expected_slope) < 1e-9 * max(1.0, abs(expected_slope))


def check_layer_transforms(layer: Mixer, x: Tensor, grid: Grid) -> None:
    """`torch.func`: outputs of a layer, and gradients of its parameters, for each image equal those of autograd."""
    parameters = dict(layer.named_parameters())
    assert gap(torch.vmap(lambda image: layer(image[None], grid)[0])(x), layer(x, grid)) < 1e-12

    def loss(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (image[None], grid)).square().sum()

    grads = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, image in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, image), list(parameters.values()))
        for name, grad in zip(parameters, expected, strict=True):
            assert gap(grads[name][i], grad) < 1e-11, name


def check_hidden(run: Run, inputs: Sequence[Tensor], keep: Tensor, queries: Tensor | None = None) -> Tensor:
    """inf and NaN at hidden tokens change neither outputs nor gradients, which are finite, and zero at these tokens.

    queries: passed before the inputs; hidden queries may change their own rows of the output, which are not compared.
    Returns the outputs.
    """
    hidden = ~keep[:, None, :, None]
    first = () if queries is None else (queries.detach().requires_grad_(),)
    expected = run(*first, *inputs).detach()
    for bad in (math.inf, math.nan):
        leaves = [x.detach().masked_fill(hidden, bad).requires_grad_() for x in inputs]
        out = run(*first, *leaves)
        assert gap(out, expected) == 0
        grads = torch.autograd.grad(out.sum(), (*first, *leaves))
        assert all(grad.isfinite().all() for grad in grads)
        assert not any(grad.masked_select(hidden).any() for grad in grads[len(first) :])
        if queries is not None:
            out = run(queries.detach().masked_fill(hidden, bad), *leaves)
            assert gap(out.masked_fill(hidden, 0), expected.masked_fill(hidden, 0)) == 0
    return expected


def check_heads_apart(run: Run, inputs: Sequence[Tensor]) -> None:
    """A value that is not finite changes neither outputs nor gradients of another image or head."""

    def outputs(inputs: Sequence[Tensor]) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = run(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    clean = outputs(inputs)
    for index in range(len(inputs)):
        for head in ((0, 0), (-1, -1)):
            for value in (math.inf, -math.inf, math.nan):
                bad = [x.detach().clone() for x in inputs]
                bad[index][*head, 7, 2] = value
                results = outputs(bad)
                assert not results[0][head].isfinite().all()
                for actual, expected in zip(results, clean, strict=True):
                    actual[head] = expected[head]
                    assert gap(actual, expected) < 1e-12
