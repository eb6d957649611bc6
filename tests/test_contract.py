"""The contract of `regard.testing` over every mechanism and every projection; and that it catches what is wrong."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import MIXERS, Card, ConfigError, Cost, Grid, Mask, Mixer, Site, Softmax
from regard.mixers.softmax import SoftmaxOperator
from regard.testing import ContractError, check
from samples import SAMPLES, Sample, pairs, samples

PAPERS = ("Softmax", "SKA", "CSKA", "XCA", "MiTA", "Factors")


def _slow_pair(sample: Sample) -> Any:
    """The papers' mechanisms and F-SNE run each time, the others, which take minutes, in `make slow`."""
    quick = sample.text.startswith(PAPERS) or "FSNE" in sample.text
    return sample if quick else pytest.param(sample, marks=pytest.mark.slow)


def _slow_variant(sample: Sample) -> Any:
    """One sample of a mechanism is compiled each time, the variants in `make slow`."""
    first = SAMPLES[type(sample.config).__name__][0]
    return sample if sample is first else pytest.param(sample, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [cls.__name__ for cls in MIXERS])
def test_every_mechanism_has_a_sample(name: str) -> None:
    assert name in SAMPLES, f"{name} has no sample in tests/samples.py: add one, the contract runs over it"
    assert all(type(sample.config).__name__ == name for sample in SAMPLES[name])


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.text)
def test_contract(sample: Sample) -> None:
    report = check(sample.config, **sample.options)
    assert "reference" in report.passed
    assert len(report.grids) >= 3


@pytest.mark.parametrize("sample", [_slow_pair(pair) for pair in pairs()], ids=lambda sample: sample.text)
def test_contract_with_every_projection(sample: Sample) -> None:
    check(sample.config, grids=(Grid(4, 6, 2), Grid(3, 5, 1, 2), Grid(8, 7, 1)), **sample.options)


@pytest.mark.untyped
@pytest.mark.parametrize("sample", [_slow_variant(one) for one in samples()], ids=lambda sample: sample.text)
def test_compiles_without_a_graph_break(sample: Sample) -> None:
    report = check(sample.config, grids=(Grid(3, 5, 1, 2), Grid(8, 7, 1)), **sample.options)
    assert "compile" in report.passed or "compile" in sample.options.get("skip", {})


class OnGrid(nn.Module):
    """A layer on one grid, as `torch.export` takes it."""

    def __init__(self, sample: Sample, grid: Grid) -> None:
        super().__init__()
        self.grid, self.layer = grid, sample.config.build(Site(16, 2, grid)).eval()

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


@pytest.mark.untyped
@pytest.mark.parametrize("sample", [_slow_pair(made[0]) for made in SAMPLES.values()], ids=lambda sample: sample.text)
def test_exports_on_a_fixed_grid(sample: Sample) -> None:
    """For any batch but for ViT3, in which each image has a convolution of its own: a group, whose number is fixed."""
    torch.manual_seed(0)
    grid, fixed = Grid(4, 6, 1), sample.text.startswith("ViT3")
    model, x = OnGrid(sample, grid), torch.randn(2, grid.tokens, 16)
    graph = exported(model, x, None if fixed else torch.export.Dim("batch", max=64))
    more = x if fixed else torch.randn(5, grid.tokens, 16)
    with torch.no_grad():
        assert torch.allclose(graph(more), model(more), rtol=0, atol=1e-6)


@pytest.mark.untyped
@pytest.mark.parametrize(
    "text",
    ["Factors('1100')", "Factors('0111', window=3)", "DeformableConv(version=2)", "DynamicConv(kernel=3)",
     "Conv(extra='zero')"],
)  # fmt: skip
def test_exports_for_any_batch_in_other_options(text: str) -> None:
    torch.manual_seed(0)
    grid = Grid(4, 6, 1)
    model, x = OnGrid(Sample(text), grid), torch.randn(5, grid.tokens, 16)
    graph = exported(model, x[:2], torch.export.Dim("batch", max=64))
    with torch.no_grad():
        assert torch.allclose(graph(x), model(x), rtol=0, atol=1e-6)


@pytest.mark.untyped
@pytest.mark.parametrize("text", ["MiTA(m=16, k=9)", "Reformer(chunk=8)", "DAT(stride=2, kernel=3)"])
def test_exports_what_sorts_many_tokens_or_adds_a_learned_bias(text: str) -> None:
    """And with gradients on, as an unwary user has it, where the order of memory differs from graph to graph."""
    torch.manual_seed(0)
    grid = Grid(14, 14)
    model, x = OnGrid(Sample(text), grid), torch.randn(2, grid.tokens, 16)
    graph = exported(model, x)
    with torch.no_grad():
        assert torch.allclose(graph(x), model(x), rtol=0, atol=1e-6)


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
        if self.fault == "doors":
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
    "doors": "doors",
    "padding": "masks",
    "dtype": "shape",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(fault: str) -> None:
    with pytest.raises(ContractError, match=rf"{FAULTS[fault]} on "):
        check(Broken(fault=fault))


def test_a_mechanism_without_faults_passes() -> None:
    assert "spelling" in check(Broken()).passed


def test_locality_and_order_are_claims_that_can_fail() -> None:
    with pytest.raises(ContractError, match=r"local on .* reaches beyond 1 cells"):
        check(Softmax(), reach=1)
    with pytest.raises(ContractError, match=r"order on "):
        check(OrderMatters(), positions=False, skip=dict.fromkeys(("parameters", "macs"), "it has none"))


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
