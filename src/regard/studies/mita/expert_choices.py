"""What the experts of a trained MiTA network choose, and pictures of it."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from regard.core import Grid, Mask, UnsupportedError
from regard.explain.pictures import png
from regard.mixers.mita.mita import MiTAOperator
from regard.mixers.mita.routing import MitaPlan, mita_plan
from regard.swapping.shared_state import swapped
from regard.tasks.base import Task
from regard.tasks.classification import Classification
from regard.tasks.data.feed import evaluation_batches
from regard.train.measurements import PICTURE, sample_inputs

SCALE = 16
"""Pixels of a cell in an overlay with a frame."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one layer chose for a batch."""

    plan: MitaPlan
    grid: Grid


@dataclass(frozen=True, kw_only=True)
class Photograph:
    """inputs (1, C, H, W) as the network expects them; image: base64 of the PNG; note: where it comes from."""

    inputs: Tensor
    image: str
    note: str


def choices(model: nn.Module, inputs: Float[Tensor, "B C H W"]) -> dict[str, Choice]:
    """The plan of every MiTA layer in one forward pass, by the layer's name, in the order of the network.

    Raises: UnsupportedError if the model has no such layer.
    """
    found: dict[str, Choice] = {}
    mixers: dict[str, Any] = {name: model.get_submodule(name).mixer for name in swapped(model, "*")}
    mixers = {
        name: mixer for name, mixer in mixers.items() if isinstance(getattr(mixer, "operator", None), MiTAOperator)
    }
    if not mixers:
        raise UnsupportedError(f"{type(model).__name__} has no layer with MiTA, so nobody chooses keys")
    handles = [mixer.register_forward_hook(_noting(found, name), with_kwargs=True) for name, mixer in mixers.items()]
    try:
        with torch.no_grad():
            model.eval()(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _noting(found: dict[str, Choice], name: str) -> Callable[..., None]:
    def note(mixer: Any, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
        found[name] = _choice(mixer, *args, **kwargs)

    return note


def _choice(mixer: Any, x: Tensor, grid: Grid, mask: Mask | None = None, rope: Tensor | None = None) -> Choice:
    made, config = mixer.roles(x, grid, rope), mixer.config
    landmarks, _ = mixer.operator.pooled(made["q"], grid)
    return Choice(plan=mita_plan(made["q"], made["k"], landmarks, config.k, experts=config.experts), grid=grid)


def first_inputs(task: Task, number: int) -> Float[Tensor, "B C H W"]:
    """Some test images of a task, prepared: as its `limit` takes them."""
    if not isinstance(task, Classification):
        raise UnsupportedError(f"{type(task).__name__} has no test images to take; a classification has")
    images, _ = next(evaluation_batches(task.at_most(number).test_images(), task.size))
    return task.prepared(images, torch.device("cpu"))


def photograph(task: Task, name: str = PICTURE) -> Photograph:
    """A free photograph, or for grey images a digit, prepared as the task's own images are."""
    inputs, shown, credit = sample_inputs(task, name)
    return Photograph(inputs=inputs, image=base64.b64encode(png(shown)).decode(), note=f"Picture: {credit}.")


def overlay(weights: Tensor, grid: Grid, frame: Tensor | None = None) -> str:
    """Weights of cells as amber, opacity = share of the largest; base64 of a PNG. frame: cells that get a red frame."""
    share = weights.float() / weights.float().max().clamp_min(1e-9)
    pixels = np.zeros((grid.height, grid.width, 4), np.uint8)
    pixels[..., :3] = (255, 176, 0)
    pixels[..., 3] = (225 * share).round().reshape(grid.height, grid.width).numpy()
    pixels = pixels.repeat(SCALE, 0).repeat(SCALE, 1)
    if frame is not None:
        rows, columns = np.nonzero(frame.reshape(grid.height, grid.width).numpy())
        box = (rows.min() * SCALE, (rows.max() + 1) * SCALE, columns.min() * SCALE, (columns.max() + 1) * SCALE)
        _framed(pixels, *map(int, box))
    out = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def _framed(pixels: np.ndarray, top: int, bottom: int, left: int, right: int, thick: int = 2) -> None:
    """A red frame of a few pixels, inside the box."""
    red = (214, 40, 40, 255)
    pixels[top : top + thick, left:right] = red
    pixels[bottom - thick : bottom, left:right] = red
    pixels[top:bottom, left : left + thick] = red
    pixels[top:bottom, right - thick : right] = red
