"""`torch.compile` traces every mechanism for CUDA without a graph break. Tensors without data stand for those of a GPU,
so that the branches that only a GPU takes are traced here too."""

import warnings
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import regard.mixers.mita.mita as mita_module
from regard import MIXERS, ConfigError, Grid, MixerConfig, Site, parse
from regard.core import GridError
from regard.mixers.shared import block_attention, routed_attention
from samples import texts

pytestmark = pytest.mark.untyped


def built(text: str, grids: tuple[Grid, ...]) -> tuple[nn.Module, Grid]:
    """The layer on the first grid that it takes."""
    for grid in grids:
        with suppress(ConfigError, GridError):
            return parse(text).build(Site(64, 2, grid)).eval(), grid
    raise AssertionError(f"{text} takes none of the grids")


def trace(layer: nn.Module, grid: Grid, dtype: torch.dtype) -> Tensor:
    """The layer's output, without data, of two images on "cuda", by a graph in one piece; a warning is an error."""
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for module in layer.modules():
            for kept in (module._parameters, module._buffers):
                for name, value in kept.items():
                    if value is not None:
                        kind = dtype if value.is_floating_point() else value.dtype
                        moved = torch.empty(value.shape, dtype=kind, device="cuda")
                        kept[name] = nn.Parameter(moved) if isinstance(value, nn.Parameter) else moved
        x = torch.empty(2, grid.tokens, 64, dtype=dtype, device="cuda")
        return torch.compile(layer, fullgraph=True, backend="eager")(x, grid)


@pytest.mark.parametrize("cls", MIXERS, ids=lambda cls: cls.__name__)
def test_every_mechanism(cls: type[MixerConfig]) -> None:
    layer, grid = built(texts(cls)[0], (Grid(6, 4, 1), Grid(4, 4), Grid(9, 7, 1), Grid(8, 8)))
    out = trace(layer, grid, torch.float32)
    assert (out.shape, out.device.type) == ((2, grid.tokens, 64), "cuda")


@pytest.mark.parametrize(
    ("text", "taken"),
    [("MiTA(m=64, k=64)", "triton"), ("MoBA(block=8, k=3)", "triton"), ("MiTA(m=64, k=64, experts=2)", "grouped")],
)
def test_what_long_sequences_take(text: str, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = executions_of(monkeypatch)
    trace(*built(text, (Grid(64, 72),)), torch.bfloat16)
    assert seen == {taken}


@pytest.mark.parametrize("text", ["MiTA(m=16, k=16)", "MoBA(block=8, k=2)"])
def test_few_logits_are_all_computed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = executions_of(monkeypatch)
    trace(*built(text, (Grid(16, 16),)), torch.float32)
    assert seen == {"dense"}
    monkeypatch.setattr(routed_attention, "FEW", 2 * 256 * 256 - 1)
    trace(*built(text, (Grid(16, 16),)), torch.float32)
    assert seen == {"dense", "grouped"}


def executions_of(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The set into which the executions go that "auto" takes from here on."""
    seen = set[str]()

    def noting(choose: Callable[..., str]) -> Callable[..., str]:
        def noted(*arguments: object) -> str:
            seen.add(taken := choose(*arguments))
            return taken

        return noted

    for module in (mita_module, block_attention):
        monkeypatch.setattr(module, "choose", noting(module.choose))
    return seen
