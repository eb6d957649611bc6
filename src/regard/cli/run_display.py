"""One run on the command line: train it, and show its progress and its outcome."""

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regard.files.paths import printable_lines

from .run_options import TrainingOptions, find_device

FEW = 3
"""Up to so many details of an evaluation are printed; more are in the outcome."""

if TYPE_CHECKING:
    from regard.lab.train.run import Run
    from regard.lab.train.watch import Progress


def execute_run(run: "Run", results: Path, options: TrainingOptions, as_json: bool) -> None:
    """Train with progress on standard error, and show the outcome; of torchrun's processes the first one shows it.

    Ctrl-C keeps a checkpoint and exits with 130; a run that fails ends the command with exit code 1.
    Raises: ConfigError; what `execute` raises.
    """
    from regard.lab.results.results import Results
    from regard.lab.train.child_processes import check_workers
    from regard.lab.train.execute import execute
    from regard.lab.train.loggers import loggers
    from regard.lab.train.torchrun import FirstFailed, check_launch, launch
    from regard.lab.train.watch import Interrupted, Watch

    store, torch_device, launched = Results(results), find_device(options.device), launch()
    check_launch(launched, options.devices, options.nodes)
    check_workers(options.workers)
    before = store.status(run.key) if launched.first else "new"
    with progress() if launched.first else nullcontext((None, None)) as (report, say):
        watch = Watch(
            report=report,
            say=say,
            workers=options.workers,
            loggers=loggers(options.log if launched.first else "", store.folder(run.key), run.label),
            compile=options.compile,
            shard=options.shard,
        )
        try:
            outcome = execute(run, store, options.devices, device=torch_device.type, watch=watch)
        except Interrupted as stop:
            if launched.first:
                folder = store.folder(run.key)
                typer.echo(f"{stop}; the checkpoint is in {folder}. The same command continues from there.", err=True)
            raise typer.Exit(130) from None
        except FirstFailed:
            raise typer.Exit(1) from None
    if before in ("done", "failed"):
        text = "was finished before: nothing is trained or logged now; another --results FOLDER trains it again"
        if before == "failed":
            text = f"failed earlier: nothing is executed now; delete {store.folder(run.key)} to try it again"
        typer.echo(printable_lines(f"run {run.key} {text}"), err=True)
    if launched.first:
        show_outcome(run, outcome, as_json)
        if outcome["status"] == "done" and (note := _still_rises(run, store.folder(run.key))):
            typer.echo(note, err=True)
    if outcome["status"] != "done":
        raise typer.Exit(1)


SILENCE = 60.0
"""Seconds without a line of progress, at most."""


@contextmanager
def progress() -> "Iterator[Any]":
    """Two functions, for progress and for a line of text, on standard error.

    Progress is a bar on a terminal, elsewhere a line for each epoch, and for each minute of a long one.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(printable_lines(line), highlight=False, markup=False, soft_wrap=True)

    if not console.is_terminal:
        shown = time.monotonic()

        def print_epoch(progress: "Progress") -> None:
            nonlocal shown
            if progress.step * progress.epochs % progress.steps == 0 or time.monotonic() - shown > SILENCE:
                shown = time.monotonic()
                new = progress.evaluated == progress.epoch
                say(progress_line(progress if new else dataclasses.replace(progress, metrics={})))

        yield print_epoch, say
        return
    with Bar(BarColumn(), TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("loading", total=None)

        def update_bar(progress: "Progress") -> None:
            bar.update(task, total=progress.steps, completed=progress.step, description=progress_line(progress))

        yield update_bar, say


def progress_line(progress: "Progress") -> str:
    """Epoch, loss, scores (with their epoch, if it is an earlier one) and the time left, as minutes:seconds."""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    score = "".join(f", {progress.split} {name} {value:.4f}" for name, value in progress.metrics.items())
    if score and progress.evaluated != progress.epoch:
        score += f" after epoch {progress.evaluated}"
    return f"epoch {progress.epoch}/{progress.epochs}, loss {progress.loss:.4f}{score}, {minutes}:{seconds:02d} left"


def _still_rises(run: "Run", folder: Path) -> str:
    """A sentence where the last of three evaluations or more is the best by a fiftieth, else ""."""
    from regard.lab.results.metrics import Metrics

    metric = run.task.metric
    found = [float(row[metric]) for row in Metrics(folder / "metrics.csv").read() if row.get(metric)]
    if len(found) < 3 or found[-1] <= 1.02 * max(found[:-1]):
        return ""
    return f"{metric} still rose at the end: more epochs may help, such as --set recipe.epochs={2 * run.recipe.epochs}"


def show_outcome(run: "Run", outcome: dict[str, Any], as_json: bool) -> None:
    """The outcome as a line, or as JSON."""
    if as_json:
        typer.echo(json.dumps({name: value for name, value in outcome.items() if name not in ("bits", "samples")}))
        return
    if outcome["status"] != "done":
        typer.echo(printable_lines(f"run {run.key} failed: {outcome['error']}"), err=True)
        return
    scores = ", ".join(f"{name} {value:.4f}" for name, value in outcome["metrics"].items() if value is not None)
    task, chance = run.task, outcome.get("chance")
    beside = "" if chance is None else f" ({task.trivial}: {task.metric} {chance:.4f})"
    details = outcome.get("details") or {}
    if 0 < len(details) <= FEW:
        beside += "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in details.items())
    pace = outcome["images_per_second"] or 0.0
    speed = f"{outcome['seconds']:.0f} s, {pace:.{int(pace < 10)}f} {task.unit}/s"
    typer.echo(
        f"run {run.key}: {scores} on {outcome['data']['test']} {task.unit}{beside}; {speed}; "
        f"{outcome['parameters']} parameters"
    )
    for note in outcome["notes"]:
        typer.echo(note)
