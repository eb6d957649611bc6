"""`load`: the trained model in a folder that `save` or a run wrote."""

import os
from functools import partial
from pathlib import Path

from torch import nn

from regard.core import Extra, StoreError
from regard.models import saving
from regard.store.results import Results

from . import checkpoint
from .run import Run, read_run


def load(folder: str | os.PathLike[str], extra: Extra = (), *, best: bool = False) -> nn.Module:
    """The trained model in a folder that `save` wrote, or of a finished run, in evaluation mode, on the CPU.

    Nothing is unpickled. extra: the user's own mechanisms, models and ports that it needs. best: for a run, the weights
    of its best evaluation instead of the last ones. The model of an old run, whose outcome does not describe the host,
    is built by its task, which needs the data.
    Raises: StoreError if neither `save` nor a run wrote the folder, it is incomplete or damaged, or the run is not
    finished; DataError.
    """
    target = Path(folder).expanduser()
    if (target / "run.json").exists() and not (target / "model.json").exists():
        return _of_run(target, tuple(extra), best)
    if best:
        raise StoreError(f"{target} is not the folder of a run; only a run has best weights")
    return saving.load(target, extra)


def _of_run(target: Path, extra: Extra, best: bool) -> nn.Module:
    target = target.resolve()
    store = Results(target.parent)
    outcome = store.outcome(target.name)
    if outcome is None:
        raise StoreError(f"the run in {target} is not finished; repeat the command that started it")
    if outcome.get("status") != "done":
        raise StoreError(f"the run in {target} failed: {outcome.get('error')}; it has no trained model")
    weights = checkpoint.trained_weights(target, best)
    recipe = outcome.get("model")
    if recipe is None:
        run = read_run(store, target.name, extra)
        model = run.task.model(run.mixer, run.seed, run.removed, outcome.get("data"))
    else:
        with saving.description_errors(target, "outcome.json"):
            model = saving.build_matching(partial(saving.rebuild, recipe, extra), weights)
    with checkpoint.load_errors(target):
        model.load_state_dict(weights)
    return model.eval()


def trained(run: Run, store: Results, best: bool = False) -> nn.Module:
    """The model of a finished run with its trained weights (their average if the recipe has one), in evaluation mode.

    best: the weights of its best evaluation instead of the last ones.
    Raises: StoreError if the run has no such checkpoint.
    """
    weights = checkpoint.trained_weights(store.folder(run.key), best)
    record = (store.outcome(run.key) or {}).get("data")
    model = run.task.model(run.mixer, run.seed, run.removed, record)
    with checkpoint.load_errors(store.folder(run.key)):
        model.load_state_dict(weights)
    return model.eval()
