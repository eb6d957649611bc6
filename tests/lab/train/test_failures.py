"""What the machine does to a run: full disks, forbidden folders, killed workers, locks that two processes want."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.core import DataError, StoreError
from regard.lab.engine.jobs import Job, execute_job
from regard.lab.results import lock as lock_file
from regard.lab.results.results import Results
from regard.lab.train import checkpoint
from regard.lab.train.execute import execute
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.lab.train.watch import Watch
from stopped_runs import stop
from tiny_task import Tiny
from waiting import wait_until

SHORT = Recipe(epochs=3, batch=32, augment="none")
KEY = "0123456789ab"


def in_child(work: Any) -> str:
    """What `work()` raises or returns, as text, in a forked process whose limits and user may change."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


# the disk


def test_a_full_disk_is_said_and_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the checkpoint no longer fits."""
    run, store, whole = Run(task=Tiny(), recipe=SHORT), Results(tmp_path / "cut"), Results(tmp_path / "whole")
    stop(run, store, 8)
    folder = store.folder(run.key)
    before = (folder / checkpoint.LAST).read_bytes()

    def work() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, len(before) // 2))
        return str(execute(run, store, device="cpu", watch=Watch(save_steps=1)))

    said = in_child(work)
    assert said.startswith("StoreError: cannot write")
    assert "free some space and repeat the command: finished runs are kept" in said
    assert (folder / checkpoint.LAST).read_bytes() == before
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".part")]
    assert store.status(run.key) == "begun"
    assert execute(run, store, device="cpu")["bits"] == execute(run, whole, device="cpu")["bits"]


def test_a_folder_without_permission_is_said(tmp_path: Path) -> None:
    run, store = Run(task=Tiny(), recipe=SHORT), Results(tmp_path / "kept")
    stop(run, store, 8)
    other = dataclasses.replace(run, seed=1)
    execute(other, Results(tmp_path / "elsewhere"), device="cpu")  # all modules are loaded before rights are given up
    before = {path.name: path.read_bytes() for path in store.folder(run.key).iterdir()}
    for path in (tmp_path, store.root, store.folder(run.key)):
        path.chmod(0o555)

    def work() -> str:
        if os.getuid() == 0:
            for place in (*tmp_path.parents,):  # pytest's own folders are closed to others
                if place.stat().st_mode & 0o005 != 0o005 and len(place.parts) > 2:
                    place.chmod(0o755)
            os.setgid(65534)
            os.setuid(65534)
        said = []
        for one in (run, other):
            try:
                said.append(str(execute(one, store, device="cpu")["status"]))
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return "\n".join(said)

    try:
        first, second = in_child(work).splitlines()
    finally:
        for path in (tmp_path, store.root, store.folder(run.key)):
            path.chmod(0o755)
    for said in (first, second):
        assert said.startswith("StoreError: cannot write")
        assert "Permission denied; choose a folder that you may write to with --results" in said
    assert {path.name: path.read_bytes() for path in store.folder(run.key).iterdir()} == before
    assert execute(run, store, device="cpu")["status"] == "done"


# workers


@pytest.mark.slow
def test_a_study_survives_the_kill_of_its_worker(tmp_path: Path) -> None:
    """`regard study run` whose worker gets SIGKILL in the middle of training: tried again, and all is there."""
    options = ["--scale", "smoke", "--rows", "softmax", "--seeds", "1", "--workers", "1", "--results", str(tmp_path)]
    command = [sys.executable, "-m", "regard", "study", "run", "quickstart", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        found = wait_until(lambda: list(tmp_path.glob("*/metrics.csv")), process)  # training has begun
        worker = json.loads((found[0].parent / "lock").read_text())["pid"]
        assert worker != process.pid
        os.kill(worker, signal.SIGKILL)
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()  # nothing happens if it has ended; its workers end with it
        process.wait()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert [one["status"] for one in Results(tmp_path).outcomes()] == ["done"]
    assert not list(tmp_path.glob("*/lock"))


def test_a_failure_in_a_study_is_one_failed_run(tmp_path: Path) -> None:
    """NaN, and data that are not there: the store says why, and the next run is carried out."""
    wild = dataclasses.replace(SHORT, lr=1e18, clip=0.0, warmup=0.0)
    runs = [Run(task=Tiny(), recipe=wild), Run(task=Tiny(limit=0, split="held"), recipe=SHORT)]
    runs.append(Run(task=Tiny(), recipe=dataclasses.replace(SHORT, epochs=1)))
    states = [execute_job(Job(run, "s", "smoke", f"row {i}", 0), str(tmp_path))[0] for i, run in enumerate(runs)]
    assert states == ["failed", "failed", "done"]
    errors = [str((Results(tmp_path).outcome(run.key) or {})["error"]) for run in runs[:2]]
    assert "at step" in errors[0]
    assert errors[1].startswith(DataError.__name__)
    assert 'use split="test"' in errors[1]


# checkpoints


@pytest.mark.parametrize(
    "content", [None, {"weights": 1}, Recipe(), {"version": 9, "step": 5}],
    ids=["junk", "foreign", "pickle", "another version"],
)  # fmt: skip
def test_a_checkpoint_that_is_not_ours_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: object
) -> None:
    folder = tmp_path / KEY
    folder.mkdir()
    for step in (1, 2):
        checkpoint.save(folder, {"step": step, "model": {}})
    last = folder / checkpoint.LAST
    last.write_bytes(b"junk") if content is None else torch.save(content, last)
    assert (checkpoint.load(folder) or {})["step"] == 1
    assert f"{last} cannot be read" in caplog.text
    assert "using the one before it" in caplog.text


def test_a_checkpoint_of_another_network_stops_the_run_and_stays(tmp_path: Path) -> None:
    run, store = Run(task=Tiny(), recipe=SHORT), Results(tmp_path)
    stop(run, store, 8)
    last = store.folder(run.key) / checkpoint.LAST
    state = checkpoint.load(last.parent) or {}
    checkpoint.save(last.parent, {**state, "model": {"head.weight": torch.zeros(3, 4)}})
    before = last.read_bytes()
    with pytest.raises(StoreError, match=r"does not fit this run .*delete the folder to start again"):
        execute(run, store, device="cpu")
    assert last.read_bytes() == before


# locks


def test_a_lock_that_came_to_life_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """The race: we saw a dead lock, another process took it away and made its own, and only now it is our turn."""
    store = Results(tmp_path)
    with store.lock(KEY) as folder:
        held = (folder / "lock").read_text()
        assert not lock_file._remove_dead_lock(folder)
        assert (folder / "lock").read_text() == held
        assert not (folder / "takeover").exists()


def test_one_takes_a_dead_lock_away_while_the_other_waits(tmp_path: Path) -> None:
    """The guard of a living process keeps others from removing the lock; that of a dead one is cleared."""
    folder = tmp_path / KEY
    folder.mkdir()
    (folder / "lock").write_text('{"host": "gone", "pid": 1}')
    os.utime(folder / "lock", (1.0, 1.0))
    lock_file._create(folder / "takeover", lock_file._this_process())
    os.utime(folder / "takeover", (1.0, 1.0))  # its process is only slow
    assert not lock_file._remove_dead_lock(folder)
    assert (folder / "lock").exists()
    (folder / "takeover").write_text((folder / "lock").read_text())  # of a process that is gone
    os.utime(folder / "takeover", (1.0, 1.0))
    assert not lock_file._remove_dead_lock(folder)
    assert not (folder / "takeover").exists()
    assert lock_file._remove_dead_lock(folder)
    assert not (folder / "lock").exists()


def test_a_lock_that_was_taken_from_us_is_not_removed_by_us(tmp_path: Path) -> None:
    store = Results(tmp_path)
    with store.lock(KEY) as folder:
        (folder / "lock").write_text('{"host": "another", "pid": 1, "token": "x"}')
    assert json.loads((folder / "lock").read_text())["token"] == "x"


def test_a_run_that_was_taken_over_is_not_written_any_more(tmp_path: Path) -> None:
    """A process of another machine has taken the lock while this one was silent."""
    run, store = Run(task=Tiny(), recipe=SHORT), Results(tmp_path)
    folder, seen = store.folder(run.key), list[bytes]()

    def report(progress: Any) -> None:
        if progress.step == 8:
            seen.append((folder / checkpoint.LAST).read_bytes())
            (folder / "lock").write_text('{"host": "another", "pid": 1, "token": "x"}')

    with pytest.raises(StoreError, match=r"process 1 on another has taken it over; repeat the command"):
        execute(run, store, device="cpu", watch=Watch(report=report, save_steps=1))
    assert (folder / checkpoint.LAST).read_bytes() == seen[0]
    assert store.outcome(run.key) is None


def test_a_lock_that_could_not_be_written_leaves_no_empty_lock(tmp_path: Path) -> None:
    """On a full disk the file is made, but nothing fits into it; an empty lock would look alive for a minute."""

    def work() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with Results(tmp_path).lock(KEY):
            return "held"

    assert in_child(work).startswith("StoreError: cannot write")
    with Results(tmp_path).lock(KEY):
        pass
