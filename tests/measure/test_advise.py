"""Advice: exact counts over all layers, refusals with reasons, and a front that nothing beats."""

import json

import pytest

from regard.cli.app import run as command
from regard.core import Grid
from regard.measure.advise import Advice, _beats, advise, attention_sites
from regard.measure.cost import model_cost
from regard.mixers.factors import Factors
from regard.mixers.mita import MiTA
from regard.mixers.ska import SKA
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA

HOST = "vit_desk(size=(16, 24), patch=4, dim=16, depth=3, heads=2)"


def test_the_sites_are_those_of_the_host() -> None:
    ((site, number),) = attention_sites(HOST).items()
    assert number == 3
    assert (site.dim, site.heads, site.grid.height, site.grid.width) == (16, 2, 4, 6)
    ((larger, _),) = attention_sites("deit_tiny_patch16_224", (64, 32)).items()
    assert (larger.grid, larger.dim) == (Grid(4, 2, 1), 192)


def test_counts_are_those_of_the_formulas() -> None:
    found = {one.mixer: one for one in advise(HOST, [SKA(), XCA()], seconds=0.001, batch=1)}
    assert set(found) == {"Softmax()", "SKA()", "XCA()"}
    for config in (SKA(), XCA()):
        one, other = (model_cost(HOST, mixer) for mixer in (config, Softmax()))
        mine, soft = found[f"{type(config).__name__}()"], found["Softmax()"]
        assert (mine.params or 0) - (soft.params or 0) == one.params - other.params
        assert (mine.macs or 0) - (soft.macs or 0) == one.macs - other.macs
    assert found["Softmax()"].ratio == 1
    assert found["SKA()"].ratio == pytest.approx((found["SKA()"].both or 0) / (found["Softmax()"].both or 1))


def test_what_cannot_stand_there_is_refused_with_a_reason() -> None:
    *good, bad = advise(HOST, [MiTA(m=4, k=100)], seconds=0.001, batch=1)
    assert [one.mixer for one in good] == ["Softmax()"]
    assert bad.refused
    assert bad.params is None


def test_masks_and_other_sizes_are_told() -> None:
    found = {one.mixer: one for one in advise(HOST, [XCA(), Factors(terms="0110")], seconds=0.001, batch=1)}
    assert found["Softmax()"].masks == tuple(sorted(Softmax().masks))
    assert found["XCA()"].masks == tuple(sorted(XCA().masks))
    assert found["Softmax()"].other_grid is True


def test_the_front_is_what_nothing_beats() -> None:
    def row(params: int, macs: int, both: float) -> Advice:
        return Advice(mixer="x", params=params, macs=macs, both=both)

    assert _beats(row(1, 1, 1.0), row(1, 2, 1.0))
    assert not _beats(row(1, 1, 1.0), row(1, 1, 1.0))
    assert not _beats(row(1, 2, 1.0), row(2, 1, 1.0))
    found = advise(HOST, [SKA(), XCA(), Factors(terms="0000")], seconds=0.001, batch=1)
    assert any(one.pareto for one in found)
    assert all(one.pareto != any(_beats(other, one) for other in found) for one in found)
    assert [one.both for one in found] == sorted(one.both or 0 for one in found)


def test_the_verb_prints_a_row_a_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["advise", HOST, "--mixers", "SKA; XCA()", "--seconds", "0.001", "--json"]) == 0
    assert {row["mixer"] for row in json.loads(capsys.readouterr().out)} == {"Softmax()", "SKA()", "XCA()"}
    assert command(["advise", HOST, "--mixers", "SKA", "--seconds", "0.001"]) == 0
    assert "3 with 16 channels, 2 heads on 4x6" in capsys.readouterr().out
    assert command(["advise", HOST, "--mixers", "None"]) == 2
    assert command(["advise", "resnet18", "--mixers", "SKA"]) == 2
