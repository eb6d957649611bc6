"""Annotation files of COCO's format: read, checked, and as `Scene`s."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.core import DataError
from regard.files.paths import check_utf8, printable, user_path
from regard.images.images import SUFFIXES

from . import masks
from .scenes import Rle, Scene, objects_of

log = logging.getLogger("regard.data")

LARGEST = 1e30
"""Numbers of annotations are smaller than this."""
LARGEST_SIDE = 2**20
"""Pixels of the longest side of an image that is read."""
TOLERANCE = 1.0
"""Pixels by which a box may reach beyond its image: annotations round. It is clipped."""


@dataclass(frozen=True)
class Categories:
    """ids: the numbers in the annotation file, sorted; they need not be contiguous. names: in the order of ids."""

    ids: tuple[int, ...]
    names: tuple[str, ...]


def read_json(file: Path) -> Any:
    """The content of a JSON file. Raises: DataError with line and column."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise DataError(f"{file} is empty; expected COCO annotations: images, annotations and categories")
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is no valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, a number of 5,000 digits, 5,000 brackets
        raise DataError(f"{file} cannot be read: {error}") from error


def read_scenes(file: Path, folders: list[Path], with_masks: bool, corrupt: str) -> tuple[Categories, list[Scene]]:
    """The categories and scenes of an annotation file. folders: where its images may be.

    corrupt: "stop" at the first wrong annotation or missing image, or "skip" it with a warning. "leave out": wrong
    annotations, with one message about all of them, for COCO itself, of whose boxes two have no height.
    Raises: DataError that names the file and the annotation.
    """
    content = read_json(file)
    if not isinstance(content, dict):
        raise DataError(f"{file} is no object with images, annotations and categories, but a {type(content).__name__}")
    for part in ("images", "annotations", "categories"):
        if not isinstance(content.get(part), list):
            raise DataError(f"{file} has no list {part!r}; expected COCO annotations: images, annotations, categories")
    categories = _categories(file, content["categories"])
    images = _by_id(file, "image", content["images"], ("file_name", "width", "height"))
    if not images:
        raise DataError(f"{file} has no images")
    annotations = _by_id(file, "annotation", content["annotations"], ("image_id", "category_id", "bbox"))
    wrong = Wrong(corrupt)
    sources = {number: source for number, image in images.items() if (source := _source(file, image, folders, wrong))}
    rows: dict[int, list[dict[str, Any]]] = {number: [] for number in images}
    labels = {number: label for label, number in enumerate(categories.ids)}
    for number, annotation in annotations.items():
        where = f"{file}: annotation {number}"
        ids = annotation["image_id"], annotation["category_id"]
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in ids):
            wrong(f"{where} has image_id {ids[0]!r} and category_id {ids[1]!r}; expected whole numbers")
        elif annotation["image_id"] not in images:
            wrong(f"{where} is of image {annotation['image_id']}, which is not among the images")
        elif annotation["category_id"] not in labels:
            known = ", ".join(map(str, categories.ids[:20]))
            wrong(f"{where} has category {annotation['category_id']}; the categories are {known}")
        elif annotation["image_id"] in sources:
            row = _checked(where, annotation, images[annotation["image_id"]], with_masks, wrong)
            if row is not None:
                rows[annotation["image_id"]].append({**row, "label": labels[annotation["category_id"]]})
    wrong.summarise(file)
    scenes = [
        Scene(str(source), source, (images[n]["height"], images[n]["width"]), _objects(rows[n], with_masks), n)
        for n, source in sources.items()
    ]
    if not scenes:
        raise DataError(f"{file}: none of its images is there")
    if corrupt == "skip":
        _check_kept(file, categories, annotations.values(), scenes)
    return categories, scenes


def _check_kept(
    file: Path, categories: Categories, annotations: Iterable[Mapping[str, Any]], scenes: list[Scene]
) -> None:
    """Raises: DataError for a category whose objects were all skipped."""
    kept = {categories.ids[label] for scene in scenes for label in scene.objects.labels}
    named = {number for entry in annotations if isinstance(number := entry["category_id"], int)}
    lost = [name for number, name in zip(categories.ids, categories.names, strict=True) if number in named - kept]
    if lost:
        raise DataError(f"{file}: all annotations of category {lost[0]} were skipped; correct or remove them")


class Wrong:
    """What happens with a wrong entry: an error, a warning, or a place in `summarise`. Raises: DataError."""

    def __init__(self, corrupt: str) -> None:
        self.corrupt = corrupt
        self.left_out: list[str] = []

    def __call__(self, message: str, annotation: bool = True) -> None:
        """annotation: whether an object is wrong, not an image."""
        if self.corrupt == "leave out" and annotation:
            self.left_out.append(message)
            return
        if self.corrupt != "skip":
            raise DataError(f'{message}; correct or remove it, or pass corrupt="skip" to leave it out')
        log.warning("skipped: %s", message)

    def summarise(self, file: Path) -> None:
        """One message about the annotations of a file that were left out, with the first of them."""
        if self.left_out:
            log.warning(
                "%s: %d wrong annotations are left out, the first: %s", file, len(self.left_out), self.left_out[0]
            )


