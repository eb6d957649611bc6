"""Probes: measurements on a trained network, kept in the run's folder."""

from typing import TYPE_CHECKING

from regard.core import RegardError, StoreError

from .files import write_json
from .results import Results

if TYPE_CHECKING:
    from .run import Run

PICTURE = "flower"
"""The photograph of every study's maps; images of research sets may not be shown in pages that are passed on."""


def probe_maps(run: "Run", store: Results) -> str:
    """Attention maps of a finished run on a sample picture, into probes/maps.json.

    The picture is a free photograph (for grey images a digit), cut and resized to the model's input and normalised as
    the run's task does; every run of a study with one image size gets the same. Returns "done", or why there are no
    maps: a network without attention between tokens, or without a single grid.
    Raises: StoreError if the run has no checkpoint or the folder cannot be written.
    """
    import torch

    from regard.measure.pictures import CREDITS, attention_of, sample_image

    from .run import trained

    if run.removed:
        return "no attention to show"
    model = trained(run, store)
    try:
        _, channels, height, width = run.task.example().shape
        grey = channels == 1
        shown = sample_image((height, width), grey=grey, name=PICTURE)
        pixels = torch.from_numpy(shown.copy()).permute(2, 0, 1)[None]
        image = run.task.prepared(pixels, torch.device("cpu"))[0]
        maps = attention_of(model, image, picture=shown, credit=CREDITS["digit" if grey else PICTURE])
    except StoreError:
        raise
    except RegardError as error:
        return str(error)
    if not maps["layers"]:
        return "no layer has weights between all tokens"
    write_json(store.folder(run.key) / "probes" / "maps.json", maps)
    return "done"
