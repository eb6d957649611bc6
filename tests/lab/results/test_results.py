"""The store: states, locks between real processes, and what becomes of them when a process dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from regard.core import StoreError
from regard.lab.results import lock as lock_file
from regard.lab.results.lock import Busy
from regard.lab.results.results import Results

KEY = "0123456789ab"

HOLD = """
import signal, sys, time
from regard.lab.results.results import Results
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
with Results(sys.argv[1]).lock(sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""

WORK = """
import sys, time
from regard.lab.results.lock import Busy
from regard.lab.results.results import Results
store = Results(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
done = 0
for i in range(40):
    key = f"{i:012x}"
    try:
        with store.lock(key) as folder:
            if store.outcome(key) is None:
                with (folder / "who").open("a") as file:
                    file.write(sys.argv[2] + "\\n")
                store.finish(key, {"status": "done", "metrics": {"top1": 1.0}})
    except Busy:
        pass
"""


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=pipe, stdin=pipe, text=True)


def said(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


@contextmanager
def held(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock; it is killed at the end."""
    holder = child(HOLD, str(root), KEY)
    try:
        assert said(holder) == "held"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def test_states(tmp_path: Path) -> None:
    store = Results(tmp_path)
    assert store.status(KEY) == "new"
    with store.lock(KEY) as folder:
        assert store.status(KEY) == "running"
        (folder / "metrics.csv").write_text("epoch\n")
    assert store.status(KEY) == "begun"
    store.finish(KEY, {"status": "failed"})
    assert store.status(KEY) == "failed"
    store.reopen(KEY)
    assert store.status(KEY) == "begun"
    store.finish(KEY, {"status": "done", "metrics": {"top1": 90.0}})
    assert store.status(KEY) == "done"
    assert store.frame().to_dict("records")[0]["top1"] == 90.0
    store.forget(KEY)
    assert store.status(KEY) == "new"


def test_a_run_is_held_by_one_process(tmp_path: Path) -> None:
    store = Results(tmp_path)
    with held(tmp_path) as holder:
        assert store.status(KEY) == "running"
        with pytest.raises(Busy, match=str(holder.pid)), store.lock(KEY):
            pass
    assert store.status(KEY) != "running"
    with store.lock(KEY):  # the lock of a dead process is taken over at once
        assert store.status(KEY) == "running"
    assert not (store.folder(KEY) / "lock").exists()


def test_an_error_before_anything_is_started_leaves_nothing(tmp_path: Path) -> None:
    def fail(*names: str) -> None:
        with suppress(ZeroDivisionError), Results(tmp_path / "results").lock("a1") as folder:
            for name in names:
                (folder / name).touch()
            raise ZeroDivisionError

    fail("run.json")
    assert not (tmp_path / "results").exists()
    (tmp_path / "results").mkdir()
    fail("run.json")
    assert not list((tmp_path / "results").iterdir())  # the user's own folder stays
    fail("run.json", "last.ckpt")
    assert sorted(path.name for path in (tmp_path / "results" / "a1").iterdir()) == ["last.ckpt", "run.json"]


def test_a_folder_that_comes_and_goes_can_be_locked(tmp_path: Path) -> None:
    """Threads that remove the empty folder of their run, as each does at its end, do not disturb those that begin."""
    barrier, entered = threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        for _ in range(25):
            with Results(tmp_path / "results").lock("a1", wait=60.0):
                entered.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entered) == 100
    assert not (tmp_path / "results" / "a1").exists()


def test_a_silent_lock_of_another_machine_becomes_stale(tmp_path: Path) -> None:
    store = Results(tmp_path)
    lock = store.folder(KEY) / "lock"
    lock.parent.mkdir()
    lock.write_text('{"host": "another machine", "pid": 1}')
    with pytest.raises(Busy, match="another machine"), store.lock(KEY):
        pass
    lock.write_text('{"host": "a name\\nof two lines", "pid": 1}')
    with pytest.raises(Busy, match="on a name of two lines"), store.lock(KEY):
        pass
    old = time.time() - lock_file.STALE_SECONDS - 1
    os.utime(lock, (old, old))
    with store.lock(KEY):
        assert store.status(KEY) == "running"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the start times of /proc, which Linux has")
def test_a_suspended_process_keeps_its_lock_until_it_is_gone(tmp_path: Path) -> None:
    """Ctrl-Z stops the beat; the process is alive, and would go on to write."""
    store = Results(tmp_path)
    with held(tmp_path) as holder:
        holder.send_signal(signal.SIGSTOP)
        os.utime(store.folder(KEY) / "lock", (1.0, 1.0))
        assert store.status(KEY) == "running"
        with pytest.raises(Busy, match=str(holder.pid)), store.lock(KEY):
            pass
    with store.lock(KEY):
        assert store.status(KEY) == "running"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the start times of /proc, which Linux has")
def test_a_number_that_another_process_got_holds_no_lock(tmp_path: Path) -> None:
    store, lock = Results(tmp_path), Results(tmp_path).folder(KEY) / "lock"
    lock.parent.mkdir()
    own = lock_file._this_process()
    lock.write_text(json.dumps({**own, "begun": own["begun"] - 1}))
    assert store.status(KEY) == "new"
    del own["begun"]  # as locks were before they had it: the time of the lock counts
    lock.write_text(json.dumps(own))
    assert store.status(KEY) == "running"
    os.utime(lock, (1.0, 1.0))
    assert store.status(KEY) == "new"


def test_a_lock_keeps_beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "RENEW_SECONDS", 0.01)
    with Results(tmp_path).lock(KEY) as folder:
        os.utime(folder / "lock", (1.0, 1.0))
        until = time.time() + 10
        while (folder / "lock").stat().st_mtime == 1.0:
            assert time.time() < until


def test_two_processes_never_do_a_run_twice(tmp_path: Path) -> None:
    workers = [child(WORK, str(tmp_path), name) for name in "ab"]
    assert [said(worker) for worker in workers] == ["ready", "ready"]
    for worker in workers:
        worker.communicate("\n", timeout=300)
        assert worker.returncode == 0
    runs = sorted(tmp_path.glob("*/who"))
    assert len(runs) == 40
    assert all(len(path.read_text().split()) == 1 for path in runs)
    assert not list(tmp_path.glob("*/lock"))


def test_a_dead_lock_is_taken_over_by_one_of_two(tmp_path: Path) -> None:
    for i in range(40):
        folder = tmp_path / f"{i:012x}"
        folder.mkdir()
        (folder / "lock").write_text('{"host": "gone", "pid": 1}')
        os.utime(folder / "lock", (1.0, 1.0))
    test_two_processes_never_do_a_run_twice(tmp_path)


def test_a_damaged_outcome_is_named(tmp_path: Path) -> None:
    store = Results(tmp_path)
    store.finish(KEY, {"status": "done", "metrics": {"top1": 1.0}})
    (store.folder(KEY) / "outcome.json").write_text("{")
    with pytest.raises(StoreError, match="outcome.json"):
        store.outcome(KEY)


def test_a_signal_releases_the_lock(tmp_path: Path) -> None:
    with held(tmp_path) as holder:
        holder.send_signal(signal.SIGINT)
        holder.wait(timeout=300)
        assert not (tmp_path / KEY / "lock").exists()
