"""`regard study run`: executes the missing runs of a study here or on a cluster, or prints their commands."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError
from regard.lab.results.results import Results
from regard.lab.studies import ANALYSES

from .analysis import run_and_print_analysis
from .imports import Imports
from .run_options import Changes, Compile, Devices, Digest, ResultsOption, RootOption, use_data
from .study_all import run_all
from .study_display import Display, print_table
from .study_options import (
    Cpus,
    Data,
    Gpu,
    Host,
    Memory,
    NameOrNone,
    NodesOfRun,
    On,
    Only,
    Rows,
    Scale,
    Seeds,
    Size,
    SlurmOptions,
    Utilisation,
    Workers,
    find_cluster,
    find_study,
    own_data,
)
from .tables import AsJson, show, without_empty_columns

if TYPE_CHECKING:
    from regard.lab.engine.study import Study


def run(
    name: NameOrNone = "",
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="All studies, with --decide: the most promising first; with --dry-run: only the plan."
        ),
    ] = False,
    scale: Scale = "smoke",
    rows: Rows = "*",
    seeds: Seeds = None,
    on: On = "local",
    workers: Workers = None,
    cpus: Cpus = None,
    memory: Memory = None,
    nodes: NodesOfRun = 1,
    slurm: SlurmOptions = None,
    devices: Devices = 1,
    compile: Compile = False,
    results: ResultsOption = Path("results"),
    data: Data = None,
    host: Host = None,
    size: Size = None,
    change: Changes = None,
    data_root: RootOption = None,
    digest: Digest = None,
    only: Only = None,
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
    gpu: Gpu = None,
    utilisation: Utilisation = None,
    decide: Annotated[
        bool,
        typer.Option(
            "--decide",
            help="Train the gate, then add seeds to undecided claims until they are decided or --hours are spent.",
        ),
    ] = False,
    hours: Annotated[float | None, typer.Option(help="With --decide: no run begins after so many hours [6].")] = None,
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Execute the missing runs of a study, or compute an analysis; print the tables."""
    study_options = {
        "--rows": None if rows == "*" else rows, "--seeds": seeds, "--devices": None if devices == 1 else devices,
        "--compile": compile, "--data": data, "--host": host, "--size": size, "--digest": digest,
        "--set": change,
    }  # fmt: skip
    place_options = {"--on": None if on == "local" else on, "--workers": workers, "--cpus": cpus, "--memory": memory,
                     "--nodes": None if nodes == 1 else nodes, "--slurm": slurm, "--only": only}  # fmt: skip
    work_options = {"--retry": retry, "--fresh": fresh, "--dry-run": dry_run, "--decide": decide, "--hours": hours}
    if every == bool(name):
        both = ", not both" if every else ""
        raise ConfigError(f"give the name of a study (`regard study list` shows all), or --all for all of them{both}")
    if every:
        refused = study_options | place_options | work_options | {"--gpu": gpu, "--utilisation": utilisation}
        for option in ("--workers", "--compile", "--dry-run", "--decide", "--hours"):
            refused.pop(option)
        if (given := _given(refused | {"--import": modules})) or not decide:
            what = f"leave out {', '.join(given)}" if given else "add --decide"
            raise ConfigError(f"--all plans which studies to decide, each as it is: {what}")
        use_data(data_root)
        raise typer.Exit(
            run_all(scale, Results(results), 6.0 if hours is None else hours, workers, compile, dry_run, as_json)
        )
    if name in ANALYSES:
        given = _given(study_options | place_options | work_options)
        if given:
            raise ConfigError(f"{name} is an analysis, which trains nothing: leave out {', '.join(given)}")
        use_data(data_root)
        run_and_print_analysis(name, scale, results, as_json)
        return
    chosen = {"--seeds": seeds, "--fresh": fresh,
              "--dry-run": dry_run, "--only": only}  # fmt: skip
    if decide and (given := _given(chosen)):
        raise ConfigError(f"--decide chooses seeds itself: leave out {', '.join(given)}")
    if hours is not None and not decide:
        raise ConfigError("--hours is for --decide, which adds seeds; without it the number of seeds is fixed")
    if dry_run:
        unused = place_options | {"--seeds": seeds, "--compile": compile, "--retry": retry, "--fresh": fresh}
        if given := _given(unused):
            raise ConfigError(
                f"--dry-run executes nothing, and counts the seeds of the study: leave out {', '.join(given)}"
            )
    elif given := _given({"--gpu": gpu, "--utilisation": utilisation}):
        raise ConfigError(f"{' and '.join(given)} estimate what a --dry-run needs: add it, or leave them out")
    if only is not None and as_json:
        raise ConfigError("--only prints no table, also none as JSON: leave out --json")
    place = None if on == "print" else find_cluster(on, workers, cpus, memory, nodes, slurm)
    study = find_study(name, scale, data, host, size, data_root, modules, digest, change)
    study.rows(scale, rows)
    if dry_run:
        raise typer.Exit(_dry_run(study, scale, rows, ("A100" if gpu is None else gpu, utilisation), devices, as_json))
    store = Results(results)
    if on == "print":
        refused = place_options | {"--on": None} | work_options | {"--retry": None}
        if given := _given(refused):
            raise ConfigError(f"--on print prints a command for each missing run: leave out {', '.join(given)}")
        folder = os.environ.get("REGARD_DATA", "")
        lines = {**study_options, "--data": own_data(study.setting(scale).task, data),
                 "--data-root": folder if os.path.isdir(folder) else None,
                 "--retry": retry, "--import": modules}  # fmt: skip
        _print_commands(study, scale, store, rows, seeds, lines, as_json)
        return
    from regard.lab.engine.progress import STATES
    from regard.lab.engine.run_study import run_study

    if not decide:
        _warn_of_looks(study, scale, store, seeds)
    command = _same_command(name, scale, sys.argv[1:])
    with _lost_clusters(), Display(sys.stderr.isatty()) as display:
        try:
            if decide:
                from regard.lab.engine.decide import decide as add_seeds

                decision = add_seeds(study, scale, store, hours=6.0 if hours is None else hours,
                                     workers=workers, compile=compile, devices=devices, place=place,
                                     rows="" if rows == "*" else rows, retry=retry,
                                     watch=display.show_event)  # fmt: skip
                counts = {state: decision.counts.get(state, 0) for state in STATES}
                display.print_line(f"ended: {decision.reason}")
            else:
                counts = run_study(study, scale, store, rows=rows, seeds=seeds, workers=workers, retry=retry,
                                   fresh=fresh, devices=devices, compile=compile, place=place, only=only,
                                   watch=display.show_event)  # fmt: skip
        except KeyboardInterrupt:
            display.print_line(f"stopped; finished work is kept. Continue with: {command}")
            raise
    if only is None:
        print_table(results, name, study.setting_name(scale), as_json)
    missing = [f"{number} {state}" for state, number in counts.items() if state != "done" and number]
    if missing:
        print(f"{counts['done']} runs done, {', '.join(missing)}. {_advice(counts)}", file=sys.stderr)
    raise typer.Exit(1 if missing else 0)


