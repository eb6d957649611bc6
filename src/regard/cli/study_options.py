"""The options of `regard study`: which study, on which data, and where its runs are executed."""

import os
import sys
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError
from regard.lab.studies import load_study

from .imports import imported
from .run_options import absolute, checked_text, pair, read_changes, refuse_twice, use_data
from .sizes import read_size

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
Rows = Annotated[
    str,
    typer.Option(
        help="Rows by label or glob, such as 'MiTA*', separated by commas. With --decide: these too get three seeds, "
        "last of all, if no claim needs them."
    ),
]
Seeds = Annotated[int | None, typer.Option(help="Number of seeds. Default: the study's own.")]
Data = Annotated[
    str | None,
    typer.Option(help="A data set by name, a folder of class folders, or a parquet file.", callback=checked_text),
]
Host = Annotated[str | None, typer.Option(help="A host model for all rows, such as 'vit_tiny_patch16_224'.")]
Size = Annotated[str | None, typer.Option(help="Height and width of images, with --data or --host: 32 or 224x160.")]

Workers = Annotated[
    int | None,
    typer.Option(help="Processes for runs. Default: one for each GPU, or for each core without GPUs; 0: none."),
]
On = Annotated[
    str,
    typer.Option(
        metavar="PLACE",
        help="Where runs are executed: local, ray (the cluster of this machine), ray://HOST:PORT, slurm; print: only "
        "print one command for each missing run.",
    ),
]
Only = Annotated[str | None, typer.Option(metavar="KEY", help="Execute only the run with this key; no table.")]
Cpus = Annotated[int | None, typer.Option(min=1, max=4096, help="With --on ray or slurm: cores of each run [1].")]
NodesOfRun = Annotated[
    int, typer.Option("--nodes", min=1, help="With --on slurm: machines that share each batch of a run.")
]
Memory = Annotated[
    float | None,
    typer.Option(min=0.1, max=100_000, help="With --on ray or slurm: memory of each run in GB. Default: not counted."),
]
SlurmOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm",
        metavar="NAME=VALUE",
        help="With --on slurm: an option of sbatch, such as partition=gpu, gpus_per_node=1 or exclusive=True, or "
        "timeout_min=600. May be repeated.",
    ),
]

Gpu = Annotated[
    str | None,
    typer.Option(help="With --dry-run: the GPU for which hours and memory are estimated, such as H100 [A100]."),
]
Utilisation = Annotated[
    float | None, typer.Option(help="With --dry-run: the assumed share of the GPU's peak, between 0 and 1 [0.3].")
]


def find_cluster(
    word: str, workers: int | None, cpus: int | None, memory: float | None, nodes: int, slurm: list[str] | None
) -> "Place | None":
    """The cluster of --on; None for this machine. Raises: ConfigError for an unknown word, or options of another."""
    from regard.lab.engine.executors import find_place

    place = find_place(
        word, workers=workers, cpus=cpus, memory=memory, nodes=nodes, options=list(map(pair, slurm or ()))
    )
    return None if place.here else place


def find_study(
    name: str,
    scale: str,
    data: str | None,
    host: str | None,
    size: str | None,
    root: Path | None,
    modules: list[str] | None,
    digest: str | None = None,
    changes: list[str] | None = None,
) -> "Study":
    """The study, on the user's data, host and image size if these are given, with `changes`, the values of --set.

    Paths of data become absolute, also that of REGARD_DATA: runs are executed in other folders, too.
    Raises: ConfigError.
    """
    use_data(root)
    if folder := os.environ.get("REGARD_DATA"):
        os.environ["REGARD_DATA"] = os.path.abspath(os.path.expanduser(folder))
    study = load_study(name)
    setting = study.setting(scale)
    if digest is not None:
        if data is None or "digest" not in setting.task.__dataclass_fields__:
            raise ConfigError("--digest is for your own images: give them with --data")
        task = replace(setting.task, digest=digest)  # type: ignore[call-arg]
        study = replace(study, settings={**study.settings, scale: replace(setting, task=task)})
    values = _changes(study, scale, changes or [])
    for row in study.rows(scale):
        if own := sorted({*row.recipe} & {*values["recipe"]} | {*row.task} & {*values["task"]}):
            print(f"{row.label} keeps its own {', '.join(own)}", file=sys.stderr)
    data = own_data(setting.task, data)
    sides = read_size(size) if size else None
    return study.elsewhere(scale, data, host, sides, imported(modules), recipe=values["recipe"], fields=values["task"])


def own_data(task: "Task", data: str | None) -> str | None:
    """The value of --data with the path of the user's own data absolute; the name of a set stays as it is."""
    return data if data is None or data in task.sets else absolute(data)


def _changes(study: "Study", scale: str, changes: list[str]) -> dict[str, dict[str, Any]]:
    """The values of --set, by part. Raises: ConfigError."""
    setting = study.setting(scale)
    own = (
        "data",
        "host",
        "size",
        "extra",
        "digest",
        "revision",
    )  # the others have options, and this no value to choose
    fields = {
        part: {each.name: each for each in dataclass_fields(value) if each.init and each.name not in own}
        for part, value in (("recipe", setting.recipe), ("task", setting.task))
        if value is not None
    }
    refuse_twice(changes)
    return {"recipe": {}, "task": {}} | read_changes(changes, fields)
