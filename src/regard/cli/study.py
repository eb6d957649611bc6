"""`regard study list|show|run|status|export|import`. Torch is loaded only where a study is built."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, nearest
from regard.lab.results import Results
from regard.studies import STUDIES, load_study

from .show import AsJson, show

if TYPE_CHECKING:
    from regard.lab.progress import Event
    from regard.lab.study import Study

study_app = typer.Typer(help="Tables and figures of papers as runs with statistics.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The study; `regard study list` has them all.")]
Scale = Annotated[str, typer.Option(help="smoke (minutes, judges nothing), desk (hours), or paper (a cluster).")]
Folder = Annotated[Path, typer.Option("--results", help="The folder with the results.")]
Rows = Annotated[str, typer.Option(help="Rows by label or glob, such as 'MiTA*'; several with commas.")]
Seeds = Annotated[int | None, typer.Option(help="How many seeds, instead of the study's own number.")]
Data = Annotated[str | None, typer.Option(help="A data set's name, or your own folder of class folders or parquet.")]
Host = Annotated[str | None, typer.Option(help="A host for all rows, such as 'vit_tiny_patch16_224'.")]
Size = Annotated[str | None, typer.Option(help="Image size as HEIGHTxWIDTH, with --data or --host.")]
Root = Annotated[Path | None, typer.Option(help="Folder of the data sets; else REGARD_DATA.")]


@study_app.command("list")
def list_studies(as_json: AsJson = False) -> None:
    """All studies."""
    show([{"name": name, "title": title, "source": source} for name, (_, title, source) in STUDIES.items()], as_json)


@study_app.command("show")
def show_study(
    name: Name,
    scale: Scale = "desk",
    results: Folder = Path("results"),
    data: Data = None,
    host: Host = None,
    size: Size = None,
    data_root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Rows, seeds, what is done, and the hours to go on this machine."""
    from regard.lab.spread import usable_cores

    study = _study(name, scale, data, host, size, data_root)
    store = Results(results)
    lines: list[dict[str, Any]] = []
    seconds: list[float] = []
    for row in study.setting(scale).rows:
        runs = [run for found, run in study.runs(scale, row.label)] if study.setting(scale).recipe else []
        states = [store.status(run.key) for run in runs]
        times = [(store.outcome(run.key) or {}).get("seconds") for run in runs]
        known = [value for value in times if isinstance(value, int | float)]
        seconds += known
        lines.append({
            "row": row.label, "mechanism": _spelled(row), "control": row.control, "seeds": len(runs),
            "done": states.count("done"), "failed": states.count("failed"), "running": states.count("running"),
            "seconds a run": round(sum(known) / len(known), 1) if known else None,
        })  # fmt: skip
    left = sum(line["seeds"] - line["done"] - line["failed"] for line in lines)
    notes = [study.question, *(f"claim: {claim.a} / {claim.b}, {claim.metric}" for claim in study.claims)]
    if left and seconds:
        hours = left * sum(seconds) / len(seconds) / usable_cores() / 3600
        notes.append(f"{left} runs to go: about {hours:.2f} hours on the {usable_cores()} cores of this machine")
    elif left:
        notes.append(f"{left} runs to go; the time is known after the first finished run")
    show(lines, as_json, f"{study.title} ({study.source}), {scale} scale", notes)


