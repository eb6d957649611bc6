"""Many runs on one machine: worker processes that each import torch once, and a parent that survives their deaths."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from regard.core import ConfigError
from regard.store.results import Busy, Results
from regard.train.child_processes import follow_parent, surroundings
from regard.train.distributed import check_number
from regard.train.loop import Watch
from regard.train.signals import handled

from .progress import STATES, Progress

TICK_SECONDS = 1.0
ATTEMPTS = 2
_SURROUNDINGS = (OSError, MemoryError, torch.OutOfMemoryError, ImportError, ConfigError)
"""Errors that say nothing about a run; `StoreError` and `Busy` are OSErrors."""


class Carried(Protocol):
    """What a run has to offer to be carried out here; `regard.train.run.Run` does."""

    @property
    def key(self) -> str: ...

    def execute(self, store: Results, devices: int = 1, *, watch: Watch | None = None) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Job:
    """A run and where it belongs. epochs: of its recipe, for the display. probes: measurements on the trained model.
    compile: as in `Watch`."""

    run: Any
    study: str
    scale: str
    row: str
    seed: int
    epochs: int = 0
    probes: bool = False
    compile: bool = False


class Worker:
    """One process that carries out one run at a time. If it dies, its own run alone is affected."""

    def __init__(self, threads: int, gpus: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self.gpus = gpus
        self.pool = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare)
        with surroundings(threads, gpus):  # the child reads these when it starts
            self.pid = self.pool.submit(os.getpid).result()

    def submit(self, job: Job, store: Results, devices: int) -> "Future[tuple[str, dict[str, Any] | None, str]]":
        """Start a run; the result is (state, outcome, text)."""
        return self.pool.submit(carry, job, str(store.root), devices)

    def stop(self, patience: float = 10.0) -> None:
        """Interrupt what it does, and end it; after `patience` seconds without being heard."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        ending = threading.Thread(target=self.pool.shutdown, kwargs={"wait": True, "cancel_futures": True}, daemon=True)
        ending.start()
        ending.join(patience)
        if ending.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            ending.join(patience)

    def close(self) -> None:
        """End it when it has nothing to do."""
        self.pool.shutdown(wait=True)


