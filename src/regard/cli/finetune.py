"""`regard finetune`: train on from a saved model, a finished run, or timm's published weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError

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
    make_run,
    run_at,
    use_data,
)
from .sizes import read_size

if TYPE_CHECKING:
    from regard.train.initial_weights import Saved
    from regard.train.run import Run

DEFAULTS: dict[str, Any] = {"epochs": 10, "lr": 2e-4}
"""Of the recipe: less than from scratch."""


def finetune(
    start: Annotated[
        str, typer.Argument(help="A folder that `save` wrote, a finished run (folder or key), or a model of timm.")
    ],
    data: Annotated[str, typer.Option(help="A set by name, a folder of class folders, or a parquet file.")],
    mixer: Annotated[
        str, typer.Option(help='Swap attention, such as "MiTA(m=9, k=9)"; "host": the host\'s own; else as it is.')
    ] = "",
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
    """Train a model further on your data, with another mechanism if you like (10 epochs, lr 2e-4 unless --set)."""
    use_data(data_root)
    run = finetuning(
        start, mixer, data, read_size(size) if size else None, seed, changed(change, precision), download, results
    )
    carry_out(run, results, device, devices, workers, logger, compile, as_json)


def finetuning(
    start: str,
    mixer: str,
    data: str,
    size: tuple[int, int] | None,
    seed: int,
    changes: list[str],
    download: bool,
    results: Path,
) -> "Run":
    """The run that begins with the weights of `start`. Raises: ConfigError, StoreError."""
    from regard.lab.study import size_of, sized
    from regard.train.run import Run

    host, own, source = _start(start, results)
    defaults: dict[str, dict[str, Any]] = {"recipe": DEFAULTS}
    if source is None:
        defaults["task"] = {"init": "host"}
    if size is None:
        size = source.task.size if isinstance(source, Run) else size_of(host)
    return make_run(mixer or own, data, sized(host, size), size, seed, changes, download, defaults, source)


def _start(start: str, results: Path) -> "tuple[str, str, Run | Saved | None]":
    """(host, mechanism as it is, source); source None: timm's weights, which the host's spelling asks for."""
    from regard.mixers.spelling import spell
    from regard.models.create import parse_host, spell_host
    from regard.train.initial_weights import Saved
    from regard.train.run import read_run

    folder = Path(start).expanduser()
    if (folder / "model.json").exists():
        from regard.models.saving import read_about

        about = read_about(folder)
        mixers = {group["mixer"] for group in about["swaps"]}
        if len(mixers) > 1:
            raise ConfigError(f"{start} mixes {', '.join(sorted(mixers))}; say with --mixer which one to train")
        own = next(iter(mixers)).replace("removed", "None") if mixers else "host"
        return _bare(about["host"]), own, Saved(str(folder))
    if (found := run_at(start, results)) is not None:
        store, key = found
        if store.root.resolve() != results.expanduser().resolve():
            raise ConfigError(f"run {key} lies in {store.root}; pass --results {store.root} to go on there")
        run = read_run(store, key)
        if store.status(key) != "done":
            raise ConfigError(f"run {key} is not finished; carry it out first, with the command that began it")
        mixer = "None" if run.removed else "host" if run.mixer is None else spell(run.mixer)
        return _bare(run.task.host), mixer, run
    if folder.is_dir():
        raise ConfigError(f"{start} is neither a saved model (model.json) nor a run (run.json)")
    name, options = parse_host(start)
    import timm

    if not timm.is_model(name.partition(".")[0]):
        raise ConfigError(f"{start!r} is no saved folder, no run in {results} and no model of timm")
    return spell_host(name, {**options, "pretrained": True}), "host", None


def _bare(host: str) -> str:
    """A host's spelling without the classes and channels, which the new data decide, and without timm's weights."""
    from regard.models.create import parse_host, spell_host

    name, options = parse_host(host)
    kept = {key: value for key, value in options.items() if key not in ("num_classes", "in_chans", "pretrained")}
    return spell_host(name, kept)
