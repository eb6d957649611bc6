"""Many runs and an executor: each run is submitted, watched and, if its worker or machine is lost, repeated."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set

from regard.lab.results.results import Results
from regard.lab.train.run import Run
from regard.lab.train.signals import handle_signals, interrupt

from .executors.base import Ending, Executor, Handle, Place
from .jobs import Job
from .progress import STATES, Progress

TICK_SECONDS = 1.0
LOOK_SECONDS = 10.0
"""So often the store, which may lie on a disk that many machines share, is asked which of the submitted jobs run."""
ATTEMPTS = 2
"""How often a run may take its worker with it."""


def run_all(
    jobs: Sequence[Job], store: Results, place: Place, progress: Progress, devices: int = 1,
    deadline: float | None = None,
) -> dict[str, int]:  # fmt: skip
    """Execute the jobs and return the counts of `progress` by state.

    devices: how many one run uses. deadline: of `time.monotonic`, after which no job starts.
    A run whose worker was killed is tried once more, one whose machine was lost as often as needed. If that fails too,
    or an error of the environment stopped the run (`execute_job`), it continues from its checkpoint the next time the
    study is run.
    Raises: KeyboardInterrupt (Ctrl-C, SIGTERM) after the runs have saved checkpoints; what `Place.open` raises;
    ClusterLost.
    """
    if jobs:
        _Jobs(jobs, store, place.open(store, devices, len(jobs)), progress, deadline).run()
    else:
        progress.add_waiting((), 1)
    return {state: progress.counts[state] for state in STATES}


def needs(run: Run) -> Iterator[Run]:
    """The runs that a run needs (its start, its teacher), and those that they need in turn."""
    for needed in run.needs():
        yield needed
        yield from needs(needed)


class _Jobs:
    """Jobs that wait here (`queue`), that are submitted, and that run (`started`).

    A run may be locked by another process, such as a worker whose own run needs this one first. It is tried again
    whenever a job ends, and reported as busy when no other job is left.
    """

    def __init__(
        self, jobs: Sequence[Job], store: Results, executor: Executor, progress: Progress, deadline: float | None
    ) -> None:
        self.store, self.executor, self.progress, self.deadline = store, executor, progress, deadline
        self.queue = list(jobs)
        self.submitted: dict[Handle, Job] = {}
        self.started: set[Handle] = set()
        self.looked = -LOOK_SECONDS
        self.keys: dict[Handle, set[str]] = {}
        self.locked: list[tuple[Job, Ending]] = []
        self.deaths: Counter[str] = Counter()

    def run(self) -> None:
        """Execute all jobs. Raises: as `run_all`."""
        self.progress.add_waiting((job.row for job in self.queue), self.executor.slots())
        try:
            with handle_signals(interrupt, signal.SIGTERM):  # with which schedulers stop a job, this process
                while self.queue or self.submitted:
                    self._step()
            for job, ending in self.locked:
                self._report(job, ending)
            self.executor.close(stop=False)
        except BaseException:
            with handle_signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):  # another Ctrl-C changes nothing
                self.executor.close(stop=True)
            raise

    def _step(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._withdraw()
        handles = self.executor.submit(self.queue)
        self.submitted |= zip(handles, self.queue, strict=False)
        del self.queue[: len(handles)]
        self._find_started()
        if any([self._end(handle, ending) for handle, ending in self.executor.poll(TICK_SECONDS)]):
            for job, _ in self.locked:
                self._requeue(job)
            self.locked.clear()
        if self.submitted:
            self.progress.workers = self.executor.slots()
            self.progress.tick(self.store)

    def _withdraw(self) -> None:
        """Let no further job start."""
        self.queue.clear()
        self.looked = -LOOK_SECONDS
        self._find_started()
        for handle in self.submitted.keys() - self.started:
            self.executor.cancel(handle)
            del self.submitted[handle]

    def _find_started(self) -> None:
        """Report jobs that run now. An executor with a queue does not say so, but their runs are locked then."""
        waiting = [handle for handle in self.submitted if handle not in self.started]
        if waiting and self.executor.queues:
            if time.monotonic() - self.looked < LOOK_SECONDS:
                return
            self.looked = time.monotonic()
            folders = set(os.listdir(self.store.root)) if self.store.root.exists() else set()
            waiting = [handle for handle in waiting if self._is_locked(handle, folders)]
        for handle in waiting:
            self._start(handle, self.submitted[handle])

    def _is_locked(self, handle: Handle, folders: Set[str]) -> bool:
        """Whether the run of a job, or one that it needs, is locked; folders: the runs that have begun."""
        if handle not in self.keys:
            run = self.submitted[handle].run
            self.keys[handle] = {each.key for each in (run, *(needs(run) if isinstance(run, Run) else ()))}
        return any(self.store.status(key) == "running" for key in self.keys[handle] & folders)

    def _start(self, handle: Handle, job: Job) -> None:
        self.started.add(handle)
        self.progress.start(job.row, job.seed, job.run.key, job.epochs)

    def _end(self, handle: Handle, ending: Ending) -> bool:
        """Handle the end of a job; False if its run is locked by another process."""
        job, state = self.submitted.pop(handle), ending[0]
        if handle not in self.started:
            self._start(handle, job)
        self.started.remove(handle)
        self.deaths[job.run.key] += state == "died"
        if state == "busy":
            self.locked.append((job, ending))
        elif state == "lost" or (state == "died" and self.deaths[job.run.key] < ATTEMPTS):
            self._requeue(job)
        else:
            self._report(job, ending)
        return state != "busy"

    def _report(self, job: Job, ending: Ending) -> None:
        state, outcome, text = ending
        self.progress.end(state, job.row, job.seed, job.run.key, outcome, text)

    def _requeue(self, job: Job) -> None:
        self.progress.requeue(job.row, job.run.key)
        self.queue.append(job)
