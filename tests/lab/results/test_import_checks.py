"""What is refused at the door of a store, before anything is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from pilot_store import make_store
from regard.core import StoreError
from regard.files.data_record import names_digest
from regard.files.records import write_record
from regard.lab.engine.export import import_runs
from regard.lab.results.results import Results

KEY = "0" * 12
OUTCOME = {"key": KEY, "status": "done", "metrics": {"top1": 1.0}}
CLAIM = {"a": "SKA", "b": "w/o", "metric": "top1"}
SNAPSHOT = {"study": "x", "scale": "desk", "metric": "top1", "baseline": "a", "rows": [], "runs": []}
LISTED = {**SNAPSHOT, "rows": [{"label": "a"}], "runs": [{"key": KEY, "row": "a", "seed": 0}]}
EVIDENCE = {"snapshot": LISTED, "outcomes": [{**OUTCOME, "seed": 77}]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({**OUTCOME, "metrics": [1.0]}, "metrics of an outcome is of type list, expected dict or null"),
        ({**OUTCOME, "metrics": {"top1": "high"}}, "metric 'top1' is 'high'"),
        ({**OUTCOME, "bits": 5}, "bits of an outcome is of type int"),
        ({**OUTCOME, "diverged": 1}, "diverged of an outcome is of type int"),
        ({**OUTCOME, "data": {"class_names": ["b", "a"], "classes": names_digest(["a", "b"])}}, "class_names is not"),
        ({**OUTCOME, "zz": 1}, "has 'zz', which this Regard does not know"),
        *(
            ({**SNAPSHOT, name: text}, "not the name of a study")
            for name, texts in {
                "study": ("../x", "..", ""),
                "scale": ("de-sk", "desk+x"),
                "variant": ("a-b", "/x"),
            }.items()
            for text in texts
        ),
        *(
            ({**SNAPSHOT, "decide": {"pairs": [pairs], "shares": [1.0], "level": 0.05}}, f"interim analyses, {said}")
            for pairs, said in (
                ("a", "Looks has pairs="),
                (None, "Looks has pairs="),
                (True, "Looks has pairs="),
                (10**9, "interim analyses are rising numbers of pairs from 3 to 1000, not"),
            )
        ),
        (EVIDENCE, "given.json is taken: one of the two is damaged"),
        ({**SNAPSHOT, "rows": [{"spelling": "SKA()"}]}, "a row of a snapshot lacks label"),
        ({**SNAPSHOT, "runs": [5]}, "has int instead of a run of a snapshot"),
        ({**SNAPSHOT, "runs": [{"key": "x", "row": "a", "seed": 0}]}, "expected 12 hexadecimal digits"),
        ({**OUTCOME, "status": "fine"}, "the status is 'fine', expected done or failed"),
        ({**OUTCOME, "bits": "8A==", "data": {"test": 8}}, "has top1 1, but its bits have 50 % correct"),
        (
            {**OUTCOME, "metrics": {"top1": None, "loss": 1.0}, "bits": "8A==", "data": {"test": 8}},
            "has top1 null, but its bits have 50 % correct",
        ),
        ({**SNAPSHOT, "rows": [{"label": "a", "paper": {"top1": "x"}}]}, "the paper number 'top1' is 'x'"),
        ({**SNAPSHOT, "rows": [{"label": "a", "card": {"x": 1}}]}, "a card lacks title"),
        ({**SNAPSHOT, "runs": [{"key": KEY, "row": "a", "seed": True}]}, "seed of a run of a snapshot is of type bool"),
        ({**SNAPSHOT, "runs": [{"key": KEY, "row": "b", "seed": 0}]}, "belongs to 'b', which is not one row"),
        ({**SNAPSHOT, "rows": [{"label": "a"}] * 2, "runs": [{"key": KEY, "row": "a", "seed": 0}]}, "is not one row"),
        (
            {**SNAPSHOT, "rows": [{"label": "a"}], "runs": [{"key": KEY, "row": "a", "seed": i} for i in (0, 1)]},
            "seed 1, is also listed with another seed or key",
        ),
        (
            {**SNAPSHOT, "rows": [{"label": "a"}], "runs": [{"key": i * 12, "row": "a", "seed": 0} for i in "01"]},
            "seed 0, is also listed with another seed or key",
        ),
        ({**SNAPSHOT, "notes": [5]}, "notes is [5], expected texts"),
        ({**SNAPSHOT, "data": {"train": "8"}}, "train of the data is of type str"),
        ({**SNAPSHOT, "rows": [{"label": "a", "notes": [5]}]}, "notes of a row is [5], expected texts"),
        ({**SNAPSHOT, "rows": [{"label": "a", "control": "no"}]}, "control of a row of a snapshot is of type str"),
        ({**SNAPSHOT, "rows": [{"label": "a", "card": {"title": "x", "scaling": [5]}}]}, "scaling of a card is [5]"),
        ({**SNAPSHOT, "claims": [{"a": "a"}]}, "a claim of a snapshot lacks b, metric"),
        ({**SNAPSHOT, "claims": [{**CLAIM, "than": ["x"]}]}, "has than ['x'], expected two labels"),
        ({**SNAPSHOT, "claims": [{**CLAIM, "than": ["x", 5]}]}, "has than ['x', 5], expected two labels"),
        ({**SNAPSHOT, "claims": [{**CLAIM, "than": "xy"}]}, "than of a claim of a snapshot is of type str"),
        ({"snapshot": None, "outcomes": []}, "has NoneType instead of a snapshot"),
        ({"snapshot": {"study": "x"}, "outcomes": []}, "a snapshot lacks scale, metric, baseline, rows, runs"),
        ({"snapshot": SNAPSHOT, "outcomes": {"a": 1}}, "an outcome lacks status, key"),
    ],
)
def test_a_value_of_another_kind_is_named_and_nothing_is_written(tmp_path: Path, value: Any, said: str) -> None:
    write_record(tmp_path / "given.json", value)
    with pytest.raises(StoreError, match="given.json") as error:
        import_runs(tmp_path / "given.json", Results(tmp_path / "here"))
    assert said in str(error.value)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(range(256)), "is not JSON"), (b'{"version": 3, "key": "0"}', "has version 3"), (b"{}", "is no record"),
        (b"[]", "is no record"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_record_of_this_version_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "given.json").write_bytes(content)
    with pytest.raises(StoreError, match=f"given.json {said}"):
        import_runs(tmp_path / "given.json", Results(tmp_path / "here"))


def test_one_bad_file_of_a_folder_keeps_all_out(tmp_path: Path) -> None:
    there, here = make_store(tmp_path / "there"), Results(tmp_path / "here")
    (there.folder("f" * 12)).mkdir()
    write_record(there.folder("f" * 12) / "outcome.json", {"key": "f" * 12, "status": "done", "metrics": 5})
    with pytest.raises(StoreError, match="metrics of an outcome"):
        import_runs(there.root, here)
    assert not here.root.exists()


@pytest.mark.parametrize("values", [(LISTED, {**OUTCOME, "seed": 77}), ({**OUTCOME, "seed": 77}, LISTED)])
def test_a_run_that_the_store_knows_with_another_seed_is_refused(tmp_path: Path, values: Any) -> None:
    for number, value in enumerate(values):
        write_record(tmp_path / f"{number}.json", value)
    store = Results(tmp_path / "here")
    import_runs(tmp_path / "0.json", store)
    before = sorted(store.root.rglob("*"))
    with pytest.raises(StoreError, match="with seed 0 in its study, but its outcome has seed 77; nothing of .*1.json"):
        import_runs(tmp_path / "1.json", store)
    assert sorted(store.root.rglob("*")) == before


@pytest.mark.parametrize("name", ["mita_table2-desk", "quickstart-desk", "ska_table1-desk"])
def test_the_committed_evidence_is_taken(tmp_path: Path, name: str) -> None:
    file = Path(__file__).parents[3] / "docs" / "results" / name / "evidence.json"
    counts = import_runs(file, Results(tmp_path))
    assert counts["new"] == len(json.loads(file.read_text())["outcomes"])
    assert (counts["known"], counts["snapshots"], counts["left out"]) == (0, 1, 0)
