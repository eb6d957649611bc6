"""The options of `regard train` and `finetune`, and the run that they describe."""

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, DataError, Extra, check_known, nearest
from regard.core.validation import as_float
from regard.files.paths import named_folder, user_path

from .imports import Imports, imported_items
from .sizes import read_size

if TYPE_CHECKING:
    from regard.lab.results.results import Results
    from regard.lab.tasks.base import Task
    from regard.lab.train.initial_weights import Saved
    from regard.lab.train.run import Run


def path_option(help: str, metavar: str = "PATH") -> Any:
    """An option that names a file or folder."""
    return typer.Option(help=help, parser=user_path, metavar=metavar)


ResultsOption = Annotated[Path, path_option("The folder of all runs and studies.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
RootOption = Annotated[
    Path | None, path_option("The folder of all data sets. Default: that of the environment variable REGARD_DATA.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set a field of recipe or task: recipe.lr=1e-3, task.init=host. May be repeated."),
]
Precision = Annotated[str, typer.Option(help="32-true, bf16-mixed, ...; the same as --set recipe.precision=...")]
Seed = Annotated[int, typer.Option(help="Seed of the initial weights, the order of images and the augmentation.")]
Devices = Annotated[int, typer.Option(min=1, help="GPUs of this machine that share each batch of a run.")]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Train with torch.compile: faster in long runs, after up to a minute of compilation."
    ),
]
Digest = Annotated[
    str | None,
    typer.Option(
        "--digest",
        help="What the run's key takes of your own images: bytes (all; the default up to 20 GB), or index (names, "
        "sizes and the first 4 KiB of each).",
    ),
]
Download = Annotated[bool, typer.Option("--download", help="Let torchvision download the data set.")]


def use_data(root: Path | None) -> None:
    """Read data sets from this folder; None changes nothing. Raises: ConfigError if it is not a folder."""
    if root is not None:
        if not root.is_dir():
            raise ConfigError(f"--data-root {root} is not a folder")
        os.environ["REGARD_DATA"] = str(root.resolve())


def optional_run(text: str, results: Path) -> "tuple[Results, str] | None":
    """The store and the key of a run that is named by its folder, or by its key in `results`; None if it is no run."""
    from regard.lab.results.results import Results

    folder = named_folder(text)
    if folder is not None and (folder / "run.json").exists():
        folder = folder.resolve()
        return Results(folder.parent), folder.name
    is_key = Path(text).name == text and os.path.exists(results / text / "run.json")  # False for a name too long
    return (Results(results), text) if is_key else None


def saved_model(text: str) -> Path | None:
    """The folder of a saved model that a text names; None if it names none."""
    folder = named_folder(text)
    return folder if folder is not None and (folder / "model.json").exists() else None


def find_run(text: str, results: Path) -> "tuple[Results, str]":
    """`optional_run`. Raises: ConfigError if it is no run."""
    stored = optional_run(text, results)
    folder = named_folder(text) or (results / text if Path(text).name == text else None)
    if stored is None and folder is not None and os.path.exists(folder / "outcome.json"):
        raise ConfigError(
            f"{text} is a run without weights, whose outcome was imported or whose run.json is gone: delete its folder "
            f"{folder} and train it here"
        )
    if stored is None:
        raise ConfigError(
            f"{text!r} is not the folder of a run or of a saved model, and {results} has no run with this key; "
            "`regard results list` lists the runs, --results names their folder"
        )
    return stored


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `regard train` and `finetune` say of a run besides its mechanism, data and host."""

    size: Annotated[
        str, typer.Option(help="Height and width of images: 32 or 224x160. Default: those of the data set or the host.")
    ] = ""
    seed: Seed = 0
    val: Annotated[
        float | None,
        typer.Option(help="Share of the training samples that are not trained on and choose the best weights."),
    ] = None
    exif: Annotated[
        str,
        typer.Option(help="keep: pictures as they are stored; turn: as EXIF says. Default: as they were annotated."),
    ] = ""
    change: Changes = None
    precision: Precision = ""
    data_root: RootOption = None
    results: ResultsOption = Path("results")
    download: Download = False
    digest: Digest = None
    as_json: AsJson = False
    modules: Imports = None

    @property
    def extra(self) -> Extra:
        """What the modules of --import have."""
        return imported_items(self.modules)

    @property
    def changes(self) -> list[str]:
        """The values of --set; --precision and --digest are the last ones."""
        more = [f"recipe.precision={self.precision}"] if self.precision else []
        return [*(self.change or ()), *more, *([f"task.digest={self.digest}"] if self.digest else ())]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How `regard train` and `finetune` execute a run."""

    device: DeviceOption = "auto"
    devices: Devices = 1
    nodes: Annotated[
        int, typer.Option(min=1, help="Machines that share each batch of a run; torchrun starts them.")
    ] = 1
    shard: Annotated[
        bool, typer.Option("--shard", help="Divide weights and optimizer state among torchrun's processes (FSDP2).")
    ] = False
    compile: Compile = False
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that load images. Default: one for each core, at most 8, where images are decoded while "
            "training; none for data in memory.",
        ),
    ] = None
    log: Annotated[str, typer.Option("--log", "--logger", help="Also log to csv, tensorboard, wandb or mlflow.")] = ""


