"""`regard study run`: executes the missing runs of a study here or on a cluster, or prints their commands."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError
from regard.lab.results.results import Results
from regard.lab.studies import ANALYSES

from .analysis import run_and_print_analysis
from .given import Context, expand_groups, given_options
from .run_options import use_data
from .study_all import run_all
from .study_display import Display, print_table, too_few_seeds
from .study_options import NameOrNone, PlaceOptions, StudyOptions, WorkOptions, find_study, own_data
from .tables import show, without_empty_columns
from .user_model import progress

if TYPE_CHECKING:
    from regard.lab.engine.executors.base import Place
    from regard.lab.engine.study import Study

CHANGES = ("rows", "seeds", "devices", "compile", "data", "host", "size", "digest", "change")
PLACE = ("on", "workers", "cpus", "memory", "nodes", "slurm", "only")
WORK = ("retry", "fresh", "dry_run", "decide", "hours")
"""Names of options, by what they are about."""


@expand_groups
def run(
    context: Context,
    name: NameOrNone = "",
    every: Annotated[bool, typer.Option("--all", help="All studies, with --decide: the most promising first.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only build every row, train one step, and compare its counts with the published ones; needs no data.",
        ),
    ] = False,
    decide: Annotated[
        bool,
        typer.Option(
            "--decide",
            help="Train the gate, then add seeds to undecided claims until they are decided or --hours are spent.",
        ),
    ] = False,
    *,
    options: StudyOptions,
    work: WorkOptions,
    place: PlaceOptions,
) -> None:
    """Execute the missing runs of a study, or compute an analysis; print the tables."""
    if every == bool(name):
        both = ", not both" if every else ""
        raise ConfigError(f"give the name of a study (`regard study list` shows all), or --all for all of them{both}")
    _check_options(context, name, every, dry_run, decide, place.on)
    use_data(options.data_root)
    if every:
        run_all(work, place.workers)
        return
    if name in ANALYSES:
        run_and_print_analysis(name, work.scale, work.results, work.as_json)
        return
    cluster = None if place.on == "print" else place.cluster()
    study = find_study(name, work.scale, options)
    study.rows(work.scale, work.rows)
    if dry_run:
        raise typer.Exit(_dry_run(study, work))
    if place.on == "print":
        _print_commands(study, work, options)
        return
    further = work.rows if given_options(context, ["rows"]) else ""
    counts = _execute(study, work, cluster, place.workers, decide, further)
    if work.only is None:
        print_table(work.results, name, study.setting_name(work.scale), work.as_json)
    missing = [f"{number} {state}" for state, number in counts.items() if state != "done" and number]
    if missing:
        progress(f"{counts['done']} runs done, {', '.join(missing)}. {_advice(counts)}")
    raise typer.Exit(1 if missing else 0)


def _check_options(context: Context, name: str, every: bool, dry_run: bool, decide: bool, on: str) -> None:
    """Raises: ConfigError for an option that has no meaning beside the others."""

    def refuse(names: Sequence[str], reason: str) -> None:
        if options := given_options(context, names):
            raise ConfigError(f"{reason}: leave out {', '.join(options)}")

    if every:
        plan = "--all plans which studies to decide, each as it is"
        refuse([each for each in (*CHANGES, *PLACE, *WORK, "modules")
                if each not in ("workers", "compile", "decide", "hours")], plan)  # fmt: skip
        if not decide:
            raise ConfigError(f"{plan}: add --decide")
    elif name in ANALYSES:
        refuse((*CHANGES, *PLACE, *WORK), f"{name} is an analysis, which trains nothing")
    if decide:
        refuse(("seeds", "fresh", "dry_run", "only"), "--decide chooses seeds itself")
    elif given_options(context, ["hours"]):
        raise ConfigError("--hours is for --decide, which adds seeds; without it the number of seeds is fixed")
    if dry_run:
        refuse((*PLACE, "seeds", "devices", "compile", "retry", "fresh"),
               "--dry-run executes nothing, and counts the seeds of the study")  # fmt: skip
    if given_options(context, ["only"]):
        refuse(("as_json",), "--only prints no table, also none as JSON")
    if on == "print":
        refuse([each for each in (*PLACE, *WORK) if each not in ("on", "retry")],
               "--on print prints a command for each missing run")  # fmt: skip


def _execute(
    study: "Study", work: WorkOptions, place: "Place | None", workers: int | None, decide: bool, further: str
) -> dict[str, int]:
    """Execute the missing runs, or with `decide` those that decide claims; the number of runs by state."""
    from regard.lab.engine.decide import decide as add_seeds
    from regard.lab.engine.progress import STATES
    from regard.lab.engine.run_study import run_study

    store = Results(work.results)
    if not decide:
        _warn_of_looks(study, work.scale, store, work.seeds)
        for line in too_few_seeds(study, work.scale, work.seeds):
            progress(line)
    command = _same_command(study.name, work.scale, sys.argv[1:])
    with _lost_clusters(), Display(f". Continue with: {command}") as display:
        if not decide:
            return run_study(study, work.scale, store, rows=work.rows, seeds=work.seeds, workers=workers,
                             retry=work.retry, fresh=work.fresh, devices=work.devices, compile=work.compile,
                             place=place, only=work.only, watch=display.show_event)  # fmt: skip
        decision = add_seeds(study, work.scale, store, hours=6.0 if work.hours is None else work.hours,
                             workers=workers, compile=work.compile, devices=work.devices, place=place,
                             rows=further, retry=work.retry, watch=display.show_event)  # fmt: skip
        display.print_line(f"ended: {decision.reason}")
        return {state: decision.counts.get(state, 0) for state in STATES}


def _warn_of_looks(study: "Study", scale: str, store: Results, seeds: int | None) -> None:
    """Say so where seeds are added to a study of fixed seeds that had verdicts already."""
    from regard.lab.engine.table import Table, stored_snapshot
    from regard.measure.intervals import FEWEST

    name = study.setting_name(scale)
    if (earlier := stored_snapshot(store.root, study.name, name)) is None:
        return
    listed = {run["seed"] for run in earlier["runs"] if run["row"] == earlier["baseline"]}
    finished = Table.load(store.root, study.name, name).runs
    seen = {run["seed"] for run in finished if run["row"] == earlier["baseline"]}
    planned = len(study.setting(scale).numbers) if seeds is None else seeds
    if earlier["claims"] and scale != "smoke" and len(seen) >= FEWEST and planned > len(listed):
        progress(
            f"{study.name} has verdicts on {len(seen)} seeds already. Whoever adds seeds after a look at them has more "
            "than 5 % false verdicts; --decide --results FOLDER adds them and keeps the 5 %"
        )


@contextmanager
def _lost_clusters() -> Iterator[None]:
    """End the process when a cluster is lost: threads that wait for it in Ray would crash the end of Python."""
    from regard.lab.engine.executors.base import ClusterLost

    try:
        yield
    except ClusterLost as error:
        print(f"regard: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _print_commands(study: "Study", work: WorkOptions, options: StudyOptions) -> None:
    """Write the snapshot, and print a command for each missing run, which trains in the process of the command."""
    from regard.lab.engine.run_study import missing_jobs, planned_jobs
    from regard.lab.engine.snapshot import write_snapshot

    store = Results(work.results)
    jobs = planned_jobs(study, work.scale, study.runs(work.scale, work.rows, work.seeds))
    if work.retry:
        jobs = [job for job in jobs if store.status(job.run.key) != "done"]
    else:
        jobs = missing_jobs(jobs, store)
    write_snapshot(study, work.scale, store, work.seeds, work.rows)
    folder = os.environ.get("REGARD_DATA", "")
    same = {
        "--scale": work.scale, "--rows": None if work.rows == "*" else work.rows, "--seeds": work.seeds,
        "--devices": None if work.devices == 1 else work.devices, "--compile": work.compile,
        "--data": own_data(study.setting(work.scale).task, options.data), "--host": options.host,
        "--size": options.size, "--digest": options.digest, "--set": options.change,
        "--data-root": folder if os.path.isdir(folder) else None, "--retry": work.retry, "--import": options.modules,
        "--results": store.root.resolve(), "--workers": 0,
    }  # fmt: skip
    start = [*_module_path(options.modules), sys.executable, "-m", "regard", "study", "run", study.name,
             *_arguments(same)]  # fmt: skip
    lines = [
        {"row": job.row, "seed": job.seed, "key": job.run.key, "command": shlex.join([*start, "--only", job.run.key])}
        for job in jobs
    ]
    if work.as_json:
        show(lines, True)
    else:
        print(*(line["command"] for line in lines), sep="\n", end="\n" * bool(lines))
    progress(
        f"{len(lines)} runs are missing; each command runs one of them on any machine that shares {store.root}, and "
        "the table follows from the same command without --on print"
    )


def _module_path(modules: Sequence[str] | None) -> list[str]:
    """The start of a command that finds the modules of --import in whatever folder it begins; [] without any."""
    searched = filter(None, (os.environ.get("PYTHONPATH"), os.getcwd()))
    return ["env", f"PYTHONPATH={os.pathsep.join(searched)}"] if modules else []


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as they are typed."""
    arguments = list[str]()
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item is not False:
                arguments += [name] if item is True else [name, str(item)]
    return arguments


def _dry_run(study: "Study", work: WorkOptions) -> int:
    """Print the counts of all rows; the exit code."""
    from regard.lab.engine.dry_run import dry_run

    found = dry_run(study, work.scale, work.rows, report=progress)
    errors = [f"{line.label}: {line.error}" for line in found if line.error]
    if errors:
        progress(f"regard: {len(errors)} of {len(found)} rows cannot be built, the first of them {errors[0]}")
    lines = [asdict(line) for line in found]
    if not work.as_json:
        for line in lines:
            del line["error"]
        lines = without_empty_columns(lines)
    title = f"{study.title}, {work.scale} scale: built here, one step on two random samples; MACs: multiply-accumulates"
    show(lines, work.as_json, title, errors)
    return 1 if errors else 0


def _same_command(name: str, scale: str, arguments: Sequence[str]) -> str:
    """The command that continues this one: without --fresh."""
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