def run_all(
    jobs: Sequence[Job], store: Results, workers: int | None, progress: Progress, devices: int = 1
) -> dict[str, int]:
    """Carry out the jobs and return the counts of `progress` by state.

    workers: processes, the cores shared out between them; 0 = this process; None = one for each `devices` GPUs, or
    cores where there are no GPUs, but not more than jobs. devices: that one run uses. Workers get GPUs of their own as
    far as there are enough.
    A run whose worker was killed is tried once more, and then left as it is: it goes on at the next start, as one does
    that was stopped by its surroundings (`carry`).
    Raises: KeyboardInterrupt after the workers have ended.
    """
    number = min(usual_workers(devices) if workers is None else workers, len(jobs))
    progress.plan((job.row for job in jobs), max(number, 1))
    if number <= 0:
        for job in jobs:
            progress.start(job.row, job.seed, job.run.key, job.epochs)
            progress.end(*_ended(job, carry(job, str(store.root), devices)))
    else:
        _share_out(list(jobs), store, number, max(1, usable_cores() // number), progress, devices)
    return {state: progress.counts[state] for state in STATES}


def usual_workers(devices: int = 1) -> int:
    """Runs side by side where a user names no number: as many as have GPUs, or cores, of their own."""
    return max(1, (len(usable_gpus()) or usable_cores()) // devices)


def usable_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def gpu_shares(gpus: Sequence[str], workers: int, devices: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES for each worker: `devices` GPUs each, in turn; "" where nothing is to be chosen.

    Raises: ConfigError for more devices than there are.
    """
    if len(gpus) <= 1 and devices == 1:
        return [""] * workers
    if gpus:
        check_number(devices, len(gpus))
    groups = [",".join(gpus[start : start + devices]) for start in range(0, len(gpus) - devices + 1, devices)] or [""]
    return [groups[worker % len(groups)] for worker in range(workers)]


def usable_gpus() -> list[str]:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; torch sees those before the first that the
    machine does not have."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    there = torch.cuda.device_count()
    return named[:there] or [str(number) for number in range(there)]


def carry(job: Job, root: str, devices: int = 1) -> tuple[str, dict[str, Any] | None, str]:
    """Carry out one job: (state, outcome, text); nothing is raised.

    An error of the run becomes a failed outcome. One of what is around it (disk, memory, packages, options), or of the
    probes, is no result: the run is "stopped", and goes on at the next start as far as it was not done.
    """
    store = Results(root)
    try:
        try:
            outcome = job.run.execute(store, devices, watch=Watch(compile=job.compile))
        except Exception as error:
            if _of_surroundings(error):
                raise
            outcome = store_failure(job, store, f"{type(error).__name__}: {error}")
        with suppress(Busy):
            outcome = _belongs(job, store, outcome)
    except Busy as error:
        return "busy", None, str(error)
    except Exception as error:
        return "stopped", None, f"{type(error).__name__}: {error}"
    state = "done" if outcome.get("status") == "done" else "failed"
    return state, _small(outcome), str(outcome.get("error") or "")


def _of_surroundings(error: Exception) -> bool:
    """Whether an error says nothing about the run; torch's allocator on the CPU has no error of its own."""
    return isinstance(error, _SURROUNDINGS) or "can't allocate memory" in str(error)


def store_failure(job: Job, store: Results, text: str) -> dict[str, Any]:
    """Record an error that the run itself did not record. Raises: StoreError."""
    outcome = store.outcome(job.run.key)
    if outcome is None:
        outcome = {"version": 1, "key": job.run.key, "status": "failed", "error": text, "metrics": {}}
        store.finish(job.run.key, outcome)
    return outcome


def _belongs(job: Job, store: Results, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Write into the outcome which study and row it was made for, and what the probes found."""
    whole: dict[str, Any] = dict(store.outcome(job.run.key) or outcome)
    named = {"study": job.study, "scale": job.scale, "row": job.row, "seed": job.seed}
    changed = whole if whole.get("study") else {**whole, **named}
    if job.probes and whole.get("status") == "done" and "maps" not in (whole.get("probes") or {}):
        from regard.train.measurements import probe_maps

        changed = {**changed, "probes": {**(whole.get("probes") or {}), "maps": probe_maps(job.run, store)}}
    if changed != whole:
        with store.lock(job.run.key):
            store.finish(job.run.key, changed)
    return changed


def _small(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """What the parent shows."""
    return {name: outcome.get(name) for name in ("status", "metrics", "seconds", "error")}


def _ended(job: Job, result: tuple[str, dict[str, Any] | None, str]) -> tuple[str, str, int, Any, str]:
    return result[0], job.row, job.seed, result[1], result[2]


def _share_out(jobs: list[Job], store: Results, number: int, threads: int, progress: Progress, devices: int) -> None:
    """Give each free worker the next job; replace workers that die.

    A run that is carried out elsewhere, as by another worker whose own run begins with it, is asked for again whenever
    one of ours ends; it is reported as busy when nothing else is left.
    """
    shares = gpu_shares(usable_gpus(), number, devices)
    free: list[Worker] = []
    busy: dict[Future[Any], tuple[Worker, Job]] = {}
    deaths: Counter[str] = Counter()
    queue, held = list(jobs), list[tuple[Job, Any]]()
    try:
        while queue or busy:
            while queue and len(busy) < number:
                worker = free.pop() if free else Worker(threads, shares.pop(0))
                job = queue.pop(0)
                busy[worker.submit(job, store, devices)] = (worker, job)
                progress.start(job.row, job.seed, job.run.key, job.epochs)
            over, _ = wait(busy, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED)
            ended = False
            for future in over:
                worker, job = busy.pop(future)
                if _died(future):
                    shares.append(worker.gpus)
                    _bury(worker, job, deaths, queue, progress)
                    ended = True
                    continue
                free.append(worker)
                if (result := future.result())[0] == "busy":
                    held.append((job, result))
                else:
                    progress.end(*_ended(job, result))
                    ended = True
            if ended:
                _ask_again(held, queue, progress)
            progress.tick(store)
        for job, result in held:
            progress.end(*_ended(job, result))
        for worker in free:
            worker.close()
    except BaseException:
        with handled(signal.SIG_IGN, signal.SIGINT):  # a second Ctrl-C does not stop us from ending the workers
            for worker in (*free, *(worker for worker, _ in busy.values())):
                worker.stop()
        raise


def _ask_again(held: list[tuple[Job, Any]], queue: list[Job], progress: Progress) -> None:
    for job, _ in held:
        progress.again(job.row, job.seed)
        queue.append(job)
    held.clear()


def _died(future: "Future[Any]") -> bool:
    error = future.exception()
    if isinstance(error, BrokenProcessPool | KeyboardInterrupt):
        return True
    if error is not None:
        raise error
    return False


def _bury(worker: Worker, job: Job, deaths: Counter[str], queue: list[Job], progress: Progress) -> None:
    worker.stop()
    deaths[job.run.key] += 1
    if deaths[job.run.key] < ATTEMPTS:
        progress.again(job.row, job.seed)
        queue.append(job)
    else:
        progress.end("died", job.row, job.seed, None, "its worker was killed (memory?); it goes on at the next start")


def _prepare() -> None:
    """In the child: Ctrl-C is the parent's business, SIGTERM interrupts the run, and the parent's death ends us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    follow_parent()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
