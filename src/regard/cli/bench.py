"""`regard bench`: compare the speed and the memory of mechanisms on this machine."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, Extra
from regard.files.atomic import check_writable

from .given import Context, refuse_given
from .imports import Imports, imported_items
from .run_options import check_page, find_device, path_option
from .sizes import check_heads, read_grids, read_size
from .tables import AsJson, show
from .user_model import host_of, progress

if TYPE_CHECKING:
    from regard.core import MixerConfig
    from regard.measure.bench import Timing


def bench(
    context: Context,
    mixers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MECHANISM",
            help="Mechanisms; all are compared with the first, with --model with the model's own attention, which None "
            "removes. Default: softmax attention and all others.",
        ),
    ] = None,
    grid: Annotated[str, typer.Option(help="Grids of patch tokens. [default: 14x14,32x32]")] = "",
    backward: Annotated[
        bool, typer.Option("--backward", help="Time forward and backward pass together. Default: forward only.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    dim: Annotated[int, typer.Option(help="Channels.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads.")] = 2,
    batch: Annotated[int, typer.Option(help="Images in a batch.")] = 4,
    part: Annotated[
        str, typer.Option(help="operator (on heads) or layer (with projections). [default: operator; layer for all]")
    ] = "",
    model: Annotated[str, typer.Option(help="Time this whole model, with its own attention and with each mechanism.")]
    = "",
    size: Annotated[str, typer.Option(help="Image sizes for --model, such as 224,512. Default: the model's own.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Seconds for each mechanism on each grid.")] = 2.0,
    page: Annotated[
        Path | None, path_option("Write an offline page with curves, of forward passes and of training, to this file.")
    ] = None,
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:  # fmt: skip
    """Time mechanisms in turn; print medians and their ratio to the first (of CPU time, or of CUDA), the share of the
    bound that is reached, and peak memory.
    """
    if page:  # before minutes of timing: a missing extra, and a page that cannot be written
        from regard.pages.bench_page import write_bench

        check_page(page)
        check_writable(page)
    if model:
        reason = "is of one mechanism: leave it out with --model, and give --size, the size of images"
        refuse_given(context, ("grid", "dim", "heads", "part"), reason)
    if size and not model:
        raise ConfigError("--size is the image size of a model: give --model too, or use --grid for mechanisms")
    sizes = [read_size(text) for text in size.split(",")] if size else None
    model = host_of(model) if model else ""
    grids = read_grids(grid or "14x14,32x32")
    part = part or ("operator" if mixers else "layer")
    import torch

    from regard.measure.bench import bench as run
    from regard.measure.bench import conditions
    from regard.measure.bench_model import OWN, bench_model
    from regard.mixers import MIXERS

    check_heads(dim, heads)
    clock_device = find_device(device)
    extra = imported_items(modules)
    configs = _mixers(mixers, bool(model), extra) if mixers else [cls() for cls in MIXERS]
    refused: list[str] = []
    timings: list[Timing] = []
    for trained in (False, True) if page else (backward,):
        common: dict[str, Any] = {
            "batch": batch, "dtype": dtype, "backward": trained, "device": str(clock_device), "seconds": seconds,
            "report": progress, "refuse": refused.append,
        }  # fmt: skip
        if model:
            timings += bench_model(model, configs, sizes, extra=extra, **common)
        else:
            timings += run(configs, grids, dim=dim, heads=heads, part=part, **common)
    if refused and not any(timing.mixer != OWN for timing in timings):
        raise ConfigError(refused[0])
    clock = "CUDA events" if clock_device.type == "cuda" else "CPU time of one thread"
    of = f"{model}" if model else f"{part}, {dim} channels, {heads} heads"
    notes = [f"{of}; {dtype}, batch {batch}; {clock}; torch {torch.__version__}", *conditions()]
    notes += [f"left out: {reason}" for reason in dict.fromkeys(refused)]
    if as_json:
        show([dataclasses.asdict(timing) for timing in timings], as_json)
    else:
        show([_row(timing) for timing in timings], notes=[*notes, _COLUMNS])
    if page:  # after the table, which a page that cannot be written does not lose
        progress(f"page: {write_bench(page, timings, model, notes)}")


_COLUMNS = (
    "of bound: the time of the products alone (in training three times those of the forward pass, also where fewer "
    "keys have a gradient) at this machine's matrix speed, or of reading and writing, divided by the time; "
    "peak: memory that a pass adds; N^: growth of the time with the tokens since the grid before"
)


def _mixers(texts: list[str], in_model: bool, extra: Extra) -> "list[MixerConfig]":
    """The mechanisms that a user names; of a model also None, and host, which is its first row anyway.

    Raises: ConfigError for host and None without a model, and as `parse_mixer`.
    """
    from regard.measure.bench_model import OWN
    from regard.mixers.spelling import parse_mixer
    from regard.swapping.removed import Removed

    for text in () if in_model else set(texts) & {OWN, "None"}:
        raise ConfigError(f"{text} is of a whole model: give --model too, or leave it out")
    configs = (parse_mixer(text, extra) for text in texts if text != OWN)
    return [Removed() if config is None else config for config in configs]


def _row(timing: "Timing") -> dict[str, Any]:
    row = {
        "mechanism": timing.mixer,
        "grid": timing.grid,
        "pass": "training" if timing.backward else "forward",
        "ms": timing.seconds * 1000,
        "quartiles": f"{timing.low * 1000:.3g} - {timing.high * 1000:.3g}",
        "ratio": None if timing.ratio is None else round(timing.ratio, 3),
        "of bound": f"{timing.bound / timing.seconds:.0%}" if timing.seconds else "",
        "peak MB": None if timing.memory is None else round(timing.memory / 1e6, 1),
        "N^": None if timing.exponent is None else round(timing.exponent, 2),
        "rounds": timing.rounds,
        "system": f"{timing.system:.0%}" + (" !" if timing.system > 0.05 else ""),
    }
    if timing.estimated:
        row |= {"quartiles": "not run: estimate", "ratio": None, "of bound": "", "rounds": None, "system": ""}
    return row
