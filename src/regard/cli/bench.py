"""`regard bench`: speed of mechanisms beside each other on this machine."""

import dataclasses
import sys
from typing import Annotated

import typer

from .run_options import timed_device
from .sizes import read_grids
from .tables import AsJson, show


def bench(
    mixers: Annotated[list[str], typer.Argument(help="Spellings; the first is what the others are compared with.")],
    grid: Annotated[str, typer.Option(help="Grids of tokens, such as 14x14,32x32.")] = "14x14,32x32",
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward pass.")] = False,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    dim: Annotated[int, typer.Option(help="Channels.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads.")] = 2,
    batch: Annotated[int, typer.Option(help="Images.")] = 4,
    part: Annotated[str, typer.Option(help="operator (on heads) or layer (with its projections).")] = "operator",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Time for each mechanism on each grid.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Time mechanisms: interleaved, medians and quartiles, CPU time of one thread, ratio to the first."""
    grids = read_grids(grid)
    import torch

    from regard.core import ConfigError
    from regard.measure.bench import bench as run
    from regard.measure.bench import conditions
    from regard.mixers.spelling import parse_mixer

    place = timed_device(device)
    configs = [config for text in mixers if (config := parse_mixer(text)) is not None]
    if len(configs) < len(mixers):
        raise ConfigError("None cannot be timed: it stands for no mixer at all")
    timings = run(
        configs,
        grids,
        dim=dim,
        heads=heads,
        batch=batch,
        dtype=dtype,
        backward=backward,
        part=part,
        device=str(place),
        seconds=seconds,
        report=lambda line: print(line, file=sys.stderr),
    )
    rows = [dataclasses.asdict(timing) for timing in timings]
    if as_json:
        show(rows, as_json)
        return
    mode = "forward and backward" if backward else "forward"
    clock = "CUDA events" if place.type == "cuda" else "CPU time of one thread"
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
