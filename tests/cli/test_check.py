"""`regard check`: the contract suite from the command line, and what it is told of each mechanism."""

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

from regard import MIXERS, Card, Site, Softmax, parse
from regard.cli.app import run
from regard.cli.check import SMALL, checked, told
from regard.core import ConfigError, GridError
from regard.mixers.softmax import SoftmaxOperator
from regard.testing import GRIDS, ITEMS
from samples import SAMPLES, Sample

EVERY = [sample for found in SAMPLES.values() for sample in found]


@pytest.mark.parametrize("name", [cls.__name__ for cls in MIXERS])
def test_the_arguments_fit_small_grids(name: str) -> None:
    config = parse(SMALL.get(name, name))
    assert type(config).__name__ == name
    fitting = 0
    for grid in GRIDS:
        try:
            config.build(Site(16, 2, grid))
        except (ConfigError, GridError):
            continue
        fitting += 1
    assert fitting >= 3


@pytest.mark.parametrize("sample", EVERY, ids=lambda sample: sample.text)
def test_the_suite_is_told_what_the_tests_of_this_package_tell_it(sample: Sample) -> None:
    """So `regard check` passes for every configuration for which the package's own contract tests pass."""
    mine = told(sample.config)
    assert mine["skip"] == sample.options.get("skip", {})
    for name in ("macs", "counted"):
        assert mine.get(name) == sample.options.get(name)


def test_a_mechanism_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "SKA()", "--no-compile", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["mechanism"], row["result"], row["failure"]) == ("SKA()", "passed", "")
    assert {"reference", "gradients", "macs", "masks"} <= set(row["passed"])
    assert set(row["passed"]) | set(row["skipped"]) == set(ITEMS)
    assert row["skipped"]["compile"] == "left out (--no-compile)"


def test_the_table_says_why_items_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "XCA", "--no-compile"]) == 0
    out = capsys.readouterr().out
    assert "skipped: compile (XCA): left out" in out
    assert "skipped: weights (XCA): no matrix of token weights" in out


def test_a_failure_is_named_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "MiTA(m=400)", "--no-compile"]) == 1
    out = capsys.readouterr().out
    assert "failed: MiTA(m=400) refuses every grid" in out


@pytest.mark.parametrize("text", ["None", "Sofmax", "SNE()"])
def test_what_is_no_mechanism_is_wrong_use(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", text]) == 2
    assert text.strip("()") in capsys.readouterr().err


class Louder(SoftmaxOperator):
    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Tensor:
        return super().forward(q * 1.01, k, v, **options)


@dataclass(frozen=True, kw_only=True)
class Wrong(Softmax):
    card: ClassVar[Card] = Softmax.card

    def operator(self, site: Site) -> SoftmaxOperator:
        return Louder(self)


def test_a_wrong_mechanism_is_found() -> None:
    row = checked(Wrong(), compiled=False)
    assert row["result"] == "failed"
    assert "reference on" in row["failure"]


@pytest.mark.slow
def test_every_mechanism_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--no-compile", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["mechanism"].partition("(")[0] for row in rows] == [cls.__name__ for cls in MIXERS]
