"""Data of labelme: a .json file with shapes beside each image."""

import math
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any

from regard.core import DataError
from regard.files.paths import files_below
from regard.images.folders import split_of_name

from .coco import Categories, Content, Reading, class_name, read_json, splits_by_name
from .scenes import Scene
from .voc import image_of

NO_OBJECTS = "points and lines of labelme, which are no objects and are not read"
OTHER_PATH = "files that imagePath names and that are not there, in whose place the image with the JSON's name is read"


def shape_files(path: Path) -> list[Path]:
    """The files of a folder if the first of them that can be read has the format; else none."""
    files = files_below(path, frozenset({".json"}))
    for file in files:
        with suppress(DataError):
            return files if _is_labelme(read_json(file, strict=False)) else []
    return []


def _is_labelme(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("shapes"), list) and "imagePath" in content


def read(path: Path, reading: Reading) -> tuple[Categories, dict[str, list[Scene]]]:
    """The categories, the sorted labels of all shapes, and the scenes of each split, by the names of folders; all are
    for training where no folder is named after a split. Shapes of one label and group are one object.

    Raises: DataError that names the file and the shape.
    """
    found: dict[str, Content] = {}
    first: dict[str, Path] = {}
    for number, file in enumerate(shape_files(path), 1):
        try:
            content = read_json(file)
        except DataError as error:
            reading.wrong(str(error), annotation=False)
            continue
        if not _is_labelme(content):
            raise DataError(f"{file} has no shapes and imagePath, as the other files have; put it elsewhere")
        folders = file.relative_to(path).parts[:-1]
        split = next((split for folder in folders if (split := split_of_name(folder))), "train")
        part, places = found.setdefault(split, ({"images": [], "annotations": []}, []))
        given = PureWindowsPath(str(content["imagePath"])).name
        image = file.with_name(given) if file.with_name(given).is_file() else image_of(file.with_suffix(""))
        if image is not None and image.name.lower() != given.lower():
            reading.notes.add(OTHER_PATH, f"{given} of {file}")
        name = (image or file.with_name(given)).relative_to(path).as_posix()
        if (other := first.setdefault(name, file)) != file:
            reading.wrong(f"{file} and {other.name} are both of {name}: move the shapes of both into one of them")
            continue
        sides = {"height": content.get("imageHeight"), "width": content.get("imageWidth")}
        part["images"].append({"id": number, "file_name": name, **sides})
        groups: dict[Any, dict[str, Any]] = {}
        for index, shape in enumerate(content["shapes"], 1):
            place = f"{file}: shape {index}"
            try:
                if not isinstance(shape, dict):
                    raise ValueError(f"it is {type(shape).__name__}, not points and a label")
                polygon = _polygon(shape)
                label = class_name(shape["label"]) if polygon else ""
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                reading.wrong(f"{place} cannot be read ({error or type(error).__name__})")
                continue
            if not polygon:
                reading.notes.add(NO_OBJECTS, place)
                continue
            group = shape.get("group_id")
            key = (label, index if group is None else f"group {group}")
            if key not in groups:
                groups[key] = {"image_id": number, "category_id": label, "segmentation": []}
                part["annotations"].append(groups[key])
                places.append(place)
            groups[key]["segmentation"].append(polygon)
    if "train" not in found:
        raise DataError(f"{path} has no images for training")
    return splits_by_name(path, found, reading)


def _polygon(shape: dict[str, Any]) -> list[float]:
    """A shape as a polygon x, y, x, y, ...; [] for one without area. Raises: ValueError, TypeError, KeyError."""
    points = [(float(x), float(y)) for x, y in shape["points"]]
    if not all(math.isfinite(value) for point in points for value in point):
        raise ValueError("a point without a finite number")
    kind = shape.get("shape_type") or "polygon"
    if kind == "polygon" and len(points) >= 3:
        return [value for point in points for value in point]
    if kind == "rectangle" and len(points) in (2, 4):
        (left, top), (right, bottom) = (
            tuple(pick(values) for values in zip(*points, strict=True)) for pick in (min, max)
        )
        return [left, top, right, top, right, bottom, left, bottom]
    if kind == "circle" and len(points) == 2:
        (x, y), (edge_x, edge_y) = points
        radius = math.hypot(edge_x - x, edge_y - y)
        turns = [2 * math.pi * step / 64 for step in range(64)]
        return [value for turn in turns for value in (x + radius * math.cos(turn), y + radius * math.sin(turn))]
    if kind in ("point", "points", "line", "linestrip"):
        return []
    raise ValueError(f"a {kind} of {len(points)} points; expected a polygon, rectangle or circle")
