"""What `regard train`, `finetune` and `eval` have in common: options, the run they describe, and how it is shown."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, nearest

if TYPE_CHECKING:
    from regard.store.results import Results
    from regard.train.initial_weights import Saved
    from regard.train.loop import Progress
    from regard.train.run import Run

ResultsOption = Annotated[Path, typer.Option(help="The folder with one sub-folder a run.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
RootOption = Annotated[Path | None, typer.Option(help="The folder with one sub-folder a data set (or REGARD_DATA).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]


Changes = Annotated[list[str] | None, typer.Option("--set", help="recipe.lr=1e-3 or task.init=host; can be repeated.")]
Precision = Annotated[str, typer.Option(help="The same as --set recipe.precision: 32-true, bf16-mixed, ...")]
Seed = Annotated[int, typer.Option(help="First weights, order and augmentation.")]
Size = Annotated[str, typer.Option(help="Height and width of images: 32 or 224x160.")]
Workers = Annotated[int, typer.Option(help="Loader processes; 0 is best for sets in memory.")]
Logger = Annotated[str, typer.Option(help="csv or tensorboard, below the run's folder.")]
Devices = Annotated[int, typer.Option(min=1, help="GPUs of this machine that share each batch of a run.")]
Compile = Annotated[bool, typer.Option("--compile", help="Train through torch.compile; pays in long runs.")]
Download = Annotated[bool, typer.Option("--download", help="Let torchvision fetch its set.")]


def use_data(root: Path | None) -> None:
    """Data sets lie in this folder, for this command. Raises: ConfigError if it is none."""
    if root is not None:
        if not root.expanduser().is_dir():
            raise ConfigError(f"--data-root {root} is not a folder")
        os.environ["REGARD_DATA"] = str(root.expanduser().resolve())


def run_at(text: str, results: Path) -> "tuple[Results, str] | None":
    """The store and the key of a run that is named by its folder, or by its key in `results`; None if it is no run."""
    from regard.store.results import Results

    folder = Path(text).expanduser()
    if (folder / "run.json").exists():
        folder = folder.resolve()
        return Results(folder.parent), folder.name
    known = Path(text).name == text and (results.expanduser() / text / "run.json").exists()
    return (Results(results), text) if known else None


def find_run(text: str, results: Path) -> "tuple[Results, str]":
    """`run_at`. Raises: ConfigError if it is no run."""
    found = run_at(text, results)
    if found is None:
        raise ConfigError(
            f"{text!r} is no run's folder, and {results} has no run of this key; "
            "`regard study status` lists runs, --results says where they lie"
        )
    return found


def recorded_data(store: "Results", key: str) -> dict[str, Any]:
    """What a run's outcome says of its data; {} without one."""
    return (store.outcome(key) or {}).get("data") or {}


def make_run(
    mixer: str,
    data: str,
    host: str,
    size: "tuple[int, int] | None",
    seed: int,
    changes: list[str],
    download: bool,
    defaults: "dict[str, dict[str, Any]] | None" = None,
    start: "Run | Saved | None" = None,
) -> "Run":
    """The run that options describe. mixer: a spelling, "host" or "None". defaults: fields of task and recipe that
    `changes` ("recipe.lr=1e-3") may replace. Raises: ConfigError."""
    from regard.mixers.spelling import parse_mixer
    from regard.tasks import Classification
    from regard.train.recipe import Recipe
    from regard.train.run import Run

    sides = size or _SIZES.get(data, (224, 224))
    fields = {"task": Classification.__dataclass_fields__, "recipe": Recipe.__dataclass_fields__}
    given: dict[str, dict[str, Any]] = {"task": {}, "recipe": {"augment": "none"} if data.startswith("digits") else {}}
    for part, values in (defaults or {}).items():
        given[part] |= values
    for text in changes:
        name, value = pair(text)
        part, _, field = name.partition(".")
        known = [f"{each}.{one}" for each, names in fields.items() for one in names]
        if part not in fields or field not in fields[part]:
            raise ConfigError(f"--set knows no {name!r}; {nearest(name, known)}")
        given[part][field] = of_kind(name, literal(value), fields[part][field].default)
    options = {"host": host, "data": data, "size": sides, "download": download, **given["task"]}
    try:
        task, recipe = Classification(**options), Recipe(**given["recipe"])
    except TypeError as error:
        raise ConfigError(f"--set has a value of the wrong kind: {error}") from error
    plain = mixer in ("host", "None")
    return Run(
        task=task,
        mixer=None if plain else parse_mixer(mixer),
        recipe=recipe,
        seed=seed,
        removed=mixer == "None",
        start=start,
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


def pair(text: str) -> tuple[str, str]:
    """Name and value of NAME=VALUE. Raises: ConfigError."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise ConfigError(f"expected NAME=VALUE, such as recipe.lr=1e-3, not {text!r}")
    return name.strip(), value.strip()


def numbers(text: str) -> dict[str, Any]:
    """Read "m=16,k=16"."""
    found = dict(map(pair, text.split(",")))
    for name, value in found.items():
        if not value.isdecimal():
            raise ConfigError(f"--retune takes whole numbers, such as m=16,k=16, not {name}={value}")
    return {name: int(value) for name, value in found.items()}


def literal(text: str) -> Any:
    import ast

    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def of_kind(name: str, value: Any, like: Any) -> Any:
    """The value, if it is of the kind of the field's default (a whole number may stand for a fraction)."""
    kinds: tuple[tuple[type, tuple[type, ...], str], ...] = (
        (bool, (bool,), "True or False"),
        (int, (int,), "a whole number"),
        (float, (int, float), "a number"),
        (str, (str,), "a word"),
        (tuple, (tuple, list), "several numbers, such as 0.9,0.99"),
    )
    for kind, allowed, said in kinds:
        if isinstance(like, kind):
            if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(f"--set {name} is {said}, not {value!r}")
            break
    return value


def find_device(name: str) -> Any:
    """The torch device of "auto", "cpu", "cuda" or "mps". Raises: ConfigError if this machine has none."""
    import torch

    from regard.train.environment import resolved

    name = resolved(name)
    if name not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"--device is auto, cpu, cuda or mps, not {name!r}; CUDA_VISIBLE_DEVICES chooses a GPU")
    if (name == "cuda" and not torch.cuda.is_available()) or (name == "mps" and not torch.backends.mps.is_available()):
        raise ConfigError(f"this machine has no {name} device; pass --device cpu")
    return torch.device(name)


