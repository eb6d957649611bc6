"""The comparison of features: rows of Table 1, and which networks are compared."""

from pathlib import Path

import pytest

from regard.core import RegardError
from regard.explain.cka import compare_layers
from regard.lab.engine.analysis import Source, run_analysis, trained_runs
from regard.lab.results.results import Results
from regard.lab.studies import load_analysis, load_study
from regard.lab.studies.overlays import first_inputs
from regard.lab.studies.ska.cka import TEST_IMAGES, similarities
from regard.lab.train.load import load_trained
from trained_rows import train_rows


def test_rows_and_tasks_are_those_of_table_1() -> None:
    mine, theirs = load_study("ska_cka"), load_study("ska_table1")
    for scale in ("smoke", "desk", "paper"):
        here, there = mine.setting(scale), theirs.setting(scale)
        known = {row.label: row for row in theirs.rows("paper" if scale == "paper" else "desk")}
        assert here.task == there.task
        assert {row.label for row in here.rows} == {"Softmax", "SKA a", "CSKA", "w/o", "0000"}
        assert all(row == known[row.label] for row in here.rows)
    assert mine.setting("paper").recipe == theirs.setting("paper").recipe


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    store = Results(tmp_path_factory.mktemp("store"))
    train_rows(store, "ska_cka", ("Softmax", "CSKA"), seeds=2)
    return Source(store, "smoke")


def test_networks_of_different_seeds_are_compared(source: Source) -> None:
    runs = {(row, seed): key for row, seed, key in trained_runs(source, "ska_cka")}
    models = {place: load_trained(source.run(key), source.store) for place, key in runs.items()}
    images = first_inputs(source.run(runs["Softmax", 0]).task, TEST_IMAGES)
    found = similarities(source)
    assert list(found) == ["Softmax", "CSKA"]
    pairs = {"Softmax": [("Softmax", 0, 1)], "CSKA": [("CSKA", 0, 1), ("CSKA", 1, 0)]}
    for row, every in found.items():
        assert len(every) == len(pairs[row])
        for one, (other, i, j) in zip(every, pairs[row], strict=True):
            expected = compare_layers(models["Softmax", i], models[other, j], images)
            assert (one.values == expected.values).all()


def test_the_sheets_have_the_means_and_the_distance_to_two_seeds(source: Source) -> None:
    same, pairs = run_analysis(load_analysis("ska_cka_layers"), source.store, "smoke")["sheets"]
    found = similarities(source)
    rows = [dict(zip(same["columns"], row, strict=True)) for row in same["rows"]]
    assert [(row["softmax beside"], row["depth"], row["pairs"]) for row in rows] == [
        ("Softmax", 1, 1), ("Softmax", 2, 1), ("CSKA", 1, 2), ("CSKA", 2, 2),
    ]  # fmt: skip
    floor, mean = (sum(float(one.values[1, 1]) for one in found[row]) / len(found[row]) for row in ("Softmax", "CSKA"))
    assert rows[3]["CKA"] == pytest.approx(mean, abs=1e-4)
    assert rows[3]["below softmax"] == pytest.approx(floor - mean, abs=2e-4)
    assert rows[1]["below softmax"] == 0
    assert "Not trained yet: SKA a" in same["note"]
    assert len(pairs["rows"]) == 2 * 4
    assert pairs["rows"][1][:3] == ("Softmax", 1, 2)
    assert pairs["rows"][1][3] == pytest.approx(float(found["Softmax"][0].values[0, 1]), abs=1e-4)


def test_one_seed_is_not_enough(tmp_path: Path) -> None:
    store = Results(tmp_path)
    train_rows(store, "ska_cka", ("Softmax",))
    with pytest.raises(RegardError, match="needs two seeds"):
        load_analysis("ska_cka_layers").compute(Source(store, "smoke"))
