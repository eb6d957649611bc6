"""Advice for a model that does not exist yet: exact costs, times between the stored ones, and what is not known."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard import MiTA, Softmax
from regard.advice.new_model import MASKS, TABLE, NewModel, advise_new_model, new_site, read_table
from regard.cli.app import app
from regard.core import ConfigError, Grid, StoreError
from regard.mixers.spelling import spell
from tools import advice_table


def wanted(
    tokens: int = 4096, dim: int = 384, task: str = "", masks: tuple[str, ...] = (), backward: bool = False
) -> NewModel:
    return NewModel(site=new_site(tokens, dim), task=task, masks=masks, backward=backward)


def made(folder: Path, high: float = 1.0, low: float = -1.0) -> Path:
    """A table in which MiTA takes 1, 0.25 and 0.0625 of the time at 64, 1024 and 16384 tokens."""
    line = {"mechanism": "MiTA", "spelling": "MiTA()", "row": "MiTA", "study": "made", "task": "classification",
            "data": "squares", "metric": "top1", "tokens": 64, "seeds": 3, "mean": (high + low) / 2, "low": low,
            "high": high, "verdict": ""}  # fmt: skip
    times = {"measured": "a machine", "source": "a page", "tokens": [64, 1024, 16384],
             "forward": {"Softmax": [1, 1, 1], "MiTA": [1, 0.25, 0.0625]},
             "training": {"Softmax": [1, 1, 1], "MiTA": [1, 0.5, None]}}  # fmt: skip
    file = folder / "table.json"
    probes = [{"mechanism": "MiTA", "spelling": "MiTA(m=4, k=4)", "plain": True, "tokens": 36,
               "learned": {"content": 0.5, "place": 0.49}}]  # fmt: skip
    file.write_text(json.dumps({"times": times, "evidence": [line], "abilities": probes}))
    return file


def test_the_shipped_table_is_what_is_measured_and_judged() -> None:
    assert TABLE.read_text(encoding="utf-8") == advice_table.text(), "run `make generated`"


def test_the_table_has_no_row_that_was_trained_in_another_way() -> None:
    rows = {line["row"] for line in read_table()["evidence"]}
    assert {"MiTA", "SKA a"} <= rows
    assert not any("epochs" in row or "plain start" in row for row in rows)


def test_costs_are_those_of_the_layer() -> None:
    model = wanted()
    option = next(o for o in advise_new_model(model).options if o.mixer == "MiTA()")
    assert option.macs == MiTA().cost(model.site).macs
    assert option.macs_ratio == MiTA().cost(model.site).macs / Softmax().cost(model.site).macs


def test_evidence_on_the_task_comes_before_narrower_evidence_on_others(tmp_path: Path) -> None:
    file = made(tmp_path)
    table = json.loads(file.read_text())
    wide = {**table["evidence"][0], "task": "segmentation", "low": -19.0, "high": 8.0}
    file.write_text(json.dumps({**table, "evidence": [*table["evidence"], wide]}))
    answers = {task: " ".join(advise_new_model(wanted(task=task), table=file).answer) for task in
               ("classification", "segmentation", "sequences")}  # fmt: skip
    assert "try first: MiTA()" in answers["classification"]
    assert "compare with" not in answers["classification"]
    assert "keep Softmax()" in answers["segmentation"]
    assert "no study here judged MiTA() in sequences, so compare with Softmax()" in answers["sequences"]


@pytest.mark.parametrize(
    ("tokens", "backward", "ratio"),
    [(64, False, 1), (256, False, 0.5), (1024, False, 0.25), (4096, False, 0.125), (36, False, 1),
     (65536, False, 0.0625), (1024, True, 0.5), (16384, True, 0.5)],
)  # fmt: skip
def test_times_lie_between_the_measured_ones(tmp_path: Path, tokens: int, backward: bool, ratio: float) -> None:
    """0.5 lies in the middle of 1 and 0.25 on logarithmic scales; a pass that was not measured has the nearest."""
    (option,) = advise_new_model(wanted(tokens, backward=backward), [MiTA(m=4, k=4)], made(tmp_path)).options
    assert option.time_ratio is None, "other options than the measured ones have no time"
    (option,) = advise_new_model(wanted(tokens, backward=backward), [MiTA()], made(tmp_path)).options
    assert option.time_ratio == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("low", "high", "named"),
    [(-1.0, 1.0, True), (-3.0, 1.0, False), (-1.5, -0.5, False)],
    ids=["near", "wide", "worse"],
)
def test_only_what_is_faster_and_near_softmax_is_named(tmp_path: Path, low: float, high: float, named: bool) -> None:
    answer = advise_new_model(wanted(), [MiTA()], made(tmp_path, high, low)).answer
    assert ("try first: MiTA()" in answer[1]) is named
    assert ("keep Softmax()" in answer[1]) is not named
    assert ("in probes these did not learn: MiTA() place (" in answer[-1]) is named


def test_abilities_are_those_of_the_configuration_or_its_default(tmp_path: Path) -> None:
    """Below half of what softmax attention gains is not learned; other values than the probed ones are not known."""
    asked = [MiTA(m=4, k=4), MiTA(), MiTA(m=4, k=5), Softmax()]
    options = advise_new_model(wanted(), asked, made(tmp_path)).options
    found = {option.mixer: option.lacking for option in options}
    assert [found[spell(config)] for config in asked] == [("place",), ("place",), None, None]


def test_the_shipped_abilities_are_those_of_the_committed_probes() -> None:
    found = {option.mixer: option.lacking for option in advise_new_model(wanted()).options}
    assert found["SKA()"] == ("content", "salience", "compare", "count")
    assert found["MiTA()"] == ()
    assert found["Factors()"] is None  # probed are 0110, 0100 and 1000, which are no default


def test_where_attention_costs_little_it_stays() -> None:
    assert "keep Softmax()" in advise_new_model(wanted(196, 768)).answer[-1]


def test_what_nobody_has_measured_is_said() -> None:
    advice = advise_new_model(wanted(10_000, task="detection"))
    assert any("accuracy in detection" in line for line in advice.unknown)
    assert any("10,000 tokens" in line for line in advice.unknown)
    assert any("mita_table2" in line for line in advice.studies)
    known = advise_new_model(wanted(task="classification"))
    assert not any("accuracy in classification" in line for line in known.unknown)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_leave_mechanisms_out(mask: str) -> None:
    advice = advise_new_model(wanted(masks=(mask,)))
    names = {option.mixer for option in advice.options}
    assert "Softmax()" in names
    assert "XCA()" not in names or mask == "padding"
    assert any(mask in line for line in advice.left_out)


def test_sites() -> None:
    assert new_site(4096, 384).grid == Grid(64, 64)
    assert new_site(4096, 384).heads == 6
    assert new_site(0, 96, sides=(3, 5)).grid == Grid(3, 5)
    assert new_site(0, 96, sides=(3, 5)).heads == 3
    assert new_site(1000, 64, line=True).grid == Grid(1, 1000)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text("{}")
    with pytest.raises(StoreError, match="no times and verdicts"):
        advise_new_model(wanted(), table=file)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "1000", "--dim", "64"], "1000 tokens are no square"),
        (["--tokens", "16", "--grid", "3x5", "--dim", "64"], "a grid of 3x5 has 15 tokens, not 16"),
        (["--tokens", "16", "--dim", "50"], "50 channels are not a multiple of 32"),
        (["--tokens", "16", "--dim", "64", "--heads", "5"], "64 channels are not a multiple of 5 heads"),
        (["--tokens", "16"], "--dim"),
        (["--dim", "64"], "give --tokens"),
        (["--tokens", "-4", "--dim", "64"], "expected positive numbers"),
        (["--tokens", "16", "--dim", "64", "--task", "segmentatoin"], "no task 'segmentatoin'"),
        (["--tokens", "16", "--dim", "64", "--masks", "holes"], "no mask 'holes'"),
        (["--tokens", "16", "--dim", "64", "--data", "digits"], "--data is for a MODEL that exists"),
        (["--tokens", "16", "--dim", "64", "--results", "/nowhere"], "--results is for a MODEL that exists"),
        (["vit_desk", "--tokens", "16"], "--tokens describes a model that does not exist yet"),
        ([], "advise takes a MODEL"),
    ],
)
def test_nonsense_is_refused_in_a_line(given: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["advise", *given])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.untyped
def test_the_command_prints_json() -> None:
    result = CliRunner().invoke(app, ["advise", "--tokens", "4096", "--dim", "384", "--json"])
    rows = {row["mechanism"]: row for row in json.loads(result.output)}
    assert rows["Softmax()"]["MACs ratio"] == 1
    assert rows["MiTA()"]["time ratio"] < 1
