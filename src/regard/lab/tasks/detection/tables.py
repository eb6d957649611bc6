"""Tables of objects: a .csv with a box in each row, or metadata.jsonl of the Hub with an image in each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.core import DataError
from regard.files.paths import subfolders, visible
from regard.images.folders import check_column, split_of_name
from regard.images.images import size_of
from regard.images.lists import FILES, KINDS, find_image, images_by_name, is_elsewhere, is_empty, rows_in, whole_numbers
from regard.images.notes import ELSEWHERE

from .coco import FRACTIONS, Categories, Reading, class_name, in_fractions, splits_by_name
from .scenes import Scene

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_CLASSES = ("class", "label", "category", "name")
_OF_OBJECTS = ("categories", "category", "labels", "label", "class")


def table_files(path: Path) -> list[Path]:
    """The tables in a folder or in the folders of its splits."""
    folders = [path, *(folder for folder in subfolders(path) if split_of_name(folder.name))]
    files = [folder / entry.name for folder in folders for entry in visible(folder)]
    return [file for file in files if file.suffix.lower() in KINDS and _has_objects(file)]


def _has_objects(file: Path) -> bool:
    try:
        first = {str(name).lower(): value for name, value in next(rows_in(file, strict=False), {}).items()}
    except DataError:
        return False
    boxes = first.keys() >= {*_SIDES} and any(name in first for name in _CLASSES)
    return any(name in first for name in FILES) and (boxes or isinstance(first.get("objects"), dict | list))


def read(path: Path, reading: Reading) -> tuple[Categories, dict[str, list[Scene]]]:
    """The categories, the sorted classes of all objects, and the scenes of each split that names a table or its folder.

    A row of a .csv has a file, a class and xmin, ymin, xmax, ymax; one of a .jsonl has file_name and objects, with
    boxes [left, top, width, height] in `bbox` and as many classes in `categories`. Raises: DataError with file and
    line.
    """
    below = images_by_name(path)
    found: dict[str, tuple[dict[Path, int], list[dict[str, Any]], list[str]]] = {}  # images, annotations, places
    tables: dict[tuple[str, Path], Path] = {}
    for file in table_files(path):
        split = (split_of_name(file.parent.name) if file.parent != path else split_of_name(file.stem)) or "train"
        images, annotations, places = found.setdefault(split, ({}, [], []))
        for number, row in enumerate(rows_in(file), 1 + (file.suffix.lower() != ".jsonl")):
            place = f"{file}, line {number}"
            row = {str(name).lower(): value for name, value in row.items()}
            check_column(place, row.get("split"), split)
            given = str(next((row[name] for name in FILES if name in row), ""))
            source = find_image(file, path, given, below)
            if isinstance(source, str):
                reading.wrong(f"{place}: {source}", annotation=False)
                continue
            if (other := tables.setdefault((split, source), file)) != file:
                raise DataError(f"{other} and {file.name} both have {source.name} of {split}: join them, or keep one")
            if source not in images and is_elsewhere(file, given, source):
                reading.notes.add(ELSEWHERE, f"{source} for {given}")
            if source not in images and (problem := _other_size(row, source)):
                reading.wrong(f"{place}: {problem}", annotation=False)
                continue
            image_id = images.setdefault(source, len(images) + 1)
            try:
                for name, box in _objects(row):
                    annotations.append({"image_id": image_id, "category_id": name, "bbox": box})
                    places.append(place)
            except (ValueError, TypeError, KeyError) as error:
                reading.wrong(f"{place}: its objects cannot be read ({error or type(error).__name__})")
    objects = [one for _, annotations, _ in found.values() for one in annotations]
    for one, name in zip(objects, whole_numbers([one["category_id"] for one in objects]), strict=True):
        one["category_id"] = name
    if "train" not in found:
        raise DataError(f"{path} has tables of {', '.join(found)}, but none for training")
    contents = {
        split: ({"images": [{"id": n, "file_name": file.relative_to(path).as_posix()} for file, n in images.items()],
                 "annotations": annotations}, places) for split, (images, annotations, places) in found.items()
    }  # fmt: skip
    return splits_by_name(path, contents, reading, _order)


def _order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isascii() and name.isdigit() else (0, name)


def _other_size(row: dict[str, Any], image: Path) -> str:
    """What is wrong with the columns width and height, where a table has them: boxes of another size do not fit.

    Which side is which depends on how the image is turned.
    """
    sides = [str(row.get(name) or "").strip() for name in ("width", "height")]
    if not all(sides):
        return ""
    found = size_of(image)
    if sorted(sides) == sorted(map(str, found)):
        return ""
    return f"{image.name} has {found[1]}x{found[0]} pixels, its width and height say {'x'.join(sides)}"


def _objects(row: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Class and [left, top, width, height] of each object of a row. Raises: ValueError, TypeError, KeyError."""
    if "objects" in row:
        objects = row["objects"]
        if isinstance(objects, list):  # one by one
            objects = {name: [each[name] for each in objects] for name in (objects[0] if objects else ["bbox"])}
        if not isinstance(objects, dict):
            raise ValueError(f"objects is {type(objects).__name__}, expected bbox and categories")
        boxes: list[Any] = objects["bbox"]
        labels: list[Any] = next((objects[name] for name in _OF_OBJECTS if name in objects), [])
        if len(boxes) != len(labels):
            raise ValueError(f"{len(boxes)} boxes and {len(labels)} classes")
        for box, label in zip(boxes, labels, strict=True):
            yield class_name(label), [float(value) for value in box]
    elif any(str(row[side] or "").strip() for side in _SIDES):  # an empty row is an image without objects
        left, top, right, bottom = sides = [float(row[side]) for side in _SIDES]
        if in_fractions([sides]):
            raise ValueError(f"its box is {FRACTIONS}")
        label = class_name(next(row[name] for name in _CLASSES if name in row))
        if is_empty(label):
            raise ValueError(f"the class {label}, which stands for none")
        yield label.strip(), [left, top, right - left, bottom - top]
    elif label := next((str(row[name]) for name in _CLASSES if str(row.get(name) or "").strip()), ""):
        raise ValueError(f"it has the class {label} and no box; an image without objects has neither")
