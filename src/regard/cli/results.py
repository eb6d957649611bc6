"""`regard results`: which runs a folder of results has, and the removal of runs. Does not load torch."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.core import ConfigError, check_known
from regard.lab.results.housekeeping import STATES, StoredRun, remove, select_runs, stored_runs
from regard.lab.results.results import Results

from .run_options import ResultsOption, check_results
from .tables import AsJson, show

_ALL = ",".join(STATES)

results_app = typer.Typer(help="Housekeeping of the folder of results.", no_args_is_help=True)

States = Annotated[str, typer.Option("--state", help=f"Only runs in these states: {', '.join(STATES)}.")]
Days = Annotated[float, typer.Option("--older", min=0, help="Only runs that were not changed for so many days.")]
Size = Annotated[float, typer.Option("--larger", min=0, help="Only runs of at least so many megabytes.")]


@results_app.command("list")
def list_runs(
    results: ResultsOption = Path("results"),
    state: States = _ALL,
    older: Days = 0.0,
    larger: Size = 0.0,
    as_json: AsJson = False,
) -> None:
    """List the runs: state, task, data, score, date of the end (UTC), size, and days since the last change."""
    runs = _select(results, state, older, larger)
    lines = [asdict(run) if as_json else _line(run) for run in runs]
    show(lines, as_json, notes=[f"{len(runs)} runs, {_megabytes(runs)} MB"])


@results_app.command("prune")
def prune(
    results: ResultsOption = Path("results"),
    state: States = "begun,failed",
    older: Days = 0.0,
    larger: Size = 0.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete runs with all their files, after a question. Runs that a process works on are kept.

    Without --state these are runs that failed or were stopped before the end; finished ones need --state done.
    """
    store, runs = Results(results), _select(results, state, older, larger)
    kept: dict[str, str] = {}
    if runs:
        if not as_json:
            show(list(map(_line, runs)))
        _confirm(f"Delete these {len(runs)} runs ({_megabytes(runs)} MB) in {results}?", yes)
        kept = {run.key: reason for run in runs if (reason := remove(store, run))}
    deleted = [run for run in runs if run.key not in kept]
    if as_json:
        lines = [{**asdict(run), "deleted": run.key not in kept, "kept": kept.get(run.key, "")} for run in runs]
        print(json.dumps(lines, indent=2))
        return
    print(f"{len(deleted)} runs deleted, {_megabytes(deleted)} MB")
    for key, reason in kept.items():
        print(f"kept {key}: {reason}")


def _select(results: Path, states: str, days: float, megabytes: float) -> list[StoredRun]:
    """Raises: ConfigError if there is no such folder, and for an unknown state."""
    check_results(results)
    names = [name.strip() for name in states.split(",")]
    for name in names:
        check_known(name, STATES, f"--state has no {name!r}")
    return select_runs(stored_runs(Results(results)), names, days, megabytes * 1e6)


def _confirm(question: str, yes: bool) -> None:
    """Ask on standard error. Raises: ConfigError without an answer; typer.Exit if it is not yes."""
    if yes:
        return
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
        raise ConfigError("nothing is deleted without an answer; pass --yes to delete without asking")
    if answer.strip().lower() not in ("y", "yes"):
        print("nothing deleted", file=sys.stderr)
        raise typer.Exit(0)


def _megabytes(runs: list[StoredRun]) -> str:
    return f"{sum(run.size for run in runs) / 1e6:.1f}"


def _line(run: StoredRun) -> dict[str, Any]:
    data = run.data or ""
    return {
        "key": run.key,
        "state": run.state,
        "task": run.task,
        "data": Path(data).name if Path(data).is_absolute() else data,
        "row": run.row,
        "seed": run.seed,
        "score": run.state if run.score is None else run.score,
        "date": (run.finished or "").partition("T")[0],
        "study": run.study,
        "size": f"{run.size / 1e6:.1f} MB",
        "days": f"{run.days:.1f}",
    }
