"""`regard advise MODEL`: cost and time of each mechanism in a model's attention layers, on this machine."""

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from .imports import Imports, imported
from .mixers import read_mixer
from .run_options import find_device
from .sizes import read_size, short_grid
from .tables import AsJson, show


def advise(
    model: Annotated[str, typer.Argument(help="A host model, such as deit_tiny_patch16_224.")],
    mixers: Annotated[
        str, typer.Option(help="Mechanisms, separated by semicolons: 'SKA; MiTA(m=9, k=9)'. Default: all.")
    ] = "",
    size: Annotated[str, typer.Option(help="Image size, such as 224x224. Default: the host's own.")] = "",
    batch: Annotated[int, typer.Option(help="Images in a batch.")] = 4,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Seconds for each mechanism and each kind of layer.")] = 0.3,
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Rank mechanisms for a model's attention layers by their time on this machine; accuracy is not measured."""
    from regard.advice.advise import AttentionKind
    from regard.advice.advise import advise as run
    from regard.measure.bench import conditions
    from regard.mixers import MIXERS

    clock_device = str(find_device(device))
    texts = [text for text in mixers.split(";") if text.strip()]
    extra = imported(modules)
    configs = [read_mixer(text, extra) for text in texts] or [cls() for cls in MIXERS]
    layers: list[str] = []

    def report(kind: AttentionKind, number: int) -> None:
        windows = f"{kind.windows} windows of " if kind.windows > 1 else ""
        grid = short_grid(kind.site.grid)
        layers.append(f"{number} with {kind.site.dim} channels, {kind.site.heads} heads on {windows}{grid} tokens")
        print(f"timing {layers[-1]}", file=sys.stderr)

    results = run(model, configs, size=read_size(size) if size else None, batch=batch, dtype=dtype,
                  device=clock_device, seconds=seconds, report=report, extra=extra)  # fmt: skip
    if as_json:
        show([asdict(result) for result in results], as_json)
        return
    notes = [
        f"attention layers of {model}: {', '.join(layers)}",
        f"times are of layers with their projections, {dtype}, batch {batch}, {clock_device}; ratio: time of forward "
        "and backward, divided by that of softmax attention; *: no other mechanism is better in parameters, MACs and "
        "this time together",
        *(f"{result.mixer} is left out: {result.refused}" for result in results if result.refused),
        *conditions(),
    ]
    show([_row(result) for result in results if not result.refused], notes=notes)


def _row(result: Any) -> dict[str, Any]:
    return {
        "": "*" if result.pareto else "",
        "mechanism": result.mixer,
        "parameters": result.params,
        "MACs": result.macs,
        "forward ms": round(result.forward * 1000, 2),
        "with backward ms": round(result.both * 1000, 2),
        "ratio": round(result.ratio, 3),
        "masks": ", ".join(result.masks) or "none",
        "other image sizes": result.other_grid,
    }
