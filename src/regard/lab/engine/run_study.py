"""Running a study: workers execute the missing runs, and a snapshot of the study is written beside the results."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regard.core import ConfigError
from regard.core.validation import check_arguments
from regard.lab.results.results import Results
from regard.lab.train.distributed import check_devices, check_parts
from regard.lab.train.run import Run
from regard.lab.train.sources import warn_of_edits

from .executors.base import Place
from .executors.local import Local
from .jobs import ENDED, Job
from .progress import Event, Progress
from .run_jobs import needs, run_all
from .snapshot import undo_if_refused, write_snapshot
from .study import Row, Study

log = logging.getLogger("regard.lab.engine")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How runs are executed: where, with how many devices each, and whether with `torch.compile`."""

    place: Place = Local()
    devices: int = 1
    compile: bool = False


def execution(workers: int | None, place: Place | None, devices: int, compile: bool) -> Execution:
    """How runs are executed, from the arguments of `run_study`. Raises: ConfigError for workers on a cluster."""
    if place is not None and workers is not None:
        raise ConfigError(f"workers are processes of this machine: leave out workers={workers}, or the place {place}")
    return Execution(place=place or Local(workers=workers), devices=devices, compile=compile)


@check_arguments
def run_study(
    study: Study, scale: str, store: Results, *, rows: str = "*", seeds: int | None = None, workers: int | None = None,
    retry: bool = False, fresh: bool = False, devices: int = 1, compile: bool = False,
    watch: Callable[[Event], None] | None = None, place: Place | None = None, only: str | None = None,
) -> dict[str, int]:  # fmt: skip
    """Execute the missing runs of a study, and return the number of runs by state (`STATES`).

    rows, seeds: as in `Study.runs`. workers: number of processes, by default one for each GPU, or for each core without
    GPUs; 0 = this process. devices: GPUs that divide each batch of a run. compile: train with `torch.compile`.
    retry: repeat failed runs; fresh: repeat finished runs too. Both also apply to the runs that a row needs (its start,
    its teacher). watch: called with each `Event`. place: a cluster, instead of workers of this machine. only: the key
    of the one run to execute.
    The snapshot is written first, so that tables and reports can be made from the store at any time. Runs that stopped
    or died continue when the study is run again. A place that refuses the runs leaves nothing.
    Raises: DeviceError, before anything is written, if a run cannot use so many devices; ConfigError, also for a host
    or size that `Study.elsewhere` set and that cannot be built; StoreError; ClusterLost; KeyboardInterrupt after the
    workers have stopped.
    """
    how = execution(workers, place, devices, compile)
    jobs = planned_jobs(study, scale, study.runs(scale, rows, seeds), compile)
    if only is not None:
        jobs = [job for job in jobs if job.run.key == only]
    if not jobs:
        raise ConfigError(f"{study.name} has no run {only} at {scale} scale with these rows, seeds and data")
    check_jobs(study, scale, jobs, how)
    with undo_if_refused(study, scale, store):
        if (retry or fresh) and not how.place.here:  # a place that refuses the runs does so before any is deleted
            how.place.open(store, devices, len(jobs)).close(stop=False)
        write_snapshot(study, scale, store, seeds, rows)
        if retry or fresh:
            reset([job.run for job in jobs], store, fresh)
        warn_of_edits([run for job in jobs for run in (job.run, *needs(job.run))], store)
        return execute_jobs(jobs, store, how, watch)


def check_jobs(study: Study, scale: str, jobs: Sequence[Job], how: Execution) -> None:
    """Refuse what no run could do, before anything is written.

    Raises: DeviceError if the place cannot divide the batches of these runs, or of those that they need; ConfigError if
    the user's own host or size cannot be built, or not together with a host that the study names, such as a teacher.
    """
    runs = [run for job in jobs for run in (job.run, *needs(job.run))]
    for run in runs:
        check_parts(how.devices * how.place.nodes, run.recipe.batch)
        if how.place.here:
            check_devices(how.devices, run.recipe.batch, "auto")
    if study.setting(scale).variant:
        for task in {run.task.host: run.task for run in runs}.values():
            task.trial(None)


def planned_jobs(study: Study, scale: str, planned: Sequence[tuple[Row, Run]], compile: bool = False) -> list[Job]:
    """Jobs for runs of a study; the attention maps of each row's run with the setting's first seed are kept."""
    first_seed = study.setting(scale).numbers[0]
    setting = study.setting_name(scale)
    return [
        Job(run, study.name, setting, row.label, run.seed, run.recipe.trained_epochs, run.seed == first_seed, compile)
        for row, run in planned
    ]


def missing_jobs(jobs: Sequence[Job], store: Results) -> list[Job]:
    """The jobs whose runs have not ended, in the order in which they are executed."""
    return _in_order([job for job in jobs if store.status(job.run.key) not in ENDED], store)


def execute_jobs(
    jobs: Sequence[Job], store: Results, how: Execution, watch: Callable[[Event], None] | None,
    deadline: float | None = None,
) -> dict[str, int]:  # fmt: skip
    """Execute the jobs whose runs have not ended, and return the number of all runs by state.

    deadline: of `time.monotonic`, after which no run begins. The other arguments and errors are those of `run_study`.
    """
    progress = Progress(watch or (lambda event: None))
    missing = missing_jobs(jobs, store)
    waiting = {job.run.key for job in missing}
    for job in jobs:
        if job.run.key not in waiting:
            outcome = store.outcome(job.run.key)
            state = "done" if (outcome or {}).get("status") == "done" else "failed"
            progress.add_finished(state, job.row, outcome)
    if failed := progress.counts["failed"]:
        text = "%d runs failed earlier and are not executed now: --retry (in Python retry=True) repeats them"
        log.warning(text, failed)
    return run_all(missing, store, how.place, progress, how.devices, deadline)


def _in_order(jobs: Sequence[Job], store: Results) -> list[Job]:
    """First one job for each missing run that jobs need, then the others, so that no workers wait for the same run."""
    first, rest, needed_before = list[Job](), list[Job](), set[str]()
    for job in jobs:
        keys = {run.key for run in needs(job.run)} - needed_before
        (first if any(store.status(key) != "done" for key in keys) else rest).append(job)
        needed_before |= keys
    return first + rest


def reset(runs: Sequence[Run], store: Results, fresh: bool) -> None:
    """Reopen failed runs, or with `fresh` delete all runs that have ended; also the runs that these need, each once."""
    keys: dict[str, None] = {}
    for run in runs:
        status = store.status(run.key)
        if status != "running" and (status != "done" or fresh):
            keys |= dict.fromkeys(needed.key for needed in (run, *needs(run)))
    for key in keys:
        status = store.status(key)
        if fresh and status not in ("new", "running"):
            store.forget(key)
        elif not fresh and status == "failed":
            store.reopen(key)
