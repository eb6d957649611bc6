"""`regard study list|show|run|status|export|import`. Torch is loaded only where a study is built."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, nearest
from regard.store.results import Results
from regard.studies import ANALYSES, STUDIES, load_study

from .analysis import analysis_text, run_analysis, show_analysis
from .run_options import Compile, Devices, ResultsOption, RootOption, use_data
from .sizes import read_size
from .study_display import Display, print_table
from .tables import AsJson, show

if TYPE_CHECKING:
    from regard.lab.study import Study

study_app = typer.Typer(help="Tables and figures of papers as runs with statistics.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The study; `regard study list` has them all.")]
Scale = Annotated[str, typer.Option(help="smoke (minutes, judges nothing), desk (hours), or paper (a cluster).")]
Rows = Annotated[str, typer.Option(help="Rows by label or glob, such as 'MiTA*'; several with commas.")]
Seeds = Annotated[int | None, typer.Option(help="How many seeds, instead of the study's own number.")]
Data = Annotated[str | None, typer.Option(help="A data set's name, or your own folder of class folders or parquet.")]
Host = Annotated[str | None, typer.Option(help="A host for all rows, such as 'vit_tiny_patch16_224'.")]
Size = Annotated[str | None, typer.Option(help="Height and width of images, with --data or --host: 32 or 224x160.")]


@study_app.command("list")
def list_studies(as_json: AsJson = False) -> None:
    """All studies, and the analyses, which train nothing."""
    lines = [
        {"name": name, "title": title, "source": source, "trains": "yes" if group is STUDIES else ""}
        for group in (STUDIES, ANALYSES)
        for name, (_, title, source) in group.items()
    ]
    show(lines, as_json)


@study_app.command("show")
def show_study(
    name: Name,
    scale: Scale = "desk",
    results: ResultsOption = Path("results"),
    data: Data = None,
    host: Host = None,
    size: Size = None,
    data_root: RootOption = None,
    workers: Annotated[
        int | None, typer.Option(help="Runs side by side; by default one a GPU, or a core without.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Time a few steps of each row, to tell the hours.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Rows, seeds, what is done, and the hours on this machine (smoke and desk scale; kept in estimates.json)."""
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is 1 or more, not {workers}")
    if name in ANALYSES:
        show_analysis(name, scale, results, as_json)
        return None
    if "+" in scale:
        return _show_place(name, scale, results, as_json)
    from regard.lab.table import claim_text
    from regard.lab.workers import usual_workers
    from regard.store.layout import places

    study = _study(name, scale, data, host, size, data_root)
    store, place = Results(results), study.place(scale)
    runs = study.runs(scale) if study.setting(scale).recipe else ()
    number = min(workers or usual_workers(), max(len(runs), 1))
    guess: dict[str, float] = {}
    if runs and estimate and scale != "paper":
        from regard.lab.estimate import estimate as time_rows

        guess = time_rows(study, scale, store, number, lambda label: print(f"timing {label}", file=sys.stderr))
    lines = [_line(row, [run for found, run in runs if found == row], store, guess) for row in study.rows(scale)]
    notes = [study.question, *(f"claim: {claim_text(asdict(claim), scale)}" for claim in study.claims)]
    if runs:
        notes.append(_hours(study, scale, store, guess, number))
    others = [other for other in places(results, study.name) if other != place and other.startswith(scale)]
    if others:
        notes.append(f"other results at this scale: {', '.join(f'--scale {other}' for other in others)}")
    return show(lines, as_json, f"{study.title} ({study.source}), {place} scale", notes)


def _line(row: Any, runs: list[Any], store: Results, guess: dict[str, float]) -> dict[str, Any]:
    """One row: its mechanism, its runs by state, and the seconds of one."""
    states = [store.status(run.key) for run in runs]
    times = [(store.outcome(run.key) or {}).get("seconds") for run in runs]
    known = [value for value in times if isinstance(value, int | float)]
    return {
        "row": row.label, "mechanism": _spelled(row), "control": row.control, "seeds": len(runs),
        "done": states.count("done"), "failed": states.count("failed"), "running": states.count("running"),
        "seconds a run": round(sum(known) / len(known), 1) if known else None,
        "estimate": None if row.label not in guess else round(guess[row.label], 1),
    }  # fmt: skip


