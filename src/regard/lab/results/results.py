"""Results: the store, a folder with one subfolder for each run. Needs no torch.

`<root>/<key>/` holds run.json, metrics.csv, last.ckpt, probes/*.json, and outcome.json, which is written last. While a
run is executed, a file `lock` beside them names the process; its modification time, renewed every few seconds, shows
that the process is alive. Processes on several machines can work on one study in a shared folder.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.core import StoreError, require
from regard.core.validation import checked
from regard.files.atomic import TEMPORARY, parse_json, read_if_present, store_errors
from regard.files.paths import user_path
from regard.files.records import read_record_if_present, write_record

from .import_checks import OUTCOME_FIELDS, check_outcome, check_same_run

if TYPE_CHECKING:
    import pandas

Status = Literal["new", "running", "begun", "failed", "done"]

RENEW_SECONDS = 5.0
STALE_SECONDS = 60.0


class Busy(StoreError):
    """Another process executes the run."""


class Results:
    """The store in the folder `root`, which is created when something is written."""

    @checked
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
            if _alive(folder / "lock"):
                return "running"
            outcome = self.outcome(key)
            if outcome is not None:
                return "done" if outcome.get("status") == "done" else "failed"
            started = any((folder / name).exists() for name in ("run.json", "metrics.csv", "last.ckpt"))
        return "begun" if started else "new"

    @contextmanager
    def lock(self, key: str, wait: float = 0.0) -> Iterator[Path]:
        """Lock a run for this process: yields its folder.

        A lock is taken over if its process is dead or, on another machine, has not renewed it for a minute; a suspended
        process of this machine keeps its lock. wait: seconds to wait for a lock that another process holds. A folder
        in which an error leaves nothing but run.json is removed: nothing was started.
        Raises: Busy if another process holds the lock, with whose it is and how to clear it; StoreError if the folder
        cannot be written.
        """
        folder, until = self.folder(key), time.monotonic() + wait
        new_root = not self.root.exists()
        while True:
            try:
                mine = _acquire(folder, key)
                break
            except Busy:
                if time.monotonic() >= until:
                    raise
            time.sleep(0.02)
        _remove_temporary(folder)
        stop = threading.Event()
        renewal = threading.Thread(target=_renew, args=(folder / "lock", mine, stop), daemon=True)
        renewal.start()
        try:
            yield folder
        except BaseException:
            with suppress(OSError):
                if {path.name for path in folder.iterdir()} == {"lock", "run.json"}:
                    (folder / "run.json").unlink()
            raise
        finally:
            stop.set()
            renewal.join()
            with suppress(OSError):
                if _read(folder / "lock") == mine:  # else another process took it over while this one was suspended
                    (folder / "lock").unlink()
                    folder.rmdir()  # if it is empty
                    if new_root:
                        self.root.rmdir()

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
        value = read_record_if_present(path, OUTCOME_FIELDS)
        if value is None:
            return None
        check_outcome(path, value)
        if value["key"] != path.parent.name:
            raise StoreError(f"{path} is the outcome of run {value['key']}; move it to a folder of that name")
        check_same_run(path, value)
        return value

    def outcomes(self) -> list[dict[str, Any]]:
        """All outcomes in the store, by key. Raises: StoreError if the store may not be read or a file is damaged."""
        with store_errors(self.root, "read"):
            if not os.path.lexists(self.root):
                return []
            folders = [name for name in sorted(os.listdir(self.root)) if (self.root / name).is_dir()]
        return [outcome for outcome in map(self.outcome, folders) if outcome is not None]

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


def check_held(folder: Path) -> None:
    """Check that a run is still locked by this process or its parent.

    Raises: StoreError if the lock was not renewed for too long, and another process took it over or finished the run.
    """
    holder = _read(folder / "lock") or {}
    ours = _local(holder) and holder.get("pid") in (os.getpid(), os.getppid())
    if "pid" in holder and not ours:
        who = f"process {holder['pid']} on {_host(holder)} has taken it over"
    elif (folder / "outcome.json").exists():
        who = "another process has finished it"
    else:
        return
    raise StoreError(
        f"run {folder.name} was stopped here: this process did not renew its lock for too long, and {who}; repeat the "
        "command when that process has ended"
    )


def _acquire(folder: Path, key: str) -> dict[str, Any]:
    """Create the lock file; the file system guarantees that only one process succeeds. Raises: Busy, StoreError."""
    mine = {**_this_process(), "since": time.time(), "token": secrets.token_hex(8)}
    for _ in range(20):
        _make(folder)
        if _create(folder / "lock", mine):
            return mine
        if _alive(folder / "lock"):
            break
        if not _remove_dead_lock(folder):  # another process does, or was killed while it did
            time.sleep(0.01)
    raise Busy(_busy(folder / "lock", key))


def _make(folder: Path) -> None:
    """Create a folder, which other processes may remove at the same time as long as it is empty. Raises: StoreError."""
    with store_errors(folder):
        for _ in range(20):
            with suppress(FileExistsError, FileNotFoundError):
                folder.mkdir(parents=True, exist_ok=True)
                return
        folder.mkdir(parents=True, exist_ok=True)


def _busy(lock: Path, key: str) -> str:
    """Whose lock it is, when it was renewed, and how to clear it."""
    holder = _read(lock) or {}
    whose = f"process {holder.get('pid')} on {_host(holder)}" if holder.get("host") else "an unknown process"
    try:
        renewed = lock.stat().st_mtime
        date = datetime.fromtimestamp(renewed, UTC).isoformat(" ", "seconds")
    except (OSError, ValueError, OverflowError):
        return f"run {key} is executed by {whose}; wait for it"
    if _local(holder) and renewed <= time.time() + STALE_SECONDS:
        return f"run {key} is executed by {whose}; wait for it"
    future = ", which is in the future," if renewed > time.time() + STALE_SECONDS else ""
    return (
        f"run {key} is executed by {whose}, whose lock was renewed at {date}{future} by the clock of the files; wait "
        f"for it or, if that process is gone, delete {lock}"
    )


def _host(holder: Mapping[str, Any]) -> str:
    """The machine of a lock, in one line whatever the file holds."""
    return " ".join(str(holder.get("host")).split())[:80]


def _remove_temporary(folder: Path) -> None:
    """Delete what killed processes left of files that they wrote; the run is locked by this process."""
    for path in folder.glob(f".*{TEMPORARY}"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                path.unlink()


def _create(path: Path, content: dict[str, Any]) -> bool:
    """True if this process created the file; False if it existed, or its folder was removed meanwhile."""
    with store_errors(path):
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except (FileExistsError, FileNotFoundError):
            return False
        try:
            with open(handle, "wb") as file:
                file.write(json.dumps(content).encode())
        except OSError:  # the disk is full: an empty lock would block the run for a minute
            path.unlink(missing_ok=True)
            raise
    return True


def _remove_dead_lock(folder: Path) -> bool:
    """Delete a dead lock. Only one process does so, and checks the lock again first: a new one is not deleted.

    Returns whether the lock was deleted.
    """
    guard = folder / "takeover"
    with store_errors(folder / "lock"):
        if not _create(guard, _this_process()):
            if not _alive(guard):
                guard.unlink(missing_ok=True)
            return False
        try:
            if _alive(folder / "lock"):
                return False
            (folder / "lock").unlink(missing_ok=True)
            return True
        finally:
            guard.unlink(missing_ok=True)


def _this_process() -> dict[str, Any]:
    """This process. `space` (the PID namespace) distinguishes containers that have the same host name."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return {"host": socket.gethostname(), "space": space, "pid": os.getpid(), "begun": _start_time(os.getpid())}


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a lock file; {} while it is written or if it is damaged; None if there is none."""
    try:
        data = read_if_present(path)
        value = None if data is None else parse_json(path, data)
    except StoreError:
        return {}
    if data is None:
        return None
    pid = value.get("pid") if isinstance(value, dict) else None
    return value if isinstance(pid, int) and not isinstance(pid, bool) and 0 < pid < 2**31 else {}


def _alive(lock: Path) -> bool:
    """Whether the process of a lock lives.

    For a process of another machine, or where start times are not available: whether the lock was renewed in the last
    minute.
    """
    holder = _read(lock)
    if holder is None:
        return False
    if holder and _local(holder):
        if not _exists(holder["pid"]):
            return False
        begun = _start_time(holder["pid"])
        if begun is not None and holder.get("begun") is not None:
            return begun == holder["begun"]  # else another process has this number now
    try:
        return time.time() - lock.lstat().st_mtime < STALE_SECONDS
    except OSError:
        return False


def _local(holder: Mapping[str, Any]) -> bool:
    """Whether a lock's process is on this machine, in this PID namespace."""
    here = _this_process()
    return holder.get("host") == here["host"] and holder.get("space") == here["space"]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, the state first; [] if the system does not provide them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> int | None:
    """Start time of a process on this machine, in clock ticks since boot; None where /proc is missing."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _exists(pid: int) -> bool:
    """Whether a process of this machine lives; a zombie does not. Windows cannot ask: there every process does."""
    if os.name == "nt":  # there `os.kill` would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _stat(pid)[:1] != ["Z"]


def _renew(lock: Path, mine: dict[str, Any], stop: threading.Event) -> None:
    """Renew the modification time of the lock, as long as this process holds it."""
    while not stop.wait(RENEW_SECONDS):
        with suppress(OSError):
            if _read(lock) == mine:
                os.utime(lock)
