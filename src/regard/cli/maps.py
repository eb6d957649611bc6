"""`regard maps`: where a model looks, drawn over a picture."""

from pathlib import Path
from typing import Annotated

import typer

from .run_options import ResultsOption, recorded_data, run_at


def maps(
    model: Annotated[
        str, typer.Argument(help="A run (key or folder), a folder that `save` wrote, a timm model or a spelled host.")
    ],
    image: Annotated[str, typer.Argument(help='A picture file, or a sample: "china", "flower", "digit".')] = "flower",
    mixer: Annotated[str, typer.Option(help="Replace attention by this mechanism, such as 'MiTA(m=25, k=25)'.")] = "",
    layer: Annotated[str, typer.Option(help='Layers by name, such as "blocks.1?.attn", or "last".')] = "last",
    head: Annotated[
        str,
        typer.Option(
            help='A number from 0, "mean" or "all"; of groups for offsets and kernels. Left out: all for maps and '
            "offsets, the mean for terms and kernels."
        ),
    ] = "",
    query: Annotated[
        str,
        typer.Option(
            help="Row,column of the cell that looks, on the finest grid of such layers; the middle one if left out."
        ),
    ] = "",
    show: Annotated[
        str,
        typer.Option(
            help="maps: attention; terms: each factor of `Factors`; offsets: of deformable convolutions; kernels: of "
            "dynamic ones; auto: the first of these that the model has."
        ),
    ] = "auto",
    pretrained: Annotated[bool, typer.Option(help="Load timm's published weights.")] = False,
    out: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path("maps.png"),
    results: ResultsOption = Path("results"),
) -> None:
    """Draw attention maps over a picture, or what takes their place. Untrained weights carry a warning."""
    from regard.explain import pictures, views
    from regard.store.files import write_atomically

    cell = _cell(query)
    if (found := run_at(model, results)) is not None:
        store, key = found
        model = str(store.folder(key))
    network, trained = _network(model, mixer, pretrained)
    view = views.chosen_view(network, show)
    tensor, shown, credit = _input(network, image, found)
    names, last = ("*", True) if layer == "last" else (layer, False)
    drawn, layers = views.draw_view(
        view, network, tensor, shown, f"{model}{', ' + mixer if mixer else ''}", trained=trained, query=cell,
        layers=names, last=last, part=head, credit=credit,
    )  # fmt: skip
    write_atomically(out, drawn)
    typer.echo(f"{out}: {view} of {'1 layer' if len(layers) == 1 else f'{len(layers)} layers'}")
    others = [name for name in views.views_of(network) if name != view]
    if show == "auto" and others:
        typer.echo(f"note: it has {', '.join(others)} too; --show draws them", err=True)
    if not trained:
        typer.echo(f"note: {pictures.WARNING}", err=True)


def _cell(text: str) -> tuple[int, int] | None:
    """Read "y,x"."""
    from regard.core import ConfigError

    if not text:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--query is row,column of a cell, such as 6,7, not {text!r}")
    return int(parts[0]), int(parts[1])


def _network(model: str, mixer: str, pretrained: bool):  # type: ignore[no-untyped-def]
    """The model in evaluation mode, and whether its weights are trained. A new mechanism with parameters of its own
    counts as untrained."""
    from regard.core import ConfigError
    from regard.mixers.spelling import parse_mixer
    from regard.models.create import create_model
    from regard.swapping.swap import plan_swap

    if Path(model).is_dir():
        from regard.train.load import load

        if mixer:
            raise ConfigError("a saved model has its mechanisms; leave --mixer out, or name its host")
        return load(Path(model)).eval(), True
    config = parse_mixer(mixer) if mixer else None
    network = create_model(model, None, **({"pretrained": True} if pretrained else {}))
    if config is None:
        return network.eval(), pretrained
    plan = plan_swap(network, config)
    kept_all = not any(site.new for site in plan.sites)
    return plan.apply().eval(), pretrained and kept_all


def _input(network, image: str, found):  # type: ignore[no-untyped-def]
    """The picture as the network expects it (C, H, W), as it is shown (H, W, C), and where a sample comes from."""
    import numpy as np
    import torch
    from timm.data import resolve_model_data_config

    from regard.core import DataError
    from regard.explain import pictures
    from regard.swapping.inspect import example_of
    from regard.tasks.data.images import decode
    from regard.train.run import read_run

    settings = resolve_model_data_config(network)
    _, channels, height, width = example_of(network).shape
    credit = "" if Path(image).exists() else pictures.CREDITS.get(image, "")
    if credit:
        shown = pictures.sample_image((height, width), grey=image == "digit", name=image)
    else:
        try:
            shown = decode(Path(image), (height, width), 1 if channels == 1 else 3)
        except FileNotFoundError as error:
            samples = ", ".join((*pictures.SAMPLES, "digit"))
            raise DataError(f"no picture {image}; give a file, or one of the samples {samples}") from error
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{image} cannot be read as a picture: {error}") from error
    if shown.shape[-1] != channels:
        one = shown.mean(-1, keepdims=True).round().astype(np.uint8)
        shown = one if channels == 1 else one.repeat(channels, -1)
    pixels = torch.from_numpy(np.array(shown)).permute(2, 0, 1)
    if found is not None:
        task, record = read_run(*found).task, recorded_data(*found)
        return task.prepared(pixels[None], torch.device("cpu"), record)[0], shown, credit
    values = pixels.float() / 255
    if channels == 3:
        mean, deviation = (torch.tensor(settings[key])[:, None, None] for key in ("mean", "std"))
        values = (values - mean) / deviation
    return values, shown, credit
