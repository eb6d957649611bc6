"""The contract of `regard.testing` over every mechanism and every projection; and that it catches what is wrong."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import MIXERS, Card, ConfigError, Contract, Cost, Grid, Mask, Mixer, MixerConfig, Site, Softmax, parse
from regard.core import GridError
from regard.mixers.softmax import SoftmaxOperator
from regard.testing import GRIDS, ITEMS, ContractError, check
from samples import pairs, samples, texts
from wrong_softmax import Louder, Wrong

PAPERS = ("Softmax", "SKA", "CSKA", "XCA", "MiTA", "Factors")


def _slow_pair(text: str) -> Any:
    """The papers' mechanisms with F-SNE run each time, the others, which take minutes, in `make slow`."""
    quick = text.startswith(PAPERS) and "FSNE" in text
    return text if quick else pytest.param(text, marks=pytest.mark.slow)


def _slow_export(text: str) -> Any:
    """One mechanism for each way of exporting is exported each time."""
    quick = text.startswith(("Softmax", "CSKA", "MiTA", "Factors('0111'"))
    return text if quick else pytest.param(text, marks=pytest.mark.slow)


def _slow_variant(text: str) -> Any:
    """One sample of the papers' mechanisms is compiled each time; test_traced_for_gpus.py traces one of each."""
    quick = text.startswith(PAPERS) and ("FSNE" in text or text == texts(type(parse(text)))[0])
    return text if quick else pytest.param(text, marks=pytest.mark.slow)


@pytest.mark.parametrize("cls", MIXERS, ids=lambda cls: cls.__name__)
def test_samples_are_of_the_mechanism_and_fit_small_grids(cls: type[MixerConfig]) -> None:
    assert all(type(parse(text)) is cls for text in texts(cls))
    fitting = 0
    for grid in GRIDS:
        with suppress(ConfigError, GridError):
            parse(texts(cls)[0]).build(Site(16, 2, grid))
            fitting += 1
    assert fitting >= 3


@pytest.mark.parametrize("text", samples())
def test_contract(text: str) -> None:
    """The first sample of a mechanism on every grid, the others on those with the most kinds of tokens, and a line."""
    first = text == texts(type(parse(text)))[0]
    report = check(parse(text), grids=() if first else (Grid(4, 6, 2), Grid(3, 5, 1, 2), Grid(1, 12)))
    assert "reference" in report.passed
    assert len(report.grids) >= (3 if first else 1)


LONG = ("MoBA()", "NSA()", "MiTA(m=9, k=9, experts=2)", "MiTA(m=9, k=9)", "TopK(k=4)")
"""They route where there are many tokens."""


def first_layer(text: str, grids: Iterable[Grid]) -> tuple[Mixer, Grid]:
    for grid in grids:
        with suppress(ConfigError, GridError):
            layer = parse(text).build(Site(16, 2, grid))
            layer(torch.zeros(1, grid.tokens, 16), grid)
            return layer, grid
    raise AssertionError(f"{text} takes none of the grids")


@pytest.mark.parametrize("text", [*samples(), *LONG])
def test_no_images_give_no_outputs_and_no_gradients(text: str) -> None:
    """On the first grid that the layer takes, and on another if it takes that."""
    layer, grid = first_layer(text, (Grid(14, 14),) if text in LONG else GRIDS)
    other = replace(grid, height=grid.height + 5, width=11)
    for form, on in product((layer, layer.reference), (grid, other)):
        x = torch.zeros(0, on.tokens, 16, requires_grad=True)
        with suppress(*([GridError] if on == other else [])):
            out = form(x, on)
            assert out.shape == (0, on.tokens, 16)
            out.sum().backward()
            assert x.grad is not None


@pytest.mark.parametrize("text", [_slow_pair(pair) for pair in pairs()])
@pytest.mark.untyped  # test_contract checks the annotations; they take a third of the time
def test_contract_with_every_projection(text: str) -> None:
    check(parse(text), grids=(Grid(4, 6, 2), Grid(3, 5, 1, 2)), skip={"compile": "tested alone"})