def _objects(rows: list[dict[str, Any]], with_masks: bool) -> Any:
    columns = {name: [row[name] for row in rows] for name in ("box", "label", "crowd", "area", "mask")}
    found: list[Rle] | None = columns["mask"] if with_masks else None
    return objects_of(columns["box"], columns["label"], columns["crowd"], columns["area"], found)


def _by_id(file: Path, kind: str, entries: list[Any], fields: tuple[str, ...]) -> dict[int, dict[str, Any]]:
    """The entries by their id. Raises: DataError for one without its fields, or an id that occurs twice."""
    by_id: dict[int, dict[str, Any]] = {}
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(f"{file}: {kind} number {index + 1} is no object")
        missing = [name for name in ("id", *fields) if name not in entry]
        if missing:
            raise DataError(f"{file}: {kind} number {index + 1} (id {entry.get('id')}) has no {', '.join(missing)}")
        number = entry["id"]
        if not isinstance(number, int) or isinstance(number, bool):
            raise DataError(f"{file}: {kind} number {index + 1} has the id {number!r}; expected a whole number")
        if number in by_id:
            raise DataError(f"{file}: the {kind} id {number} occurs twice; ids must be unique")
        by_id[number] = entry
    if kind == "image":
        for number, entry in by_id.items():
            sides = entry["width"], entry["height"]
            whole = all(isinstance(side, int) and 0 < side <= LARGEST_SIDE for side in sides)
            if not whole or not isinstance(entry["file_name"], str):
                raise DataError(f"{file}: image {number} has no valid file_name, width and height")
    return by_id


def _categories(file: Path, entries: list[Any]) -> Categories:
    by_id = _by_id(file, "category", entries, ("name",))
    if not by_id:
        raise DataError(f"{file} has no categories")
    ids = tuple(sorted(by_id))
    names = tuple(str(by_id[number]["name"]) for number in ids)
    for name in names:
        check_utf8(Path(name), DataError)
    double = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if double is not None:
        raise DataError(f"{file} has two categories {double!r}; their names must differ")
    return Categories(ids, names)


def _source(file: Path, image: Mapping[str, Any], folders: list[Path], wrong: Wrong) -> Path | None:
    """The path of an image, None if it is skipped. Raises: DataError for one that the digest does not cover."""
    name = Path(image["file_name"])
    if name.is_absolute() or any(part.startswith(".") for part in name.parts) or name.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{file}: image {image['id']} has the file_name {printable(str(name))}; expected an image in a folder of "
            f"the data, not hidden, with one of {', '.join(sorted(SUFFIXES))}"
        )
    for folder in folders:
        path = user_path(folder / name, DataError)
        if path.exists():
            return path
    looked = " or ".join(str(folder) for folder in folders)
    wrong(f"{file}: image {image['id']}, {image['file_name']}, is not in {looked}", annotation=False)
    return None


def _checked(
    where: str, annotation: Mapping[str, Any], image: Mapping[str, Any], with_masks: bool, wrong: Wrong
) -> dict[str, Any] | None:
    """Box, crowd, area and mask of an annotation; None if it is wrong and skipped."""
    size = (image["height"], image["width"])
    problem = box_problem(annotation["bbox"], size)
    if problem:
        wrong(f"{where} in {image['file_name']}: {problem}")
        return None
    mask = None
    if with_masks:
        if annotation.get("segmentation") in (None, [], {}):
            wrong(f"{where} in {image['file_name']} has no segmentation; --task detection needs boxes alone")
            return None
        try:
            mask = masks.from_annotation(annotation["segmentation"], size)
            if not masks.area(mask):
                raise ValueError("its mask is empty")
        except ValueError as error:
            wrong(f"{where} in {image['file_name']}: {error}")
            return None
    left, top, width, height = map(float, annotation["bbox"])
    right, bottom = min(left + width, size[1]), min(top + height, size[0])
    crowd, area = annotation.get("iscrowd", 0), annotation.get("area")
    if crowd not in (0, 1):
        wrong(f"{where} in {image['file_name']} has iscrowd {crowd!r}; expected 0 or 1")
        return None
    if not _is_number(area) or not isinstance(area, int | float) or area < 0:
        area = masks.area(mask) if mask is not None else width * height
    box = (max(left, 0.0), max(top, 0.0), right, bottom)
    return {"box": box, "crowd": bool(crowd), "area": float(area), "mask": mask}


def _is_number(value: Any) -> bool:
    """Whether a value is a number that float32 holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def box_problem(bbox: Any, size: tuple[int, int]) -> str:
    """What is wrong with a box [left, top, width, height] in an image of size (height, width); "" if nothing."""
    numbers = isinstance(bbox, list | tuple) and len(bbox) == 4
    if not numbers or not all(_is_number(value) for value in bbox):
        return f"its bbox is {bbox}, expected four numbers [left, top, width, height]"
    left, top, width, height = bbox
    if width <= 0 or height <= 0:
        return f"its box {list(bbox)} has no area"
    outside = left < -TOLERANCE or top < -TOLERANCE
    if outside or left + width > size[1] + TOLERANCE or top + height > size[0] + TOLERANCE:
        return f"its box {list(bbox)} (left, top, width, height) is outside the image of {size[1]}x{size[0]} pixels"
    if left >= size[1] or top >= size[0] or left + width <= 0 or top + height <= 0:
        return f"its box {list(bbox)} lies beside the image of {size[1]}x{size[0]} pixels"
    return ""
