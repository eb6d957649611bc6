"""On this machine: worker processes that each import torch once, or this process itself.

Each worker is a `ProcessPoolExecutor` of one process. What stays our own around it, because neither one pool of
`concurrent.futures` nor loky does it: a worker that dies does not break the others (there a death ends the whole pool);
each worker has its own GPUs and number of threads; a worker that is stopped saves a checkpoint before it is killed;
workers end when their parent is killed.
"""

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import ClassVar

import torch

from regard.lab.engine.jobs import Job, JobResult, execute_job
from regard.lab.results.results import Results
from regard.lab.train.child_processes import check_workers, end_with_parent, process_environment
from regard.lab.train.distributed import check_number
from regard.lab.train.signals import handle_signals, interrupt, without_interrupts

from .base import Ending, Executor, Handle


@dataclass(frozen=True, kw_only=True)
class Local:
    """This machine. workers: number of processes, which divide the cores; 0 = this process; None = one for each run's
    GPUs, or cores where there are no GPUs, but not more than jobs. Each worker gets its own GPUs as long as there are
    enough.
    Raises: ConfigError.
    """

    workers: int | None = None
    here: ClassVar[bool] = True
    nodes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_workers(self.workers)

    def slots(self, devices: int) -> int:
        """Runs at the same time."""
        return usual_workers(devices) if self.workers is None else max(self.workers, 1)

    def open(self, store: Results, devices: int, jobs: int) -> Executor:
        """Workers start when jobs are submitted. Raises: DeviceError for more devices than the machine has."""
        number = min(usual_workers(devices) if self.workers is None else self.workers, jobs)
        return Workers(store, number, devices) if number else ThisProcess(store, devices)


def usual_workers(devices: int = 1) -> int:
    """The default number of runs at the same time: each has its own GPUs, or its own cores."""
    return max(1, (len(usable_gpus()) or usable_cores()) // devices)


def usable_cores() -> int:
    """Number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def threads_of_a_run(workers: int) -> int:
    """The share of the cores that each of so many runs has, or OMP_NUM_THREADS where that is less."""
    share = max(1, usable_cores() // max(workers, 1))
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(share, int(asked)) if asked.isdecimal() and int(asked) else share


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


class Worker:
    """One process that executes one run at a time. If it dies, no other run is affected."""

    def __init__(self, threads: int, gpus: str = "") -> None:
        self.gpus = gpus
        with process_environment(threads, gpus):  # the child reads these when it starts
            self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_prepare)
            with without_interrupts():  # until `_prepare`, Ctrl-C would print tracebacks of imports
                started = self.pool.submit(os.getpid)
            self.pid = started.result()

    def submit(self, job: Job, store: Results, devices: int) -> "Future[JobResult]":
        """Start a run."""
        return self.pool.submit(_execute, job, str(store.root), devices)

    def interrupt(self) -> None:
        """Ask the run to save a checkpoint and end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def stop(self, patience: float = 10.0) -> None:
        """End the process, whose run was interrupted; kill it after `patience` seconds."""
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


class Workers(Executor):
    """Worker processes, each with one run at a time; one that dies is replaced."""

    def __init__(self, store: Results, number: int, devices: int) -> None:
        self.store, self.number, self.devices = store, number, devices
        self.threads = threads_of_a_run(number)
        self.gpus = gpu_shares(usable_gpus(), number, devices)
        self.idle: list[Worker] = []
        self.running: dict[Future[JobResult], Worker] = {}
        self.cancelled: set[Handle] = set()

    def slots(self) -> int:
        """The number of workers."""
        return self.number

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Give a job to each free worker."""
        handles = list[Handle]()
        for job in jobs[: self.number - len(self.running)]:
            worker = self.idle.pop() if self.idle else Worker(self.threads, self.gpus.pop(0))
            future = worker.submit(job, self.store, self.devices)
            self.running[future] = worker
            handles.append(future)
        return handles

    def poll(self, seconds: float) -> list[tuple[Handle, Ending]]:
        """See `Executor`."""
        finished, _ = wait(self.running, timeout=seconds, return_when=FIRST_COMPLETED)
        endings = {future: self._ending(future) for future in finished}
        return [(future, ending) for future, ending in endings.items() if future not in self.cancelled]

    def _ending(self, future: "Future[JobResult]") -> Ending:
        worker = self.running.pop(future)
        error = future.exception()
        if error is None:
            self.idle.append(worker)
            return future.result()
        if not isinstance(error, BrokenProcessPool | KeyboardInterrupt):
            raise error
        worker.interrupt()
        worker.stop()
        self.gpus.append(worker.gpus)
        return "died", None, "its worker was killed (out of memory?); run the study again to continue it"

    def cancel(self, handle: Handle) -> None:
        """Interrupt the worker of a job."""
        self.cancelled.add(handle)
        for future, worker in self.running.items():
            if future is handle:
                worker.interrupt()

    def close(self, stop: bool) -> None:
        """End the workers; stop: their runs save checkpoints at the same time."""
        workers = (*self.idle, *self.running.values())
        for worker in workers if stop else ():
            worker.interrupt()
        for worker in workers:
            (worker.stop if stop else worker.close)()


class ThisProcess(Executor):
    """This process: one job after the other, while `poll` is called."""

    def __init__(self, store: Results, devices: int) -> None:
        self.store, self.devices = store, devices
        self.job: Job | None = None

    def slots(self) -> int:
        """One."""
        return 1

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Take one job."""
        if self.job is not None or not jobs:
            return []
        self.job = jobs[0]
        return [self.job.run.key]

    def poll(self, seconds: float) -> list[tuple[Handle, Ending]]:
        """Execute the job."""
        job, self.job = self.job, None
        return [] if job is None else [(job.run.key, execute_job(job, str(self.store.root), self.devices))]

    def cancel(self, handle: Handle) -> None:
        """Forget the job, which does not run outside of `poll`."""
        self.job = None

    def close(self, stop: bool) -> None:
        """There is nothing to release."""


def _prepare() -> None:
    """In the child: ignore Ctrl-C, which the parent handles; end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def _execute(job: Job, root: str, devices: int) -> JobResult:
    """In the child: a run that SIGTERM interrupts. Between runs SIGTERM ends the process, without a traceback."""
    with handle_signals(interrupt, signal.SIGTERM):
        return execute_job(job, root, devices)
