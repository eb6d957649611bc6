"""The options of commands about a user's model and images."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.core import ConfigError, DataError, Extra, StoreError

from .imports import Imports, imported_items
from .run_options import ResultsOption, optional_run, saved_model
from .sizes import read_size

if TYPE_CHECKING:
    from regard.advice.user_model import UserModel
    from regard.images.images import Images

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


@dataclass(frozen=True)
class ModelOptions:
    """What is said of a model beside its name, see `read_model`."""

    size: Annotated[str, typer.Option(help="Image size, such as 224x224. Default: the model's own.")] = ""
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Load timm's published weights.")] = False
    weights: WeightsOption = ""
    mean: MeanOption = ""
    std: StdOption = ""
    results: ResultsOption = Path("results")
    modules: Imports = None

    @property
    def extra(self) -> Extra:
        """What the modules of --import have."""
        return imported_items(self.modules)

    @property
    def normal(self) -> tuple[list[float], list[float]] | None:
        """The numbers of --mean and --std, None without them. Raises: ConfigError for one alone, or others."""
        if not self.mean and not self.std:
            return None
        try:
            parts = [[float(value) for value in text.split(",")] for text in (self.mean, self.std)]
        except ValueError:
            parts = [[], []]
        finite = all(math.isfinite(value) for part in parts for value in part)
        if parts[1] and finite and min(parts[1]) <= 0:
            raise ConfigError(f"--std is above 0 for each channel, not {self.std!r}")
        if len(parts[0]) != len(parts[1]) or not parts[0] or not finite:
            raise ConfigError(
                f"--mean and --std are as many numbers, such as 0.5,0.5,0.5, not {self.mean!r} and {self.std!r}"
            )
        return parts[0], parts[1]

    @property
    def given(self) -> list[str]:
        """What is said of the model itself, as words of a command."""
        named = {"--size": self.size, "--weights": self.weights, "--mean": self.mean, "--std": self.std}
        words = [part for option, value in named.items() if value for part in (option, value)]
        return [*(["--pretrained"] if self.pretrained else []), *words]

    @property
    def command(self) -> list[str]:
        """All that was given, as words of a command."""
        results = ["--results", str(self.results)] if self.results != Path("results") else []
        return [*self.given, *results, *(part for name in self.modules or () for part in ("--import", name))]


IMAGES = "A folder of images, flat or nested, or a set by name; no label is read."
DataOption = Annotated[str, typer.Option(help=IMAGES)]
OptionalData = Annotated[str | None, typer.Option(help=IMAGES)]
Reinitialise = Annotated[
    bool, typer.Option("--reinitialise", help="Also replace attention that no mechanism computes, and lose it.")
]
JudgeOption = Annotated[
    str,
    typer.Option(
        help="How the output is judged: scores, classes, map, embedding, tokens or boxes. Default: by itself."
    ),
]


def read_model(text: str, options: ModelOptions, extra: Extra, judge: str = "") -> "UserModel":
    """The user's model: a run, or what `load_user_model` takes; says how its images are prepared.

    Raises: as `load_user_model`.
    """
    from regard.advice.user_model import check_no_weights, load_user_model

    size, other_weights = read_size(options.size) if options.size else None, options.pretrained or bool(options.weights)
    if (stored := optional_run(text, options.results)) is not None:
        from regard.lab.train.load import load_user_run

        store, key = stored
        check_no_weights(text, other_weights)
        user = load_user_run(store.folder(key), size, extra)
        user = replace(user, judge=judge, statistics=options.normal or user.statistics)
    else:
        user = load_user_model(
            text, size=size, pretrained=options.pretrained, weights=options.weights, normal=options.normal,
            judge=judge, extra=extra,
        )  # fmt: skip
    progress(user.preparation("--mean, --std"))
    return user


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
    from regard.advice.user_model import read_user_images, sample_images
    from regard.lab.data import catalog, moving
    from regard.lab.data.streamed.names import is_stream

    if is_stream(data):
        raise DataError(f"{data} is a stream, which has no single images: give a folder of images")
    if user.frames and data == moving.NAME:
        return sample_images(moving.load().train, user.size, user.channels, number)
    if data in catalog.NAMED:
        cut = data in catalog.SIZES and catalog.SIZES[data] != user.size
        return sample_images(catalog.load(data, user.size, cut=cut).train, user.size, user.channels, number)
    images, damaged = read_user_images(data, user.size, user.channels, number, user.frames)
    for line in damaged:
        print(f"left out: {line}", file=sys.stderr)
    return images


def progress(text: str) -> None:
    """Show a line of progress."""
    print(text, file=sys.stderr, flush=True)
