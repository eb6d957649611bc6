"""Many jobs that wait in a scheduler's queue: how often the disk, which many machines share, is looked at."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from regard.files.records import write_record
from regard.lab.engine.executors.base import Ending, Executor, Handle
from regard.lab.engine.executors.slurm import Slurm, SlurmJobs, _Submitted
from regard.lab.engine.progress import Event, Progress
from regard.lab.engine.run_jobs import run_all
from regard.lab.results.results import Results

from lab.engine.test_workers import jobs_of  # isort: skip

NUMBER = 300


class Queue(Executor):
    """Jobs of which one begins at the third look, and all end at the tenth."""

    queues: ClassVar[bool] = True
    nodes = 1
    here = False

    def __init__(self, store: Results) -> None:
        self.store, self.looks, self.handles = store, 0, list[Handle]()

    def open(self, store: Results, devices: int, jobs: int) -> Executor:
        return self

    def slots(self, devices: int = 1) -> int:
        return 8

    def submit(self, jobs: Sequence) -> list[Handle]:
        self.handles += [job.run.key for job in jobs]
        return [job.run.key for job in jobs]

    def poll(self, seconds: float) -> list[tuple[Handle, Ending]]:
        self.looks += 1
        if self.looks == 3:
            self.lock = self.store.lock(str(self.handles[1]))
            self.lock.__enter__()
        if self.looks < 10:
            return []
        self.lock.__exit__(None, None, None)
        return [(handle, ("done", None, "")) for handle in self.handles]

    def cancel(self, handle: Handle) -> None:
        raise AssertionError

    def close(self, stop: bool) -> None:
        pass


@pytest.mark.parametrize(("pause", "first"), [(10.0, "row 0"), (0.0, "row 1")], ids=["seldom", "always"])
def test_waiting_jobs_are_not_asked_for_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float, first: str
) -> None:
    """Only runs whose folders are there can have begun."""
    monkeypatch.setattr("regard.lab.engine.run_jobs.LOOK_SECONDS", pause)
    asked: Counter[str] = Counter()
    status = Results.status
    monkeypatch.setattr(Results, "status", lambda store, key: asked.update([key]) or status(store, key))
    events = list[Event]()
    queue = Queue(Results(tmp_path))
    assert run_all(jobs_of(["work"] * NUMBER), queue.store, queue, Progress(events.append))["done"] == NUMBER
    assert [event.row for event in events if event.kind == "start"][0] == first
    assert asked.total() == (1 if pause == 0 else 0)


def test_one_look_tells_which_jobs_of_slurm_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    executor = SlurmJobs(Slurm(scheduler="local"), Results(tmp_path), 1)
    executor.endings.mkdir(parents=True)
    for number in range(NUMBER):
        job = SimpleNamespace(job_id=str(number), done=lambda: False)
        executor.jobs[number] = _Submitted(job, executor.endings / f"{number}.json")
    looks: Counter[Path] = Counter()
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: looks.update([path]) or stat(path, **options))
    assert executor.poll(0.5) == []
    write_record(executor.endings / "7.json", {"ending": ["done", None, ""]})
    assert executor.poll(0.5) == [(7, ("done", None, ""))]
    assert looks.total() < 20
    assert len(executor.jobs) == NUMBER - 1
