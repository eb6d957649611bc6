"""`regard eval`: the score of a finished run, or of any classifier on labelled images."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from regard.core import ConfigError, DataError, Extra

from .given import expand_groups
from .imports import read_mixer
from .run_options import AsJson, DeviceOption, RootOption, find_device, numbers, use_data
from .trained import Trained, TrainedArgument, read_trained, trained_run
from .user_model import ModelOptions, progress

if TYPE_CHECKING:
    from regard.core import MixerConfig
    from regard.lab.tasks.base import Task
    from regard.lab.tasks.classification import Classification


@expand_groups
def evaluate(
    model: TrainedArgument,
    best: Annotated[
        bool, typer.Option("--best", help="Use the best weights of a run with --val. Default: the last weights.")
    ] = False,
    mixer: Annotated[str, typer.Option(help="Evaluate with another mechanism, such as 'MiTA(m=9, k=9)'.")] = "",
    plan: Annotated[str, typer.Option(help="Evaluate with a plan of layers: plan.json of `regard advise`.")] = "",
    retune: Annotated[str, typer.Option(help="Change numbers of the mechanism, such as m=16,k=16.")] = "",
    device: DeviceOption = "auto",
    data: Annotated[str | None, typer.Option(help="Evaluate on these data. Default: the test of a run's own.")] = None,
    split: Annotated[str, typer.Option(help="Evaluate on another split of a run's own data, such as held.")] = "",
    *,
    options: ModelOptions,
    data_root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a finished run again, on its test images or other data, or any classifier on --data; with its attention
    or with another mechanism."""
    from regard.lab.train.autocast import ModelAtPrecision

    if mixer and plan:
        raise ConfigError("--mixer and --plan both name the mechanism: leave one out")
    use_data(data_root)
    extra = options.extra
    run = trained_run(model, options.results)
    if not data and run is None:
        raise ConfigError(f"{model} is no run, whose test images are known: give labelled images with --data")
    if not data and run is not None:
        _check_data(*run, extra)
    trained = read_trained(model, options, extra, best)
    task = cast("Task", trained.task)
    if mixer:
        _swap(trained, read_mixer(mixer, extra), extra)
    if plan:
        _swap_by_plan(trained, plan, extra)
    if retune:
        from regard.swapping.swap import retune as retune_model

        retune_model(trained.network, **numbers(retune))
    if split:
        task = _on_split(task, split, data or "")
    torch_device = find_device(device)
    network = ModelAtPrecision(trained.network.to(torch_device), trained.precision).eval()
    if data:
        score = task.score_on(data, network, torch_device, trained.record | _classes(trained, model, data))
    else:
        score = task.score(network, torch_device)
    number = None if score.samples is None else len(score.samples)
    if as_json:
        key = {} if run is None else {"key": run[1]}
        given = {"mixer": mixer, "plan": plan, "retune": retune}
        typer.echo(json.dumps({**key, "metrics": score.metrics, **given, task.unit: number}))
    else:
        values = [f"{name} {value:.4f}" for name, value in score.metrics.items()]
        typer.echo("  ".join([*values, *([] if number is None else [f"on {number} {task.unit}"])]))


def _check_data(store: Any, key: str, extra: Extra) -> None:
    """Raises: DataError if a run's data have changed since its training."""
    from regard.lab.train.run import changed_data, read_run

    if changed := changed_data(read_run(store, key, extra), key):
        raise DataError(f"{changed}; --data PATH evaluates on data that were not trained on")


def _classes(trained: Trained, model: str, data: str) -> dict[str, Any]:
    """The names of classes whose names a model does not say: those of the data, in their order.

    Raises: ConfigError if their numbers differ.
    """
    from regard.images import own
    from regard.lab.data import catalog

    if trained.named:
        return {}
    outputs = len(trained.record["class_names"])
    if data in catalog.NAMED:
        classes = cast("Classification", trained.task).on(data).data_set().classes
    else:
        classes = own.read_scored(catalog.path_of(data))[0]
    if len(classes) != outputs:
        raise ConfigError(
            f"{model} has {outputs} outputs without names and {data} has {len(classes)} classes: save the model with "
            "regard.save(model, FOLDER, data={'class_names': [...]})"
        )
    progress(f"its outputs are taken for the classes of {data} in this order: {', '.join(classes)}")
    return {"class_names": classes}


def _on_split(task: "Task", split: str, data: str) -> "Task":
    """The task on another split. data: other ones than the run's own, "" for these. Raises: ConfigError."""
    if data:
        raise ConfigError(f"--split is for a run's own data; of {data} the test is scored, or all: leave --split out")
    if "split" not in task.__dataclass_fields__:
        raise ConfigError(f"--task {task.name} has one split for evaluation")
    return dataclasses.replace(task, split=split)  # type: ignore[call-arg]


def _swap(trained: Trained, mixer: "MixerConfig", extra: Extra) -> None:
    """Swap another mechanism in, with the weights of the model; prints which weights are new."""
    import torch

    from regard.models.catalog import user_ports
    from regard.swapping.swap import plan_swap

    torch.manual_seed(trained.seed)
    plan = plan_swap(trained.network, mixer, example=trained.example, ports=user_ports(extra))
    new = sorted({name for site in plan.sites for name in site.new})
    if new:
        typer.echo(f"new and untrained in every layer: {', '.join(new)}", err=True)
    plan.apply()


def _swap_by_plan(trained: Trained, plan: str, extra: Extra) -> None:
    """Swap by a plan of layers, its file or its text; prints which weights are new."""
    import torch

    from regard.models.catalog import user_ports
    from regard.swapping.layer_plan import read_layer_plan
    from regard.swapping.swap import swap

    torch.manual_seed(trained.seed)
    before = {name for name, _ in trained.network.named_parameters()}
    swap(trained.network, read_layer_plan(plan, extra), example=trained.example, ports=user_ports(extra))
    if new := [name for name, _ in trained.network.named_parameters() if name not in before]:
        typer.echo(f"new and untrained: {', '.join(new)}", err=True)
