"""`regard study list|show|run|power|status|export|import`. Only verbs that build a study or count GPUs load torch."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, check_known, nearest
from regard.files.paths import printable_lines, user_path
from regard.lab.results.layout import SCALES, TUNING_SEED
from regard.lab.results.results import Results
from regard.lab.studies import ANALYSES, STUDIES

from .analysis import analysis_text, show_analysis
from .given import expand_groups
from .run_options import ResultsOption, check_results, path_option
from .study_display import show_prospects, too_few_seeds
from .study_options import LargestScale, Name, Scale, StudyOptions, Workers, find_study
from .study_run import run
from .tables import AsJson, show, show_list

if TYPE_CHECKING:
    from regard.lab.engine.study import Study

study_app = typer.Typer(help="Tables and figures of papers, as training runs with statistics.", no_args_is_help=True)
study_app.command("run")(run)


@study_app.command("list")
def list_studies(as_json: AsJson = False) -> None:
    """List all studies, and the analyses, which train nothing."""
    lines = [
        {"name": name, "title": title, "source": source, "trains": "yes" if group is STUDIES else ""}
        for group in (STUDIES, ANALYSES)
        for name, (_, title, source) in group.items()
    ]
    show_list(lines, as_json)


@study_app.command("show")
@expand_groups
def show_study(
    name: Name,
    scale: Scale = "desk",
    results: ResultsOption = Path("results"),
    workers: Workers = None,
    estimate: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Time a few steps of each row, to estimate the hours.")
    ] = True,
    as_json: AsJson = False,
    *,
    options: StudyOptions,
) -> None:
    """Show rows, seeds, finished runs, and the estimated hours on this machine (smoke and desk scale)."""
    if name in ANALYSES:
        show_analysis(name, scale, results, as_json)
        return None
    if "+" in scale:
        if options.change or options.data or options.host or options.size:
            raise ConfigError(
                f"--scale {scale} names results with their changes: leave out --data, --host, --size, --set"
            )
        return _show_snapshot(name, scale, results, as_json)
    from regard.lab.engine.claims import claim_text
    from regard.lab.engine.executors.local import usual_workers
    from regard.lab.engine.table import load_snapshot
    from regard.lab.results.layout import setting_names

    study = find_study(name, scale, options)
    store, setting = Results(results), study.setting_name(scale)
    if setting in setting_names(results, study.name) and load_snapshot(results, study.name, setting).get("decide"):
        return _show_snapshot(name, setting, results, as_json)  # with the rates that were chosen, and all seeds
    runs = study.runs(scale) if study.setting(scale).recipe else ()
    number = min(workers or usual_workers(), max(len(runs), 1))
    estimates: dict[tuple[str, int], float] = {}
    if runs and estimate and scale != "paper":
        from regard.lab.engine.estimate import estimate as time_rows

        estimates = time_rows(study, scale, store, number, lambda label: print(f"timing {label}", file=sys.stderr))
    lines = [
        _line(row, [run for run_row, run in runs if run_row == row], store, estimates) for row in study.rows(scale)
    ]
    notes = [study.question, *(f"claim: {claim_text(asdict(claim), scale)}" for claim in study.claims)]
    notes += too_few_seeds(study, scale)
    if runs:
        notes.append(_hours(study, scale, store, estimates, number))
    others = [name for name in setting_names(results, study.name) if name != setting and name.startswith(scale)]
    if others:
        notes.append(f"other results at this scale: {', '.join(f'--scale {name}' for name in others)}")
    return show(lines, as_json, f"{study.title} ({study.source}), {setting} scale", notes)


def _line(row: Any, runs: list[Any], store: Results, estimates: dict[tuple[str, int], float]) -> dict[str, Any]:
    """One row: its mechanism, its runs by state, and the mean seconds of a run."""
    from regard.lab.engine.snapshot import spell_row

    times = [(store.outcome(run.key) or {}).get("seconds") for run in runs]
    seconds = [value for value in times if isinstance(value, int | float)]
    return {
        "row": row.label, "mechanism": spell_row(row), "control": row.control, "seeds": len(runs),
        **_count_states(store, [run.key for run in runs], ("done", "failed", "running")),
        "seconds a run": _round(sum(seconds) / len(seconds) if seconds else None),
        "estimate": _round(estimates.get((row.label, 0))),
    }  # fmt: skip


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _hours(study: "Study", scale: str, store: Results, estimates: dict[tuple[str, int], float], workers: int) -> str:
    """How many hours the study takes, as a sentence."""
    from regard.lab.engine.estimate import hours

    total, left = hours(study, scale, store, estimates, workers)
    if not total:
        return "the hours can be estimated after the first finished run"
    source = "from finished runs where there are any, else from a few timed steps"
    first = (
        ", with the networks that rows start or learn from" if any(run.needs() for _, run in study.runs(scale)) else ""
    )
    return f"about {total:.2f} hours with {workers} workers on this machine, {left:.2f} hours left{first} ({source})"


def _show_snapshot(name: str, setting: str, results: Path, as_json: bool) -> None:
    """Show the rows of a study with changes, or of one whose seeds are added, from the snapshot of its results."""
    from regard.lab.engine.claims import claim_text
    from regard.lab.engine.table import load_snapshot
    from regard.lab.results.layout import scale_of

    snapshot, store = load_snapshot(results, name, setting), Results(results)
    lines = []
    for row in snapshot["rows"]:
        keys = [run["key"] for run in snapshot["runs"] if run["row"] == row["label"]]
        lines.append({
            "row": row["label"], "mechanism": row.get("spelling"), "host": row.get("host"), "seeds": len(keys),
            **_count_states(store, keys, ("done", "failed", "running")),
        })  # fmt: skip
    claims = [f"claim: {claim_text(claim, scale_of(setting))}" for claim in snapshot.get("claims") or ()]
    notes = [str(snapshot.get("task")), snapshot.get("question", ""), *claims]
    title = f"{snapshot.get('title', name)} ({snapshot.get('source', 'no source')}), {setting}"
    show(lines, as_json, title, notes)


@study_app.command("power")
def power(
    name: Name,
    scale: LargestScale = None,
    results: ResultsOption = Path("results"),
    hours: Annotated[float | None, typer.Option(help="Say which claims can be decided in so many hours.")] = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Say from the finished (pilot) seeds which differences more seeds would decide, and in how many hours."""
    from regard.lab.engine.power import SEEDS, prospects
    from regard.lab.results.layout import find_setting_name, scale_of

    if hours is not None and not hours > 0:
        raise ConfigError(f"--hours is a positive number, not {hours}")
    _check_study(name, results)
    if workers is None:
        from regard.lab.engine.executors.local import usual_workers

        workers = usual_workers()
    setting = find_setting_name(results, name, scale)
    if scale is None and scale_of(setting) == "smoke":  # which judges no claim
        setting = "desk"
    found = prospects(results, name, setting, hours=hours, workers=workers)
    show_prospects(found, SEEDS, hours, workers, as_json)


