"""`regard export`: a trained model as an ONNX file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.core import ConfigError, UnsupportedError

from .given import expand_groups
from .run_options import path_option
from .trained import TrainedArgument, read_trained, say_numbers
from .user_model import ModelOptions


@expand_groups
def export(
    model: TrainedArgument,
    onnx: Annotated[Path, path_option("The file to write, such as model.onnx.")],
    free_size: Annotated[
        bool, typer.Option("--free-size", help="Leave height and width free, of a model that takes images of any size.")
    ] = False,
    best: Annotated[bool, typer.Option("--best", help="Use the best weights of a run with --val.")] = False,
    *,
    options: ModelOptions,
) -> None:
    """Export a trained model to ONNX and compare it with onnxruntime; inputs are normalised as in the training."""
    from regard.lab.train.onnx_export import export_onnx

    if onnx.suffix != ".onnx":
        raise ConfigError(f"--onnx names a file that ends in .onnx, not {onnx}")
    trained = read_trained(model, options, options.extra, best, any_output=True)
    say_numbers(model, trained)
    task, record = trained.task, trained.record
    if task is not None and task.no_export:
        raise UnsupportedError(f"--task {task.name} cannot be exported to ONNX: {task.no_export}")
    inputs, about = trained.inputs(), _about(record)
    if free_size and any(item.ndim != 4 for item in inputs):
        raise ConfigError("--free-size is for models of images: leave it out")
    difference, dynamic = export_onnx(trained.network, inputs, onnx, about=about, free_size=free_size)
    shapes = ", ".join(_shape(item.shape, dynamic, free_size) for item in inputs)
    typer.echo(f"{onnx}: input {shapes}; largest relative difference in onnxruntime {difference:.1e}")
    if "mean" in about:
        colours = "red, green, blue" if len(record["normal"][0]) == 3 else "grey"
        typer.echo(
            f"input = (pixels / 255 - mean) / deviation, {colours}: mean {about['mean']}, deviation "
            f"{about['deviation']}; they are in the metadata of the file, with the class names"
        )


def _shape(shape: Sequence[int], dynamic: bool, free_size: bool) -> str:
    """Of an input of the file, such as batchx3x224x224."""
    sides = ("height", "width") if free_size else shape[2:]
    return "x".join(map(str, ("batch" if dynamic else 1, *shape[1:2], *sides)))


def _about(record: dict[str, Any]) -> dict[str, str]:
    """What a user of the file has to know, as texts of JSON: class names, and the normalisation of images."""
    about = {"class_names": record["class_names"]} if record.get("class_names") else {}
    if record.get("normal"):
        about["mean"], about["deviation"] = ([round(value, 6) for value in part] for part in record["normal"])
    return {name: json.dumps(value) for name, value in about.items()}
