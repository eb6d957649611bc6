"""Compiled kernels: whether this installation has them for this processor, and what all of them must do."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from operators import Run, check_error
from regard import Grid, MixerConfig, Site
from regard.core import UnsupportedError
from regard.mixers.shared.native import LIBRARY
from regard.testing.subject import gap

needs_kernels = pytest.mark.skipif(LIBRARY is None, reason="this installation has no compiled kernels")


def runs_kernel(name: str, call: Callable[[], object]) -> bool:
    """Whether a call runs the kernel of this name."""
    with torch.profiler.profile() as profile:
        call()
    return any(event.key == f"regard::{name}" for event in profile.key_averages())


def check_threads(run: Run, inputs: Sequence[Tensor]) -> None:
    """The number of threads changes no bit of outputs and gradients. The inputs are worth the start of threads."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            out = run(*inputs)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for more in results[1:] for x, y in zip(results[0], more, strict=True))


def check_rounded(
    out: Tensor, rounded: Sequence[Tensor], exact: Tensor, whole: Sequence[Tensor], allowed: float, gradients: float
) -> None:
    """Output and gradients for inputs of another precision, relative to the size of those in float64."""
    ahead = torch.randn_like(exact)
    pairs = zip(
        torch.autograd.grad(out, rounded, ahead.to(out.dtype)), torch.autograd.grad(exact, whole, ahead), strict=True
    )
    for (one, other), limit in (((out, exact), allowed), *((pair, gradients) for pair in pairs)):
        assert one.dtype == rounded[0].dtype
        assert gap(one.double(), other) < limit * other.abs().max().item()


def check_strides(run: Run, plain: Run, more: Callable[[Tensor], tuple[Tensor, ...]] = lambda q: ()) -> None:
    """A model's packed q, k and v, keys that samples share, and a transposed width. more: inputs that follow from q."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 30, 3, 2, 8, dtype=torch.float64).permute(2, 0, 3, 1, 4)
    static = torch.randn(1, 2, 30, 8, dtype=torch.float64).expand(2, -1, -1, -1)
    turned = torch.randn(2, 2, 8, 30, dtype=torch.float64).mT
    for keys, values in ((k, v), (static, v), (turned, turned)):
        inputs = [x.detach().requires_grad_() for x in (q, keys, values, *more(q))]
        ahead = torch.randn(2, 30, 2, 8, dtype=torch.float64).transpose(1, 2)
        results = [(out, *torch.autograd.grad(out, inputs, ahead)) for out in (run(*inputs), plain(*inputs))]
        assert max(gap(one, other) for one, other in zip(*results, strict=True)) < 1e-12


def check_vmap(run: Run, plain: Run, inputs: Sequence[Tensor]) -> None:
    """`torch.vmap` of the kernel and of "auto", which takes PyTorch's operators there, also in `torch.func.grad`."""
    stacked = [torch.stack([x, x.flip(0)]) for x in inputs]
    for execution in ("native", "auto"):
        one = partial(run, execution=execution)
        mapped = torch.vmap(one)(*stacked)
        assert gap(mapped[0], plain(*inputs)) < 1e-13
        assert gap(mapped[1], mapped[0].flip(0)) < 1e-13
        shared = torch.vmap(one, in_dims=(0, *[None] * (len(inputs) - 1)))(stacked[0], *inputs[1:])
        assert gap(shared[0], mapped[0]) < 1e-13
    found, wanted = (torch.func.grad(lambda q, f=f: f(q, *inputs[1:]).sum())(inputs[0]) for f in (one, plain))
    assert gap(found, wanted) < 1e-12


def check_once(out: Tensor, x: Tensor) -> None:
    """A second derivative is refused."""
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    check_error(UnsupportedError, "cannot be differentiated twice", grad.sum().backward)


def opcheck(name: str, *inputs: Any) -> None:
    """The kernel is registered properly: its schema, its gradients, its shapes, also where sizes are symbols."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    loose = {"atol": 1e-2, "rtol": 1e-2} if inputs[0].dtype == torch.bfloat16 else {}
    torch.library.opcheck(getattr(torch.ops.regard, name), inputs, test_utils=checks, **loose)


def check_compile_takes_it_and_export_does_not(config: MixerConfig, operator: str) -> None:
    """`torch.compile` keeps the kernel as an operator of its graph; an exported program needs no Regard."""
    layer, x, graphs = config.build(Site(16, 2, Grid(4, 6))), torch.randn(2, 24, 16), []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=keep, fullgraph=True)
    assert gap(compiled(x, Grid(4, 6)), layer(x, Grid(4, 6))) < 1e-6
    assert f"torch.ops.regard.{operator}" in graphs[0]

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return layer(x, Grid(4, 6))

    program = torch.export.export(Model(), (x,), strict=False)
    assert "regard" not in str(program.graph)
    assert gap(program.module()(x), layer(x, Grid(4, 6))) < 1e-6