@study_app.command("run")
def run(
    name: Name,
    scale: Scale = "smoke",
    rows: Rows = "*",
    seeds: Seeds = None,
    workers: Annotated[int | None, typer.Option(help="Processes; one a core by default.")] = None,
    results: Folder = Path("results"),
    data: Data = None,
    host: Host = None,
    size: Size = None,
    data_root: Root = None,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed runs.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Repeat finished runs too: what they left is deleted.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build every row and compare its counts; no data.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Carry out what is missing of a study, and print its table."""
    if workers is not None and workers < 0:
        raise ConfigError(f"--workers is 0 or more, not {workers}")
    study = _study(name, scale, data, host, size, data_root)
    study.rows(scale, rows)
    if dry_run:
        raise typer.Exit(_dry_run(study, scale, rows, as_json))
    from regard.lab.study import run_study

    command = _again(name, scale, sys.argv[1:])
    with _Display(sys.stderr.isatty()) as display:
        try:
            counts = run_study(study, scale, Results(results), rows=rows, seeds=seeds, workers=workers, retry=retry,
                               fresh=fresh, watch=display.see)  # fmt: skip
        except KeyboardInterrupt:
            display.say(f"stopped; what was done is kept. Go on with: {command}")
            raise
    _print_table(results, name, scale, as_json)
    missing = [f"{number} {state}" for state, number in counts.items() if state != "done" and number]
    if missing:
        print(f"{counts['done']} runs done, {', '.join(missing)}. {_advice(counts)}", file=sys.stderr)
    raise typer.Exit(1 if counts["failed"] or counts["died"] else 0)


@study_app.command("status")
def status(
    name: Annotated[str | None, typer.Argument(help="A study; all in the folder if left out.")] = None,
    scale: Annotated[str | None, typer.Option(help="One scale only.")] = None,
    results: Folder = Path("results"),
    as_json: AsJson = False,
) -> None:
    """What the store has: runs by state, for every study with results."""
    from regard.lab.table import load_snapshot, snapshots

    found = [one for one in snapshots(results) if name in (None, one[0]) and scale in (None, one[1])]
    if name is not None and not found:
        known = {study for study, _ in snapshots(results)} | set(STUDIES)
        if name not in known:
            raise ConfigError(f"no study {name!r}; {nearest(name, known)}")
    store, lines = Results(results), []
    for study, size in found:
        runs = load_snapshot(results, study, size)["runs"]
        states = [store.status(run["key"]) for run in runs]
        counts = {
            kind: sum(state == kind for state in states) for kind in ("done", "failed", "running", "begun", "new")
        }
        lines.append({"study": study, "scale": size, "runs": len(runs), **counts})
    show(lines, as_json, notes=[] if lines else [f"no results in {results}"])


@study_app.command("export")
def export(
    name: Name,
    scale: Scale = "desk",
    results: Folder = Path("results"),
    format: Annotated[str, typer.Option(help="csv (a line a run), json, md, tex, or evidence (for import).")] = "csv",
    out: Annotated[Path | None, typer.Option(help="A file; standard output if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """The finished runs or the table of a study."""
    from regard.lab.exchange import FORMATS, evidence
    from regard.lab.files import write_atomically
    from regard.lab.table import Table

    format = "json" if as_json else format
    if format not in (*FORMATS, "evidence"):
        raise ConfigError(f"no format {format!r}; {nearest(format, (*FORMATS, 'evidence'))}")
    if name not in STUDIES and not (results / "studies" / f"{name}-{scale}.json").exists():
        raise ConfigError(f"no study {name!r}; {nearest(name, STUDIES)}")
    if format == "evidence":
        text = json.dumps(evidence(results, name, scale), indent=1, ensure_ascii=False) + "\n"
    else:
        text = FORMATS[format](Table.load(results, name, scale))
    if out is None:
        sys.stdout.write(text)
    else:
        write_atomically(out, text)


@study_app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="An outcome file, a folder of them, a store, or an evidence file.")],
    results: Folder = Path("results"),
    replace: Annotated[bool, typer.Option("--replace", help="Replace runs that are finished here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take in finished runs from another machine or from committed evidence."""
    from regard.lab.exchange import import_runs

    show([import_runs(path, Results(results), replace)], as_json)


def _study(name: str, scale: str, data: str | None, host: str | None, size: str | None, root: Path | None) -> "Study":
    """The study with what the user changed. Raises: ConfigError."""
    if root is not None:
        if not root.is_dir():
            raise ConfigError(f"--data-root {root} is not a folder")
        os.environ["REGARD_DATA"] = str(root.resolve())
    study = load_study(name)
    study.setting(scale)
    return study.elsewhere(scale, data, host, _pixels(size) if size else None)


def _pixels(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--size is HEIGHTxWIDTH, such as 224x224, not {text!r}")
    return int(parts[0]), int(parts[1])


def _spelled(row: Any) -> str:
    from regard.mixers.spell import spell

    return spell(row.mixer) if row.mixer is not None else "no mixer" if row.removed else "the host's own attention"


def _dry_run(study: "Study", scale: str, rows: str, as_json: bool) -> int:
    from dataclasses import asdict

    from regard.lab.dryrun import dry_run

    lines = [asdict(line) for line in dry_run(study, scale, rows)]
    title = f"{study.title}, {scale} scale: built here, one step on two random images; MACs are multiply-accumulates"
    errors = [f"{line['label']}: {line['error']}" for line in lines if line["error"]]
    shown = lines if as_json else [{k: v for k, v in line.items() if k != "error"} for line in lines]
    show(shown, as_json, title, errors)
    return 1 if errors else 0


def _print_table(results: Path, name: str, scale: str, as_json: bool) -> None:
    from regard.lab.exchange import json_text
    from regard.lab.table import Table

    table = Table.load(results, name, scale)
    if as_json:
        sys.stdout.write(json_text(table))
        return
    lines = []
    for line in table.rows:
        gap = line.difference
        lines.append({
            "row": line.label, "n": line.n, table.metric: _short(line.mean), "interval": _span(line.low, line.high),
            f"minus {table.baseline}": "" if gap is None else _short(gap.mean, "+"),
            "paired interval": "" if gap is None else _span(gap.low, gap.high, "+"),
            "seconds": None if line.seconds is None else round(line.seconds, 1), "parameters": line.parameters,
        })  # fmt: skip
    claims = [f"{claim.text}: {claim.verdict.sentence}" for claim in table.claims]
    show(lines, False, f"{table.title} ({table.caption})", [table.gate.sentence, *claims, *table.warnings])


def _short(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.1f}"


def _span(low: float | None, high: float | None, sign: str = "") -> str:
    return "" if low is None or high is None else f"[{low:{sign}.1f}, {high:{sign}.1f}]"


def _again(name: str, scale: str, arguments: Sequence[str]) -> str:
    import shlex

    if arguments[:2] == ["study", "run"]:
        return "regard " + shlex.join([one for one in arguments if one != "--fresh"])
    return f"regard study run {name} --scale {scale}"


def _advice(counts: dict[str, int]) -> str:
    if counts["died"]:
        return "Killed runs go on with the same command; fewer --workers need less memory."
    if counts["failed"]:
        return "Failed runs are repeated with --retry; outcome.json in the run's folder says why they failed."
    return "The others are carried out by another process."


class _Display:
    """Progress on standard error: a bar on a terminal, a line a run elsewhere."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> "_Display":
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def see(self, event: "Event") -> None:
        """Show what happened."""
        counts = event.counts
        over = counts["done"] + counts["failed"] + counts["died"] + counts["busy"]
        total = over + counts["running"] + counts["waiting"]
        left = "" if event.left is None else f", about {_duration(event.left)} left"
        if event.kind in ("done", "failed", "died", "busy"):
            metrics = (event.outcome or {}).get("metrics") or {}
            result = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if value is not None)
            text = "; ".join(part for part in (result, event.text) if part)
            self.say(f"[{over}/{total}] {event.row} seed {event.seed}: {event.kind} {text}{left}")
        if self.bar is not None:
            states = f"{counts['done']} done, {counts['running']} running, {counts['waiting']} to come{left}"
            text = f"{states}; {event.text}" if event.kind == "tick" and event.text else states
            self.bar.update(self.task, total=max(total, 1), completed=over, description=text)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
