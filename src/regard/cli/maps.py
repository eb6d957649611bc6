"""`regard maps`: attention maps of a model, drawn over an image."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.core import ConfigError
from regard.files.paths import named_folder
from regard.pages.phrasing import count

from .given import expand_groups
from .run_options import optional_run, path_option
from .user_model import ModelArgument, ModelOptions, read_model

if TYPE_CHECKING:
    from regard.advice.user_model import UserModel


@expand_groups
def maps(
    model: ModelArgument,
    image: Annotated[str, typer.Argument(help='An image file, or a sample: "china", "flower", "digit".')] = "flower",
    mixer: Annotated[str, typer.Option(help="Replace attention by this mechanism, such as 'MiTA(m=25, k=25)'.")] = "",
    layer: Annotated[str, typer.Option(help='Layers by name, such as "blocks.1?.attn", or "last".')] = "last",
    head: Annotated[
        str,
        typer.Option(
            help='The head: a number from 0, "mean" or "all"; of offsets and kernels, the group. Default: all for maps '
            "and offsets, mean for terms and kernels."
        ),
    ] = "",
    query: Annotated[
        str,
        typer.Option(help="Row,column of the query on the grid of patch tokens (the finest one). Default: the middle."),
    ] = "",
    show: Annotated[
        str,
        typer.Option(
            help="maps: attention; terms: each factor of Factors; offsets: of deformable convolutions; kernels: of "
            "dynamic convolutions; auto: the first of these that the model has."
        ),
    ] = "auto",
    out: Annotated[Path, path_option("The PNG file to write.")] = Path("maps.png"),
    *,
    options: ModelOptions,
) -> None:
    """Draw attention maps over an image, or factors, offsets or kernels where a model has them."""
    from regard.explain import pictures, views
    from regard.explorer.explore import swapped_copy
    from regard.files.atomic import write_atomically

    if out.suffix.lower() != ".png" or os.path.realpath(out) == os.path.realpath(image):
        raise ConfigError(f"--out names a new file that ends in .png, not {out}")
    position, extra = _position(query), options.extra
    if mixer and (optional_run(model, options.results) or named_folder(model)):
        raise ConfigError("a run or a saved model has its mechanism: leave --mixer out, which is for other models")
    user = read_model(model, options, extra)
    seen = swapped_copy(user, mixer, extra) if mixer else user
    network, trained = seen.network, seen.trained
    view = views.select_view(network, show)
    tensor, shown, credit = _input(user, image)
    names, last = ("*", True) if layer == "last" else (layer, False)
    drawn, layers = views.draw_view(
        view, network, tensor, shown, f"{model}{', ' + mixer if mixer else ''}", trained=trained, query=position,
        layers=names, last=last, part=head, credit=credit,
    )  # fmt: skip
    write_atomically(out, drawn)
    typer.echo(f"{out}: {view} of {count(len(layers), 'layer')}")
    others = [name for name in views.available_views(network) if name != view]
    if show == "auto" and others:
        typer.echo(f"note: this model has {', '.join(others)} too; --show draws them", err=True)
    if not trained:
        typer.echo(f"note: {pictures.WARNING}", err=True)


def _position(text: str) -> tuple[int, int] | None:
    """(row, column) of "6,7"; None for an empty text. Raises: ConfigError."""
    if not text:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise ConfigError(f"--query is row,column on the grid of patch tokens, such as 6,7, not {text!r}")
    return int(parts[0]), int(parts[1])


def _input(user: "UserModel", image: str):  # type: ignore[no-untyped-def]
    """The image as the network expects it (C, H, W), as it is shown (H, W, C), and the credit of a sample."""
    import torch

    from regard.explorer.explore import picture_of

    shown, credit = picture_of(user, image)
    return user.prepare(torch.from_numpy(shown.copy()).permute(2, 0, 1)[None])[0], shown, credit
