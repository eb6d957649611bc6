"""Carrying a study out: what is missing is run by workers, and a snapshot stands beside the results."""

from collections.abc import Callable, Iterator, Sequence

from regard.store.results import Results
from regard.train.distributed import check_devices
from regard.train.run import Run

from .progress import Event, Progress
from .snapshot import write_snapshot
from .study import Study
from .workers import Job, run_all


def run_study(
    study: Study,
    scale: str,
    store: Results,
    *,
    rows: str = "*",
    seeds: int | None = None,
    workers: int | None = None,
    retry: bool = False,
    fresh: bool = False,
    devices: int = 1,
    compile: bool = False,
    watch: Callable[[Event], None] | None = None,
) -> dict[str, int]:
    """Carry out what is missing, and return the number of runs by state: done, failed, stopped, died, busy.

    workers: processes, by default one a GPU, or a core where there is none; 0 runs in this process. devices: GPUs that
    share each batch of a run.
    compile: train through `torch.compile`.
    Failed runs are repeated only with `retry`, finished ones only with `fresh`; so are those that a run needs (its
    start, its teacher) and that are no rows. A snapshot is written first, so tables and reports can be drawn from the
    store at any time. stopped: something around the run was wrong, such as a full disk; died: a worker was killed; both
    go on at the next start.
    Raises: ConfigError, before anything is written, if a run cannot use so many devices; StoreError; KeyboardInterrupt
    after the workers have stopped.
    """

    plan = study.runs(scale, rows, seeds)
    for _, run in plan:
        for one in (run, *needs(run)):
            check_devices(devices, one.recipe.batch, "auto")
    write_snapshot(study, scale, store, seeds, rows)
    progress = Progress(watch or (lambda event: None))
    jobs = []
    pictured = min(run.seed for _, run in plan)
    seen: set[str] = set()
    for row, run in plan:
        _repeat(run, store, retry, fresh, seen)
        status = store.status(run.key)
        if status in ("done", "failed"):
            progress.found(status, row.label, store.outcome(run.key))
        else:
            jobs.append(
                Job(
                    run,
                    study.name,
                    study.place(scale),
                    row.label,
                    run.seed,
                    run.recipe.trained_epochs,
                    run.seed == pictured,
                    compile,
                )
            )
    return run_all(_in_order(jobs, store), store, workers, progress, devices)


def _in_order(jobs: Sequence[Job], store: Results) -> list[Job]:
    """Those first that need a missing run which none before them needs: workers then do not wait for one another."""
    first: list[Job] = []
    rest: list[Job] = []
    seen: set[str] = set()
    for job in jobs:
        needed = {one.key for one in needs(job.run)} - seen
        (first if any(store.status(key) != "done" for key in needed) else rest).append(job)
        seen |= needed
    return first + rest


def needs(run: Run) -> Iterator[Run]:
    """The runs that a run needs, each followed by those that it needs itself."""
    for other in run.needs():
        yield other
        yield from needs(other)


def _repeat(run: Run, store: Results, retry: bool, fresh: bool, seen: set[str]) -> None:
    """Reopen or forget a run that is to be repeated, and with it what it needs: each key once."""
    status = store.status(run.key)
    if status == "running" or (status == "done" and not fresh):
        return
    for one in (run, *needs(run)):
        if one.key in seen:
            continue
        seen.add(one.key)
        status = store.status(one.key)
        if fresh and status not in ("new", "running"):
            store.forget(one.key)
        elif retry and status == "failed":
            store.reopen(one.key)
