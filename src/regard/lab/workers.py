"""Many runs on one machine, in worker processes that each import torch once; if a worker dies, the others go on."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from regard.store.results import Busy, Results
from regard.train.child_processes import end_with_parent, process_environment
from regard.train.distributed import check_number
from regard.train.environment import is_environment_error
from regard.train.loop import Watch
from regard.train.signals import handled

from .progress import STATES, Progress

TICK_SECONDS = 1.0
ATTEMPTS = 2

JobResult = tuple[str, dict[str, Any] | None, str]
"""(state, outcome, text) of a job: one of `STATES`, the parts of the outcome that are displayed, the error's text."""


@dataclass(frozen=True)
class Job:
    """A run and the row that it belongs to.

    run: a `regard.train.run.Run`, or an object with the same `key` and `execute`. scale: the setting's name. epochs: of
    its recipe, for the display. probes: whether attention maps of the trained model are kept. compile: as in `Watch`.
    """

    run: Any
    study: str
    scale: str
    row: str
    seed: int
    epochs: int = 0
    probes: bool = False
    compile: bool = False


class Worker:
    """One process that executes one run at a time. If it dies, no other run is affected."""

    def __init__(self, threads: int, gpus: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self.gpus = gpus
        self.pool = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare)
        with process_environment(threads, gpus):  # the child reads these when it starts
            self.pid = self.pool.submit(os.getpid).result()

    def submit(self, job: Job, store: Results, devices: int) -> "Future[JobResult]":
        """Start a run."""
        return self.pool.submit(execute_job, job, str(store.root), devices)

    def stop(self, patience: float = 10.0) -> None:
        """Interrupt the run, which saves a checkpoint, and end the process; kill it after `patience` seconds."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        ending = threading.Thread(target=self.pool.shutdown, kwargs={"wait": True, "cancel_futures": True}, daemon=True)
        ending.start()
        ending.join(patience)
        if ending.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows every signal kills
            ending.join(patience)

    def close(self) -> None:
        """End the process when its run is over."""
        self.pool.shutdown(wait=True)


def run_all(
    jobs: Sequence[Job],
    store: Results,
    workers: int | None,
    progress: Progress,
    devices: int = 1,
    deadline: float | None = None,
) -> dict[str, int]:
    """Execute the jobs and return the counts of `progress` by state.

    workers: number of processes, which divide the cores; 0 = this process; None = one for each `devices` GPUs, or
    cores where there are no GPUs, but not more than jobs. devices: how many one run uses. Each worker gets its own GPUs
    as long as there are enough. deadline: of `time.monotonic`, after which no job starts.
    A run whose worker was killed is tried once more. If that fails too, or an error of the environment stopped the run
    (`execute_job`), it continues from its checkpoint the next time the study is run.
    Raises: KeyboardInterrupt after the workers have ended.
    """
    number = min(usual_workers(devices) if workers is None else workers, len(jobs))
    progress.add_waiting((job.row for job in jobs), max(number, 1))
    if number <= 0:
        for job in jobs:
            if _is_over(deadline):
                break
            progress.start(job.row, job.seed, job.run.key, job.epochs)
            _report_end(progress, job, execute_job(job, str(store.root), devices))
    else:
        _Pool(jobs, store, number, progress, devices, deadline).run()
    return {state: progress.counts[state] for state in STATES}


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def usual_workers(devices: int = 1) -> int:
    """The default number of runs at the same time: each has its own GPUs, or its own cores."""
    return max(1, (len(usable_gpus()) or usable_cores()) // devices)


def usable_cores() -> int:
    """Number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def gpu_shares(gpus: Sequence[str], workers: int, devices: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES for each worker: `devices` GPUs each, in turn; "" where there is no choice.

    Raises: DeviceError for more devices than the machine has.
    """
    if len(gpus) <= 1 and devices == 1:
        return [""] * workers
    if gpus:
        check_number(devices, len(gpus))
    groups = [",".join(gpus[start : start + devices]) for start in range(0, len(gpus) - devices + 1, devices)] or [""]
    return [groups[worker % len(groups)] for worker in range(workers)]


def usable_gpus() -> list[str]:
    """GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES. As in CUDA, a name that the machine does
    not have ends the list."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return names[:count] or [str(number) for number in range(count)]


def execute_job(job: Job, root: str, devices: int = 1) -> JobResult:
    """Execute one job; no error is raised.

    An error of the run, such as a configuration that the model refuses or the failure of a run that it needs, is
    recorded as a failed outcome. An error of the environment (disk, memory, packages, devices) or of the probes is not:
    the run is "stopped", and continues the next time the study is run.
    """
    store = Results(root)
    try:
        try:
            outcome = job.run.execute(store, devices, watch=Watch(compile=job.compile))
        except Exception as error:
            if is_environment_error(error):
                raise
            outcome = record_failure(job, store, f"{type(error).__name__}: {error}")
        with suppress(Busy):
            outcome = _complete_outcome(job, store, outcome)
    except Busy as error:
        return "busy", None, str(error)
    except Exception as error:
        return "stopped", None, f"{type(error).__name__}: {error}"
    state = "done" if outcome.get("status") == "done" else "failed"
    displayed = {name: outcome.get(name) for name in ("status", "metrics", "seconds", "error")}
    return state, displayed, str(outcome.get("error") or "")


def record_failure(job: Job, store: Results, text: str) -> dict[str, Any]:
    """Write a failed outcome for a run that has none yet, and return the outcome. Raises: StoreError."""
    outcome = store.outcome(job.run.key)
    if outcome is None:
        outcome = {"key": job.run.key, "status": "failed", "error": text, "metrics": {}}
        store.finish(job.run.key, outcome)
    return outcome


def _complete_outcome(job: Job, store: Results, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Add the study and row that a run was trained for, and the result of the probes, to its outcome."""
    stored: dict[str, Any] = dict(store.outcome(job.run.key) or outcome)
    names = {"study": job.study, "scale": job.scale, "row": job.row, "seed": job.seed}
    complete = stored if stored.get("study") else {**stored, **names}
    if job.probes and stored.get("status") == "done" and "maps" not in (stored.get("probes") or {}):
        from regard.train.measurements import probe_maps

        complete = {**complete, "probes": {**(stored.get("probes") or {}), "maps": probe_maps(job.run, store)}}
    if complete != stored:
        with store.lock(job.run.key):
            store.finish(job.run.key, complete)
    return complete


def _report_end(progress: Progress, job: Job, result: JobResult) -> None:
    state, outcome, text = result
    progress.end(state, job.row, job.seed, outcome, text)


class _Pool:
    """The parent of the workers: it gives each free worker the next job, and replaces workers that die.

    A run may be locked by another process, such as a worker whose own run needs this one first. It is tried again
    whenever a job ends, and reported as busy when no other job is left.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        store: Results,
        number: int,
        progress: Progress,
        devices: int,
        deadline: float | None = None,
    ) -> None:
        self.deadline = deadline
        self.store, self.number, self.progress, self.devices = store, number, progress, devices
        self.threads = max(1, usable_cores() // number)
        self.gpus = gpu_shares(usable_gpus(), number, devices)
        self.queue = list(jobs)
        self.idle: list[Worker] = []
        self.running: dict[Future[JobResult], tuple[Worker, Job]] = {}
        self.locked: list[tuple[Job, JobResult]] = []
        self.deaths: Counter[str] = Counter()

    def run(self) -> None:
        """Execute all jobs. Raises: KeyboardInterrupt after the workers have ended."""
        try:
            while self.queue or self.running:
                if _is_over(self.deadline):
                    self.queue.clear()
                while self.queue and len(self.running) < self.number:
                    self._start(self.queue.pop(0))
                finished, _ = wait(self.running, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED)
                if any([self._end(future) for future in finished]):
                    for job, _ in self.locked:
                        self._requeue(job)
                    self.locked.clear()
                self.progress.tick(self.store)
            for job, result in self.locked:
                _report_end(self.progress, job, result)
            for worker in self.idle:
                worker.close()
        except BaseException:
            with handled(signal.SIG_IGN, signal.SIGINT):  # a second Ctrl-C must not keep us from ending the workers
                for worker in (*self.idle, *(worker for worker, _ in self.running.values())):
                    worker.stop()
            raise

    def _start(self, job: Job) -> None:
        worker = self.idle.pop() if self.idle else Worker(self.threads, self.gpus.pop(0))
        self.running[worker.submit(job, self.store, self.devices)] = (worker, job)
        self.progress.start(job.row, job.seed, job.run.key, job.epochs)

    def _end(self, future: "Future[JobResult]") -> bool:
        """Handle the end of a job; False if its run is locked by another process."""
        worker, job = self.running.pop(future)
        error = future.exception()
        if isinstance(error, BrokenProcessPool | KeyboardInterrupt):
            self._replace(worker, job)
            return True
        if error is not None:
            raise error
        self.idle.append(worker)
        result = future.result()
        if result[0] == "busy":
            self.locked.append((job, result))
            return False
        _report_end(self.progress, job, result)
        return True

    def _replace(self, worker: Worker, job: Job) -> None:
        """Return a dead worker's GPUs, and try its run again unless it has died too often."""
        worker.stop()
        self.gpus.append(worker.gpus)
        self.deaths[job.run.key] += 1
        if self.deaths[job.run.key] < ATTEMPTS:
            self._requeue(job)
        else:
            text = "its worker was killed (out of memory?); run the study again to continue it"
            self.progress.end("died", job.row, job.seed, None, text)

    def _requeue(self, job: Job) -> None:
        self.progress.requeue(job.row, job.seed)
        self.queue.append(job)


def _prepare() -> None:
    """In the child: ignore Ctrl-C, which the parent handles; interrupt the run at SIGTERM; end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    end_with_parent()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
