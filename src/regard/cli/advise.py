"""`regard advise MODEL`: counts and times of mechanisms in the place of a model's attention, on this machine."""

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from regard.core import ConfigError

from .run_options import timed_device
from .sizes import read_size
from .tables import AsJson, show


def advise(
    model: Annotated[str, typer.Argument(help="A host model, such as deit_tiny_patch16_224.")],
    mixers: Annotated[
        str, typer.Option(help="Candidates with semicolons: 'SKA; MiTA(m=9, k=9)'; all mechanisms if left out.")
    ] = "",
    size: Annotated[str, typer.Option(help="Image size, such as 224x224 (the host's own by default).")] = "",
    batch: Annotated[int, typer.Option(help="Images.")] = 4,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Time for each mechanism at each different layer.")] = 0.3,
    as_json: AsJson = False,
) -> None:
    """Rank mechanisms for a model's attention layers by time here, with parameters and MACs (not quality)."""
    from regard.advice.advise import Place
    from regard.advice.advise import advise as run
    from regard.measure.bench import conditions
    from regard.mixers import MIXERS
    from regard.mixers.spelling import parse_mixer

    place = str(timed_device(device))
    texts = [text for text in mixers.split(";") if text.strip()]
    configs = [parse_mixer(text) for text in texts] if texts else [cls() for cls in MIXERS]
    usable = [config for config in configs if config is not None]
    if len(usable) < len(configs):
        raise ConfigError("None cannot be timed: it stands for no mixer at all")
    layers: list[str] = []

    def report(kind: Place, number: int) -> None:
        windows = f"{kind.windows} windows of " if kind.windows > 1 else ""
        grid = f"{kind.site.grid.height}x{kind.site.grid.width}"
        layers.append(f"{number} with {kind.site.dim} channels, {kind.site.heads} heads on {windows}{grid}")
        print(f"timing {layers[-1]}", file=sys.stderr)

    found = run(model, usable, size=read_size(size) if size else None, batch=batch, dtype=dtype, device=place,
                seconds=seconds, report=report)  # fmt: skip
    if as_json:
        show([asdict(one) for one in found], as_json)
        return
    notes = [
        f"attention layers of {model}: {', '.join(layers)}",
        f"layers with their projections, {dtype}, batch {batch}, {place}; the ratio is that of forward and backward "
        "to softmax; *: no other is better in parameters, MACs and that time at once",
        *(f"{one.mixer} is left out: {one.refused}" for one in found if one.refused),
        *conditions(),
    ]
    show([_row(one) for one in found if not one.refused], notes=notes)


def _row(one: Any) -> dict[str, Any]:
    return {
        "": "*" if one.pareto else "",
        "mechanism": one.mixer,
        "parameters": one.params,
        "MACs": one.macs,
        "forward ms": round(one.forward * 1000, 2),
        "with backward ms": round(one.both * 1000, 2),
        "ratio": round(one.ratio, 3),
        "masks": ", ".join(one.masks) or "none",
        "other image sizes": one.other_grid,
    }
