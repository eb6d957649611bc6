"""Claims that operator functions on heads make, of (images, heads, tokens, width), and one of layers."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.core import Grid, Mixer
from regard.testing.subject import gap

Run = Callable[..., Tensor]


def check_transforms(run: Run, inputs: Sequence[Tensor]) -> None:
    """`torch.func`: gradients of a batch and of every image, and a derivative along a direction, are autograd's."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    places = tuple(range(len(inputs)))
    out = run(*inputs)
    wanted = torch.autograd.grad(out.square().sum(), inputs)
    inputs = [x.detach() for x in inputs]

    def of_all(*inputs: Tensor) -> Tensor:
        return run(*inputs).square().sum()

    def of_one(*image: Tensor) -> Tensor:
        return of_all(*(x[None] for x in image))

    for made in (torch.func.grad(of_all, places)(*inputs), torch.vmap(torch.func.grad(of_one, places))(*inputs)):
        assert max(gap(one, other) for one, other in zip(made, wanted, strict=True)) < 1e-10
    assert gap(torch.vmap(lambda *image: run(*(x[None] for x in image))[0])(*inputs), out) < 1e-12
    ahead = [torch.randn_like(x) for x in inputs]
    _, slope = torch.func.jvp(of_all, tuple(inputs), tuple(ahead))
    along = sum((x * grad).sum() for x, grad in zip(ahead, wanted, strict=True))
    assert abs(slope - along) < 1e-9 * max(1.0, abs(along))


def check_layer_transforms(layer: Mixer, x: Tensor, grid: Grid) -> None:
    """`torch.func`: outputs of a layer, and the gradients of its parameters, for every image are autograd's."""
    own = dict(layer.named_parameters())
    assert gap(torch.vmap(lambda image: layer(image[None], grid)[0])(x), layer(x, grid)) < 1e-12

    def of_one(own: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(layer, own, (image[None], grid)).square().sum()

    made = torch.vmap(torch.func.grad(of_one), (None, 0))(own, x)
    for i, image in enumerate(x):
        for name, wanted in zip(own, torch.autograd.grad(of_one(own, image), list(own.values())), strict=True):
            assert gap(made[name][i], wanted) < 1e-11, name


def check_hidden(run: Run, inputs: Sequence[Tensor], keep: Tensor, queries: Tensor | None = None) -> Tensor:
    """inf and NaN at hidden tokens reach neither outputs nor gradients, which are finite, and zero at these tokens.

    queries: they go before the inputs; hidden ones may spoil their own rows of the output, which are then not compared.
    Returns the outputs.
    """
    hidden = ~keep[:, None, :, None]
    first = () if queries is None else (queries.detach().requires_grad_(),)
    out = run(*first, *inputs).detach()
    for bad in (math.inf, math.nan):
        leaves = [x.detach().masked_fill(hidden, bad).requires_grad_() for x in inputs]
        again = run(*first, *leaves)
        assert gap(again, out) == 0
        grads = torch.autograd.grad(again.sum(), (*first, *leaves))
        assert all(grad.isfinite().all() for grad in grads)
        assert not any(grad.masked_select(hidden).any() for grad in grads[len(first) :])
        if queries is not None:
            spoilt = run(queries.detach().masked_fill(hidden, bad), *leaves)
            assert gap(spoilt.masked_fill(hidden, 0), out.masked_fill(hidden, 0)) == 0
    return out


def check_heads_apart(run: Run, inputs: Sequence[Tensor]) -> None:
    """A number that is not finite reaches neither outputs nor gradients of another image or head."""

    def made(inputs: Sequence[Tensor]) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = run(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    clean = made(inputs)
    for place in range(len(inputs)):
        for head in ((0, 0), (-1, -1)):
            for value in (math.inf, -math.inf, math.nan):
                bad = [x.detach().clone() for x in inputs]
                bad[place][*head, 7, 2] = value
                found = made(bad)
                assert not found[0][head].isfinite().all()
                for one, other in zip(found, clean, strict=True):
                    one[head] = other[head]
                    assert gap(one, other) < 1e-12
