"""`regard check`: the contract suite from the command line, and what it is told of each mechanism."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from command_line import answer, refused
from regard import MIXERS, parse
from regard.cli.app import run
from regard.cli.check import check_row, comparison_rows, deit_counts
from regard.core import MixerConfig
from regard.lab.studies.mita.printed import PUBLISHED, TINY
from regard.lab.studies.mita.printed import SMALL as DEIT_S
from regard.testing import GRIDS, ITEMS
from regard.testing.external import External
from samples import texts
from wrong_softmax import Wrong


def test_a_mechanism_passes(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = answer(capsys, "check", "SKA()", "--no-compile")
    assert (row["mechanism"], row["result"], row["failure"]) == ("SKA()", "passed", "")
    assert {"reference", "gradients", "macs", "masks"} <= set(row["passed"])
    assert set(row["passed"]) | set(row["skipped"]) == set(ITEMS)
    assert row["skipped"]["compile"] == "left out (--no-compile)"
    (found,) = row["compared"]
    assert found["with"] == "plain equation"
    assert 0 < found["difference"] < 1e-13
    assert found["holds"]


def test_the_table_says_why_items_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "XCA", "--no-compile"]) == 0
    out = capsys.readouterr().out
    assert "skipped: compile (XCA): left out" in out
    assert "skipped: weights (XCA): no matrix of token weights" in out


def test_a_failure_is_named_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "MiTA(m=400)", "--no-compile"]) == 1
    out = capsys.readouterr().out
    assert "failed: MiTA(m=400) refuses every grid" in out


def test_another_package_and_the_published_counts_stand_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Contract, comparison with its difference, DeiT-T and DeiT-S beside the printed ones, in one command."""
    pytest.importorskip("timm")
    assert run(["check", "Softmax()", "--no-compile"]) == 0
    out = capsys.readouterr().out
    assert "torch nn.MultiheadAttention" in out
    assert "e-16" in out or "e-15" in out  # rounding of the processor
    for text in ("5,717,416", "5.7M rounded", "1.25", "1.2G cut off", "22,050,664", "22M rounded", "4.6G rounded"):
        assert text in out, text


@pytest.mark.parametrize("cls", [cls for cls in MIXERS if cls.__name__ in {label[:-2] for label in PUBLISHED}])
def test_the_first_published_row_is_counted(cls: type[MixerConfig]) -> None:
    """The sample for small grids gives way to the paper's configuration."""
    config = parse(texts(cls)[0])
    for size, cells in deit_counts(config, standard=True).items():
        rows = [row for row in PUBLISHED.values() if row.label.startswith(f"{cls.__name__}-{size}") and row.mixer]
        if rows:
            assert (cells["params"], cells["macs"]) == rows[0].body.count(rows[0].mixer)  # type: ignore[arg-type]
            assert cells["printed"]["params"].startswith(rows[0].params)
            assert cells["printed"]["macs"].startswith(rows[0].macs)
        else:
            assert (cells["params"], cells["macs"]) == {"T": TINY, "S": DEIT_S}[size].count(cls())
            assert cells["printed"] is None


def test_counts_are_of_the_configuration_that_is_given() -> None:
    counts = deit_counts(parse("MiTA(m=25, k=30)"))
    assert (counts["T"]["params"], counts["T"]["macs"]) == TINY.count(parse("MiTA(m=25, k=30)"))
    assert counts["T"]["printed"] is None
    printed = deit_counts(parse("MiTA(dwc=3, gate=True)"))["S"]
    assert (printed["params"], printed["printed"]["params"]) == (23_870_824, "22M not reproduced")
    assert deit_counts(parse("MiTA(dwc=3, gate=True)"))["T"]["printed"] is None
    refused = deit_counts(parse("MiTA(m=400)"))["T"]
    assert refused["params"] is None
    assert "400 windows" in refused["note"]


def test_a_difference_that_is_too_large_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def apart() -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(2), torch.tensor([0.0, 1e-6]))]

    wrong = External(mechanism="SKA", package="torch", what="another SKA", pairs=apart)
    monkeypatch.setattr("regard.testing.external.EXTERNAL", (wrong,))
    row = check_row(parse("SKA()"), standard=True, compiled=False)
    assert (row["result"], row["failure"]) == ("failed", "SKA() differs from another SKA")
    assert row["compared"] == [{"with": "another SKA", "difference": pytest.approx(1e-6), "holds": False}]


def test_a_missing_package_is_named_and_the_plain_equation_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs() -> list[tuple[Tensor, Tensor]]:
        raise ModuleNotFoundError("No module named 'unheard_of'", name="unheard_of")

    none = External(mechanism="SKA", package="unheard-of", what="another SKA", pairs=pairs)
    monkeypatch.setattr("regard.testing.external.EXTERNAL", (none,))
    found = comparison_rows(parse("SKA()"), GRIDS)
    assert [one["with"] for one in found] == ["needs unheard-of", "plain equation"]
    assert found[0]["difference"] is None


def test_a_wrong_mechanism_is_found() -> None:
    row = check_row(Wrong(), compiled=False)
    assert row["result"] == "failed"
    assert "reference on" in row["failure"]


@pytest.mark.slow
def test_every_mechanism_passes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, "check", "--no-compile")
    assert [row["mechanism"].partition("(")[0] for row in rows] == [cls.__name__ for cls in MIXERS]
    assert all(one["holds"] for row in rows for one in row["compared"])
    assert all(row["compared"] and row["deit"][size]["params"] for row in rows for size in "TS")


def test_without_a_mechanism_those_of_the_module_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all samples, or else their defaults; a module without mechanisms is refused, not ignored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own_mechanisms.py").write_text(
        "from dataclasses import dataclass\n"
        "from regard import Softmax\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Sampled(Softmax): samples = ('Sampled(scale=0.25)', 'Sampled(gate=True)')\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Plain(Softmax): pass\n"
        "MIXERS = (Sampled, Plain)\n"
    )
    Path("own_models.py").write_text("def net():\n    pass\nHOSTS = (net,)\n")
    rows = answer(capsys, "check", "--import", "own_mechanisms", "--no-compile")
    own = {"Sampled(scale=0.25)": "passed", "Sampled(gate=True)": "passed"}
    assert {row["mechanism"]: row["result"] for row in rows} == {**own, "Plain()": "passed"}
    assert not any(row["deit"] for row in rows)  # the MiTA paper has no counts of them
    rows = answer(capsys, "check", "Sampled()", "--import", "own_mechanisms", "--no-compile")
    assert {row["mechanism"]: row["result"] for row in rows} == own
    refused(capsys, ["check", "--import", "own_models"], "no mechanisms in MIXERS")
