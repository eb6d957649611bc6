"""The trained model that `regard predict`, `eval` and `export` use: a finished run, or a user's model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, Extra, UnsupportedError
from regard.lab.results.import_checks import is_key

from .run_options import find_run, optional_run
from .user_model import ModelOptions, progress, read_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from regard.advice.judges import Judge
    from regard.advice.user_model import UserModel
    from regard.lab.results.results import Results
    from regard.lab.tasks.base import Task

TrainedArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A finished run (its key, or its folder), a saved folder, or a model that --weights or --pretrained "
        "trains: timm's name, hf:FOLDER, my_module:make_model.",
    ),
]


@dataclass(frozen=True)
class Trained:
    """network: in evaluation mode, on the CPU. task: None for outputs other than class scores. record: of the data of
    its training, see `Task.record`. precision: as in a recipe. inputs: makes its arguments for one random sample.
    named: the names of its classes are known. seed: of its training. example: an image, of a user's model."""

    network: "nn.Module"
    task: "Task | None"
    record: dict[str, Any]
    precision: str
    inputs: Callable[[], tuple[Any, ...]]
    named: bool = True
    seed: int = 0
    example: "Tensor | None" = None


def trained_run(text: str, results: Path) -> "tuple[Results, str] | None":
    """The store and the key of a run; None for other models. Raises: ConfigError for the key of a run that is not
    there."""
    return find_run(text, results) if is_key(text) else optional_run(text, results)


def read_trained(
    text: str, options: ModelOptions, extra: Extra, best: bool = False, *, any_output: bool = False
) -> Trained:
    """The model of a run, or of a user's words (`read_model`). best: the best weights of a run with --val.

    any_output: also outputs other than class scores.
    Raises: ConfigError if it is neither; UnsupportedError for another output; StoreError.
    """
    stored = trained_run(text, options.results)
    if stored is None:
        if best:
            raise ConfigError(f"{text} is no run, and has no other weights: leave --best out")
        return _of_user(text, options, extra, any_output)
    if options.given:
        raise ConfigError(f"{text} is a run, which prepares images as in its training: leave {options.given[0]} out")
    from regard.lab.train.load import load_run, with_local_host
    from regard.lab.train.run import read_run

    store, key = stored
    run = with_local_host(read_run(store, key, extra))
    record = store.data(key)
    classes = len(record.get("class_names") or ())
    return Trained(
        load_run(store.folder(key), extra, best=best),
        run.task,
        record,
        run.recipe.precision,
        lambda: run.task.trial(run.mixer, run.removed, classes).inputs,
        seed=run.seed,
    )


def say_numbers(text: str, trained: Trained) -> None:
    """Say so where labels are numbers, as the names of the classes are not known."""
    if not trained.named:
        progress(f"{text} has no names of classes: labels are the numbers of its outputs, from 0")


def _as_of_task(user: "UserModel", judge: "Judge") -> "nn.Module":
    """The network as of a task: of clips (B, C, frames, H, W), as `--task video` gives them, and with scores alone."""
    from torch import nn

    class OfTask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = user.network

        def forward(self, inputs: "Tensor") -> "Tensor":
            return judge.read(self.network(inputs.transpose(1, 2) if user.frames_first else inputs))

    return OfTask().eval()


def _of_user(text: str, options: ModelOptions, extra: Extra, any_output: bool) -> Trained:
    """The user's model; says what is not known of its classes."""
    from torch import Tensor

    from regard.advice.judges.embedding import Embedding
    from regard.advice.judges.scores import Scores
    from regard.lab.tasks import Classification, Video

    user = read_model(text, options, extra)
    output = user.output()
    judge = user.judges_of(output)[0]
    if isinstance(judge, Embedding) and getattr(user.network, "num_classes", None) != 0:
        judge = Scores(judge.name)  # a head of the user's own has no name that says so
    record: dict[str, Any] = {"normal": [list(part) for part in user.statistics]}
    if not isinstance(judge, Scores):
        if not any_output:
            raise UnsupportedError(f"{text} gives {judge}, no class scores, which alone this command predicts")
        return Trained(user.network, None, record, "32-true", lambda: (user.example,))
    scores, names = judge.read(output), user.data.get("class_names")
    known = names or [str(label) for label in range(scores.shape[1])]
    if len(known) != scores.shape[1]:
        raise ConfigError(f"{text} names {len(known)} classes, but its model has {scores.shape[1]}: save it again")
    if not user.trained:
        progress(f"the weights of {user.label} are random: give --pretrained or --weights")
    about: dict[str, Any] = {"host": "own", "size": user.size, "init": "host", "extra": extra}
    if user.frames:
        task: Classification = Video(data="own", frames=user.frames, **about)
    else:
        task = Classification(data=user.data.get("name", text), **about)
    network = user.network if isinstance(output, Tensor) and not user.frames_first else _as_of_task(user, judge)
    record["class_names"] = known
    return Trained(network, task, record, "32-true", lambda: (user.example,), named=bool(names), example=user.example)