@pytest.mark.untyped
@pytest.mark.parametrize("text", [_slow_variant(text) for text in (*samples(), "SKA(projection=FSNE())")])
def test_compiles_without_a_graph_break(text: str) -> None:
    others = dict.fromkeys(ITEMS.keys() - {"compile"}, "test_contract")
    assert check(parse(text), grids=(Grid(3, 5, 1, 2), Grid(8, 7, 1)), skip=others).passed == ("compile",)


class OnGrid(nn.Module):
    """A layer on one grid, as `torch.export` takes it; in float64, as its graph has no compiled kernels."""

    def __init__(self, text: str, grid: Grid) -> None:
        super().__init__()
        self.grid, self.layer = grid, parse(text).build(Site(16, 2, grid)).eval().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.grid)


def exported(model: nn.Module, x: Tensor, batch: Any = None) -> nn.Module:
    """The model as a graph as ONNX takes it: in core operators, attention in one piece, no stable sort.

    batch: the range of its first dimension; None is the batch of x alone.
    """
    table = torch.export.default_decompositions()
    table.pop(torch.ops.aten.scaled_dot_product_attention.default, None)
    shapes = None if batch is None else {"x": {0: batch}}
    program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=False).run_decompositions(table)
    assert not [node for node in program.graph.nodes if "sort.stable" in str(node.target)]
    return program.module()


OPTIONS = (
    "Factors('1100')",
    "Factors('0111', window=3)",
    "DeformableConv(version=2)",
    "DynamicConv(kernel=3)",
    "Conv(extra='zero')",
)
SORTING = ("MiTA(m=16, k=9)", "Reformer(chunk=8)", "DAT(stride=2, kernel=3)")
"""They sort many tokens or add a learned bias. Exported with gradients on, as an unwary user has it, where the order of
memory differs from graph to graph, and so for one batch."""


@pytest.mark.untyped
@pytest.mark.parametrize(
    "text", [_slow_export(text) for text in (*(texts(cls)[0] for cls in MIXERS), *OPTIONS, *SORTING)]
)
def test_exports_on_a_fixed_grid(text: str) -> None:
    """For any batch but for ViT3, in which each image has a convolution of its own: a group, whose number is fixed."""
    torch.manual_seed(0)
    grid = Grid(14, 14) if text in SORTING else Grid(4, 6, 1)
    fixed = text.startswith("ViT3") or text in SORTING
    model, x = OnGrid(text, grid), torch.randn(5, grid.tokens, 16, dtype=torch.float64)
    graph = exported(model, x if fixed else x[:2], None if fixed else torch.export.Dim("batch", max=64))
    with torch.no_grad():
        assert torch.allclose(graph(x), model(x), rtol=0, atol=1e-12)


# Mechanisms that break one item each; the contract must name it.


class BrokenOperator(SoftmaxOperator):
    fault: str

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Tensor:
        if self.fault == "scale":
            return super().forward(q * 1.01, k, v, **options)
        if self.fault == "batch":
            return super().forward(q, k - k.mean(0), v, **options)
        if self.fault == "detach":
            return super().forward(q, k.detach(), v, **options)
        if self.fault == "images":
            return super().forward(q + 0 * q.mean(0), k, v, **options)
        if self.fault == "padding":  # a hidden key's weight is 0, and 0 times NaN is NaN
            mask = options.get("mask") or Mask()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(q, k.shape[-2]))
        if self.fault == "dtype":
            return super().forward(q, k, v, **options).float()
        return super().forward(q, k, v, **options)

    def reference(self, q: Any, k: Any, v: Any, **options: Any) -> Tensor:
        if self.fault == "batch":
            return super().reference(q, k - k.mean(0), v, **options)
        return super().reference(q, k, v, **options)

    def weights(self, q: Any, k: Any, v: Any, **options: Any) -> Tensor:
        k = k - k.mean(0) if self.fault == "batch" else k
        return super().weights(q, k, v, **options) * (0.5 if self.fault == "weights" else 1.0)


