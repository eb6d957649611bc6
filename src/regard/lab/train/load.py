"""`load_run`: the trained model of a finished run."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from torch import nn

from regard.advice.user_model import UserModel, as_user_model
from regard.core import Extra, StoreError, UnsupportedError
from regard.core.validation import check_arguments
from regard.files.atomic import store_errors
from regard.files.paths import user_path
from regard.files.tensor_files import check_weights
from regard.lab.results.import_checks import spelled_call, spelled_fields
from regard.lab.results.results import Results
from regard.models import recipe as recipes

from . import checkpoint
from .run import Run, read_run, run_file


@check_arguments
def load_run(
    folder: str | os.PathLike[str], extra: Extra = (), *, best: bool = False, download: bool = False
) -> nn.Module:
    """The trained model in the folder of a finished run, in evaluation mode, on the CPU.

    Nothing is unpickled, and no network is asked. extra: the user's own mechanisms, models and ports that it needs.
    best: the weights of its best evaluation instead of the last ones. download: also load a model whose
    description names pretrained weights, a hub or a checkpoint file, which are then loaded first. The model of a run
    whose outcome does not describe the host is built by its task, which needs the data.
    Raises: StoreError if the folder has no run, it is damaged or not finished, or its description names other weights
    without `download`; DataError.
    """
    extra, target = tuple(extra), user_path(folder, StoreError)
    with store_errors(target, "read"):
        is_run = (target / "run.json").exists() and not (target / "model.json").exists()
    if not is_run:
        raise StoreError(f"{target} is not the folder of a run; regard.load reads folders that regard.save wrote")
    target = target.resolve()
    store = Results(target.parent)
    outcome = store.outcome(target.name)
    if outcome is None:
        raise StoreError(f"the run in {target} is not finished; repeat the command that started it")
    if outcome.get("status") != "done":
        raise StoreError(f"the run in {target} failed: {outcome.get('error')}; it has no trained model")
    run_file(target / "run.json")
    if best and "val" not in spelled_call(spelled_fields(outcome.get("spelling")).get("task"))[1]:
        raise checkpoint.no_best_weights(target.name)
    weights = checkpoint.trained_weights(target, best, _has_average(outcome), outcome.get("step"))
    recipe = outcome.get("model")
    if recipe is None:
        run = with_local_host(read_run(store, target.name, extra))
        if not download:
            recipes.check_local(target / "run.json", run.task.host)
        model = run.model(store.data(target.name) or None)
    else:
        with recipes.description_errors(target, "outcome.json"):
            if not download:
                recipes.check_local(target / "outcome.json", recipe)
            model = recipes.rebuild(recipe, extra)
    model.regard_data = outcome.get("data") or {}  # type: ignore[assignment]  # `regard.save` keeps it
    return _with_weights(model, weights, target)


def _with_weights(model: nn.Module, weights: dict[str, Any], folder: Path) -> nn.Module:
    """The model in evaluation mode with the weights of a run's folder. Raises: StoreError if they do not fit."""
    with checkpoint.load_errors(folder):
        check_weights(model, weights)
        model.load_state_dict(weights)
    return model.eval()


def load_user_run(folder: Path, size: tuple[int, int] | None = None, extra: Extra = ()) -> UserModel:
    """The model of a finished run, for advice: its images are prepared as in its training.

    Raises: as `load_run`; UnsupportedError for a run of texts or sequences.
    """
    model: Any = load_run(folder, extra).float()
    outcome = Results(folder.parent).outcome(folder.name) or {}
    task, _ = spelled_call(spelled_fields(outcome.get("spelling")).get("task"))
    if task in ("Translation", "Sequences"):
        raise UnsupportedError(f"{folder} is a run of {task.lower()}: it takes no images; use regard predict")
    return as_user_model(model, str(folder), size=size, data=model.regard_data, extra=extra)


def _has_average(outcome: dict[str, Any]) -> bool:
    """Whether the recipe of a run, as its outcome spells it, has an average of the weights."""
    _, recipe = spelled_call(spelled_fields(outcome.get("spelling")).get("recipe"))
    return any(recipe.get(name, "0") not in ("0", "0.0") for name in ("ema", "average"))


def load_trained(run: Run, store: Results) -> nn.Module:
    """The model of a finished run with its trained weights (their average if the recipe has one), in evaluation mode.

    Raises: StoreError if the run has no checkpoint.
    """
    folder, outcome, data = store.folder(run.key), store.outcome(run.key) or {}, store.data(run.key) or None
    averaged = bool(run.recipe.ema or run.recipe.average)
    weights = checkpoint.trained_weights(folder, averaged=averaged, end=outcome.get("step"))
    return _with_weights(with_local_host(run).model(data), weights, folder)


def with_local_host(run: Run) -> Run:
    """The run without the weights that its host started from, which those of its end replace."""
    return dataclasses.replace(run, task=dataclasses.replace(run.task, host=recipes.local_host(run.task.host)))
