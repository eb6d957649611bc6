"""The options of `regard study`: which study, on which data, and where its runs are executed."""

import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError
from regard.lab.studies import load_study

from .imports import Imports, imported_items, imported_studies
from .run_options import (
    Changes,
    Compile,
    Devices,
    Digest,
    ResultsOption,
    RootOption,
    absolute,
    pair,
    read_changes,
    refuse_twice,
    use_data,
)
from .sizes import read_size
from .tables import AsJson

if TYPE_CHECKING:
    from regard.lab.engine.executors.base import Place
    from regard.lab.engine.study import Study
    from regard.lab.tasks.base import Task

Name = Annotated[str, typer.Argument(help="The study; `regard study list` shows all.")]
NameOrNone = Annotated[str, typer.Argument(metavar="NAME", help="The study; `regard study list` shows all.")]
Scale = Annotated[str, typer.Option(help="smoke (minutes; judges no claim), desk (hours) or paper (a cluster).")]
LargestScale = Annotated[
    str | None,
    typer.Option("--scale", help="smoke, desk or paper, with changes such as desk+cifar10. Default: the largest here."),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Runs at the same time. Default: one for each GPU, or for each core without GPUs."),
]


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What a user changes in a study: data, host, size, and fields of task and recipe."""

    data: Annotated[
        str | None,
        typer.Option(help="A data set by name, a folder of class folders, or a parquet file."),
    ] = None
    host: Annotated[str | None, typer.Option(help="A host model for all rows, such as 'vit_tiny_patch16_224'.")] = None
    size: Annotated[
        str | None, typer.Option(help="Height and width of images, with --data or --host: 32 or 224x160.")
    ] = None
    change: Changes = None
    data_root: RootOption = None
    digest: Digest = None
    modules: Imports = None


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where the runs of a study are executed."""

    on: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Where runs are executed: local, ray (the cluster of this machine), ray://HOST:PORT, slurm; print: "
            "only print one command for each missing run.",
        ),
    ] = "local"
    workers: Annotated[
        int | None,
        typer.Option(help="Processes for runs. Default: one for each GPU, or for each core without GPUs; 0: none."),
    ] = None
    cpus: Annotated[
        int | None, typer.Option(min=1, max=4096, help="With --on ray or slurm: cores of each run [1].")
    ] = None
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=100_000, help="With --on ray or slurm: memory of each run in GB. Default: not counted."
        ),
    ] = None
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="With --on slurm: machines that share each batch of a run.")
    ] = 1
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm",
            metavar="NAME=VALUE",
            help="With --on slurm: an option of sbatch, such as partition=gpu, gpus_per_node=1 or exclusive=True, or "
            "timeout_min=600. May be repeated.",
        ),
    ] = None

    def cluster(self) -> "Place | None":
        """None for this machine. Raises: ConfigError for an unknown word of --on, or options of another place."""
        from regard.lab.engine.executors import find_place

        place = find_place(
            self.on,
            workers=self.workers,
            cpus=self.cpus,
            memory=self.memory,
            nodes=self.nodes,
            options=list(map(pair, self.slurm or ())),
        )
        return None if place.here else place


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Which runs of a study are executed, and how."""

    scale: Scale = "smoke"
    rows: Annotated[
        str,
        typer.Option(
            help="Rows by label or glob, such as 'MiTA*', separated by commas. With --decide: these too get three "
            "seeds, last of all, if no claim needs them."
        ),
    ] = "*"
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. Default: the study's own.")] = None
    devices: Devices = 1
    compile: Compile = False
    results: ResultsOption = Path("results")
    only: Annotated[str | None, typer.Option(metavar="KEY", help="Execute only the run with this key; no table.")] = (
        None
    )
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed runs.")] = False
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the results of all runs first, and repeat them.")] = (
        False
    )
    hours: Annotated[float | None, typer.Option(help="With --decide: no run begins after so many hours [6].")] = None
    as_json: AsJson = False


def find_study(name: str, scale: str, options: StudyOptions) -> "Study":
    """The study as the options change it.

    Paths of data become absolute, also that of REGARD_DATA: runs are executed in other folders, too.
    Raises: ConfigError.
    """
    use_data(options.data_root)
    if folder := os.environ.get("REGARD_DATA"):
        os.environ["REGARD_DATA"] = os.path.abspath(os.path.expanduser(folder))
    extra, yours = imported_items(options.modules), imported_studies(options.modules)
    study = yours[name] if name in yours else load_study(name)
    setting = study.setting(scale)
    if options.digest is not None:
        if options.data is None or "digest" not in setting.task.__dataclass_fields__:
            raise ConfigError("--digest is for your own images: give them with --data")
        task = replace(setting.task, digest=options.digest)  # type: ignore[call-arg]
        study = replace(study, settings={**study.settings, scale: replace(setting, task=task)})
    values = _changes(study, scale, options.change or [])
    for row in study.rows(scale):
        if own := sorted({*row.recipe} & {*values["recipe"]} | {*row.task} & {*values["task"]}):
            print(f"{row.label} keeps its own {', '.join(own)}", file=sys.stderr)
    data = own_data(setting.task, options.data)
    sides = read_size(options.size) if options.size else None
    return study.elsewhere(scale, data, options.host, sides, extra, recipe=values["recipe"], fields=values["task"])


def own_data(task: "Task", data: str | None) -> str | None:
    """The value of --data with the path of the user's own data absolute; the name of a set stays as it is."""
    return data if data is None or data in task.sets else absolute(data)


def _changes(study: "Study", scale: str, changes: list[str]) -> dict[str, dict[str, Any]]:
    """The values of --set, by part. Raises: ConfigError."""
    setting = study.setting(scale)
    own = ("data", "host", "size", "extra", "digest", "revision")  # have options, or no value to choose
    known = {
        part: {each.name: each for each in fields(value) if each.init and each.name not in own}
        for part, value in (("recipe", setting.recipe), ("task", setting.task))
        if value is not None
    }
    refuse_twice(changes)
    return {"recipe": {}, "task": {}} | read_changes(changes, known)
