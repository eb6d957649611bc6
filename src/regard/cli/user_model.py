"""The options of `regard advise`, `distill` and `swap-check` about a user's model and images."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.core import ConfigError, DataError, Extra, StoreError

from .run_options import checked_text, optional_run, saved_model
from .sizes import read_size

if TYPE_CHECKING:
    from regard.advice.user_model import UserModel
    from regard.images.images import Images
    from regard.lab.results.results import Results

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A saved folder, a run (key or folder), a model such as deit_tiny_patch16_224, hf:FOLDER of "
        "transformers, or my_module:make_model, a function of yours."
    ),
]
WeightsOption = Annotated[
    str, typer.Option("--weights", help="A state dict for a named model: .safetensors, or .pt without code.")
]
MeanOption = Annotated[str, typer.Option(help="Of each channel, to normalise images: 0.485,0.456,0.406.")]
StdOption = Annotated[str, typer.Option(help="Deviation of each channel, to normalise images.")]
IMAGES = "A folder of images, flat or nested, or a set by name; no label is read."
DataOption = Annotated[str, typer.Option(help=IMAGES, callback=checked_text)]
OptionalData = Annotated[
    str | None,
    typer.Option(help=IMAGES, callback=checked_text),
]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Load timm's published weights.")]
Reinitialise = Annotated[
    bool, typer.Option("--reinitialise", help="Also replace attention that no mechanism computes, and lose it.")
]
JudgeOption = Annotated[
    str,
    typer.Option(
        help="How the output is judged: scores, classes, map, embedding, tokens or boxes. Default: by itself."
    ),
]
SizeOption = Annotated[str, typer.Option(help="Image size, such as 224x224. Default: the model's own.")]


def read_model(
    text: str,
    results: Path,
    extra: Extra,
    *,
    size: str,
    pretrained: bool,
    weights: str,
    mean: str,
    std: str,
    judge: str,
) -> "UserModel":
    """The user's model: a run, or what `load_user_model` takes; says how its images are prepared.

    mean, std: of each channel, with commas. Raises: as `load_user_model`.
    """
    from regard.advice.user_model import load_user_model

    sides, normal = read_size(size) if size else None, _normal(mean, std)
    if (stored := optional_run(text, results)) is not None:
        user = _of_run(*stored, text, sides, pretrained or bool(weights), normal, judge, extra)
    else:
        user = load_user_model(
            text, size=sides, pretrained=pretrained, weights=weights, normal=normal, judge=judge, extra=extra
        )
    mean, std = (", ".join(f"{value:.3g}" for value in part) for part in user.statistics)
    progress(f"{user.label}: images of {user.size[0]}x{user.size[1]}, mean {mean}, deviation {std} (--mean, --std)")
    return user


def _of_run(
    store: "Results", key: str, text: str, sides: tuple[int, int] | None, other_weights: bool,
    normal: tuple[list[float], list[float]] | None, judge: str, extra: Extra,
) -> "UserModel":  # fmt: skip
    from regard.advice.user_model import check_no_weights
    from regard.lab.train.load import load_user_run

    check_no_weights(text, other_weights)
    user = load_user_run(store.folder(key), sides, extra)
    return replace(user, judge=judge, statistics=normal or user.statistics)


def _normal(mean: str, std: str) -> tuple[list[float], list[float]] | None:
    """The numbers of --mean and --std. Raises: ConfigError for one alone, or another number of each."""
    if not mean and not std:
        return None
    try:
        parts = [[float(value) for value in text.split(",")] for text in (mean, std)]
    except ValueError:
        parts = [[], []]
    finite = all(math.isfinite(value) for part in parts for value in part)
    if len(parts[0]) != len(parts[1]) or not parts[0] or not finite or min(parts[1]) <= 0:
        raise ConfigError(f"--mean and --std are as many numbers, such as 0.5,0.5,0.5, not {mean!r} and {std!r}")
    return parts[0], parts[1]


def host_of(text: str, results: Path = Path("results")) -> str:
    """The host of a saved folder or of a run, of which costs and times without its weights are asked; or the text.

    Raises: StoreError if the folder or run is damaged or not finished, or names other weights.
    """
    from regard.models.recipe import check_local, local_host
    from regard.models.saving import read_description

    if (folder := saved_model(text)) is not None:
        host, source = read_description(folder)["host"], folder / "model.json"
    elif (stored := optional_run(text, results)) is not None:
        store, key = stored
        host, source = ((store.outcome(key) or {}).get("model") or {}).get("host"), store.folder(key) / "outcome.json"
        if host is None:
            raise StoreError(f"run {key} does not say of which host it is: name the host instead")
    else:
        return text
    check_local(source, host)
    return local_host(host)


def read_images(user: "UserModel", data: str, number: int) -> "Images":
    """At most `number` of the user's images, or of the training images of a named set; says which cannot be read.

    Raises: DataError.
    """
    from regard.advice.user_model import read_user_images, unlabelled
    from regard.lab.data import catalog
    from regard.lab.data.streamed.names import is_stream

    if is_stream(data):
        raise DataError(f"{data} is a stream, which has no single images: give a folder of images")
    if data in catalog.NAMED:
        cut = data in catalog.SIZES and catalog.SIZES[data] != user.size
        return unlabelled(catalog.load(data, user.size, cut=cut).train, user.size, user.channels, number)
    images, damaged = read_user_images(data, user.size, user.channels, number)
    for line in damaged:
        print(f"left out: {line}", file=sys.stderr)
    return images


def progress(text: str) -> None:
    """Show a line of progress."""
    print(text, file=sys.stderr, flush=True)
