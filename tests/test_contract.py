"""The contract of `regard.testing` over every mechanism and every projection; and that it catches what is wrong."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from regard import MIXERS, Card, ConfigError, Cost, Grid, Mask, Mixer, Site, Softmax
from regard.mixers.softmax import SoftmaxOperator
from regard.testing import ContractError, check
from samples import SAMPLES, Sample, pairs, samples

PAPERS = ("Softmax", "SKA", "CSKA", "XCA", "MiTA", "Factors")


def _slow_pair(sample: Sample) -> Any:
    """The papers' mechanisms meet every projection, the others F-SNE; the other pairs take minutes."""
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
        return super().operator_cost(site, accounting) + extra

    def build(self, site: Site, shared: torch.nn.Module | None = None) -> Any:
        layer = super().build(site, shared)
        if self.fault == "doors":
            layer.check = lambda x, grid, mask: None  # type: ignore[method-assign]
        return layer


FAULTS = {
    "scale": "reference",
    "batch": "batch",
    "detach": "gradients",
    "weights": "weights",
    "parameters": "parameters",
    "macs": "macs",
    "doors": "doors",
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
