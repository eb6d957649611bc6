"""The lock of a run: one process executes it, and a dead one's lock is taken over.

The file `lock` in the run's folder names the process; its modification time, renewed every few seconds, shows that the
process is alive. Processes on several machines can work on one study in a shared folder. Needs no torch.
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
from typing import Any

from regard.core import StoreError
from regard.files.atomic import TEMPORARY, parse_json, read_if_present, store_errors

RENEW_SECONDS = 5.0
STALE_SECONDS = 60.0
LOST_SECONDS = STALE_SECONDS + 2 * RENEW_SECONDS
"""So long the lock of a lost machine looks alive."""


class Busy(StoreError):
    """Another process executes the run."""


@contextmanager
def lock_run(folder: Path, wait: float) -> Iterator[Path]:
    """Lock the run in a folder for this process; see `Results.lock`. Raises: Busy, StoreError."""
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link, and what it points to is not changed; put the run's folder in its place")
    until = time.monotonic() + wait
    new_root = not folder.parent.exists()
    while True:
        try:
            mine = _acquire(folder)
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
                    folder.parent.rmdir()


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


def _acquire(folder: Path) -> dict[str, Any]:
    """Create the lock file; the file system guarantees that only one process succeeds. Raises: Busy, StoreError."""
    mine = {**_this_process(), "since": time.time(), "token": secrets.token_hex(8)}
    for _ in range(20):
        _make(folder)
        if _create(folder / "lock", mine):
            return mine
        if alive(folder / "lock"):
            break
        if not _remove_dead_lock(folder):  # another process does, or was killed while it did
            time.sleep(0.01)
    raise Busy(_busy(folder / "lock"))


def _make(folder: Path) -> None:
    """Create a folder, which other processes may remove at the same time as long as it is empty. Raises: StoreError."""
    with store_errors(folder):
        for _ in range(20):
            with suppress(FileExistsError, FileNotFoundError):
                folder.mkdir(parents=True, exist_ok=True)
                return
        folder.mkdir(parents=True, exist_ok=True)


def _busy(lock: Path) -> str:
    """Whose lock it is, when it was renewed, and how to clear it."""
    holder = _read(lock) or {}
    whose = f"process {holder.get('pid')} on {_host(holder)}" if holder.get("host") else "an unknown process"
    text = f"run {lock.parent.name} is executed by {whose}"
    try:
        renewed = lock.stat().st_mtime
        date = datetime.fromtimestamp(renewed, UTC).isoformat(" ", "seconds")
    except (OSError, ValueError, OverflowError):
        return f"{text}; wait for it"
    ahead = renewed > time.time() + STALE_SECONDS
    if _local(holder) and not ahead:
        return f"{text}; wait for it"
    return (
        f"{text}, whose lock was renewed at {date}{', which is in the future,' if ahead else ''} by the clock of the "
        f"files; wait for it or, if that process is gone, delete {lock}"
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
            if not alive(guard):
                guard.unlink(missing_ok=True)
            return False
        try:
            if alive(folder / "lock"):
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
        if (data := read_if_present(path)) is None:
            return None
        value = parse_json(path, data)
    except StoreError:
        return {}
    pid = value.get("pid") if isinstance(value, dict) else None
    return value if isinstance(pid, int) and not isinstance(pid, bool) and 0 < pid < 2**31 else {}


def alive(lock: Path) -> bool:
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
