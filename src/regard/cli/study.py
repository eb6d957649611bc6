"""`regard study list|show|run|power|status|export|import`. Only verbs that build a study load torch."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, nearest
from regard.core.paths import user_path
from regard.store.results import Results
from regard.studies import ANALYSES, STUDIES, load_study

from .analysis import analysis_text, run_and_print_analysis, show_analysis
from .imports import Imports, imported
from .run_options import Compile, Devices, Digest, ResultsOption, RootOption, check_results, checked_text, use_data
from .sizes import read_size
from .study_display import Display, print_table, show_prospects
from .tables import AsJson, show

if TYPE_CHECKING:
    from regard.lab.study import Study

study_app = typer.Typer(help="Tables and figures of papers, as training runs with statistics.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The study; `regard study list` shows all.")]
Scale = Annotated[str, typer.Option(help="smoke (minutes; judges no claim), desk (hours) or paper (a cluster).")]
Rows = Annotated[str, typer.Option(help="Rows by label or glob, such as 'MiTA*', separated by commas.")]
Seeds = Annotated[int | None, typer.Option(help="Number of seeds. Default: the study's own.")]
Data = Annotated[
    str | None,
    typer.Option(help="A data set by name, a folder of class folders, or a parquet file.", callback=checked_text),
]
Host = Annotated[str | None, typer.Option(help="A host model for all rows, such as 'vit_tiny_patch16_224'.")]
Size = Annotated[str | None, typer.Option(help="Height and width of images, with --data or --host: 32 or 224x160.")]


@study_app.command("list")
def list_studies(as_json: AsJson = False) -> None:
    """List all studies, and the analyses, which train nothing."""
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
        int | None,
        typer.Option(help="Runs at the same time. Default: one for each GPU, or for each core without GPUs."),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Time a few steps of each row, to estimate the hours.")
    ] = True,
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Show rows, seeds, finished runs, and the estimated hours on this machine (smoke and desk scale)."""
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is 1 or more, not {workers}")
    if name in ANALYSES:
        show_analysis(name, scale, results, as_json)
        return None
    if "+" in scale:
        return _show_snapshot(name, scale, results, as_json)
    from regard.lab.claims import claim_text
    from regard.lab.workers import usual_workers
    from regard.store.layout import setting_names

    study = _study(name, scale, data, host, size, data_root, modules)
    store, setting = Results(results), study.setting_name(scale)
    runs = study.runs(scale) if study.setting(scale).recipe else ()
    number = min(workers or usual_workers(), max(len(runs), 1))
    estimates: dict[str, float] = {}
    if runs and estimate and scale != "paper":
        from regard.lab.estimate import estimate as time_rows

        estimates = time_rows(study, scale, store, number, lambda label: print(f"timing {label}", file=sys.stderr))
    lines = [
        _line(row, [run for run_row, run in runs if run_row == row], store, estimates) for row in study.rows(scale)
    ]
    notes = [study.question, *(f"claim: {claim_text(asdict(claim), scale)}" for claim in study.claims)]
    if runs:
        notes.append(_hours(study, scale, store, estimates, number))
    others = [name for name in setting_names(results, study.name) if name != setting and name.startswith(scale)]
    if others:
        notes.append(f"other results at this scale: {', '.join(f'--scale {name}' for name in others)}")
    return show(lines, as_json, f"{study.title} ({study.source}), {setting} scale", notes)


def _line(row: Any, runs: list[Any], store: Results, estimates: dict[str, float]) -> dict[str, Any]:
    """One row: its mechanism, its runs by state, and the mean seconds of a run."""
    states = [store.status(run.key) for run in runs]
    times = [(store.outcome(run.key) or {}).get("seconds") for run in runs]
    seconds = [value for value in times if isinstance(value, int | float)]
    return {
        "row": row.label, "mechanism": _mechanism(row), "control": row.control, "seeds": len(runs),
        "done": states.count("done"), "failed": states.count("failed"), "running": states.count("running"),
        "seconds a run": round(sum(seconds) / len(seconds), 1) if seconds else None,
        "estimate": None if row.label not in estimates else round(estimates[row.label], 1),
    }  # fmt: skip


