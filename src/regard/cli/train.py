"""`regard train` and `regard evaluate`: one run of a mechanism in a host, and the score of a finished one."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, nearest

from .sizes import read_size

if TYPE_CHECKING:
    from regard.lab.run import Progress, Run

_Results = Annotated[Path, typer.Option(help="The folder with one sub-folder a run.")]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
_Root = Annotated[Path | None, typer.Option(help="The folder with one sub-folder a data set (or REGARD_DATA).")]
_Json = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]


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
    size: Annotated[str, typer.Option(help="Height and width of images: 32 or 224x160.")] = "",
    seed: Annotated[int, typer.Option(help="First weights, order and augmentation.")] = 0,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="recipe.lr=1e-3 or task.init=host; can be repeated.")
    ] = None,
    precision: Annotated[str, typer.Option(help="The same as --set recipe.precision: 32-true, bf16-mixed, ...")] = "",
    device: _Device = "auto",
    data_root: _Root = None,
    results: _Results = Path("results"),
    workers: Annotated[int, typer.Option(help="Loader processes; 0 is best for sets in memory.")] = 0,
    logger: Annotated[str, typer.Option(help="csv or tensorboard, below the run's folder.")] = "",
    download: Annotated[bool, typer.Option("--download", help="Let torchvision fetch its set.")] = False,
    as_json: _Json = False,
) -> None:
    """Train one mechanism; Ctrl-C stops cleanly, and the same command goes on from there."""
    if data_root is not None:
        os.environ["REGARD_DATA"] = str(data_root)
    changes = [*(change or []), *([f"recipe.precision={precision}"] if precision else [])]
    run = _run(mixer, data, host, size, seed, changes, download)
    outcome = _execute(run, results, device, workers, logger)
    _show(run, outcome, as_json)
    if outcome["status"] != "done":
        raise typer.Exit(1)


def evaluate(
    key: Annotated[str, typer.Argument(help="The key of a finished run: 12 letters and digits.")],
    retune: Annotated[str, typer.Option(help="Numbers of the mechanism to change, such as m=16,k=16.")] = "",
    device: _Device = "auto",
    data: Annotated[str, typer.Option(help="Other data than the run's, with the same classes.")] = "",
    data_root: _Root = None,
    results: _Results = Path("results"),
    as_json: _Json = False,
) -> None:
    """Score a finished run on its test images again, with other numbers of the mechanism or on other data."""
    from regard.lab.results import Results
    from regard.lab.run import read_run, trained

    if data_root is not None:
        os.environ["REGARD_DATA"] = str(data_root)
    store = Results(results)
    run = read_run(store, key)
    model = trained(run, store)
    if retune:
        from regard.hosts.swap import retune as change_numbers

        numbers: dict[str, Any] = {name: int(value) for name, value in map(_pair, retune.split(","))}
        change_numbers(model, **numbers)
    place = _device(device)
    task = run.task.on(data) if data else run.task
    metrics = task.score(model.to(place), place).metrics
    if as_json:
        typer.echo(json.dumps({"key": key, "metrics": metrics, "retune": retune}))
    else:
        typer.echo("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


def _run(mixer: str, data: str, host: str, size: str, seed: int, changes: list[str], download: bool) -> "Run":
    from regard.lab.run import Recipe, Run
    from regard.mixers.spell import parse_mixer
    from regard.tasks import Classification

    sides = read_size(size) if size else _SIZES.get(data, (224, 224))
    fields = {"task": Classification.__dataclass_fields__, "recipe": Recipe.__dataclass_fields__}
    given: dict[str, dict[str, Any]] = {"task": {}, "recipe": {"augment": "none"} if data.startswith("digits") else {}}
    for text in changes:
        name, value = _pair(text)
        part, _, field = name.partition(".")
        known = [f"{each}.{one}" for each, names in fields.items() for one in names]
        if part not in fields or field not in fields[part]:
            raise ConfigError(f"--set knows no {name!r}; {nearest(name, known)}")
        given[part][field] = _literal(value)
    options = {"host": host, "data": data, "size": sides, "download": download, **given["task"]}
    try:
        task, recipe = Classification(**options), Recipe(**given["recipe"])
    except TypeError as error:
        raise ConfigError(f"--set has a value of the wrong kind: {error}") from error
    plain = mixer in ("host", "None")
    return Run(
        task=task, mixer=None if plain else parse_mixer(mixer), recipe=recipe, seed=seed, removed=mixer == "None"
    )


_SIZES = {
    "digits": (8, 8),
    "digits-canvas": (12, 12),
    "cifar10": (32, 32),
    "cifar100_small": (32, 32),
    "fashion_mnist": (28, 28),
    "CIFAR10": (32, 32),
    "CIFAR100": (32, 32),
    "SVHN": (32, 32),
    "MNIST": (28, 28),
    "KMNIST": (28, 28),
    "FashionMNIST": (28, 28),
}


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise ConfigError(f"expected NAME=VALUE, such as recipe.lr=1e-3, not {text!r}")
    return name.strip(), value.strip()


def _literal(text: str) -> Any:
    import ast

    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"--device is auto, cpu, cuda or mps, not {name!r}")
    if (name == "cuda" and not torch.cuda.is_available()) or (name == "mps" and not torch.backends.mps.is_available()):
        raise ConfigError(f"this machine has no {name} device; pass --device cpu")
    return torch.device(name)


def _execute(run: "Run", results: Path, device: str, workers: int, logger: str) -> dict[str, Any]:
    from regard.lab.results import Results
    from regard.lab.run import Interrupted, Watch

    store, place = Results(results), _device(device)
    with _progress() as report:
        watch = Watch(report=report, workers=workers, loggers=_loggers(logger, store.folder(run.key)))
        try:
            return run.execute(store, device=place.type, watch=watch)
        except Interrupted as stop:
            typer.echo(
                f"{stop}; the checkpoint is in {store.folder(run.key)}. The same command goes on from there.", err=True
            )
            raise typer.Exit(130) from None


def _loggers(name: str, folder: Path) -> tuple[Any, ...]:
    if not name:
        return ()
    if name == "csv":
        from lightning.fabric.loggers import CSVLogger

        return (CSVLogger(folder, name="log"),)
    if name == "tensorboard":
        try:
            from lightning.fabric.loggers import TensorBoardLogger

            return (TensorBoardLogger(folder, name="log"),)
        except ModuleNotFoundError as error:
            raise ConfigError("--logger tensorboard needs a package: pip install tensorboard") from error
    raise ConfigError(f"--logger is csv or tensorboard, not {name!r}")


@contextmanager
def _progress() -> "Iterator[Any]":
    """A line on standard error with epoch, loss, score and time left; plain lines where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield (
            lambda progress: (
                console.print(_line(progress), highlight=False, soft_wrap=True)
                if progress.step * progress.epochs % progress.steps == 0
                else None
            )
        )
        return
    with Bar(BarColumn(), TextColumn("{task.description}"), console=console) as bar:
        shown = bar.add_task("loading", total=None)

        def report(progress: "Progress") -> None:
            bar.update(shown, total=progress.steps, completed=progress.step, description=_line(progress))

        yield report


def _line(progress: "Progress") -> str:
    minutes, seconds = divmod(round(progress.left), 60)
    score = "".join(f", test {name} {value:.4f}" for name, value in progress.metrics.items())
    return f"epoch {progress.epoch}/{progress.epochs}, loss {progress.loss:.4f}{score}, {minutes}:{seconds:02d} left"


def _show(run: "Run", outcome: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({name: value for name, value in outcome.items() if name != "bits"}))
        return
    if outcome["status"] != "done":
        typer.echo(f"run {run.key} failed: {outcome['error']}", err=True)
        return
    scores = ", ".join(f"{name} {value:.4f}" for name, value in outcome["metrics"].items())
    speed = f"{outcome['seconds']:.0f} s, {outcome['images_per_second'] or 0:.0f} images/s"
    typer.echo(
        f"run {run.key}: {scores} on {outcome['data']['test']} images; {speed}; {outcome['parameters']} parameters"
    )
    for note in outcome["notes"]:
        typer.echo(note)