def _hours(study: "Study", scale: str, store: Results, guess: dict[str, float], workers: int) -> str:
    """How long the study takes, in a sentence."""
    from regard.lab.estimate import hours

    whole, left = hours(study, scale, store, guess, workers)
    if not whole:
        return "how long it takes is known after the first finished run"
    source = "finished runs where there are any, else a few timed steps"
    return f"about {whole:.2f} hours with {workers} workers here, {left:.2f} of them to go ({source})"


def _show_place(name: str, place: str, results: Path, as_json: bool) -> None:
    """The rows of results with changes, from their snapshot."""
    from regard.lab.table import load_snapshot

    snapshot, store = load_snapshot(results, name, place), Results(results)
    lines = []
    for row in snapshot["rows"]:
        states = [store.status(run["key"]) for run in snapshot["runs"] if run["row"] == row["label"]]
        lines.append({
            "row": row["label"], "mechanism": row["spelling"], "host": row["host"], "seeds": len(states),
            "done": states.count("done"), "failed": states.count("failed"), "running": states.count("running"),
        })  # fmt: skip
    show(lines, as_json, f"{snapshot['title']} ({snapshot['source']}), {place}", [str(snapshot.get("task"))])


@study_app.command("run")
def run(
    name: Name,
    scale: Scale = "smoke",
    rows: Rows = "*",
    seeds: Seeds = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one a GPU, or a core without.")] = None,
    devices: Devices = 1,
    compile: Compile = False,
    results: ResultsOption = Path("results"),
    data: Data = None,
    host: Host = None,
    size: Size = None,
    data_root: RootOption = None,
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
    if name in ANALYSES:
        trains = {"--rows": rows != "*", "--seeds": seeds, "--workers": workers, "--devices": devices != 1,
                  "--compile": compile, "--data": data, "--host": host, "--size": size, "--retry": retry,
                  "--fresh": fresh, "--dry-run": dry_run}  # fmt: skip
        if given := [option for option, value in trains.items() if value not in (None, False)]:
            raise ConfigError(f"{name} is an analysis, it trains nothing: leave out {', '.join(given)}")
        use_data(data_root)
        run_analysis(name, scale, results, as_json)
        return
    study = _study(name, scale, data, host, size, data_root)
    study.rows(scale, rows)
    if dry_run:
        raise typer.Exit(_dry_run(study, scale, rows, as_json))
    from regard.lab.run_study import run_study

    command = _again(name, scale, sys.argv[1:])
    with Display(sys.stderr.isatty()) as display:
        try:
            counts = run_study(study, scale, Results(results), rows=rows, seeds=seeds, workers=workers, retry=retry,
                               fresh=fresh, devices=devices, compile=compile, watch=display.see)  # fmt: skip
        except KeyboardInterrupt:
            display.say(f"stopped; what was done is kept. Go on with: {command}")
            raise
    print_table(results, name, study.place(scale), as_json)
    missing = [f"{number} {state}" for state, number in counts.items() if state != "done" and number]
    if missing:
        print(f"{counts['done']} runs done, {', '.join(missing)}. {_advice(counts)}", file=sys.stderr)
    raise typer.Exit(1 if counts["failed"] or counts["stopped"] or counts["died"] else 0)


@study_app.command("status")
def status(
    name: Annotated[str | None, typer.Argument(help="A study; all in the folder if left out.")] = None,
    scale: Annotated[str | None, typer.Option(help="One scale only.")] = None,
    results: ResultsOption = Path("results"),
    as_json: AsJson = False,
) -> None:
    """What the store has: runs by state, for every study with results."""
    from regard.lab.table import load_snapshot, snapshots
    from regard.store.layout import scale_of

    found = [
        one
        for one in snapshots(results)
        if name in (None, one[0]) and (scale is None or scale in (one[1], scale_of(one[1])))
    ]
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
    results: ResultsOption = Path("results"),
    format: Annotated[str, typer.Option(help="csv (a line a run), json, md, tex, or evidence (for import).")] = "csv",
    out: Annotated[Path | None, typer.Option(help="A file; standard output if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """The finished runs or the table of a study."""
    from regard.lab.export import FORMATS, evidence
    from regard.lab.table import Table
    from regard.store.layout import find_place

    format = "json" if as_json else format
    if name in ANALYSES:
        _out(analysis_text(name, scale, results, format), out)
        return
    if format not in (*FORMATS, "evidence"):
        raise ConfigError(f"no format {format!r}; {nearest(format, (*FORMATS, 'evidence'))}")
    scale = find_place(results, name, scale)
    if name not in STUDIES and not (results / "studies" / f"{name}-{scale}.json").exists():
        raise ConfigError(f"no study {name!r}; {nearest(name, [*STUDIES, *ANALYSES])}")
    if format == "evidence":
        text = json.dumps(evidence(results, name, scale), indent=1, ensure_ascii=False) + "\n"
    else:
        text = FORMATS[format](Table.load(results, name, scale))
    _out(text, out)


@study_app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="An outcome file, a folder of them, a store, or an evidence file.")],
    results: ResultsOption = Path("results"),
    replace: Annotated[bool, typer.Option("--replace", help="Replace runs that are finished here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take in finished runs from another machine or from committed evidence."""
    from regard.lab.export import import_runs

    counts = import_runs(path, Results(results), replace)
    left = "left out: runs of another mechanism, host, task or recipe than the study here has, or of a seed it has"
    show([counts], as_json, notes=[left] if counts["left out"] else [])


def _study(name: str, scale: str, data: str | None, host: str | None, size: str | None, root: Path | None) -> "Study":
    """The study with what the user changed. Raises: ConfigError."""
    use_data(root)
    study = load_study(name)
    study.setting(scale)
    return study.elsewhere(scale, data, host, read_size(size) if size else None)


def _out(text: str, path: Path | None) -> None:
    from regard.store.files import write_atomically

    if path is None:
        sys.stdout.write(text)
    else:
        write_atomically(path, text)


def _spelled(row: Any) -> str:
    from regard.mixers.spelling import spell

    return spell(row.mixer) if row.mixer is not None else "no mixer" if row.removed else "the host's own attention"


def _dry_run(study: "Study", scale: str, rows: str, as_json: bool) -> int:
    from regard.lab.dry_run import dry_run

    lines = [asdict(line) for line in dry_run(study, scale, rows)]
    title = f"{study.title}, {scale} scale: built here, one step on two random images; MACs are multiply-accumulates"
    errors = [f"{line['label']}: {line['error']}" for line in lines if line["error"]]
    shown = lines if as_json else [{k: v for k, v in line.items() if k != "error"} for line in lines]
    show(shown, as_json, title, errors)
    return 1 if errors else 0


def _again(name: str, scale: str, arguments: Sequence[str]) -> str:
    import shlex

    if arguments[:2] == ["study", "run"]:
        return "regard " + shlex.join([one for one in arguments if one != "--fresh"])
    return f"regard study run {name} --scale {scale}"


def _advice(counts: dict[str, int]) -> str:
    if counts["died"]:
        return "Killed runs go on with the same command; fewer --workers need less memory."
    if counts["stopped"]:
        return (
            "Stopped runs go on with the same command once what is named above is put right; with --retry where a run "
            "that they need has failed."
        )
    if counts["failed"]:
        return "Failed runs are repeated with --retry; outcome.json in the run's folder says why they failed."
    return "The others are carried out by another process."
