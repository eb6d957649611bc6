"""`regard predict`: what a trained model says about new files."""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from regard.core import ConfigError, DataError, StoreError, UnsupportedError
from regard.files.atomic import store_errors, write_atomically
from regard.files.paths import printable, user_path
from regard.images.folders import other_files
from regard.images.images import size_of
from regard.pages.phrasing import count

from .exit_codes import WRONG_USE
from .given import expand_groups
from .run_options import DeviceOption, RootOption, find_device, path_option, use_data
from .trained import TrainedArgument, read_trained, say_numbers
from .user_model import ModelOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from regard.lab.tasks.base import Task


SHOWN = 0.5
"""Objects with a lower score are not drawn."""


@expand_groups
def predict(
    model: TrainedArgument,
    files: Annotated[
        list[str], typer.Argument(help="Images, folders of images, files with a text in each line, or texts.")
    ],
    out: Annotated[Path | None, path_option("A folder for predictions.json and the drawn predictions.")] = None,
    coco: Annotated[bool, typer.Option("--coco", help="Print COCO results (boxes and masks) instead.")] = False,
    annotations: Annotated[
        Path | None,
        path_option(
            "With --coco: the annotation file whose image ids the results have. Default: the files' paths.", "FILE"
        ),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, show_default="0.5", help="With --out: the least score of an object that is drawn."
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the best weights of a run with --val.")] = False,
    *,
    options: ModelOptions,
    device: DeviceOption = "auto",
    data_root: RootOption = None,
) -> None:
    """Predict labels, boxes, masks or translations of new files with a trained model; prints JSON.

    Boxes and masks lie on the picture as its EXIF data turn it: upright.

    Files that cannot be read are named at the end, with exit code 2; the others have predictions.
    """
    from regard.lab.train.autocast import ModelAtPrecision

    use_data(data_root)
    if annotations is not None and not coco:
        raise ConfigError("--annotations gives the image ids of --coco; add --coco, or leave it out")
    if confidence is not None and out is None:
        raise ConfigError("--confidence says which objects are drawn; add --out FOLDER, or leave it out")
    ids = None if annotations is None else _ids_in(annotations)
    torch_device = find_device(device)
    trained = read_trained(model, options, options.extra, best)
    say_numbers(model, trained)
    task = cast("Task", trained.task)
    if confidence is not None:
        from regard.lab.tasks.detection.task import Boxes

        if not isinstance(task, Boxes):
            raise ConfigError("--confidence is for boxes and masks: runs of --task detection or instances")
    sources = _sources(files, task)
    if out is not None:
        _check_apart(out, files, sources)
    network = ModelAtPrecision(trained.network.to(torch_device), trained.precision).eval()
    try:
        predictions, unreadable = _predictions(task, trained.record, network, sources, torch_device)
    except RuntimeError as error:
        _check_channels(model, task, trained.record, network, error)
        raise
    _write(task, predictions, json.dumps(_coco(predictions, ids) if coco else predictions, indent=1), out, confidence)
    for line in unreadable:
        typer.echo(f"left out: {line}", err=True)
    if unreadable:
        raise typer.Exit(WRONG_USE)


def _predictions(
    task: "Task", record: dict[str, Any], model: "nn.Module", sources: list[str], device: "torch.device"
) -> tuple[list[dict[str, Any]], list[str]]:
    """The predictions of all that can be read, and a sentence for each source that cannot. Raises: UnsupportedError."""
    try:
        return task.predict(model, sources, device, record), []
    except DataError as error:
        if len(sources) == 1:
            return [], [printable(str(error))]
    half = len(sources) // 2
    first, second = (_predictions(task, record, model, part, device) for part in (sources[:half], sources[half:]))
    return first[0] + second[0], first[1] + second[1]


def _check_channels(text: str, task: "Task", record: dict[str, Any], network: "nn.Module", error: RuntimeError) -> None:
    """Raises: StoreError, from the error of the network, if images are normalised with other channels than it takes."""
    from regard.lab.tasks import Classification
    from regard.swapping.inspect import input_channels

    if isinstance(task, Classification):
        given, colours = task.host_channels(len(record["normal"][0])), input_channels(network)
        if given != colours:
            raise StoreError(
                f"mean and deviation are of {given} channels, images of {text} have {colours}: its outcome is damaged"
            ) from error


def _write(
    task: "Task", predictions: list[dict[str, Any]], text: str, out: Path | None, confidence: float | None
) -> None:
    """Print the text, or write it into a folder beside the drawn predictions. Raises: StoreError."""
    if out is None:
        typer.echo(text)
        return
    least = SHOWN if confidence is None else confidence
    with store_errors(out):
        drawn = _draw(task, [_surest(prediction, least) for prediction in predictions], out)
    write_atomically(out / "predictions.json", text + "\n")
    typer.echo(f"{out}: predictions.json{drawn}")
    if note := _nothing_drawn(predictions, least):
        typer.echo(note, err=True)


def _surest(prediction: dict[str, Any], least: float) -> dict[str, Any]:
    """A prediction with the objects that are drawn."""
    if "objects" not in prediction:
        return prediction
    return {**prediction, "objects": [item for item in prediction["objects"] if item["score"] >= least]}


def _nothing_drawn(predictions: list[dict[str, Any]], least: float) -> str:
    """A sentence where there are objects of which none is drawn."""
    scores = [item["score"] for prediction in predictions for item in prediction.get("objects", ())]
    if not scores or max(scores) >= least:
        return ""
    best = math.floor(100 * max(scores)) / 100
    return f"no object has a score of {least:g} or more, so that none is drawn; --confidence {best:g} draws the best"


def _sources(files: list[str], task: "Task") -> list[str]:
    """The files, the images in folders, and texts. Raises: ConfigError for a missing file or an empty folder."""
    sources = []
    for name in files:
        if task.takes_text and not _may_be_path(name):
            sources.append(name)
            continue
        path = user_path(name)
        if path.is_dir():
            found = [str(file) for file in task.files_in(path)]
            if not found:
                raise ConfigError(f"the folder {name} has no {task.unit}")
            sources += found
            read = {*found}
            others = [] if task.takes_text else [file for file in other_files(path) if str(file) not in read]
            if others:
                typer.echo(f"{len(others)} files of {name} are not read as images, such as {others[0]}", err=True)
        elif task.takes_text or path.exists():
            sources.append(str(path) if path.exists() else name)
        else:
            raise ConfigError(f"there is no file {name}")
    return sources


def _check_apart(out: Path, files: list[str], sources: list[str]) -> None:
    """Raises: ConfigError if drawings would lie among what is read, over it, or be read the next time."""
    where = out.resolve()
    given = [Path(path).resolve() for name in files if os.path.isdir(path := os.path.expanduser(name))]
    folders = [Path(source).resolve().parent for source in sources if os.path.isfile(source)]
    if where in folders or any(where.is_relative_to(folder) for folder in given):
        raise ConfigError(f"--out {out} is, or lies in, a folder of what is read: name another one")


def _may_be_path(text: str) -> bool:
    """Whether a text can be the name of a file; a long sentence, or one with line breaks, cannot."""
    return 0 < len(text.strip()) < 200 and "\n" not in text and not text.startswith("~")


class _Ids(NamedTuple):
    """Of a COCO annotation file. images: the entries by file_name; categories: ids by name, {} where it has none."""

    images: dict[str, dict[str, Any]]
    categories: dict[str, Any]


def _ids_in(file: Path) -> _Ids:
    """The ids in a COCO annotation file. Raises: DataError."""
    from regard.lab.tasks.detection.coco import read_json

    content = read_json(file)
    entries: dict[str, Any] = content if isinstance(content, dict) else {}
    images, categories = entries.get("images", ""), entries.get("categories", [])
    if not all(isinstance(part, list) and all(isinstance(one, dict) for one in part) for part in (images, categories)):
        raise DataError(
            f"{file} is no COCO annotation file: its images, and its categories if it has some, are no lists of entries"
        )
    names = {str(one.get("name")): one.get("id") for one in categories}
    return _Ids({str(image.get("file_name")): image for image in images}, names)


def _id_of(file: str, images: dict[str, dict[str, Any]]) -> Any:
    """The id of the image whose file_name ends a path. Raises: ConfigError for none, or one of another size."""
    parts = Path(file).parts
    for start in range(len(parts)):
        if (name := Path(*parts[start:]).as_posix()) in images:
            _check_size(file, images[name])
            return images[name].get("id")
    raise ConfigError(f"the annotation file names no image {file}; leave it out, or leave --annotations out")


def _check_size(file: str, entry: dict[str, Any]) -> None:
    """Raises: ConfigError for an image of another size than its entry says, in which boxes would lie elsewhere."""
    rows, columns = entry.get("height"), entry.get("width")
    if rows is None or columns is None:
        return
    height, width = size_of(Path(file))
    if (rows, columns) != (height, width):
        raise ConfigError(
            f"{file} has {width}x{height} pixels as its EXIF data turn it, the annotation file says {columns}x{rows}: "
            "boxes would lie elsewhere; give the picture that was annotated, without a turn in its EXIF data"
        )


def _coco(predictions: list[dict[str, Any]], ids: _Ids | None) -> list[dict[str, Any]]:
    """Boxes as COCO results: [x, y, width, height], category ids, and masks as RLE.

    ids: of images and categories; None = image_id is the file as it was given, category ids are those of the training
    data. Raises: ConfigError for two files of one image, and for a class that is no category.
    """
    items = []
    files: dict[Any, str] = {}
    for prediction in predictions:
        if "objects" not in prediction:
            raise ConfigError("--coco is for boxes and masks: runs of --task detection or instances")
        image = prediction["file"] if ids is None else _id_of(prediction["file"], ids.images)
        if (first := files.setdefault(image, prediction["file"])) != prediction["file"]:
            raise ConfigError(f"{first} and {prediction['file']} are one image of the annotation file: leave one out")
        for item in prediction["objects"]:
            left, top, right, bottom = item["box"]
            category = item["category"] if ids is None or not ids.categories else ids.categories.get(item["label"])
            if category is None:
                raise ConfigError(f"the annotation file has no category {item['label']!r}, which the model predicts")
            entry = {"image_id": image, "category_id": category, "score": item["score"]}
            entry["bbox"] = [left, top, round(right - left, 3), round(bottom - top, 3)]
            items.append(entry | ({"segmentation": item["mask"]} if "mask" in item else {}))
    return items


def _draw(task: "Task", predictions: list[dict[str, Any]], out: Path) -> str:
    """Draw every prediction that can be drawn into a folder; returns what was written, as text."""
    out.mkdir(parents=True, exist_ok=True)
    for number, prediction in enumerate(predictions):
        source = next(iter(prediction.values()))
        try:
            image = task.draw(source, prediction)
        except UnsupportedError:
            return ""
        image.save(out / f"{number:04d}-{Path(str(source)).stem[:40]}.png")
    return f" and {count(len(predictions), 'picture')}"
