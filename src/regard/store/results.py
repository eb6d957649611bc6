"""Results: a folder with one sub-folder a run; the only record of what was done. Needs no torch.

`<root>/<key>/` holds run.json, metrics.csv, last.ckpt, probes/*.json, and outcome.json, which is written last. While a
run is carried out, the file `lock` stands beside them: it says who, and its time, renewed every few seconds, that the
process is alive. Processes on several machines can work on one study in a shared folder.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.core import StoreError

from .files import explained, read_json, write_json

if TYPE_CHECKING:
    import pandas

Status = Literal["new", "running", "begun", "failed", "done"]

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
VERSION = 1
"""Of every file in a store."""
UNSAID = {"torch.compile": False}
"""How a run was computed where its files, written before they said so, do not name it."""


class Busy(StoreError):
    """The run is being carried out by another process."""


class Results:
    """The store in the folder `root`, which is made when first written to."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).expanduser()

    def __repr__(self) -> str:
        return f"Results({str(self.root)!r})"

    def folder(self, key: str) -> Path:
        """The folder of a run (it need not exist)."""
        return self.root / key

    def status(self, key: str) -> Status:
        """new: nothing there. running: a live lock. begun: stopped on the way. failed, done: as its outcome says.

        Raises: StoreError if the folder may not be read.
        """
        folder = self.folder(key)
        with explained(folder, "read"):
            if _alive(folder / "lock"):
                return "running"
            outcome = self.outcome(key)
            if outcome is not None:
                return "done" if outcome.get("status") == "done" else "failed"
            begun = any((folder / name).exists() for name in ("run.json", "metrics.csv", "last.ckpt"))
        return "begun" if begun else "new"

    @contextmanager
    def lock(self, key: str) -> Iterator[Path]:
        """Hold a run alone: yields its folder. A lock is taken over when its process is dead, or, if it cannot be seen
        from here, silent for a minute; a process of this machine that is only suspended keeps it.

        Raises: Busy if another process holds it; StoreError if the folder cannot be written.
        """
        folder = self.folder(key)
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        mine = _acquire(folder, key)
        stop = threading.Event()
        beat = threading.Thread(target=_beat, args=(folder / "lock", mine, stop), daemon=True)
        beat.start()
        try:
            yield folder
        finally:
            stop.set()
            beat.join()
            if _read(folder / "lock") == mine:  # else it was taken from us while this process was suspended
                with suppress(OSError):
                    (folder / "lock").unlink()

    def finish(self, key: str, outcome: dict[str, Any]) -> None:
        """Write the outcome, atomically. Raises: StoreError."""
        write_json(self.folder(key) / "outcome.json", {"version": VERSION, **outcome, "key": key})

    def outcome(self, key: str) -> dict[str, Any] | None:
        """The outcome of a run; None if it has none yet. Raises: StoreError if the file is damaged."""
        path = self.folder(key) / "outcome.json"
        if not path.exists():
            return None
        value = read_json(path)
        if not isinstance(value, dict):
            raise StoreError(f"{path} does not hold an outcome; delete it and run again")
        check_version(path, value)
        return value

    def outcomes(self) -> list[dict[str, Any]]:
        """All outcomes in the store, by key."""
        if not self.root.is_dir():
            return []
        found = (self.outcome(path.parent.name) for path in sorted(self.root.glob("*/outcome.json")))
        return [outcome for outcome in found if outcome is not None]

    def forget(self, key: str) -> None:
        """Remove what a run left, so that it starts anew. Raises: Busy, StoreError."""
        with self.lock(key) as folder:
            for path in sorted(folder.rglob("*"), reverse=True):
                if path.name == "lock":
                    continue
                with explained(path):
                    path.rmdir() if path.is_dir() else path.unlink()

    def reopen(self, key: str) -> None:
        """Remove the outcome of a failed run, so that it goes on from its last checkpoint. Raises: Busy, StoreError."""
        with self.lock(key) as folder, explained(folder):
            (folder / "outcome.json").unlink(missing_ok=True)

    def frame(self) -> "pandas.DataFrame":
        """One line per run: key, study, scale, row, seed, status and its metrics."""
        import pandas

        names = ("key", "study", "scale", "row", "seed", "status", "seconds", "parameters", "macs", "code")
        lines = [{**{name: one.get(name) for name in names}, **(one.get("metrics") or {})} for one in self.outcomes()]
        return pandas.DataFrame(lines, columns=None if lines else list(names))


