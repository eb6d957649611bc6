"""Attention maps of a finished run on a sample picture, stored in the run's folder."""

from typing import TYPE_CHECKING

from regard.core import RegardError, StoreError, UnsupportedError
from regard.files.atomic import store_errors
from regard.files.records import write_record
from regard.lab.results.results import Results

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from regard.lab.tasks.base import Task

    from .run import Run

PICTURE = "flower"
"""The photograph for attention maps in every study: images of research data sets may not be published in reports."""


def sample_inputs(task: "Task", name: str = PICTURE) -> "tuple[Tensor, np.ndarray, str]":
    """A photograph with a free licence, or a digit for grey images, normalised like the task's own images.

    Returns the inputs (1, C, H, W), the picture (H, W, 3 or 1) in 0..255, and its credit.
    """
    import torch

    from regard.explain.pictures import CREDITS, sample_image

    example = task.example()[0]
    if not (isinstance(example, torch.Tensor) and example.ndim == 4):
        raise UnsupportedError(f"maps are drawn for tasks on images, not for --task {task.name}")
    _, channels, height, width = example.shape
    grey = channels == 1
    picture = sample_image((height, width), grey=grey, name=name)
    pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None]
    return task.prepare(pixels, torch.device("cpu")), picture, CREDITS["digit" if grey else name]


def probe_maps(run: "Run", store: Results) -> str:
    """Attention maps of a finished run on a sample picture, into probes/maps.json.

    The picture is that of `sample_inputs`, cropped and resized to the model's input: the same for every run of a study
    with one image size. Returns "done", or why there are no maps: a model without attention between tokens, or without
    a single grid.
    Raises: StoreError if the run has no checkpoint or the folder cannot be written.
    """
    from regard.explain.pictures import attention_maps

    from .load import load_trained

    if run.removed:
        return "attention was removed"
    model = load_trained(run, store)
    try:
        inputs, picture, credit = sample_inputs(run.task)
        maps = attention_maps(model, inputs[0], picture=picture, credit=credit)
    except StoreError:
        raise
    except RegardError as error:
        return str(error)
    if not maps["layers"]:
        return "no layer has attention weights between all tokens"
    folder = store.folder(run.key) / "probes"
    with store_errors(folder):
        if folder.is_symlink():  # what it points to is not changed
            folder.unlink()
    write_record(folder / "maps.json", maps)
    return "done"
