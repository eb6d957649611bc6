"""Probes: measurements on a trained network, kept in the run's folder."""

from typing import TYPE_CHECKING

from regard.core import RegardError, StoreError
from regard.store.files import write_json
from regard.store.results import Results

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from regard.tasks.base import Task

    from .run import Run

PICTURE = "flower"
"""The photograph of every study's maps; images of research sets may not be shown in pages that are passed on."""


def sample_inputs(task: "Task", name: str = PICTURE) -> "tuple[Tensor, np.ndarray, str]":
    """A free photograph, or for grey images a digit, prepared as the task's own images are.

    Returns the inputs (1, C, H, W), the picture (H, W, 3 or 1) in 0..255, and where it comes from.
    """
    import torch

    from regard.explain.pictures import CREDITS, sample_image

    _, channels, height, width = task.example().shape
    grey = channels == 1
    shown = sample_image((height, width), grey=grey, name=name)
    pixels = torch.from_numpy(shown.copy()).permute(2, 0, 1)[None]
    return task.prepared(pixels, torch.device("cpu")), shown, CREDITS["digit" if grey else name]


def probe_maps(run: "Run", store: Results) -> str:
    """Attention maps of a finished run on a sample picture, into probes/maps.json.

    The picture is a free photograph (for grey images a digit), cut and resized to the model's input and normalised as
    the run's task does; every run of a study with one image size gets the same. Returns "done", or why there are no
    maps: a network without attention between tokens, or without a single grid.
    Raises: StoreError if the run has no checkpoint or the folder cannot be written.
    """
    from regard.explain.pictures import attention_of

    from .load import trained

    if run.removed:
        return "no attention to show"
    model = trained(run, store)
    try:
        inputs, shown, credit = sample_inputs(run.task)
        maps = attention_of(model, inputs[0], picture=shown, credit=credit)
    except StoreError:
        raise
    except RegardError as error:
        return str(error)
    if not maps["layers"]:
        return "no layer has weights between all tokens"
    write_json(store.folder(run.key) / "probes" / "maps.json", maps)
    return "done"
