"""The trained model that `regard predict` and `regard export` use: a finished run, or a folder that `save` wrote."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, Extra, UnsupportedError

from .run_options import find_run, recorded_data, saved_model

if TYPE_CHECKING:
    from torch import nn

    from regard.lab.tasks.base import Task

TrainedArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A finished run (its key, or its folder), or the folder of a saved model of classes."
    ),
]


@dataclass(frozen=True)
class Trained:
    """network: in evaluation mode, on the CPU. record: of the data of its training, see `Task.record`. precision: as in
    a recipe. inputs: makes its arguments for one random sample."""

    network: "nn.Module"
    task: "Task"
    record: dict[str, Any]
    precision: str
    inputs: Callable[[], tuple[Any, ...]]


def read_trained(text: str, results: Path, extra: Extra, best: bool = False) -> Trained:
    """The model of a run, or of a saved folder. best: the best weights of a run with --val.

    Raises: ConfigError if it is neither; UnsupportedError for a saved model without class scores; StoreError.
    """
    if (folder := saved_model(text)) is not None:
        if best:
            raise ConfigError(f"{text} is a saved model, which has no other weights: leave --best out")
        return _saved(folder, extra)
    from regard.lab.train.load import load_run, with_local_host
    from regard.lab.train.run import read_run

    store, key = find_run(text, results)
    run = with_local_host(read_run(store, key, extra))
    record = recorded_data(store, key)
    classes = len(record.get("class_names") or ())
    return Trained(
        load_run(store.folder(key), extra, best=best),
        run.task,
        record,
        run.recipe.precision,
        lambda: run.task.trial(run.mixer, run.removed, classes).inputs,
    )


def _saved(folder: Path, extra: Extra) -> Trained:
    """A saved model that gives class scores; says what its folder does not know of them."""
    from regard.advice.judges.embedding import Embedding
    from regard.advice.judges.scores import Scores
    from regard.advice.user_model import load_user_model
    from regard.lab.tasks.classification import Classification
    from regard.models.saving import read_description

    user = load_user_model(str(folder), extra=extra)
    output = user.output()
    judge = user.judges_of(output)[0]
    if isinstance(judge, Embedding) and getattr(user.network, "num_classes", None) != 0:
        judge = Scores(judge.name)  # a head of the user's own has no name that says so
    if not isinstance(judge, Scores):
        raise UnsupportedError(
            f"{folder} is a saved model that gives {judge}, no class scores: name the run that trained it"
        )
    scores = judge.read(output)
    if "normal" not in user.data:
        mean, deviation = user.statistics
        print(f"{folder} does not say how images are normalised: mean {mean}, deviation {deviation}", file=sys.stderr)
    names = user.data.get("class_names")
    if not names:
        print(f"{folder} has no names of classes: labels are the numbers of its outputs, from 0", file=sys.stderr)
    known = names or [str(label) for label in range(scores.shape[1])]
    if len(known) != scores.shape[1]:
        raise ConfigError(f"{folder} names {len(known)} classes, but its model has {scores.shape[1]}: save it again")
    host = read_description(folder)["host"]
    task = Classification(host=host, data=user.data.get("name", str(folder)), size=user.size, init="host", extra=extra)
    record = {"class_names": known, "normal": [list(part) for part in user.statistics]}
    return Trained(user.network, task, record, "32-true", lambda: (user.example,))