@study_app.command("status")
def status(
    name: Annotated[str | None, typer.Argument(help="A study. Default: all in the folder.")] = None,
    scale: Annotated[str | None, typer.Option(help="Only this scale.")] = None,
    results: ResultsOption = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Count runs (done, failed, running, begun: stopped before the end, new) and verdicts of every study.

    tuning: finished runs that choose the learning rates of rows for --decide.
    """
    from regard.lab.engine.claims import verdict_counts
    from regard.lab.engine.table import Table, load_snapshot, snapshots
    from regard.lab.results.layout import scale_of

    settings = snapshots(results)
    if name is not None:
        check_known(name, {study for study, _ in settings} | set(STUDIES), f"no study {name!r}")
    if scale is not None:
        check_known(scale, {*SCALES, *(setting for _, setting in settings)}, f"no scale {scale!r}")
    if results != Path("results"):  # the default is there after the first run
        check_results(results)
    store, lines = Results(results), []
    shown = {
        (study, setting): load_snapshot(results, study, setting)
        for study, setting in settings
        if name in (None, study) and scale in (None, setting, scale_of(setting))
    }
    outcomes = store.outcomes() if any(snapshot.get("decide") for snapshot in shown.values()) else []
    tuning = Counter((run.get("study"), run.get("scale")) for run in outcomes if run.get("seed") == TUNING_SEED)
    for (study, setting), snapshot in shown.items():
        keys = [run["key"] for run in snapshot["runs"]]
        counts = _count_states(store, keys, ("done", "failed", "running", "begun", "new"))
        verdicts = verdict_counts(Table.load(results, study, setting).claims)
        claims = ", ".join(f"{number} {word}" for word, number in verdicts.items())
        counts["tuning"] = tuning[study, setting]
        lines.append({"study": study, "scale": setting, "runs": len(keys), **counts, "claims": claims})
    show(lines, as_json, notes=[] if lines else [f"no results in {results}"])


PLOTS = ("svg", "pdf", "png")


def _write_plot(name: str, scale: str, results: Path, format: str, out: Path | None) -> None:
    """Raises: ConfigError without a file to write to."""
    from regard.files.atomic import write_atomically
    from regard.lab.report.study_page import plot

    if out is None:
        raise ConfigError(f"a plot is written to a file: give --out {name}.{format}")
    write_atomically(out, plot(results, name, scale, format))


@study_app.command("export")
def export(
    name: Name,
    scale: LargestScale = None,
    results: ResultsOption = Path("results"),
    format: Annotated[
        str,
        typer.Option(
            help="csv (a line for each run), json, md, tex, evidence (snapshot and outcomes, for `study import`), or a "
            "plot of the metric against a cost: svg, pdf, png."
        ),
    ] = "csv",
    out: Annotated[Path | None, path_option("A file. Default: standard output.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the finished runs or the table of a study, or the tables of an analysis."""
    from regard.files.records import record_text
    from regard.lab.engine.export import FORMATS, evidence
    from regard.lab.engine.table import Table
    from regard.lab.results.layout import find_setting_name

    format = "json" if as_json else format
    if name in ANALYSES:
        _write(analysis_text(name, scale or "desk", results, format), out)
        return
    check_known(format, (*FORMATS, "evidence", *PLOTS), f"no format {format!r}")
    _check_study(name, results, (*STUDIES, *ANALYSES))
    scale = find_setting_name(results, name, scale)
    if format in PLOTS:
        _write_plot(name, scale, results, format, out)
        return
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
    from regard.lab.engine.export import import_runs

    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}")
    counts = import_runs(path, Results(results), replace)
    notes = {
        "left out": "runs whose mechanism, host, task or recipe differs from the study here, and seeds that it has",
        "differ": "known runs with other metrics than those here, which are kept; --replace takes the new ones",
    }
    show([counts], as_json, notes=[f"{name}: {text}" for name, text in notes.items() if counts[name]])


def _write(text: str, path: Path | None) -> None:
    from regard.files.atomic import write_atomically

    if path is None:
        sys.stdout.write(printable_lines(text) if sys.stdout.isatty() else text)
    else:
        write_atomically(path, text)


def _count_states(store: Results, keys: Iterable[str], states: Iterable[str]) -> dict[str, int]:
    """The number of runs in each of these states."""
    found = [store.status(key) for key in keys]
    return {state: sum(each == state for each in found) for state in states}


def _check_study(name: str, results: Path, known: Collection[str] = STUDIES) -> None:
    """Raises: ConfigError if there is no study of this name, and no results of one. known: names to suggest."""
    from regard.lab.engine.table import snapshots

    if name not in STUDIES and name not in {study for study, _ in snapshots(results)}:
        raise ConfigError(f"no study {name!r}; {nearest(name, known)}")