def _warn_of_looks(study: "Study", scale: str, store: Results, seeds: int | None) -> None:
    """Say so where seeds are added to a study of fixed seeds that had verdicts already."""
    from regard.lab.engine.table import finished_runs, load_snapshot, snapshot_path
    from regard.measure.intervals import FEWEST

    if not snapshot_path(store.root, study.name, study.setting_name(scale)).exists():
        return
    earlier = load_snapshot(store.root, study.name, study.setting_name(scale))
    listed = {run["seed"] for run in earlier["runs"] if run["row"] == earlier["baseline"]}
    seen = {run["seed"] for run in finished_runs(store.root, earlier) if run["row"] == earlier["baseline"]}
    planned = len(study.setting(scale).numbers) if seeds is None else seeds
    if earlier["claims"] and scale != "smoke" and len(seen) >= FEWEST and planned > len(listed):
        print(
            f"{study.name} has verdicts on {len(seen)} seeds already. Whoever adds seeds after a look at them has more "
            "than 5 % false verdicts; --decide --results FOLDER adds them and keeps the 5 %",
            file=sys.stderr,
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


def _given(options: Mapping[str, Any]) -> list[str]:
    """The options that have a value."""
    return [option for option, value in options.items() if value is not None and value is not False and value != []]


def _print_commands(
    study: "Study",
    scale: str,
    store: Results,
    rows: str,
    seeds: int | None,
    options: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Write the snapshot, and print a command for each missing run, which trains in the process of the command."""
    from regard.lab.engine.run_study import missing_jobs, planned_jobs
    from regard.lab.engine.snapshot import write_snapshot

    jobs = planned_jobs(study, scale, study.runs(scale, rows, seeds))
    if options["--retry"]:
        jobs = [job for job in jobs if store.status(job.run.key) != "done"]
    else:
        jobs = missing_jobs(jobs, store)
    write_snapshot(study, scale, store, seeds, rows)
    fixed = {"--scale": scale, **options, "--results": store.root.resolve(), "--workers": 0}
    start = [*_module_path(options["--import"]), sys.executable, "-m", "regard", "study", "run", study.name,
             *_arguments(fixed)]  # fmt: skip
    lines = [
        {"row": job.row, "seed": job.seed, "key": job.run.key, "command": shlex.join([*start, "--only", job.run.key])}
        for job in jobs
    ]
    if as_json:
        show(lines, True)
    else:
        print(*(line["command"] for line in lines), sep="\n", end="\n" * bool(lines))
    print(f"{len(lines)} runs are missing; each command runs one of them on any machine that shares {store.root}, "
          "and the table follows from the same command without --on print", file=sys.stderr)  # fmt: skip


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


def _dry_run(
    study: "Study", scale: str, rows: str, assumed: tuple[str, float | None], devices: int, as_json: bool
) -> int:
    """Print the counts of all rows, and what they need of the GPU `assumed`: its name and utilisation."""
    from regard.lab.engine.capacity import UTILISATION, capacities, find_gpu, summary
    from regard.lab.engine.dry_run import dry_run

    from .user_model import progress

    name, share = assumed
    share = UTILISATION if share is None else share
    gpu = find_gpu(name)
    found = dry_run(study, scale, rows, report=progress)
    needed = capacities(study, scale, found, gpu, devices, share)
    errors = [f"{line.label}: {line.error}" for line in found if line.error]
    if errors:
        print(
            f"regard: {len(errors)} of {len(found)} rows cannot be built, the first of them {errors[0]}",
            file=sys.stderr,
        )
    if as_json:
        needs = [{"gpu": name, "utilisation": share, **asdict(row)} for row in needed] or [{}] * len(found)
        show([{**asdict(line), "capacity": row} for line, row in zip(found, needs, strict=True)], True)
        return 1 if errors else 0
    title = f"{study.title}, {scale} scale: built here, one step on two random samples; MACs: multiply-accumulates"
    hidden = ("error", "saved_bytes")
    lines = [{key: value for key, value in asdict(line).items() if key not in hidden} for line in found]
    show(without_empty_columns(lines), False, title, errors)
    if needed:
        table = [
            {"row": row.row, "runs": row.runs, "GPU-hours": None if row.hours is None else round(row.hours, 2),
             "memory GB": _gigabytes(row.memory), "storage GB": _gigabytes(row.finished)}
            for row in needed
        ]  # fmt: skip
        show(table, False, "What the runs need", [summary(needed, name, gpu, share)])
    return 1 if errors else 0


def _gigabytes(size: int | None) -> float | None:
    return None if size is None else round(size / 1e9, 2)


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
