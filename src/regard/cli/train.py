"""`regard train` and `regard eval`: one run of a mechanism in a host model, and the score of a finished run."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.core import ConfigError, DataError, Extra

from .given import grouped
from .imports import Imports, imported, read_mixer
from .run_display import execute_run
from .run_options import (
    AsJson,
    DeviceOption,
    ResultsOption,
    RootOption,
    RunOptions,
    TaskOption,
    TrainingOptions,
    find_device,
    find_run,
    find_task,
    make_run,
    numbers,
    use_data,
)

if TYPE_CHECKING:
    from torch import nn

    from regard.core import MixerConfig
    from regard.lab.tasks.base import Task


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


def evaluate(
    key: Annotated[
        str, typer.Argument(metavar="RUN", help="A finished run: its key (12 letters and digits) or its folder.")
    ],
    best: Annotated[
        bool, typer.Option("--best", help="Use the best weights of a run with --val. Default: the last weights.")
    ] = False,
    mixer: Annotated[str, typer.Option(help="Evaluate with another mechanism, such as 'MiTA(m=9, k=9)'.")] = "",
    retune: Annotated[str, typer.Option(help="Change numbers of the mechanism, such as m=16,k=16.")] = "",
    device: DeviceOption = "auto",
    data: Annotated[str | None, typer.Option(help="Evaluate on other data, with the same classes.")] = None,
    split: Annotated[str, typer.Option(help="Evaluate on another split of the data, such as test or held.")] = "",
    data_root: RootOption = None,
    results: ResultsOption = Path("results"),
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Evaluate a finished run again: on its test images or other data, with its mechanism or another."""
    from regard.lab.train.autocast import ModelAtPrecision
    from regard.lab.train.load import trained
    from regard.lab.train.run import changed_data, read_run

    use_data(data_root)
    store, key = find_run(key, results)
    extra = imported(modules)
    run = read_run(store, key, extra)
    if not data and (changed := changed_data(run, key)):
        raise DataError(f"{changed}; --data PATH evaluates on the data that are there")
    model = trained(run, store, best, key)
    if mixer:
        _swap(model, read_mixer(mixer, extra), run.seed, extra)
    if retune:
        from regard.swapping.swap import retune as retune_model

        retune_model(model, **numbers(retune))
    if split:
        run = dataclasses.replace(run, task=_on_split(run.task, split))
    torch_device = find_device(device)
    model = ModelAtPrecision(model.to(torch_device), run.recipe.precision)
    if data:
        score = run.task.score_on(data, model, torch_device, store.data(key))
    else:
        score = run.task.score(model, torch_device)
    number = None if score.samples is None else len(score.samples)
    if as_json:
        shown = {"key": key, "metrics": score.metrics, "mixer": mixer, "retune": retune, run.task.unit: number}
        typer.echo(json.dumps(shown))
    else:
        values = [f"{name} {value:.4f}" for name, value in score.metrics.items()]
        typer.echo("  ".join([*values, *([] if number is None else [f"on {number} {run.task.unit}"])]))


def _on_split(task: "Task", split: str) -> "Task":
    """The task on another split. Raises: ConfigError."""
    if "split" not in task.__dataclass_fields__:
        raise ConfigError(f"--task {task.name} has one split for evaluation")
    return dataclasses.replace(task, split=split)  # type: ignore[call-arg]


def _swap(model: "nn.Module", mixer: "MixerConfig", seed: int, extra: Extra) -> None:
    """Swap another mechanism in, with the weights of the model; prints which weights are new."""
    import torch

    from regard.models.catalog import user_ports
    from regard.swapping.swap import plan_swap

    torch.manual_seed(seed)
    plan = plan_swap(model, mixer, ports=user_ports(extra))
    new = sorted({name for site in plan.sites for name in site.new})
    if new:
        typer.echo(f"new and untrained in every layer: {', '.join(new)}", err=True)
    plan.apply()
