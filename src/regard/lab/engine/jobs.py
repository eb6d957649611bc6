"""Jobs: runs with the rows that they belong to, and their execution wherever an executor sends them."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from regard.lab.results.lock import Busy
from regard.lab.results.results import Results
from regard.lab.train.environment import is_environment_error
from regard.lab.train.torchrun import launch
from regard.lab.train.watch import Watch

ENDED = ("done", "failed")
"""The states of runs that have ended, in the store."""
JobResult = tuple[str, dict[str, Any] | None, str]
"""(state, outcome, text) of a job: one of `STATES`, the parts of the outcome that are displayed, the error's text."""


@dataclass(frozen=True)
class Job:
    """A run and the row that it belongs to.

    run: a `Run`, or what else has a `key` and a function of `execute.register`. scale: the setting's name. epochs: of
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


def execute_job(job: Job, root: str, devices: int = 1, patience: float = 0.0) -> JobResult:
    """Execute one job; no error is raised. patience: seconds to wait for a lock that another process holds.

    An error of the run, such as a configuration that the model refuses or the failure of a run that it needs, is
    recorded as a failed outcome. An error of the environment (disk, memory, packages, devices) or of the probes is not:
    the run is "stopped", and continues the next time the study is run. Of several processes that share a run the first
    one writes.
    """
    until = time.monotonic() + patience
    while (result := _execute(job, Results(root), devices))[0] == "busy" and time.monotonic() < until:
        time.sleep(1.0)
    return result


def _execute(job: Job, store: Results, devices: int) -> JobResult:
    from regard.lab.train.execute import execute  # loads torch

    first = launch().first
    try:
        try:
            outcome = execute(job.run, store, devices, watch=Watch(compile=job.compile))
        except Exception as error:
            if is_environment_error(error) or not first:
                raise
            outcome = record_failure(job, store, f"{type(error).__name__}: {error}")
        if first:
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
    """Add the study and row of a job to the outcome of its run, then the result of the probes, which can fail."""
    stored: dict[str, Any] = dict(store.outcome(job.run.key) or outcome)
    if not stored.get("study"):
        names = {"study": job.study, "scale": job.scale, "row": job.row, "seed": job.seed}
        stored = _replace_outcome(store, job.run.key, {**stored, **names})
    probes = stored.get("probes") or {}
    if job.probes and stored.get("status") == "done" and "maps" not in probes:
        from regard.lab.train.measurements import probe_maps

        stored = _replace_outcome(
            store, job.run.key, {**stored, "probes": {**probes, "maps": probe_maps(job.run, store)}}
        )
    return stored


def _replace_outcome(store: Results, key: str, outcome: dict[str, Any]) -> dict[str, Any]:
    with store.lock(key):
        store.finish(key, outcome)
    return outcome
