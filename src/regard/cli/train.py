"""`regard train` and `regard eval`: one run of a mechanism in a host, and the score of a finished one."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .run_options import (  # fmt: skip
    AsJson,
    Changes,
    Compile,
    DeviceOption,
    Devices,
    Download,
    Logger,
    Precision,
    ResultsOption,
    RootOption,
    Seed,
    Size,
    Workers,
    carry_out,
    changed,
    find_device,
    find_run,
    make_run,
    numbers,
    recorded_data,
    use_data,
)
from .sizes import read_size

if TYPE_CHECKING:
    from torch import nn


def train(
    mixer: Annotated[
        str, typer.Argument(help='"MiTA(m=9, k=9)"; "host" keeps the host\'s attention, "None" takes it out.')
    ],
    data: Annotated[
        str, typer.Option(help="A set by name, a folder of class folders, or a parquet file.")
    ] = "digits-canvas",
    host: Annotated[
        str, typer.Option(help='A model of timm, with options: "vit_tiny_patch16_224(patch_size=4)".')
    ] = "vit_desk",
    size: Size = "",
    seed: Seed = 0,
    change: Changes = None,
    precision: Precision = "",
    device: DeviceOption = "auto",
    devices: Devices = 1,
    compile: Compile = False,
    data_root: RootOption = None,
    results: ResultsOption = Path("results"),
    workers: Workers = 0,
    logger: Logger = "",
    download: Download = False,
    as_json: AsJson = False,
) -> None:
    """Train one mechanism; Ctrl-C stops cleanly, and the same command goes on from there."""
    use_data(data_root)
    run = make_run(mixer, data, host, read_size(size) if size else None, seed, changed(change, precision), download)
    carry_out(run, results, device, devices, workers, logger, compile, as_json)


def evaluate(
    key: Annotated[str, typer.Argument(help="A finished run: its key (12 letters and digits) or its folder.")],
    best: Annotated[bool, typer.Option("--best", help="The weights of the best evaluation, not the last.")] = False,
    mixer: Annotated[str, typer.Option(help="Run with another mechanism, such as 'MiTA(m=9, k=9)'.")] = "",
    retune: Annotated[str, typer.Option(help="Numbers of the mechanism to change, such as m=16,k=16.")] = "",
    device: DeviceOption = "auto",
    data: Annotated[str, typer.Option(help="Other data than the run's, with the same classes.")] = "",
    data_root: RootOption = None,
    results: ResultsOption = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Score a finished run on its test images again: with another mechanism or its numbers, or on other data."""
    from regard.train.autocast import Precise
    from regard.train.load import trained
    from regard.train.run import read_run

    use_data(data_root)
    store, key = find_run(key, results)
    run = read_run(store, key)
    model = trained(run, store, best)
    if mixer:
        _exchange(model, mixer, run.seed)
    if retune:
        from regard.swapping.swap import retune as change_numbers

        change_numbers(model, **numbers(retune))
    place = find_device(device)
    model = Precise(model.to(place), run.recipe.precision)
    score = run.task.score_on(data, model, place, recorded_data(store, key)) if data else run.task.score(model, place)
    metrics = score.metrics
    if as_json:
        typer.echo(json.dumps({"key": key, "metrics": metrics, "mixer": mixer, "retune": retune}))
    else:
        typer.echo("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


def _exchange(model: "nn.Module", mixer: str, seed: int) -> None:
    """Put another mechanism in, with the weights that the model has; says what was drawn anew."""
    import torch

    from regard.swapping.swap import plan_swap

    torch.manual_seed(seed)
    plan = plan_swap(model, mixer)
    new = sorted({name for site in plan.sites for name in site.new})
    if new:
        typer.echo(f"untrained in every layer: {', '.join(new)}", err=True)
    plan.apply()
