"""`regard train`: one run of a mechanism in a host model."""

from typing import Annotated

import typer

from .given import expand_groups
from .run_display import execute_run
from .run_options import RunOptions, TrainingOptions, make_run, suggest_task, use_data


@expand_groups
def train(
    mixer: Annotated[
        str,
        typer.Argument(
            metavar="MECHANISM",
            help='A mechanism, such as "MiTA(m=9, k=9)"; "host" keeps the host\'s attention, "None" removes it.',
        ),
    ],
    task: Annotated[
        str, typer.Option("--task", help="The problem: classification, segmentation, ... (`regard list tasks`).")
    ] = "classification",
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
    *,
    options: RunOptions,
    training: TrainingOptions,
) -> None:
    """Train one mechanism in a host model. Ctrl-C keeps a checkpoint; the same command continues from there."""
    use_data(options.data_root)
    with suggest_task(task, data):
        execute_run(make_run(mixer, data or "", host, options, task=task), options.results, training, options.as_json)
