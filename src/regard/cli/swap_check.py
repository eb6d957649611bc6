"""`regard swap-check MODEL MIXER`: what a swap would do to a model, layer by layer, and whether it runs."""

from typing import Annotated, Any

import typer

from .sizes import read_size
from .tables import AsJson, show


def swap_check(
    model: Annotated[str, typer.Argument(help="A host model, such as deit_tiny_patch16_224.")],
    mixer: Annotated[str, typer.Argument(help="A spelling, such as 'MiTA(m=25, k=25)'.")],
    where: Annotated[str, typer.Option(help="Only layers like this, such as 'blocks.[0-3].*'.")] = "*",
    size: Annotated[str, typer.Option(help="Image size, such as 224x224 (the host's own by default).")] = "",
    pretrained: Annotated[bool, typer.Option("--pretrained", help="With the host's published weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Swap a mechanism into a model, show what is kept, new and dropped, and how much the output changes."""
    import torch

    from regard.core import ConfigError
    from regard.mixers.spelling import parse_mixer
    from regard.models.create import create_model
    from regard.swapping.swap import plan_swap

    config = parse_mixer(mixer)
    if config is None:
        raise ConfigError("None is no mixer: there is nothing to check")
    options: dict[str, Any] = {"pretrained": True} if pretrained else {}
    if size:
        options["img_size"] = read_size(size)
    torch.manual_seed(0)
    host = create_model(model, None, **options).eval()
    plan = plan_swap(host, config, where)
    image = torch.randn(plan.example.shape)
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
    show(
        rows,
        notes=[
            f"{len(rows)} layers, all entered; parameters {parameters:,} -> {total:,}",
            f"relative change of the output: {change:.3g}{finite}",
        ],
    )


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