@contextmanager
def suggest_task(task: str, data: str | None) -> Iterator[None]:
    """Data that cannot be read as those of a classification, though their files are of another task, name it."""
    try:
        yield
    except DataError as error:
        from regard.lab.tasks.check_data import kind_of

        path = Path(data or "")
        kind = kind_of(path) if task in ("", "classification") and data and path.is_dir() else ""
        if kind in ("", "classification"):
            raise
        raise DataError(f"{error}. The files are of another task: give --task {kind}") from error


def make_run(
    mixer: str,
    data: str,
    host: str,
    options: RunOptions,
    *,
    task: str = "classification",
    defaults: "dict[str, dict[str, Any]] | None" = None,
    start: "Run | Saved | None" = None,
    plan: str = "",
) -> "Run":
    """The run that the options describe; empty ones have the task's defaults.

    mixer: a spelling, "host" (the host's own attention) or "None" (attention is removed). plan: of layers, in the place
    of a mixer. defaults: fields of task and recipe that the values of --set may replace.
    Raises: ConfigError.
    """
    from regard.lab.train.recipe import Recipe
    from regard.lab.train.run import Run
    from regard.mixers.spelling import parse_mixer

    extra, changes = options.extra, options.changes
    kind = find_task(task, extra)
    sides = read_size(options.size) if options.size else None
    given: dict[str, Any] = {
        "data": data,
        "host": host,
        "size": sides,
        "download": options.download,
        "exif": options.exif,
    }
    if options.val is not None:
        if not 0 < options.val < 1:
            raise ConfigError(f"--val is a share between 0 and 1, such as 0.1, not {options.val}")
        given |= {"val": options.val, "val_seed": options.seed}
    own = {name: value for name, value in given.items() if value and name != "data"}
    for name in own:
        if name not in kind.__dataclass_fields__:
            raise ConfigError(f"--{name} has no meaning for --task {task}")
    if data in kind.sets and Path(data).is_dir():
        print(f"{data} is a built-in set; for the folder of this name write ./{data}", file=sys.stderr)
    data = (data if data in kind.sets else absolute(data)) or kind.example_data
    parts = {"task": kind, "recipe": Recipe}
    fields = {part: {each.name: each for each in dataclasses.fields(cls)} for part, cls in parts.items()}
    del fields["task"]["extra"]  # the option --import
    refuse_twice(changes, given)
    if options.digest and data in kind.sets:
        raise ConfigError(f"--digest is for your own images, and {data} is a built-in set: leave it out")
    changed = read_changes(changes, fields)
    usual = kind.defaults(data)
    values: dict[str, dict[str, Any]] = {
        part: {**usual.get(part, {}), **(defaults or {}).get(part, {})} for part in fields
    }
    values["task"] |= own | changed["task"]
    values["recipe"] |= changed["recipe"]
    _shorten_average(values["recipe"], changes)
    try:
        problem = kind(**{"data": data, "extra": tuple(extra), **values["task"]})
        recipe = Recipe(**values["recipe"])
        problem.check(recipe)
    except TypeError as error:
        raise ConfigError(f"--set has a value of the wrong type: {error}") from error
    except ConfigError as error:
        raise ConfigError(_with_options(str(error), changes)) from error
    given_mean = changed["task"].get("mean")
    if given_mean and len(given_mean) != (channels := getattr(problem, "channels", len(given_mean))):
        raise ConfigError(f"task.mean has {len(given_mean)} numbers, the images of {data} have {channels} channels")
    return Run(
        task=problem,
        mixer=None if mixer in ("host", "None") else parse_mixer(mixer, extra),
        recipe=recipe,
        seed=options.seed,
        removed=mixer == "None",
        start=start,
        plan=plan,
    )


