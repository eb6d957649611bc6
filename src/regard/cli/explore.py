"""`regard explore`: a page on which one points at a picture and sees where a model looks."""

import os
from pathlib import Path
from typing import Annotated

import typer

from regard.core import ConfigError

from .given import expand_groups
from .run_options import path_option
from .user_model import ModelArgument, ModelOptions, read_model


@expand_groups
def explore(
    model: ModelArgument,
    pictures: Annotated[list[str], typer.Argument(help='Image files, or a sample: "china", "flower", "digit".')],
    mixer: Annotated[
        str, typer.Option(help="Show a copy with this mechanism beside the model, such as 'MiTA(m=25, k=25)'.")
    ] = "",
    plan: Annotated[str, typer.Option(help="Show a copy by this plan of layers, a file of `regard advise`.")] = "",
    layers: Annotated[str, typer.Option(help='Layers by name, such as "blocks.1?.attn".')] = "*",
    out: Annotated[Path, path_option("The HTML file to write.")] = Path("explore.html"),
    *,
    options: ModelOptions,
) -> None:
    """Write a page on which one points at a place of a picture and sees where the model looks, before and after a swap.

    The file works offline. It has the weights of all layers and heads, and their rollout.
    """
    from regard.explorer.explore import picture_of, swapped_copy
    from regard.explorer.page import make_page
    from regard.files.atomic import check_writable

    if out.suffix.lower() not in (".html", ".htm") or os.path.realpath(out) in map(os.path.realpath, pictures):
        raise ConfigError(f"--out names a new file that ends in .html, not {out}")
    if mixer and plan:
        raise ConfigError("--mixer and --plan both name the second model: leave one out")
    check_writable(out)
    extra = options.extra
    user = read_model(model, options, extra)
    names = [Path(text).name for text in pictures]
    shown, credits = {}, []
    for text, name in zip(pictures, names, strict=True):
        shown[name if names.count(name) == 1 else text], credit = picture_of(user, text)
        credits.append(credit)
    second = swapped_copy(user, mixer or plan, extra) if mixer or plan else None
    page = make_page(user, shown, second, layers, "; ".join(filter(None, credits)))
    page.save(out)
    typer.echo(f"{out}: {len(page.html) / 1e6:.1f} MB")
