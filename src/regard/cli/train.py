"""`regard train`: one run of a mechanism in a host model."""

import dataclasses
from typing import Annotated

import typer

from regard.core import ConfigError

from .given import grouped
from .run_display import execute_run
from .run_options import RunOptions, TaskOption, TrainingOptions, find_task, make_run, use_data


@grouped
def train(
    mixer: Annotated[
        str,
        typer.Argument(
            metavar="MECHANISM",
            help='A mechanism, such as "MiTA(m=9, k=9)"; "host" keeps the host\'s attention, "None" removes it.',
        ),
    ],
    task: TaskOption = "classification",
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set by name or path, or a stream (hf://OWNER/NAME, stream:FOLDER); see docs/tasks.md. "
            "Default: a small one of the task.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help='A host model, with options if needed: "vit_tiny_patch16_224(patch_size=4)". Default: the task\'s.'
        ),
    ] = "",
    val: Annotated[
        float | None,
        typer.Option(help="Share of the training samples that are not trained on and choose the best weights."),
    ] = None,
    exif: Annotated[
        str,
        typer.Option(help="keep: pictures as they are stored; turn: as EXIF says. Default: as they were annotated."),
    ] = "",
    *,
    options: RunOptions,
    training: TrainingOptions,
) -> None:
    """Train one mechanism in a host model. Ctrl-C keeps a checkpoint; the same command continues from there."""
    use_data(options.data_root)
    if val is not None:
        from regard.lab.tasks.validation import ValidationPart

        if not 0 < val < 1:
            raise ConfigError(f"--val is a share between 0 and 1, such as 0.1, not {val}")
        if not issubclass(find_task(task, options.extra), ValidationPart):
            raise ConfigError(f"--task {task} has no validation part: leave out --val")
        held = [f"task.val={val}", f"task.val_seed={options.seed}"]
        options = dataclasses.replace(options, change=[*(options.change or ()), *held])
    if exif:
        if "exif" not in find_task(task, options.extra).__dataclass_fields__:
            raise ConfigError(f"--task {task} turns all pictures as EXIF says: leave out --exif")
        options = dataclasses.replace(options, change=[*(options.change or ()), f"task.exif={exif}"])
    execute_run(make_run(mixer, data or "", host, options, task=task), options.results, training, options.as_json)
