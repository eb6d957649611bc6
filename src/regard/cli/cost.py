"""`regard cost MIXER...`: parameters and multiply-accumulates beside each other."""

from typing import Annotated, Any

import typer

from regard.core import ConfigError

from .sizes import read_grids, read_size
from .tables import AsJson, show


def cost(
    mixers: Annotated[list[str], typer.Argument(help="Spellings; 'None' is the host's own attention.")],
    host: Annotated[str, typer.Option(help="A host model; without one, a single layer is counted.")] = "",
    size: Annotated[str, typer.Option(help="Image size, such as 224x224 (the host's own by default).")] = "",
    grid: Annotated[str, typer.Option(help="A single layer's grid of tokens.")] = "14x14",
    prefix: Annotated[int, typer.Option(help="A single layer's class and register tokens.")] = 1,
    dim: Annotated[int, typer.Option(help="A single layer's channels.")] = 192,
    heads: Annotated[int, typer.Option(help="A single layer's heads.")] = 3,
    accounting: Annotated[
        str, typer.Option(help="executed: what runs; paper: as the mechanism's paper counts.")
    ] = "executed",
    as_json: AsJson = False,
) -> None:
    """Count parameters and MACs by formula, of a layer or of a whole host; the ratio is to the first row."""
    if accounting not in ("executed", "paper"):
        raise ConfigError(f"accounting is executed or paper, not {accounting!r}")
    if size and not host:
        raise ConfigError("--size is the image of a host: give --host, or --grid for a single layer")
    from regard.mixers.spelling import parse_mixer, spell

    configs = [parse_mixer(text) for text in mixers]
    rows: list[dict[str, Any]] = []
    if host:
        from regard.measure.cost import model_cost

        for config in configs:
            found = model_cost(host, config, read_size(size) if size else None, accounting)
            rows.append(_row("None" if config is None else spell(config), found.params, found.macs, rows))
        note = f"{host}" + (f" at {size}" if size else "") + "; MACs of one image, FLOPs are twice that"
    else:
        from dataclasses import replace

        from regard.core import Site

        places = [Site(dim, heads, replace(one, prefix=prefix)) for one in read_grids(grid)]
        for place in places:
            start = len(rows)
            for config in configs:
                if config is None:
                    raise ConfigError("None is the host's own attention: it needs --host")
                found = config.cost(place, accounting)
                row = _row(spell(config), found.params, found.macs, rows[start:])
                rows.append({"grid": f"{place.grid.height}x{place.grid.width}+{prefix}"} | row)
        note = f"one layer, {dim} channels, {heads} heads; MACs of one image, FLOPs are twice that"
    show(rows, as_json, notes=[note])


def _row(name: str, params: int, macs: int, before: list[dict[str, Any]]) -> dict[str, Any]:
    first = before[0] if before else {"params": params, "MACs": macs}
    return {
        "mechanism": name,
        "params": params,
        "MACs": macs,
        "params ratio": round(params / first["params"], 4) if first["params"] else None,
        "MACs ratio": round(macs / first["MACs"], 4) if first["MACs"] else None,
    }
