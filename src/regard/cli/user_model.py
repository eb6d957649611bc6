"""The options of `regard advise`, `distill` and `swap-check` about a user's model and images."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.core import Extra

from .run_options import checked_text
from .sizes import read_size

if TYPE_CHECKING:
    from regard.advice.user_model import UserModel
    from regard.images.images import Images

ModelArgument = Annotated[
    str, typer.Argument(help="A saved folder, a run (key or folder), or a model such as deit_tiny_patch16_224.")
]
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
SizeOption = Annotated[str, typer.Option(help="Image size, such as 224x224. Default: the model's own.")]


def read_model(text: str, size: str, pretrained: bool, results: Path, extra: Extra) -> "UserModel":
    """The user's model. Raises: as `load_user_model`."""
    from regard.advice.user_model import load_user_model

    return load_user_model(
        text, size=read_size(size) if size else None, pretrained=pretrained, results=results, extra=extra
    )


def read_images(user: "UserModel", data: str, number: int) -> "Images":
    """At most `number` of the user's images; says which cannot be read. Raises: DataError."""
    from regard.advice.user_model import read_user_images

    images, damaged = read_user_images(data, user.size, user.channels, number)
    for line in damaged:
        print(f"left out: {line}", file=sys.stderr)
    return images


def progress(text: str) -> None:
    """Show a line of progress."""
    print(text, file=sys.stderr, flush=True)
