"""`regard bench`: compare the speed of mechanisms on this machine."""

import dataclasses
import sys
from typing import Annotated

import typer

from .imports import Imports, imported
from .mixers import read_mixer
from .run_options import timed_device
from .sizes import check_heads, read_grids
from .tables import AsJson, show


def bench(
    mixers: Annotated[
        list[str], typer.Argument(help="Mechanisms; the first is the one that all others are compared with.")
    ],
    grid: Annotated[str, typer.Option(help="Grids of patch tokens, such as 14x14,32x32.")] = "14x14,32x32",
    backward: Annotated[
        bool, typer.Option("--backward", help="Time forward and backward pass together. Default: forward only.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    dim: Annotated[int, typer.Option(help="Channels.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads.")] = 2,
    batch: Annotated[int, typer.Option(help="Images in a batch.")] = 4,
    part: Annotated[str, typer.Option(help="operator (on heads) or layer (with its projections).")] = "operator",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Seconds for each mechanism on each grid.")] = 2.0,
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Time mechanisms in turn; print medians, quartiles and the ratio to the first (of CPU time, or of CUDA)."""
    grids = read_grids(grid)
    import torch

    from regard.measure.bench import bench as run
    from regard.measure.bench import conditions

    check_heads(dim, heads)
    clock_device = timed_device(device)
    extra = imported(modules)
    configs = [read_mixer(text, extra) for text in mixers]
    timings = run(
        configs,
        grids,
        dim=dim,
        heads=heads,
        batch=batch,
        dtype=dtype,
        backward=backward,
        part=part,
        device=str(clock_device),
        seconds=seconds,
        report=lambda line: print(line, file=sys.stderr),
    )
    rows = [dataclasses.asdict(timing) for timing in timings]
    if as_json:
        show(rows, as_json)
        return
    mode = "forward and backward" if backward else "forward"
    clock = "CUDA events" if clock_device.type == "cuda" else "CPU time of one thread"
    notes = [
        f"{part}, {mode}, {dtype}, batch {batch}, {dim} channels, {heads} heads; {clock}; torch {torch.__version__}",
        *conditions(),
    ]
    show([_row(row) for row in rows], notes=notes)


def _row(row: dict) -> dict:
    milliseconds = {name: row[name] * 1000 for name in ("seconds", "low", "high")}
    return {
        "mechanism": row["mixer"],
        "grid": row["grid"],
        "ms": milliseconds["seconds"],
        "quartiles": f"{milliseconds['low']:.3g} - {milliseconds['high']:.3g}",
        "ratio": round(row["ratio"], 3),
        "rounds": row["rounds"],
        "system": f"{row['system']:.0%}" + (" !" if row["system"] > 0.05 else ""),
    }
