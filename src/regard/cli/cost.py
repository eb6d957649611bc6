"""`regard cost MECHANISM...`: compare parameters and multiply-accumulates (MACs)."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError

from .given import Context, refuse_given
from .imports import Imports, imported_items
from .sizes import check_heads, read_grids, read_size, short_grid
from .tables import AsJson, show

if TYPE_CHECKING:
    from regard.core import Extra, MixerConfig


def cost(
    context: Context,
    mixers: Annotated[
        list[str],
        typer.Argument(metavar="MECHANISM", help='Mechanisms; "host" is the host\'s own attention, "None" is none.'),
    ],
    host: Annotated[str, typer.Option(help="A host model. Default: one layer is counted.")] = "",
    size: Annotated[str, typer.Option(help="Image size, such as 224x224. Default: the host's own.")] = "",
    grid: Annotated[str, typer.Option(help="Patch tokens of one layer.")] = "14x14",
    prefix: Annotated[int, typer.Option(help="Class and register tokens of one layer.")] = 1,
    dim: Annotated[int, typer.Option(help="Channels of one layer.")] = 192,
    heads: Annotated[int, typer.Option(help="Heads of one layer.")] = 3,
    accounting: Annotated[
        str, typer.Option(help="executed: the operations that run; paper: those that the mechanism's paper counts.")
    ] = "executed",
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Count parameters and MACs by formula, of one layer or of a whole host; ratios are to the first row."""
    if accounting not in ("executed", "paper"):
        raise ConfigError(f"--accounting is executed or paper, not {accounting!r}")
    if size and not host:
        raise ConfigError("--size is the image size of a host: give --host too, or use --grid for one layer")
    if host:
        refuse_given(context, ("grid", "prefix", "dim", "heads"), "is of one layer: leave it out with --host")
    extra = imported_items(modules)
    named = [_parse_row(text, extra) for text in mixers]
    rows: list[dict[str, Any]] = []
    if host:
        from regard.measure.cost import model_cost

        from .user_model import host_of

        host = host_of(host)
        for name, config in named:
            total = model_cost(host, config, read_size(size) if size else None, accounting, extra)
            rows.append(_row(name, total.params, total.macs, rows))
        note = f"{host}" + (f" at {size}" if size else "") + "; MACs for one image; FLOPs are twice as many"
    else:
        from dataclasses import replace

        from regard.core import Site

        check_heads(dim, heads)
        for patches in read_grids(grid):
            site = Site(dim, heads, replace(patches, prefix=prefix))
            start = len(rows)
            for name, config in named:
                if config is None:
                    raise ConfigError(f"{name} is the host's own attention: it needs --host")
                layer = config.cost(site, accounting)
                rows.append({"grid": short_grid(site.grid)} | _row(name, layer.params, layer.macs, rows[start:]))
        note = f"one layer, {dim} channels, {heads} heads; MACs for one image; FLOPs are twice as many"
    show(rows, as_json, notes=[note])


def _parse_row(text: str, extra: "Extra") -> "tuple[str, MixerConfig | None]":
    """The name of a row and its mechanism; None for the host's own attention. "None" is no attention, as in training.

    Raises: ConfigError if the text is no mechanism.
    """
    from regard.mixers.spelling import parse_mixer, spell
    from regard.swapping.removed import Removed

    if text == "host":
        return text, None
    config = parse_mixer(text, extra)
    return ("None", Removed()) if config is None else (spell(config), config)


def _row(name: str, params: int, macs: int, before: list[dict[str, Any]]) -> dict[str, Any]:
    first = before[0] if before else {"params": params, "MACs": macs}
    return {
        "mechanism": name,
        "params": params,
        "MACs": macs,
        "params ratio": round(params / first["params"], 4) if first["params"] else None,
        "MACs ratio": round(macs / first["MACs"], 4) if first["MACs"] else None,
    }