def check_version(path: Path, value: Mapping[str, Any]) -> None:
    """Raises: StoreError if a file of the store was written by another version of its format."""
    version = value.get("version", VERSION)
    if version != VERSION:
        raise StoreError(
            f"{path} has version {version}, this Regard reads {VERSION}; use the Regard that wrote it, "
            "or another folder with --results"
        )


def check_held(folder: Path) -> None:
    """Raises: StoreError if the run in a folder is no longer this process's, or that of the one which started it:
    another process took over its lock, which was silent for too long, or has finished the run."""
    holder = _read(folder / "lock") or {}
    ours = _local(holder) and holder.get("pid") in (os.getpid(), os.getppid())
    if "pid" in holder and not ours:
        who = f"process {holder['pid']} on {holder.get('host')} has taken it over"
    elif (folder / "outcome.json").exists():
        who = "another process has finished it"
    else:
        return
    raise StoreError(
        f"run {folder.name} is not written here any more: this process was silent for too long, and {who}; repeat the "
        "command when that has ended"
    )


def _acquire(folder: Path, key: str) -> dict[str, Any]:
    """Create the lock file; the system guarantees that one process alone succeeds."""
    mine = {**_self(), "since": time.time(), "token": os.urandom(8).hex()}
    for _ in range(3):
        if _create(folder / "lock", mine):
            return mine
        if _alive(folder / "lock") or not _take_away(folder):
            break
    holder = _read(folder / "lock") or {}
    raise Busy(f"run {key} is carried out by process {holder.get('pid')} on {holder.get('host')}; wait for it")


def _create(path: Path, content: dict[str, Any]) -> bool:
    """True if this process created the file; False if it was there."""
    with explained(path):
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(handle, json.dumps(content).encode())
        except OSError:  # a full disk: an empty lock would keep the run busy for a minute
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
    return True


def _take_away(folder: Path) -> bool:
    """Remove a dead lock. One process alone does it, and looks again before: a lock made meanwhile is left alone."""
    guard = folder / "takeover"
    if not _create(guard, _self()):
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


def _self() -> dict[str, Any]:
    """This process. `space` tells containers apart that have the same host name and number processes each from 1."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return {"host": socket.gethostname(), "space": space, "pid": os.getpid(), "begun": _begun(os.getpid())}


def _read(path: Path) -> dict[str, Any] | None:
    """What a lock file says; {} while it is being written; None if there is none."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _alive(lock: Path) -> bool:
    """A lock counts while its process lives. Of one that is not of this machine, or has left no start time, only the
    time of the lock is known: it is younger than a minute."""
    holder = _read(lock)
    if holder is None:
        return False
    if _local(holder) and isinstance(holder.get("pid"), int):
        if not _exists(holder["pid"]):
            return False
        begun = _begun(holder["pid"])
        if begun is not None and holder.get("begun") is not None:
            return begun == holder["begun"]  # else the number belongs to another process by now
    try:
        return time.time() - lock.stat().st_mtime < STALE_SECONDS
    except OSError:
        return False


def _local(holder: Mapping[str, Any]) -> bool:
    """Whether the process numbers of a lock are those that this process sees."""
    here = _self()
    return holder.get("host") == here["host"] and holder.get("space") == here["space"]


def _stat(pid: int) -> list[str]:
    """What the system tells of a process of this machine, its state first; [] where it tells nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _begun(pid: int) -> int | None:
    """When a process of this machine was started, in ticks since the machine was; None where that is not told."""
    told = _stat(pid)
    return int(told[19]) if told else None


def _exists(pid: int) -> bool:
    """Whether a process of this machine lives; one that has ended and was not collected (a zombie) does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _stat(pid)[:1] != ["Z"]


def _beat(lock: Path, mine: dict[str, Any], stop: threading.Event) -> None:
    """Renew the time of the lock, as long as it is ours."""
    while not stop.wait(BEAT_SECONDS):
        with suppress(OSError):
            if _read(lock) == mine:
                os.utime(lock)
