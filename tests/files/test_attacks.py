"""What others do to a store: links, folders in place of files, many writers, locks of machines that are gone."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regard.core import StoreError
from regard.files.atomic import TEMPORARY, read_bytes, write_atomically
from regard.lab.results import lock as lock_file
from regard.lab.results.lock import Busy
from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results
from threads import in_threads

KEY = "0123456789ab"
YEAR_2099 = 4_070_908_800.0


def together(number: int, work: Callable[[int], None]) -> None:
    """Call `work` in several threads at the same time. Raises: the first error."""
    in_threads(*(partial(work, index) for index in range(number)))


def test_temporary_names_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list[str]()
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: names.append(self.name) or replace(self, target))
    for _ in range(2):
        write_atomically(tmp_path / "x", "1")
    assert len(set(names)) == 2
    assert all(len(name) >= 24 and str(os.getpid()) != name.split(".")[-2] for name in names)


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    (tmp_path / "outcome.json").symlink_to(victim)
    write_atomically(tmp_path / "outcome.json", "new")
    (tmp_path / "metrics.csv").symlink_to(victim)
    with pytest.raises(StoreError):
        Metrics(tmp_path / "metrics.csv", ("top1",)).append({"epoch": 1, "step": 4})
    victim.unlink()  # a link to nothing would create what it names
    with pytest.raises(StoreError, match="a symbolic link, which is not followed"):
        Metrics(tmp_path / "metrics.csv", ("top1",)).append({"epoch": 1, "step": 4})
    assert not victim.exists()
    assert (tmp_path / "outcome.json").read_text() == "new"


def test_a_link_in_a_runs_folder_is_deleted_and_its_target_stays(tmp_path: Path) -> None:
    store, kept = Results(tmp_path / "store"), tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    store.folder(KEY).mkdir(parents=True)
    (store.folder(KEY) / "link").symlink_to(kept)
    store.forget(KEY)
    assert not (store.folder(KEY) / "link").exists()
    assert (kept / "file").read_text() == "x"


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").mkdir()
    with pytest.raises(StoreError, match=r"outcome.json: Is a directory"):
        read_bytes(tmp_path / "outcome.json")


def test_four_threads_write_one_outcome(tmp_path: Path) -> None:
    store = Results(tmp_path)
    for _ in range(5):
        together(4, lambda seed: store.finish(KEY, {"status": "done", "metrics": {"top1": 1.0}, "seed": seed}))
        assert (store.outcome(KEY) or {})["seed"] in range(4)
    assert [path.name for path in store.folder(KEY).iterdir()] == ["outcome.json"]


def test_four_threads_import_one_outcome(tmp_path: Path) -> None:
    from regard.lab.engine.export import import_runs

    Results(tmp_path / "there").finish(KEY, {"status": "done", "metrics": {"top1": 1.0}})
    here = Results(tmp_path / "here")
    together(4, lambda index: import_runs(tmp_path / "there", here, replace=True) and None)
    assert here.status(KEY) == "done"


def lock_of(store: Results, content: Any, date: float | None) -> Path:
    lock = store.folder(KEY) / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(content if isinstance(content, str) else json.dumps(content))
    if date is not None:
        os.utime(lock, (date, date))
    return lock


@pytest.mark.parametrize("date", [None, YEAR_2099], ids=["now", "2099"])
def test_a_lock_of_another_machine_says_whose_it_is_and_how_to_clear_it(tmp_path: Path, date: float | None) -> None:
    store = Results(tmp_path)
    lock = lock_of(store, {"host": "gone", "pid": 5}, date)
    with pytest.raises(Busy) as error, store.lock(KEY):
        pass
    said = str(error.value)
    assert "process 5 on gone, whose lock was renewed at 20" in said
    assert said.endswith(f"if that process is gone, delete {lock}")
    assert ("2099-01-01 00:00:00+00:00, which is in the future" in said) == (date is not None)


@pytest.mark.parametrize("pid", [-1, 0, 10**30, "x", True, None, [1]], ids=repr)
def test_a_lock_without_a_process_is_explained(tmp_path: Path, pid: Any) -> None:
    store = Results(tmp_path)
    lock = lock_of(store, {**lock_file._this_process(), "pid": pid}, None)
    with pytest.raises(Busy, match=f"an unknown process, .* delete {lock}"), store.lock(KEY):
        pass
    os.utime(lock, (1.0, 1.0))
    with store.lock(KEY):
        assert store.status(KEY) == "running"


def test_a_lock_of_a_dead_process_is_taken_whatever_its_date(tmp_path: Path) -> None:
    store = Results(tmp_path)
    lock_of(store, {**lock_file._this_process(), "pid": 2**22 - 7}, YEAR_2099)
    with store.lock(KEY):
        assert store.status(KEY) == "running"


def test_what_killed_processes_left_is_cleared(tmp_path: Path) -> None:
    store = Results(tmp_path)
    store.folder(KEY).mkdir()
    for name, date in (("old", 1.0), ("new", None)):
        path = store.folder(KEY) / f".{name}{TEMPORARY}"
        path.write_text("half")
        if date is not None:
            os.utime(path, (date, date))
    with store.lock(KEY) as folder:
        assert {path.name for path in folder.iterdir()} == {"lock", f".new{TEMPORARY}"}


def test_a_kill_while_a_dead_lock_was_removed_holds_nothing(tmp_path: Path) -> None:
    """The guard of that process stays behind, beside the lock that it wanted to remove."""
    store, dead = Results(tmp_path), {**lock_file._this_process(), "pid": 2**22 - 7}
    lock = lock_of(store, dead, None)
    (lock.parent / "takeover").write_text(json.dumps(dead))
    with store.lock(KEY) as folder:
        assert [path.name for path in folder.iterdir()] == ["lock"]
