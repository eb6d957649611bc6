"""Running a study: workers execute the missing runs, and a snapshot of the study is written beside the results."""

from collections.abc import Callable, Iterator, Sequence

from regard.core.validation import checked
from regard.store.results import Results
from regard.train.distributed import check_devices
from regard.train.run import Run

from .progress import Event, Progress
from .snapshot import write_snapshot
from .study import Row, Study
from .workers import Job, run_all


@checked
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
    """Execute the missing runs of a study, and return the number of runs by state (`STATES`).

    rows, seeds: as in `Study.runs`. workers: number of processes, by default one for each GPU, or for each core without
    GPUs; 0 = this process. devices: GPUs that divide each batch of a run. compile: train with `torch.compile`.
    retry: repeat failed runs; fresh: repeat finished runs too. Both also apply to the runs that a row needs (its start,
    its teacher). watch: called with each `Event`.
    The snapshot is written first, so that tables and reports can be made from the store at any time. Runs that stopped
    or died continue when the study is run again.
    Raises: DeviceError, before anything is written, if a run cannot use so many devices; ConfigError; StoreError;
    KeyboardInterrupt after the workers have stopped.
    """
    planned = study.runs(scale, rows, seeds)
    for _, run in planned:
        for needed in (run, *needs(run)):
            check_devices(devices, needed.recipe.batch, "auto")
    write_snapshot(study, scale, store, seeds, rows)
    if retry or fresh:
        _reset([run for _, run in planned], store, fresh)
    return execute_runs(study, scale, store, planned, workers, watch, devices, compile)


def execute_runs(
    study: Study,
    scale: str,
    store: Results,
    planned: Sequence[tuple[Row, Run]],
    workers: int | None,
    watch: Callable[[Event], None] | None,
    devices: int,
    compile: bool,
    deadline: float | None = None,
) -> dict[str, int]:
    """Execute the missing ones of planned runs, which the snapshot lists, and return the number of runs by state.

    deadline: of `time.monotonic`, after which no run begins. The other arguments and errors are those of `run_study`.
    """
    progress, jobs = Progress(watch or (lambda event: None)), []
    first_seed = min(run.seed for _, run in planned)
    setting = study.setting_name(scale)
    for row, run in planned:
        status = store.status(run.key)
        if status in ("done", "failed"):
            progress.add_finished(status, row.label, store.outcome(run.key))
        else:
            epochs, probes = run.recipe.trained_epochs, run.seed == first_seed
            jobs.append(Job(run, study.name, setting, row.label, run.seed, epochs, probes, compile))
    return run_all(_in_order(jobs, store), store, workers, progress, devices, deadline)


def _in_order(jobs: Sequence[Job], store: Results) -> list[Job]:
    """First one job for each missing run that jobs need, then the others, so that no workers wait for the same run."""
    first: list[Job] = []
    rest: list[Job] = []
    needed_before: set[str] = set()
    for job in jobs:
        keys = {run.key for run in needs(job.run)} - needed_before
        (first if any(store.status(key) != "done" for key in keys) else rest).append(job)
        needed_before |= keys
    return first + rest


def needs(run: Run) -> Iterator[Run]:
    """The runs that a run needs (its start, its teacher), and those that they need in turn."""
    for needed in run.needs():
        yield needed
        yield from needs(needed)


def _reset(runs: Sequence[Run], store: Results, fresh: bool) -> None:
    """Reopen failed runs, or with `fresh` delete all runs that have ended; also the runs that these need, each once."""
    keys: set[str] = set()
    for run in runs:
        status = store.status(run.key)
        if status == "running" or (status == "done" and not fresh):
            continue
        for needed in (run, *needs(run)):
            if needed.key in keys:
                continue
            keys.add(needed.key)
            status = store.status(needed.key)
            if fresh and status not in ("new", "running"):
                store.forget(needed.key)
            elif not fresh and status == "failed":
                store.reopen(needed.key)
