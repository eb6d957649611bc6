"""Export of a trained model to ONNX, compared with onnxruntime on the spot."""

import logging
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.core import ConfigError, RegardError, StoreError, require
from regard.mixers.agent import Agent
from regard.mixers.mita.mita import MiTA
from regard.mixers.spelling import spell
from regard.swapping.layer import Port

BATCH = 2
TOLERANCE = 1e-4
"""Largest difference of an output, relative to its largest value."""


def export_onnx(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    path: Path,
    about: Mapping[str, str] | None = None,
    free_size: bool = False,
) -> tuple[float, bool]:
    """Write a model in evaluation mode to an ONNX file, and compare its outputs with the model's in onnxruntime.

    inputs: the model's arguments for one sample, each with the batch first. The exported model takes any batch where
    the exporter can trace one, else batches of one: `BATCH` samples trace a dynamic export, and are compared.
    about: entries of the file's metadata. free_size: leave height and width of images free too, and compare twice the
    height as well; MiTA and Agent need their landmarks as m=(rows, columns).
    Returns the largest difference of an output relative to its largest value, and whether the batch is dynamic.
    Raises: MissingExtra if packages are missing; ConfigError if the exporter fails, or outputs differ by more than
    `TOLERANCE`; StoreError if the file cannot be written.
    """
    require("onnx", "onnx")
    require("onnxruntime", "onnx")
    require("onnxscript", "onnx")
    model = model.cpu().float().eval()
    if free_size:
        _check_free(model, inputs)
    many = tuple(torch.cat([item] * BATCH) for item in inputs)
    program, dynamic, failure = None, False, ""
    free = dict.fromkeys((0, 2, 3) if free_size else (0,), torch.export.Dim.DYNAMIC)
    for dynamic, examples in ((True, many), *([] if free_size else [(False, inputs)])):
        shapes = tuple(free for _ in inputs) if dynamic else None
        try:
            program = _trace(model, examples, shapes)
            break
        except Exception as error:  # the exporter raises errors of many kinds
            failure = _cause(error)
    if program is None:
        raise ConfigError(f"{type(model).__name__} cannot be exported to ONNX: {failure}")
    program.model.metadata_props.update(about or {})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:  # a former file stays until the end
            part = Path(folder) / path.name
            program.save(str(part))
            taller = _taller(examples) if free_size else examples
            difference = float(torch.tensor([compare_onnx(model, given, part) for given in (examples, taller)]).max())
            if not difference <= TOLERANCE:
                raise ConfigError(
                    f"{path} is not written: in onnxruntime the outputs of {type(model).__name__} differ by "
                    f"{difference:.1e} (relative), more than {TOLERANCE:g}"
                )
            for file in Path(folder).iterdir():  # weights of more than 2 GB have a file of their own
                file.replace(path.parent / file.name)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
    return difference, dynamic


def _check_free(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raises: ConfigError for what needs to know the size of images: a number of landmarks, a model of one size."""
    for layer in model.modules():
        config: Any = layer.mixer.config if isinstance(layer, Port) else None
        if isinstance(config, MiTA | Agent) and isinstance(config.m, int) and config.landmarks == "avg2d":
            sides = cast(Port, layer).mixer.site.grid.factor(config.m)
            raise ConfigError(
                f"{spell(config)} lays its landmarks by the shape of the image, which is free: give m=(rows, columns), "
                f"here m={sides}; regard.retune changes it in a trained model"
            )
    try:
        with torch.inference_mode():
            model(*_taller(inputs))
    except RegardError:
        raise
    except Exception as error:  # of the user's model, it may be any
        size = "x".join(map(str, inputs[0].shape[2:]))
        raise ConfigError(
            f"this {type(model).__name__} takes images of {size} only: free sides need a model of any size, in timm "
            "with dynamic_img_size=True, such as 'vit_tiny_patch16_224(dynamic_img_size=True)'"
        ) from error


def _taller(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Images of twice the height."""
    return tuple(torch.cat([item] * 2, 2) for item in inputs)


def _cause(error: BaseException) -> str:
    """The error that the exporter's own ones are about, and the beginning of its text."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' ...')}"


def _trace(model: nn.Module, inputs: tuple[Tensor, ...], shapes: tuple[Any, ...] | None) -> Any:
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(model, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


def compare_onnx(model: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> float:
    """The largest difference between the outputs of a model and of its ONNX file, relative to the largest value."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    values = session.run(None, {name: item.numpy() for name, item in zip(names, inputs, strict=True)})
    with torch.inference_mode():
        outputs = model(*inputs)
    expected = [part for part in tree_leaves(outputs) if isinstance(part, Tensor)]
    differences = [
        float((torch.as_tensor(value) - tensor).abs().max() / tensor.abs().max().clamp_min(1e-12))
        for value, tensor in zip(values, expected, strict=True)
    ]
    return float(torch.tensor(differences).max())  # NaN if one is
