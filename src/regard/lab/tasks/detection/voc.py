"""Data of Pascal VOC's format: JPEGImages, Annotations/*.xml and ImageSets/Main/*.txt."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from regard.core import DataError

from .coco import LARGEST_SIDE, Categories, Wrong, box_problem
from .scenes import Scene, objects_of

SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
"""Of images, in this order."""
_SIDES = ("xmin", "ymin", "xmax", "ymax")


def is_voc(path: Path) -> bool:
    """Whether a folder has the format."""
    return (path / "Annotations").is_dir() and (path / "ImageSets" / "Main").is_dir()


def read_splits(path: Path, corrupt: str) -> tuple[Categories, dict[str, list[Scene]]]:
    """The categories, which are the sorted names of all objects, and the scenes of train.txt, val.txt and test.txt.

    Boxes are in pixels from 1, the last one included, as VOC has them; objects that are marked as difficult are
    ordinary ones. corrupt: as in `coco.read_scenes`. Raises: DataError that names the file.
    """
    lists = {split: path / "ImageSets" / "Main" / f"{split}.txt" for split in ("train", "val", "test")}
    present = {split: file for split, file in lists.items() if file.exists()}
    if "train" not in present:
        raise DataError(f"{lists['train']} does not exist; it names the images for training, one a line")
    wrong = Wrong(corrupt)
    raw: dict[str, list[dict[str, Any]]] = {}
    for split, file in present.items():
        names = _names(file)
        raw[split] = [entry for name in names if (entry := _read(path, name, wrong)) is not None]
        if not raw[split]:
            raise DataError(f"{file} names no image that can be read")
    names = sorted({name for entries in raw.values() for entry in entries for name in entry["names"]})
    if not names:
        raise DataError(f"{path / 'Annotations'} has no objects")
    labels = {name: label for label, name in enumerate(names)}
    splits = {}
    for split, entries in raw.items():
        splits[split] = [
            Scene(
                str(entry["source"]), entry["source"], entry["size"],
                objects_of(entry["boxes"], [labels[name] for name in entry["names"]]), number,
            )
            for number, entry in enumerate(entries, 1)
        ]  # fmt: skip
    return Categories(tuple(range(1, len(names) + 1)), tuple(names)), splits


def _names(file: Path) -> list[str]:
    """The names of images in a list: the first word of each line. Raises: DataError."""
    try:
        names = [line.split()[0] for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    outside = next((name for name in names if name.startswith(".") or "/" in name), None)
    if outside is not None:
        raise DataError(f"{file} names {outside}; expected the name of an image in JPEGImages, without suffix")
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if not names or twice:
        raise DataError(f"{file} names {twice} twice" if twice else f"{file} names no images")
    return names


def _read(path: Path, name: str, wrong: Wrong) -> dict[str, Any] | None:
    """Source, size, boxes and names of objects of an image; None if it is skipped."""
    source = next((file for end in SUFFIXES if (file := path / "JPEGImages" / f"{name}{end}").is_file()), None)
    if source is None:
        wrong(f"there is no image {path / 'JPEGImages' / name} ({', '.join(SUFFIXES[:3])})")
        return None
    file = path / "Annotations" / f"{name}.xml"
    try:
        root = ElementTree.parse(file).getroot()
        size = (int(_text(root, "size/height")), int(_text(root, "size/width")))
    except ElementTree.ParseError as error:
        line, column = error.position
        wrong(f"{file} is no valid XML: line {line}, column {column + 1}: {error}")
        return None
    except DataError:
        raise
    except (OSError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        wrong(f"{file} cannot be read: {error}")
        return None
    if not all(0 < side <= LARGEST_SIDE for side in size):
        wrong(f"{file} has the size {size[1]}x{size[0]} (width x height), which no image has")
        return None
    boxes, names = [], []
    for number, item in enumerate(root.iter("object"), 1):
        try:
            left, top, right, bottom = (
                float(_text(item, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")
            )
            label = _text(item, "name").strip()
        except ValueError as error:
            wrong(f"{file}: object {number}: {error}")
            continue
        problem = box_problem([left - 1, top - 1, right - left + 1, bottom - top + 1], size)
        if problem or not label:
            wrong(f"{file}: object {number} ({label}): {problem or 'it has no name'}")
            continue
        boxes.append((max(left - 1, 0.0), max(top - 1, 0.0), min(right, size[1]), min(bottom, size[0])))
        names.append(label)
    return {"source": source, "size": size, "boxes": boxes, "names": names}


def _text(element: ElementTree.Element, path: str) -> str:
    """The text of a child. Raises: ValueError if it is missing."""
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"it has no {path}")
    return text