def timed_device(name: str) -> Any:
    """`find_device` for what times mechanisms. Raises: ConfigError for other devices than the CPU and CUDA too."""
    place = find_device(name)
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"nothing can be timed on {place.type} yet; pass --device cpu or cuda")
    return place


def carry_out(
    run: "Run", results: Path, device: str, devices: int, workers: int, logger: str, compile: bool, as_json: bool
) -> None:
    """Train with progress on standard error, and show the outcome.

    Ctrl-C keeps a checkpoint and exits with 130; a run that fails ends the command with exit code 1.
    Raises: ConfigError; what `Run.execute` raises.
    """
    from regard.store.results import Results
    from regard.train.loop import Interrupted, Watch

    if workers < 0:
        raise ConfigError(f"--workers is 0 or more, not {workers}")
    store, place = Results(results), find_device(device)
    with progress() as report:
        watch = Watch(report=report, workers=workers, loggers=loggers(logger, store.folder(run.key)), compile=compile)
        try:
            outcome = run.execute(store, devices, device=place.type, watch=watch)
        except Interrupted as stop:
            typer.echo(
                f"{stop}; the checkpoint is in {store.folder(run.key)}. The same command goes on from there.", err=True
            )
            raise typer.Exit(130) from None
    show_outcome(run, outcome, as_json)
    if outcome["status"] != "done":
        raise typer.Exit(1)


def loggers(name: str, folder: Path) -> tuple[Any, ...]:
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
def progress() -> "Iterator[Any]":
    """A line on standard error with epoch, loss, score and time left; plain lines where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield (
            lambda progress: (
                console.print(line(progress), highlight=False, soft_wrap=True)
                if progress.step * progress.epochs % progress.steps == 0
                else None
            )
        )
        return
    with Bar(BarColumn(), TextColumn("{task.description}"), console=console) as bar:
        shown = bar.add_task("loading", total=None)

        def report(progress: "Progress") -> None:
            bar.update(shown, total=progress.steps, completed=progress.step, description=line(progress))

        yield report


def line(progress: "Progress") -> str:
    minutes, seconds = divmod(round(progress.left), 60)
    score = "".join(f", test {name} {value:.4f}" for name, value in progress.metrics.items())
    return f"epoch {progress.epoch}/{progress.epochs}, loss {progress.loss:.4f}{score}, {minutes}:{seconds:02d} left"


def show_outcome(run: "Run", outcome: dict[str, Any], as_json: bool) -> None:
    """The outcome as a line, or as JSON."""
    if as_json:
        typer.echo(json.dumps({name: value for name, value in outcome.items() if name != "bits"}))
        return
    if outcome["status"] != "done":
        typer.echo(f"run {run.key} failed: {outcome['error']}", err=True)
        return
    scores = ", ".join(f"{name} {value:.4f}" for name, value in outcome["metrics"].items() if value is not None)
    speed = f"{outcome['seconds']:.0f} s, {outcome['images_per_second'] or 0:.0f} images/s"
    typer.echo(
        f"run {run.key}: {scores} on {outcome['data']['test']} images; {speed}; {outcome['parameters']} parameters"
    )
    for note in outcome["notes"]:
        typer.echo(note)


def changed(change: list[str] | None, precision: str) -> list[str]:
    """The values of --set, with that of --precision last."""
    return [*(change or []), *([f"recipe.precision={precision}"] if precision else [])]
