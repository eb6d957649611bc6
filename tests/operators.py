"""Claims that operator functions on heads make; inputs and output are (images, heads, tokens, width)."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Run = Callable[..., Tensor]


def gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


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