def _hours(study: "Study", scale: str, store: Results, estimates: dict[str, float], workers: int) -> str:
    """How many hours the study takes, as a sentence."""
    from regard.lab.estimate import hours

    total, left = hours(study, scale, store, estimates, workers)
    if not total:
        return "the hours can be estimated after the first finished run"
    source = "from finished runs where there are any, else from a few timed steps"
    return f"about {total:.2f} hours with {workers} workers on this machine, {left:.2f} hours left ({source})"


def _show_snapshot(name: str, setting: str, results: Path, as_json: bool) -> None:
    """Show the rows of a study on other data or in another host, from the snapshot of its results."""
    from regard.lab.table import load_snapshot

    snapshot, store = load_snapshot(results, name, setting), Results(results)
    lines = []
    for row in snapshot["rows"]:
        states = [store.status(run["key"]) for run in snapshot["runs"] if run["row"] == row["label"]]
        lines.append({
            "row": row["label"], "mechanism": row["spelling"], "host": row["host"], "seeds": len(states),
            "done": states.count("done"), "failed": states.count("failed"), "running": states.count("running"),
        })  # fmt: skip
    show(lines, as_json, f"{snapshot['title']} ({snapshot['source']}), {setting}", [str(snapshot.get("task"))])


@study_app.command("run")
def run(
    name: Name,
    scale: Scale = "smoke",
    rows: Rows = "*",
    seeds: Seeds = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes for runs. Default: one for each GPU, or for each core without GPUs; 0: none."),
    ] = None,
    devices: Devices = 1,
    compile: Compile = False,
    results: ResultsOption = Path("results"),
    data: Data = None,
    host: Host = None,
    size: Size = None,
    data_root: RootOption = None,
    digest: Digest = None,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed runs.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete the results of all runs first, and repeat them.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only build every row, train one step, and compare its counts with the published ones; needs no data.",
        ),
    ] = False,
    decide: Annotated[
        bool,
        typer.Option("--decide", help="Add seeds to undecided claims until they are decided or --hours are spent."),
    ] = False,
    hours: Annotated[float | None, typer.Option(help="With --decide: no run begins after so many hours [6].")] = None,
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Execute the missing runs of a study, or compute an analysis; print the tables."""
    if workers is not None and workers < 0:
        raise ConfigError(f"--workers is 0 or more, not {workers}")
    if name in ANALYSES:
        training_options = {"--rows": rows != "*", "--seeds": seeds, "--workers": workers, "--devices": devices != 1,
                  "--compile": compile, "--data": data, "--digest": digest, "--host": host, "--size": size,
                  "--retry": retry, "--fresh": fresh, "--dry-run": dry_run,
                  "--decide": decide, "--hours": hours}  # fmt: skip
        if options := [option for option, value in training_options.items() if value not in (None, False)]:
            raise ConfigError(f"{name} is an analysis, which trains nothing: leave out {', '.join(options)}")
        use_data(data_root)
        run_and_print_analysis(name, scale, results, as_json)
        return
    if decide and (given := [option for option, value in {"--rows": rows != "*", "--seeds": seeds, "--retry": retry,
                                 "--fresh": fresh, "--dry-run": dry_run}.items() if value]):  # fmt: skip
        raise ConfigError(f"--decide chooses rows and seeds itself: leave out {', '.join(given)}")
    if hours is not None and not decide:
        raise ConfigError("--hours is for --decide, which adds seeds; without it the number of seeds is fixed")
    study = _study(name, scale, data, host, size, data_root, modules, digest)
    study.rows(scale, rows)
    if dry_run:
        raise typer.Exit(_dry_run(study, scale, rows, as_json))
    from regard.lab.progress import STATES
    from regard.lab.run_study import run_study

    command = _same_command(name, scale, sys.argv[1:])
    with Display(sys.stderr.isatty()) as display:
        try:
            if decide:
                from regard.lab.decide import decide as add_seeds

                decision = add_seeds(study, scale, Results(results), hours=6.0 if hours is None else hours,
                                     workers=workers, compile=compile, devices=devices,
                                     watch=display.show_event)  # fmt: skip
                counts = {state: decision.counts.get(state, 0) for state in STATES}
                display.print_line(f"ended: {decision.reason}")
            else:
                counts = run_study(study, scale, Results(results), rows=rows, seeds=seeds, workers=workers, retry=retry,
                                   fresh=fresh, devices=devices, compile=compile, watch=display.show_event)  # fmt: skip
        except KeyboardInterrupt:
            display.print_line(f"stopped; finished work is kept. Continue with: {command}")
            raise
    print_table(results, name, study.setting_name(scale), as_json)
    missing = [f"{number} {state}" for state, number in counts.items() if state != "done" and number]
    if missing:
        print(f"{counts['done']} runs done, {', '.join(missing)}. {_advice(counts)}", file=sys.stderr)
    raise typer.Exit(1 if counts["failed"] or counts["stopped"] or counts["died"] else 0)


@study_app.command("power")
def power(
    name: Name,
    scale: Scale = "desk",
    results: ResultsOption = Path("results"),
    hours: Annotated[float | None, typer.Option(help="Say which claims can be decided in so many hours.")] = None,
    workers: Annotated[int | None, typer.Option(help="Runs at the same time. Default: one for each core.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say from the finished (pilot) seeds which differences more seeds would decide, and in how many hours."""
    from regard.lab.power import SEEDS, prospects
    from regard.lab.table import snapshots
    from regard.store.layout import find_setting_name

    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is 1 or more, not {workers}")
    if hours is not None and not hours > 0:
        raise ConfigError(f"--hours is a positive number, not {hours}")
    if name not in STUDIES and name not in {study for study, _ in snapshots(results)}:
        raise ConfigError(f"no study {name!r}; {nearest(name, STUDIES)}")
    number = workers or os.cpu_count() or 1
    found = prospects(results, name, find_setting_name(results, name, scale), hours=hours, workers=number)
    show_prospects(found, SEEDS, hours, number, as_json)


