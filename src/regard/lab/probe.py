"""Probes: measurements on a trained network, kept in the run's folder."""

from typing import TYPE_CHECKING

from regard.core import RegardError

from .files import write_json
from .results import Results

if TYPE_CHECKING:
    from .run import Run


def probe_maps(run: "Run", store: Results) -> str:
    """Attention maps of a finished run on the first test image, into probes/maps.json.

    Returns "done", or why there are none: a network without attention between tokens, or without a single grid.
    Raises: StoreError if the run has no checkpoint or the folder cannot be written.
    """
    from regard.core import StoreError
    from regard.measure.pictures import attention_of

    from .run import trained

    if run.removed:
        return "no attention to show"
    model = trained(run, store)
    try:
        maps = attention_of(model, run.task.example()[0])
    except StoreError:
        raise
    except RegardError as error:
        return str(error)
    if not maps["layers"]:
        return "no layer has weights between all tokens"
    write_json(store.folder(run.key) / "probes" / "maps.json", maps)
    return "done"