@dataclass(frozen=True, kw_only=True)
class Broken(Softmax):
    fault: str = ""
    card: ClassVar[Card] = Softmax.card

    def operator(self, site: Site) -> SoftmaxOperator:
        operator = BrokenOperator(self)
        operator.fault = self.fault
        return operator

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        extra = {"parameters": Cost(1, 0), "macs": Cost(0, 1)}.get(self.fault, Cost())
        if self.fault == "memory" and site.memory is not None:
            extra = Cost(0, site.memory.tokens)
        return super().operator_cost(site, accounting) + extra

    def build(self, site: Site, shared: torch.nn.Module | None = None) -> Any:
        layer = super().build(site, shared)
        if self.fault == "input checks":
            layer.check = lambda x, grid, mask, memory=None: None  # type: ignore[method-assign]
        return layer


FAULTS = {
    "scale": "reference",
    "batch": "batch",
    "images": "images",
    "memory": "cross",
    "detach": "gradients",
    "weights": "weights",
    "parameters": "parameters",
    "macs": "macs",
    "input checks": "input checks",
    "padding": "masks",
    "dtype": "shape",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(fault: str) -> None:
    with pytest.raises(ContractError, match=rf"{FAULTS[fault]} on "):
        check(Broken(fault=fault))


@dataclass(frozen=True, kw_only=True)
class ThreeFaults(Wrong):
    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        return super().operator_cost(site, accounting) + Cost(1, 1)


def test_wrong_counts_do_not_hide_each_other_or_a_wrong_form() -> None:
    with pytest.raises(ContractError, match=r"^ThreeFaults\(\): parameters on .*; macs on .*; reference on "):
        check(ThreeFaults())


@dataclass(frozen=True, kw_only=True)
class WrongOption(Softmax):
    samples: ClassVar[tuple[str, ...]] = ("WrongOption()", "WrongOption(gate=True)")

    def operator(self, site: Site) -> SoftmaxOperator:
        return Louder(self) if self.gate else super().operator(site)


def test_a_class_stands_for_all_of_its_samples() -> None:
    assert "reference" in check(WrongOption()).passed
    with pytest.raises(ContractError, match=r"^WrongOption\(gate=True\): reference on "):
        check(WrongOption)
    report = check(Broken, skip={"gradients": "slow"})
    assert (report.spelling, report.skipped["gradients"]) == ("Broken()", "slow")


def test_a_mechanism_without_faults_passes() -> None:
    assert "spelling" in check(Broken()).passed


def test_locality_and_order_are_claims_that_can_fail() -> None:
    with pytest.raises(ContractError, match=r"local on .* influences others beyond 1"):
        check(Softmax(), contract=Contract(reach=1))
    with pytest.raises(ContractError, match=r"order on "):
        check(OrderMatters(), skip=dict.fromkeys(("parameters", "macs"), "it has none"))


@dataclass(frozen=True, kw_only=True)
class OrderMatters(Softmax):
    masks: ClassVar[frozenset[str]] = frozenset()
    cross: ClassVar[bool] = False

    def build(self, site: Site, shared: torch.nn.Module | None = None) -> Any:
        return Shifted(self, site)


class Shifted(Mixer):
    """Every token gets its place among the tokens added; no parameters."""

    def forward(self, x: Any, grid: Grid, mask: Mask | None = None, rope: Any = None) -> Any:
        self.check(x, grid, mask)
        return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]

    reference = forward


def test_skipped_items_keep_their_reason() -> None:
    report = check(Softmax(), skip={"compile": "because"}, grids=(Grid(2, 3),))
    assert report.skipped["compile"] == "because"
    assert "not applicable  compile: because" in str(report)
    with pytest.raises(ConfigError, match="did you mean compile"):
        check(Softmax(), skip={"compiles": "because"})