@study_app.command("status")
def status(
    name: Annotated[str | None, typer.Argument(help="A study. Default: all in the folder.")] = None,
    scale: Annotated[str | None, typer.Option(help="Only this scale.")] = None,
    results: ResultsOption = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Count runs (done, failed, running, begun: stopped before the end, new) and verdicts of every study."""
    from regard.lab.claims import verdict_counts
    from regard.lab.table import Table, load_snapshot, snapshots
    from regard.store.layout import scale_of

    settings = snapshots(results)
    if name is not None and name not in (names := {study for study, _ in settings} | set(STUDIES)):
        raise ConfigError(f"no study {name!r}; {nearest(name, names)}")
    if results != Path("results"):  # the default is there after the first run
        check_results(results)
    store, lines = Results(results), []
    for study, setting in settings:
        if name not in (None, study) or scale not in (None, setting, scale_of(setting)):
            continue
        runs = load_snapshot(results, study, setting)["runs"]
        states = [store.status(run["key"]) for run in runs]
        counts = {
            kind: sum(state == kind for state in states) for kind in ("done", "failed", "running", "begun", "new")
        }
        verdicts = verdict_counts(Table.load(results, study, setting).claims)
        claims = ", ".join(f"{number} {word}" for word, number in verdicts.items())
        lines.append({"study": study, "scale": setting, "runs": len(runs), **counts, "claims": claims})
    show(lines, as_json, notes=[] if lines else [f"no results in {results}"])


@study_app.command("export")
def export(
    name: Name,
    scale: Scale = "desk",
    results: ResultsOption = Path("results"),
    format: Annotated[
        str,
        typer.Option(
            help="csv (a line for each run), json, md, tex or evidence (snapshot and outcomes, for `study import`)."
        ),
    ] = "csv",
    out: Annotated[
        Path | None, typer.Option(help="A file. Default: standard output.", parser=user_path, metavar="PATH")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the finished runs or the table of a study, or the tables of an analysis."""
    from regard.lab.export import FORMATS, evidence
    from regard.lab.table import Table
    from regard.store.layout import find_setting_name
    from regard.store.records import record_text

    format = "json" if as_json else format
    if name in ANALYSES:
        _write(analysis_text(name, scale, results, format), out)
        return
    if format not in (*FORMATS, "evidence"):
        raise ConfigError(f"no format {format!r}; {nearest(format, (*FORMATS, 'evidence'))}")
    scale = find_setting_name(results, name, scale)
    if name not in STUDIES and not (results / "studies" / f"{name}-{scale}.json").exists():
        raise ConfigError(f"no study {name!r}; {nearest(name, [*STUDIES, *ANALYSES])}")
    if format == "evidence":
        text = record_text(evidence(results, name, scale))
    else:
        text = FORMATS[format](Table.load(results, name, scale))
    _write(text, out)


@study_app.command("import")
def import_(
    path: Annotated[
        Path,
        typer.Argument(
            help="An outcome file, a folder of them, a store, or an evidence file.", parser=user_path, metavar="PATH"
        ),
    ],
    results: ResultsOption = Path("results"),
    replace: Annotated[bool, typer.Option("--replace", help="Replace runs that are already finished here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Import finished runs from another machine or from an evidence file."""
    from regard.lab.export import import_runs

    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}")
    counts = import_runs(path, Results(results), replace)
    note = "left out: runs whose mechanism, host, task or recipe differs from the study here, and seeds that it has"
    show([counts], as_json, notes=[note] if counts["left out"] else [])


def _study(
    name: str,
    scale: str,
    data: str | None,
    host: str | None,
    size: str | None,
    root: Path | None,
    modules: list[str] | None,
    digest: str | None = None,
) -> "Study":
    """The study, on the user's data, host and image size if these are given. Raises: ConfigError."""
    use_data(root)
    study = load_study(name)
    setting = study.setting(scale)
    if digest is not None:
        if data is None or "digest" not in setting.task.__dataclass_fields__:
            raise ConfigError("--digest is for your own images: give them with --data")
        task = replace(setting.task, digest=digest)  # type: ignore[call-arg]
        study = replace(study, settings={**study.settings, scale: replace(setting, task=task)})
    return study.elsewhere(scale, data, host, read_size(size) if size else None, imported(modules))


def _write(text: str, path: Path | None) -> None:
    from regard.store.files import write_atomically

    if path is None:
        sys.stdout.write(text)
    else:
        write_atomically(path, text)


def _mechanism(row: Any) -> str:
    """The spelling of a row's mechanism."""
    from regard.mixers.spelling import spell

    return spell(row.mixer) if row.mixer is not None else "no mixer" if row.removed else "the host's own attention"


def _dry_run(study: "Study", scale: str, rows: str, as_json: bool) -> int:
    from regard.lab.dry_run import dry_run

    lines = [asdict(line) for line in dry_run(study, scale, rows)]
    title = f"{study.title}, {scale} scale: built here, one step on two random samples; MACs: multiply-accumulates"
    errors = [f"{line['label']}: {line['error']}" for line in lines if line["error"]]
    rows_without_errors = [{key: value for key, value in line.items() if key != "error"} for line in lines]
    show(lines if as_json else rows_without_errors, as_json, title, errors)
    return 1 if errors else 0


def _same_command(name: str, scale: str, arguments: Sequence[str]) -> str:
    """The command that continues this one: without --fresh."""
    import shlex

    if arguments[:2] == ["study", "run"]:
        return "regard " + shlex.join([argument for argument in arguments if argument != "--fresh"])
    return f"regard study run {name} --scale {scale}"


def _advice(counts: dict[str, int]) -> str:
    if counts["died"]:
        return "Killed runs continue with the same command; fewer --workers need less memory."
    if counts["stopped"]:
        return "Stopped runs continue with the same command after the problem above is solved."
    if counts["failed"]:
        return "Failed runs are repeated with --retry; outcome.json in the run's folder says why they failed."
    return "Another process executes the others."
