"""`load`: the trained model of a folder, whether `save` or a run wrote it."""

import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from regard.core import StoreError
from regard.models import saving
from regard.store.results import Results

from . import checkpoint
from .run import Run, read_run


def load(folder: str | os.PathLike[str], extra: Iterable[type] = (), *, best: bool = False) -> nn.Module:
    """The trained model of a folder that `save` wrote, or of a finished run, in evaluation mode, on the CPU.

    Nothing is unpickled. extra: a user's own mechanisms that a saved folder names. best: of a run, the weights of its
    best evaluation instead of the last ones. A run that was finished before outcomes held the host is built by its
    task, which needs the data.
    Raises: StoreError if the folder is neither, incomplete or damaged, or the run is not finished; DataError.
    """
    target = Path(folder).expanduser()
    if (target / "run.json").exists() and not (target / "model.json").exists():
        return _of_run(target, tuple(extra), best)
    if best:
        raise StoreError(f"{target} is no run's folder; only a run has best weights")
    return saving.load(target, extra)


def _of_run(target: Path, extra: tuple[type, ...], best: bool) -> nn.Module:
    target = target.resolve()
    store = Results(target.parent)
    outcome = store.outcome(target.name)
    if outcome is None:
        raise StoreError(f"the run in {target} is not finished; carry it out first, with the command that began it")
    if outcome.get("status") != "done":
        raise StoreError(f"the run in {target} failed: {outcome.get('error')}; it has no trained model")
    weights = checkpoint.trained_weights(target, best)
    recipe = outcome.get("model")
    if recipe is None:
        run = read_run(store, target.name)
        model = run.task.model(run.mixer, run.seed, run.removed)
    else:
        with saving.described(target, "outcome.json"):
            model = saving.rebuild(recipe, extra)
    with checkpoint.fitting(target):
        model.load_state_dict(weights)
    return model.eval()


def trained(run: Run, store: Results, best: bool = False) -> nn.Module:
    """The network of a finished run with its trained weights (the average where the recipe has one), for evaluation.

    best: those of its best evaluation instead of the last. Raises: StoreError if the run has no such checkpoint.
    """
    weights = checkpoint.trained_weights(store.folder(run.key), best)
    model = run.task.model(run.mixer, run.seed, run.removed)
    with checkpoint.fitting(store.folder(run.key)):
        model.load_state_dict(weights)
    return model.eval()
