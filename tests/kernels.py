"""Compiled kernels: whether this installation has them for this processor, and what all of them must do."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from regard import Grid, MixerConfig, Site
from regard.mixers.shared.native import LIBRARY
from regard.testing.subject import gap

needs_kernels = pytest.mark.skipif(LIBRARY is None, reason="this installation has no compiled kernels")


def runs_kernel(name: str, call: Callable[[], object]) -> bool:
    """Whether a call runs the kernel of this name."""
    with torch.profiler.profile() as profile:
        call()
    return any(event.key == f"regard::{name}" for event in profile.key_averages())


def check_threads(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
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
