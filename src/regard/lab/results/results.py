"""Results: the store, a folder with one subfolder for each run. Needs no torch.

`<root>/<key>/` holds run.json, metrics.csv, last.ckpt, probes/*.json, outcome.json, which is written last, and a lock
while the run is executed (lock.py).
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.core import StoreError, require
from regard.core.validation import check_arguments
from regard.files.atomic import store_errors
from regard.files.paths import user_path
from regard.files.records import read_record_if_present, write_record

from .import_checks import check_outcome, check_same_run, is_key
from .lock import alive, lock_run

if TYPE_CHECKING:
    import pandas

Status = Literal["new", "running", "begun", "failed", "done"]


class _Data(dict[str, Any]):
    """The entries about data in the outcome at a path."""

    def __init__(self, entries: dict[str, Any], path: Path) -> None:
        super().__init__(entries)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise StoreError(f"{self.path}: of its data, {name!r} is missing, which is needed here; the file is damaged")


class Results:
    """The store in the folder `root`, which is created when something is written."""

    @check_arguments
    def __init__(self, root: Path | str) -> None:
        self.root = user_path(root, StoreError)

    def __repr__(self) -> str:
        return f"Results({str(self.root)!r})"

    def folder(self, key: str) -> Path:
        """The folder of a run, which may not exist yet."""
        return self.root / key

    def status(self, key: str) -> Status:
        """new: no files. running: locked by a living process. begun: started, not finished. failed, done: its outcome.

        Raises: StoreError if the folder may not be read.
        """
        folder = self.folder(key)
        with store_errors(folder, "read"):
            if alive(folder / "lock"):
                return "running"
            outcome = self.outcome(key)
            if outcome is not None:
                return "done" if outcome.get("status") == "done" else "failed"
            started = any((folder / name).exists() for name in ("run.json", "metrics.csv", "last.ckpt"))
        return "begun" if started else "new"

    def lock(self, key: str, wait: float = 0.0) -> AbstractContextManager[Path]:
        """Lock a run for this process, in a `with` block that gets its folder.

        A lock is taken over if its process is dead or, on another machine, has not renewed it for a minute; a suspended
        process of this machine keeps its lock. wait: seconds to wait for a lock that another process holds. A folder
        in which an error leaves nothing but run.json is removed: nothing was started.
        Raises: Busy if another process holds the lock, with whose it is and how to clear it; StoreError if the folder
        cannot be written or is a link.
        """
        return lock_run(self.folder(key), wait)

    def finish(self, key: str, outcome: dict[str, Any]) -> None:
        """Write the outcome, atomically; of several threads or processes the last one's remains.

        Raises: StoreError, also if the fields of the outcome do not agree with one another.
        """
        path = self.folder(key) / "outcome.json"
        check_outcome(path, {**outcome, "key": key})
        write_record(path, {**outcome, "key": key})

    def outcome(self, key: str) -> dict[str, Any] | None:
        """The outcome of a run, None if it has none yet.

        Raises: StoreError if the file is damaged, belongs to another run, or its fields do not agree with one another
        or with run.json.
        """
        path = self.folder(key) / "outcome.json"
        value = read_record_if_present(path)
        if value is None:
            return None
        check_outcome(path, value)
        if value["key"] != path.parent.name:
            raise StoreError(f"{path} is the outcome of run {value['key']}; move it to a folder of that name")
        check_same_run(path, value)
        return value

    def data(self, key: str) -> dict[str, Any]:
        """What the outcome of a run says of the data of its training; {} without an outcome.

        Raises: as `outcome`; also what is returned raises StoreError, for an entry that it lacks.
        """
        return _Data((self.outcome(key) or {}).get("data") or {}, path=self.folder(key) / "outcome.json")

    def keys(self) -> list[str]:
        """The names of all folders that are keys, sorted: another one is no run's, whatever its files are called.

        Raises: StoreError if the store may not be read.
        """
        with store_errors(self.root, "read"):
            if not os.path.lexists(self.root):
                return []
            return [name for name in sorted(os.listdir(self.root)) if is_key(name) and self.folder(name).is_dir()]

    def outcomes(self) -> list[dict[str, Any]]:
        """All outcomes in the store, by key. Raises: StoreError if the store may not be read or a file is damaged."""
        return [outcome for outcome in map(self.outcome, self.keys()) if outcome is not None]

    def forget(self, key: str) -> None:
        """Delete the files of a run, so that it starts again. Raises: Busy, StoreError."""
        with self.lock(key) as folder:
            for path in sorted(folder.rglob("*"), reverse=True):
                if path.name == "lock":
                    continue
                with store_errors(path):
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def reopen(self, key: str) -> None:
        """Delete the outcome of a failed run, so that it continues from its checkpoint. Raises: Busy, StoreError."""
        with self.lock(key) as folder, store_errors(folder):
            (folder / "outcome.json").unlink(missing_ok=True)

    def frame(self) -> "pandas.DataFrame":
        """One row for each finished run: key, study, scale, row, seed, status, costs and metrics."""
        require("pandas")

        import pandas

        names = ("key", "study", "scale", "row", "seed", "status", "seconds", "parameters", "macs", "code")
        rows = [
            {name: outcome.get(name) for name in names} | (outcome.get("metrics") or {}) for outcome in self.outcomes()
        ]
        return pandas.DataFrame(rows, columns=None if rows else list(names))