def read_changes(changes: Sequence[str], fields: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The values of --set by part, "task" and "recipe". fields: of these, with their defaults. Raises: ConfigError."""
    values: dict[str, dict[str, Any]] = {part: {} for part in fields}
    for text in changes:
        name, value = pair(text)
        part, _, field = name.partition(".")
        if part not in fields or field not in fields[part]:
            names = [f"{part}.{field}" for part in fields for field in fields[part]]
            raise ConfigError(f"--set has no field {name!r}; {nearest(name, names)}")
        values[part][field] = checked_value(name, literal(value), fields[part][field].default)
    return values


def absolute(data: str) -> str:
    """The path of the user's own data, or of their stream, from any working folder; what is no path stays as it is."""
    from regard.lab.data.streamed.names import LOCAL

    prefix = LOCAL if data.startswith(LOCAL) else ""
    place, mark, choices = data.removeprefix(prefix).partition("?") if prefix else (data, "", "")
    if not place.strip() or not user_path(place).exists():
        return data
    return f"{prefix}{user_path(place).absolute()}{mark}{choices}"


def refuse_twice(changes: Sequence[str], options: Mapping[str, Any] | None = None) -> None:
    """Raises: ConfigError for a field that is set twice. options: values of the task's fields that have own options."""
    found: dict[str, Any] = {f"task.{field}": value for field, value in (options or {}).items() if value}
    for name, value in map(pair, changes):
        if name in found:
            raise ConfigError(f"{name} is set to {found[name]} and to {value}; set it once, by --set or its own option")
        found[name] = value


def _shorten_average(recipe: dict[str, Any], changes: list[str]) -> None:
    """Average no more epochs than are trained, unless the user has set the number."""
    epochs = recipe.get("stop_after") or recipe.get("epochs")
    if isinstance(epochs, int) and not any(text.startswith("recipe.average") for text in changes):
        recipe |= {"average": min(recipe["average"], epochs)} if "average" in recipe else {}


def find_task(name: str, extra: Extra = ()) -> "type[Task]":
    """The task of a name: Regard's, or one in `extra`. Raises: ConfigError."""
    from regard.lab.tasks import TASKS, Task

    tasks = {task.name: task for task in TASKS}
    tasks |= {item.name: item for item in extra if isinstance(item, type) and issubclass(item, Task)}
    check_known(name, tasks, f"there is no task {name!r}")
    return tasks[name]


def _with_options(message: str, changes: list[str]) -> str:
    """A message about a field, with the --set that changed this field before it."""
    fields = {text.partition("=")[0].rpartition(".")[2].strip(): text for text in changes}
    named = [text for field, text in fields.items() if re.search(rf"\b{field}\b", message)]
    return f"--set {' --set '.join(named)}: {message}" if named else message


def pair(text: str) -> tuple[str, str]:
    """Name and value of NAME=VALUE. Raises: ConfigError."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise ConfigError(f"expected NAME=VALUE, such as recipe.lr=1e-3, not {text!r}")
    return name.strip(), value.strip()


def numbers(text: str) -> dict[str, Any]:
    """The numbers of "m=16,k=16", by name. Raises: ConfigError."""
    values = dict(map(pair, text.split(",")))
    for name, value in values.items():
        if not value.isdecimal():
            raise ConfigError(f"--retune takes whole numbers, such as m=16,k=16, not {name}={value}")
    return {name: int(value) for name, value in values.items()}


def literal(text: str) -> Any:
    """The Python literal that a text spells, else the text itself."""
    import ast

    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def checked_value(name: str, value: Any, default: Any) -> Any:
    """The value, if it has the type of the field's default; an int may stand for a float. Raises: ConfigError."""
    types: tuple[tuple[type, tuple[type, ...], str], ...] = (
        (bool, (bool,), "True or False"),
        (int, (int,), "a whole number"),
        (float, (int, float), "a number"),
        (str, (str,), "a text"),
        (tuple, (tuple, list), "several numbers, such as 0.9,0.99, or one and a comma, such as 7,"),
    )
    for kind, allowed, expected in types:
        if isinstance(default, kind):
            if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(f"--set {name} is {expected}, not {value!r}")
            break
    return as_float(value, default)


def check_page(path: Path) -> None:
    """Raises: ConfigError for a --page whose name is not that of a page, such as a script that it would replace."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--page names a file that ends in .html, not {path}")


def find_device(name: str) -> Any:
    """The torch device of "auto", "cpu", "cuda" or "mps". Raises: ConfigError if this machine has none."""
    import torch

    from regard.lab.train.environment import resolved_device

    name = resolved_device(name)
    if name not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"--device is auto, cpu, cuda or mps, not {name!r}; CUDA_VISIBLE_DEVICES chooses a GPU")
    if (name == "cuda" and not torch.cuda.is_available()) or (name == "mps" and not torch.backends.mps.is_available()):
        raise ConfigError(f"this machine has no {name} device; pass --device cpu")
    return torch.device(name)


def check_results(results: Path) -> None:
    """Raises: ConfigError if there is no such folder of results."""
    if not results.is_dir():
        raise ConfigError(f"there is no folder of results {results}; --results names it")
