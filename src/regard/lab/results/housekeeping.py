"""Housekeeping of a store: which runs it has, with state, size and age; and their removal. Needs no torch."""

import ast
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from regard.core import StoreError
from regard.files.atomic import read_bytes, store_errors, write_atomically
from regard.files.records import read_record_if_present

from .import_checks import spelled_call, spelled_fields
from .lock import Busy
from .results import Results

STATES = ("done", "failed", "begun", "running", "damaged")
"""Of stored runs; "damaged": the outcome or the lock cannot be read."""
_FILES = ("run.json", "outcome.json", "metrics.csv", "last.ckpt", "lock")


@dataclass(frozen=True)
class StoredRun:
    """A run in a store: state (one of `STATES`), size in bytes, days since the last change, and what its files say
    (None: not known): study, row, seed, the name of its task, its data as the user named them, the main metric and its
    value, and when it was finished (ISO 8601, UTC)."""

    key: str
    state: str
    size: int
    days: float
    study: str | None = None
    row: str | None = None
    seed: int | None = None
    task: str | None = None
    data: str | None = None
    metric: str | None = None
    score: float | None = None
    finished: str | None = None


def stored_runs(store: Results) -> list[StoredRun]:
    """All runs of a store, by key; links to folders are left out. Raises: StoreError if a folder may not be read."""
    with store_errors(store.root, "read"):
        folders = [folder for folder in map(store.folder, store.keys()) if not folder.is_symlink()]
        return [_run(store, folder) for folder in folders if any((folder / name).exists() for name in _FILES)]


def select_runs(
    runs: Sequence[StoredRun], states: Sequence[str] = STATES, days: float = 0.0, size: float | int = 0
) -> list[StoredRun]:
    """The runs in one of these states, unchanged for at least so many days, and of at least so many bytes."""
    return [run for run in runs if run.state in states and run.days >= days and run.size >= size]


def remove(store: Results, run: StoredRun) -> str:
    """Delete a run's files and folder; "" if that was done, else why the run is kept.

    A run is kept if a process holds its lock, or if its state has changed since it was listed. Raises: StoreError.
    """
    now = _state(store, run.key)
    if now == "running" or now != run.state:
        return f"it is {now} now"
    try:
        store.forget(run.key)
    except Busy as error:
        return str(error)
    with suppress(OSError):
        store.folder(run.key).rmdir()
    return ""


def bring(source: Results, key: str, store: Results) -> bool:
    """Copy the files of a finished run into another store, unless it has the run already; whether it was copied.

    Raises: StoreError; Busy if a process executes the run there.
    """
    if store.status(key) == "done":
        return False
    with store.lock(key) as folder, store_errors(folder):
        remove_training(folder)
        for path in sorted(source.folder(key).iterdir(), key=lambda path: path.name == "outcome.json"):
            if path.is_file() and path.name != "lock":  # the outcome last: it says that the run is finished
                write_atomically(folder / path.name, read_bytes(path))
    return True


def remove_training(folder: Path) -> None:
    """Delete checkpoints, metrics and maps of a run that was trained here, before another result takes its place.

    Of a link only itself is deleted. Raises: StoreError.
    """
    with store_errors(folder):
        maps = folder / "probes"
        files = [maps] if maps.is_symlink() else maps.glob("*.json")
        for path in (*folder.glob("*.ckpt"), *files, folder / "metrics.csv"):
            path.unlink(missing_ok=True)


def _run(store: Results, folder: Path) -> StoredRun:
    status = [folder.lstat()]
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # the run goes on, and replaces its files
            status.append(path.lstat())
    state = _state(store, folder.name)
    age = max(time.time() - max(entry.st_mtime for entry in status), 0.0)
    outcome = (store.outcome(folder.name) or {}) if state in ("done", "failed") else {}
    size = sum(entry.st_size for entry in status[1:])
    task, data = _task(spelled_fields(outcome.get("spelling") or _spelling(folder)).get("task"))
    metric = outcome.get("sampled")
    score = (outcome.get("metrics") or {}).get(metric)
    further = {name: outcome.get(name) for name in ("study", "row", "seed", "finished")}
    return StoredRun(
        folder.name, state, size, round(age / 86400, 2), task=task, data=data, metric=metric, score=score, **further
    )


def _spelling(folder: Path) -> str | None:
    """Of a run that is not finished; None if its run.json is missing or damaged."""
    with suppress(StoreError):
        return (read_record_if_present(folder / "run.json") or {}).get("spelling")
    return None


def _task(spelled: str | None) -> tuple[str | None, str | None]:
    """Name and data of a spelled task, 'Classification(data="digits", ...)'."""
    name, fields = spelled_call(spelled)
    try:
        return name.lower() or None, str(ast.literal_eval(fields["data"])) if "data" in fields else None
    except (ValueError, SyntaxError):  # of an imported run: shown as it is written
        return name.lower() or None, fields["data"]


def _state(store: Results, key: str) -> str:
    try:
        return store.status(key)
    except StoreError:
        return "damaged"
