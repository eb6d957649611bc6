"""The studies of the probes, the profile, and the shipped scores of the controls."""

import json
from pathlib import Path

import pytest

from regard.core import ConfigError, StoreError
from regard.lab.data.boards import NAMES, PROBED
from regard.lab.engine.study import Row
from regard.lab.studies import STUDIES, load_study
from regard.lab.studies.probes.names import AVERAGE, BASELINE, NONE
from regard.lab.studies.probes.profile import Cell, profile_cell, profiles, shipped_controls
from regard.lab.studies.probes.run import LARGE, SWEEP, profile_runs, sweep_runs
from regard.lab.studies.probes.study import CLAIMS, FURTHER, HYPOTHESES, ROWS, protocol
from regard.mixers.static_keys.ska import SKA


def test_every_ability_has_a_study() -> None:
    assert {name for name in STUDIES if name.startswith("probes_")} == {f"probes_{ability}" for ability in PROBED}
    for ability in PROBED:
        study = load_study(f"probes_{ability}")
        assert study.setting("desk").task.data == f"boards(ability={ability})"
        assert study.setting("smoke").task.data == f"digit_boards(ability={ability})"
        assert len(study.setting("desk").numbers) >= 4


def test_hypotheses_name_claims_of_the_studies() -> None:
    claimed = {(ability, claim.a) for ability, claims in CLAIMS.items() for claim in claims}
    named = {(ability, row) for hypothesis in HYPOTHESES for ability, row, _ in hypothesis.claims}
    assert named == claimed


@pytest.mark.parametrize("row", [*ROWS, *FURTHER], ids=lambda row: row.label)
def test_every_row_fits_the_boards(row: Row) -> None:
    task = load_study("probes_content").setting("desk").task
    assert task.trial(row.mixer, row.removed).loss(1).isfinite()


def test_runs_of_hypotheses_come_first() -> None:
    runs = profile_runs((*ROWS, *FURTHER), tuple(PROBED), "boards", seeds=2)
    assert len({probe.run.key for probe in runs}) == len(runs) == 2 * 7 * len((*ROWS, *FURTHER))
    first = runs[: 2 * len(CLAIMS) * len(ROWS)]
    assert {(probe.label, probe.ability) for probe in first} == {(row.label, a) for row in ROWS for a in CLAIMS}


def test_runs_of_a_profile_are_those_of_the_study() -> None:
    (probe,) = profile_runs((Row("any label", SKA()),), ("place",), "boards", seeds=1)
    study = load_study("probes_place")
    (row,) = study.rows("desk", "SKA")
    assert probe.run.key == study.run("desk", row, 0).key


def test_a_sweep_has_large_boards_for_two_mechanisms_once() -> None:
    from regard.mixers import MiTA, Softmax

    rows = (Row("Softmax", Softmax()), Row("SKA", SKA()), Row("MiTA", MiTA(m=9, k=9)))
    runs = sweep_runs(rows, "digit_boards", seeds=2)
    assert len(runs) == 2 * 3 * len(SWEEP) + 2
    assert {probe.label for probe in runs if probe.tokens == LARGE[0] ** 2} == {"Softmax", "MiTA"}
    assert {probe.tokens for probe in runs} == {36, 144, 576}


def test_a_profile_counts_seeds_that_do_not_learn_and_leaves_them_out_of_the_mean() -> None:
    controls = [[20.0, 20.0], [10.0]]
    assert profile_cell([85.0, 21.0], [90.0, 90.0], controls) == Cell(85.0, 2, 1, (85 - 20) / 70)
    assert str(profile_cell([85.0, 21.0], [90.0], controls)) == "85.0 (1 of 2)"
    assert [profile_cell(values, [90.0], controls).mixed for values in ([85.0, 21.0], [85.0], [21.0])] == [
        True, False, False,
    ]  # fmt: skip
    assert profile_cell([30.0, 40.0], [90.0], controls) == Cell(35.0, 2, 0, 15 / 70)
    assert str(profile_cell([30.0, 40.0], [90.0], controls)) == "35.0"
    assert str(profile_cell([], [90.0], controls)) == ""


@pytest.mark.parametrize(("baseline", "controls"), [([], [[20.0]]), ([90.0], [[]]), ([25.0], [[20.0]])])
def test_without_a_gap_nothing_is_said_to_be_learned(baseline: list[float], controls: list[list[float]]) -> None:
    cell = profile_cell([80.0], baseline, controls)
    assert (cell.mean, cell.learned, cell.share) == (80.0, None, None)


def test_profiles_take_the_better_control() -> None:
    controls = {BASELINE: {"content": [90.0]}, AVERAGE: {"content": [20.0]}, NONE: {"content": [40.0]}}
    cells = profiles({"SKA": {"content": [65.0]}}, controls, ["content", "place"])
    assert cells["SKA"]["content"].share == 0.5
    assert cells["SKA"]["place"] == Cell(None, 0)


@pytest.mark.parametrize("boards", NAMES)
def test_shipped_controls_are_of_this_protocol(boards: str) -> None:
    scores = shipped_controls(boards, protocol(boards))
    assert BASELINE in scores
    assert set(scores[BASELINE]) <= set(PROBED)
    assert all(0 <= value <= 100 for parts in scores.values() for values in parts.values() for value in values)


def test_controls_of_another_protocol_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"another protocol.*--train-controls"):
        shipped_controls("boards", protocol("boards") + " ")


def test_a_damaged_table_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "controls.json"
    file.write_text(json.dumps({"boards": {"protocol": ""}}))
    with pytest.raises(StoreError, match="has no scores of the controls on boards"):
        shipped_controls("boards", "", file)


def test_the_protocol_changes_with_what_changes_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.lab.data.generated import REVISIONS

    before = protocol("boards")
    monkeypatch.setitem(REVISIONS, "boards", 2)
    assert protocol("boards") != before
