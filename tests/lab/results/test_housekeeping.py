"""What a store has, and what `regard results prune` deletes."""

import io
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import answer
from regard.cli.app import run
from regard.cli.results import _line
from regard.core import StoreError
from regard.files.atomic import write_atomically
from regard.lab.results import housekeeping
from regard.lab.results.housekeeping import StoredRun, remove, select_runs, stored_runs
from regard.lab.results.results import Results


@pytest.fixture
def store(tmp_path: Path) -> Results:
    """A finished, a failed and a stopped run, and a folder that is no run."""
    store = Results(tmp_path / "results")
    store.finish("a" * 12, {"status": "done", "study": "pilot", "row": "SKA", "seed": 1, "metrics": {"top1": 50.0}})
    store.finish("b" * 12, {"status": "failed", "error": "x"})
    (store.folder("c" * 12)).mkdir()
    (store.folder("c" * 12) / "metrics.csv").write_bytes(b"x" * 5000)
    (store.root / "studies").mkdir()
    return store


def test_runs_have_state_size_and_age(store: Results) -> None:
    long_ago = time.time() - 10 * 86400
    for path in (store.folder("c" * 12), store.folder("c" * 12) / "metrics.csv"):
        os.utime(path, (long_ago, long_ago))
    done, failed, begun = stored_runs(store)
    assert (done.state, failed.state, begun.state) == ("done", "failed", "begun")
    assert (done.study, done.row, done.seed) == ("pilot", "SKA", 1)
    assert begun.size == 5000
    assert (done.days, begun.days) == (pytest.approx(0, abs=0.1), pytest.approx(10, abs=0.1))
    runs = [done, failed, begun]
    assert select_runs(runs, ("begun", "done"), days=5.0) == select_runs(runs, size=4999) == [begun]


def test_a_run_that_is_executed_or_has_changed_is_kept(store: Results) -> None:
    done, failed, begun = stored_runs(store)
    with store.lock(begun.key):
        assert [run.state for run in stored_runs(store)] == ["done", "failed", "running"]
        assert "running" in remove(store, begun)
    store.finish(begun.key, {"status": "done", "metrics": {"top1": 50.0}})
    assert "done" in remove(store, begun)
    assert remove(store, failed) == ""
    assert [run.key for run in stored_runs(store)] == [done.key, begun.key]
    assert not store.folder(failed.key).exists()


def test_a_run_that_replaces_its_files_meanwhile_is_listed(store: Results) -> None:
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            write_atomically(store.folder("c" * 12) / "last.ckpt", "x")

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        assert {len(stored_runs(store)) for _ in range(200)} == {3}
    finally:
        stop.set()
        writer.join()


def test_a_damaged_outcome_is_a_state(store: Results) -> None:
    (store.folder("a" * 12) / "outcome.json").write_text("{")
    damaged = stored_runs(store)[0]
    assert damaged == StoredRun("a" * 12, "damaged", damaged.size, damaged.days)
    assert remove(store, damaged) == ""


def test_a_link_to_a_folder_is_no_run_of_this_store(store: Results, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (store.root / ("d" * 12)).symlink_to(store.folder("a" * 12))
    assert len(stored_runs(store)) == 3


def test_what_a_link_points_to_is_not_changed(store: Results, tmp_path: Path) -> None:
    mine, key, source = tmp_path / "mine", "b" * 12, Results(tmp_path / "source")
    mine.mkdir()
    (mine / "a.json").write_text("mine")
    (store.folder(key) / "probes").symlink_to(mine)
    (store.folder(key) / "run.json").symlink_to(mine / "a.json")
    (store.root / ("d" * 12)).symlink_to(mine)
    source.finish(key, {"status": "done", "metrics": {"top1": 50.0}})
    (source.folder(key) / "run.json").write_text("new")
    assert housekeeping.bring(source, key, store)
    for change in (store.forget, store.reopen, lambda key: housekeeping.bring(source, key, store)):
        with pytest.raises(StoreError, match=f"{'d' * 12} is a link"):
            change("d" * 12)
    assert {path.name: path.read_text() for path in mine.iterdir()} == {"a.json": "mine"}
    assert (store.folder(key) / "run.json").read_text() == "new"


@pytest.mark.parametrize("name", ["last.ckpt", "metrics.csv", "outcome.json", "run.json", "lock"])
def test_a_folder_of_another_program_is_no_run(tmp_path: Path, name: str) -> None:
    """Lightning calls its files last.ckpt and metrics.csv too, and puts them beside those of the user."""
    store, others = Results(tmp_path), tmp_path / "my_net"
    others.mkdir()
    (others / name).write_text("{}")
    (others / "notes.md").write_text("mine")
    assert stored_runs(store) == store.outcomes() == []
    assert run(["results", "prune", "--results", str(tmp_path), "--state", ",".join(housekeeping.STATES), "--yes"]) == 0
    assert sorted(path.name for path in others.iterdir()) == sorted([name, "notes.md"])


def states(store: Results) -> list[str]:
    return [found.state for found in housekeeping.stored_runs(store)]


@pytest.mark.parametrize(
    ("more", "answer", "code", "left"),
    [
        ([], "n\n", 0, ["done", "failed", "begun"]),
        ([], "\n", 0, ["done", "failed", "begun"]),
        ([], "", 2, ["done", "failed", "begun"]),
        ([], "y\n", 0, ["done"]),
        (["--yes"], "", 0, ["done"]),
        (["--state", "done", "--yes"], "", 0, ["failed", "begun"]),
        (["--larger", "0.004", "--yes"], "", 0, ["done", "failed"]),
        (["--older", "1", "--yes"], "", 0, ["done", "failed", "begun"]),
        (["--larger", "1e308", "--yes"], "", 0, ["done", "failed", "begun"]),
        (["--state", "finished"], "", 2, ["done", "failed", "begun"]),
    ],
    ids=["no", "default", "no answer", "y", "yes", "state", "larger", "older", "larger than all", "unknown"],
)
def test_prune_asks_before_it_deletes(store, monkeypatch, capsys, more, answer, code, left) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert run(["results", "prune", "--results", str(store.root), *more]) == code
    assert states(store) == left


def test_both_verbs_print_json(store: Results, capsys: pytest.CaptureFixture[str]) -> None:
    root = ("--results", str(store.root))
    assert [row["key"] for row in answer(capsys, "results", "list", *root, "--state", "done")] == ["a" * 12]
    with store.lock("c" * 12):
        rows = answer(capsys, "results", "prune", *root, "--state", "failed,begun,running", "--yes")
    assert {row["key"]: row["deleted"] for row in rows} == {"b" * 12: True, "c" * 12: False}


def test_a_list_has_task_data_score_and_date(tmp_path: Path) -> None:
    task = "Classification(host='vit_desk', data='/home/me/my photos of flowers', size=(8, 8))"
    spelling = f"Run(task={task}, mixer=SKA(), seed=1)"
    about = {"spelling": spelling, "sampled": "top1", "metrics": {"top1": 61.25, "loss": 1.0}, "seed": 1}
    store = Results(tmp_path)
    store.finish("a" * 12, {"status": "done", "row": "SKA()", "finished": "2026-07-01T10:00:00+00:00", **about})
    (run,) = stored_runs(store)
    assert (run.task, run.data, run.metric, run.score) == (
        "classification", "/home/me/my photos of flowers", "top1", 61.25,
    )  # fmt: skip
    line = _line(run)
    assert (line["data"], line["date"], line["score"]) == ("my photos of flowers", "2026-07-01", 61.25)
    assert _line(replace(run, state="failed", score=None))["score"] == "failed"
