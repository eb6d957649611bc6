"""What figures of trained networks share: runs and images to read, and weights drawn over a picture."""

import base64
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.core import Grid, UnsupportedError
from regard.explain.pictures import png
from regard.images.feed import evaluation_batches
from regard.lab.engine.analysis import Source, trained_runs
from regard.lab.tasks.base import Task
from regard.lab.tasks.classification import Classification
from regard.lab.train.measurements import PICTURE, sample_inputs

CELL_PIXELS = 16
"""Side of a grid cell in an overlay."""
AMBER, RED = (255, 176, 0), (214, 40, 40, 255)
SMOKE_NOTE = "a smoke run is hardly trained, and only shows that the figure can be computed."


@dataclass(frozen=True, kw_only=True)
class Photograph:
    """inputs (1, C, H, W) as the network expects them; image: base64 of the PNG; note: where it comes from."""

    inputs: Tensor
    image: str
    note: str


def first_runs(source: Source, study: str) -> dict[str, str]:
    """The key of the first finished seed of every row that has one. Raises: ConfigError or StoreError if none has."""
    keys: dict[str, str] = {}
    for row, _, key in trained_runs(source, study):
        keys.setdefault(row, key)
    return keys


def first_inputs(task: Task, number: int) -> Float[Tensor, "B C H W"]:
    """The first test images of a task, prepared, in the order of its `limit`."""
    if not isinstance(task, Classification):
        raise UnsupportedError(f"the figure needs the test images of a Classification, not of {type(task).__name__}")
    images, _ = next(evaluation_batches(task.at_most(number).test_images(), task.size))
    return task.prepare(images, torch.device("cpu"))


def photograph(task: Task, name: str = PICTURE) -> Photograph:
    """A photograph with a free licence, or for grey images a digit, prepared as the task's own images are."""
    inputs, pixels, credit = sample_inputs(task, name)
    return Photograph(inputs=inputs, image=as_text(pixels), note=f"Picture: {credit}.")


def as_text(pixels: UInt8[np.ndarray, "height width channels"]) -> str:
    """Pixels as base64 of a PNG."""
    return base64.b64encode(png(pixels)).decode()


def overlay(weights: Tensor, grid: Grid, frame: Tensor | None = None) -> str:
    """Weights of grid cells (cells,) in amber, opacity = share of the largest weight; base64 of a PNG.

    frame: (cells,), True inside a red frame.
    """
    share = weights.float() / weights.float().max().clamp_min(1e-9)
    pixels = np.zeros((grid.height, grid.width, 4), np.uint8)
    pixels[..., :3] = AMBER
    pixels[..., 3] = (225 * share).round().reshape(grid.height, grid.width).numpy()
    pixels = pixels.repeat(CELL_PIXELS, 0).repeat(CELL_PIXELS, 1)
    if frame is not None:
        cells = np.nonzero(frame.reshape(grid.height, grid.width).numpy())
        rows, columns = (slice(each.min() * CELL_PIXELS, (each.max() + 1) * CELL_PIXELS) for each in cells)
        box = pixels[rows, columns]
        box[:2] = box[-2:] = box[:, :2] = box[:, -2:] = RED
    return as_text(pixels)


def cell_frame(grid: Grid, cell: int) -> Tensor:
    """True at one cell, (cells,)."""
    return torch.arange(grid.cells) == cell
