"""`regard swap-check MODEL MIXER`: what a swap does to each attention layer of a model, and whether the model runs."""

from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from .imports import Imports, imported
from .mixers import read_mixer
from .sizes import read_size, short_grid
from .tables import AsJson, show, wrapped


def swap_check(
    model: Annotated[str, typer.Argument(help="A host model, such as deit_tiny_patch16_224.")],
    mixer: Annotated[str, typer.Argument(help="A mechanism, such as 'MiTA(m=25, k=25)'.")],
    where: Annotated[str, typer.Option(help="Only layers whose name matches, such as 'blocks.[0-3].*'.")] = "*",
    size: Annotated[str, typer.Option(help="Image size, such as 224x224. Default: the host's own.")] = "",
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Load the model's published weights.")] = False,
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Swap a mechanism into a model; show which weights are kept, new or dropped, and how much the output changes."""
    import torch

    from regard.models.catalog import user_ports
    from regard.models.create import create_model
    from regard.swapping.swap import plan_swap

    extra = imported(modules)
    config = read_mixer(mixer, extra)
    options: dict[str, Any] = {"pretrained": True} if pretrained else {}
    if size:
        options["img_size"] = read_size(size)
    torch.manual_seed(0)
    host = create_model(model, None, extra=extra, **options).eval()
    plan = plan_swap(host, config, where, ports=user_ports(extra))
    image = torch.randn(cast(torch.Tensor, plan.example).shape)
    rows = [_row(site) for site in plan.sites]
    with torch.no_grad():
        before = host(image)
        parameters = sum(p.numel() for p in host.parameters())
        after = plan.apply()(image)
    change = ((after - before).norm() / before.norm().clamp_min(1e-12)).item()
    total = sum(p.numel() for p in host.parameters())
    if as_json:
        show([row | {"change": change, "parameters before": parameters, "parameters": total} for row in rows], True)
        return
    finite = "" if after.isfinite().all() else "; the output is not finite"
    table = [
        {"layer": site.name, "port": row["port"], "grid": short_grid(site.layer.mixer.site.grid)}
        for site, row in zip(plan.sites, rows, strict=True)
    ]
    notes = [
        f"{len(rows)} layers, and the model runs; parameters {parameters:,} -> {total:,}",
        f"relative change of the output: {change:.3g}{finite}",
    ]
    show(table, notes=wrapped([*_weights(rows), *notes]))


def _row(site: Any) -> dict[str, Any]:
    return {
        "layer": site.name,
        "port": type(site.layer).__name__,
        "grid": str(site.layer.mixer.site.grid),
        "kept": ", ".join(site.kept),
        "new": ", ".join(site.new),
        "dropped": ", ".join(site.dropped),
        "notes": "; ".join(site.notes),
    }


def _weights(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What happens to the weights: `kept: qkv.weight` for all layers, or `kept in a, b: ...` where layers differ."""
    lines = []
    for part in ("kept", "new", "dropped", "notes"):
        layers: dict[str, list[str]] = {}
        for row in rows:
            layers.setdefault(row[part], []).append(row["layer"])
        for text, names in layers.items():
            where = "" if len(names) == len(rows) else f" in {', '.join(names)}"
            if text:
                lines.append(f"{part.removesuffix('s')}{where}: {text}")
    return lines
