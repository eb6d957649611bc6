"""Data of Pascal VOC's format: Annotations/*.xml, with or without JPEGImages and ImageSets/Main/*.txt."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from regard.core import DataError
from regard.files.paths import files_below, printable, subfolders, visible, words_in
from regard.images.folders import split_of_name
from regard.images.images import SUFFIXES as OF_IMAGES

from .coco import CLIPPED, FRACTIONS, LARGEST_SIDE, Categories, Reading, beyond, box_problem, in_fractions
from .scenes import Scene, objects_of

SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
"""Of images, in this order; others after them."""
IMAGES = "JPEGImages"
"""The folder of the images of data with lists."""
_SIDES = ("xmin", "ymin", "xmax", "ymax")
_FLAGS = ("1", "-1", "0")
OTHER_NAME = "images that <filename> names and that are there, in whose place the image with the XML's name is read"
"""Second words of a line of a list: whether the image has an object of a class."""


def is_voc(path: Path) -> bool:
    """Whether a folder has the format with its lists."""
    return (path / "Annotations").is_dir() and (path / "ImageSets" / "Main").is_dir()


def texts(path: Path) -> list[Path]:
    """The lists and annotations of a folder with lists."""
    return [*sorted((path / "ImageSets" / "Main").glob("*.txt")), *sorted((path / "Annotations").glob("*.xml"))]


def xml_files(path: Path) -> list[Path]:
    """The annotations of a folder without lists: in Annotations, beside the images, or in the folders of splits.

    The first one that can be read tells whether they are of VOC.
    """
    folders = [path / "Annotations"] if (path / "Annotations").is_dir() else [path, *split_folders(path).values()]
    files = [folder / entry.name for folder in folders for entry in visible(folder) if entry.name.endswith(".xml")]
    return files if next(filter(None, map(_root_of, files)), "") == "annotation" else []


def split_folders(path: Path) -> dict[str, Path]:
    """The folders "train", "val" and "test" that a folder has under these names or their like."""
    named = ((split_of_name(folder.name), folder) for folder in subfolders(path))
    return {split: folder for split, folder in reversed(list(named)) if split}


def _root_of(file: Path) -> str:
    """The outermost tag of a file; "" if it cannot be read."""
    try:
        return ElementTree.parse(file).getroot().tag
    except (ElementTree.ParseError, OSError, LookupError, ValueError):
        return ""


def read_lists(path: Path, reading: Reading) -> tuple[Categories, dict[str, list[Scene]]]:
    """The categories, which are the sorted names of all objects, and the scenes of train.txt, val.txt and test.txt.

    Without train.txt, trainval.txt or default.txt names the images for training, but for those of the other lists.
    Boxes are in pixels from 1, the last one included, as VOC has them; objects that are marked as difficult are
    ordinary ones. Raises: DataError that names the file.
    """
    folder = path / "ImageSets" / "Main"
    lists = {split: folder / f"{split}.txt" for split in ("train", "val", "test")}
    names = {split: listed_images(file) for split, file in lists.items() if file.exists()}
    if "train" not in names:
        whole = next((file for name in ("trainval", "default") if (file := folder / f"{name}.txt").exists()), None)
        if whole is None:
            raise DataError(f"{folder / 'train.txt'} does not exist; it names the images for training, one a line")
        others = {name for part in names.values() for name in part}
        names = {"train": [name for name in listed_images(whole) if name not in others], **names}
    annotations, images = path / "Annotations", path / IMAGES
    files = {split: [(annotations / f"{name}.xml", images / name) for name in part] for split, part in names.items()}
    return _read_all(annotations, files, reading)


def read_files(path: Path, reading: Reading) -> tuple[Categories, dict[str, list[Scene]]]:
    """As `read_lists`, for annotations without lists: in folders of splits, or all for training."""
    beside = {file.with_suffix("").name: file for file in reversed(files_below(path, OF_IMAGES))}
    files: dict[str, list[tuple[Path, Path]]] = {}
    for xml in xml_files(path):
        split = split_of_name(xml.parent.name) if xml.parent != path else ""
        image = beside.get(xml.stem, xml).with_suffix("")
        files.setdefault(split or "train", []).append((xml, xml.with_suffix("") if split else image))
    return _read_all(path, {split: files[split] for split in ("train", "val", "test") if split in files}, reading)


def _read_all(
    where: Path, files: dict[str, list[tuple[Path, Path]]], reading: Reading
) -> tuple[Categories, dict[str, list[Scene]]]:
    """files: for each split the annotations, and their images without suffix."""
    if reading.with_masks:
        raise DataError(f"{where} is read as Pascal VOC, for boxes alone; for --task instances use COCO's format")
    raw: dict[str, list[dict[str, Any]]] = {}
    for split, part in files.items():
        raw[split] = [entry for xml, image in part if (entry := _read(xml, image, reading)) is not None]
        if not raw[split]:
            raise DataError(f"{where}: no image of the {split} split can be read")
    names = sorted({name for entries in raw.values() for entry in entries for name in entry["names"]})
    if not names:
        raise DataError(f"{where} has no objects")
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


def listed_images(file: Path) -> list[str]:
    """The names of images in a list: each line without suffix and without a flag at its end. Raises: DataError."""
    names = []
    for line in words_in(file):
        words = line.rsplit(maxsplit=1)
        name = words[0] if len(words) == 2 and words[1] in _FLAGS else line
        suffix = Path(name).suffix
        whole = suffix.lower() in OF_IMAGES and (file.parents[2] / IMAGES / name).is_file()
        names.append(name.removesuffix(suffix) if whole else name)
    outside = next((name for name in names if name.startswith(".") or "/" in name), None)
    if outside is not None:
        raise DataError(f"{file} names {outside}; expected the name of an image in JPEGImages, without suffix")
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if not names or twice:
        raise DataError(f"{file} names {twice} twice" if twice else f"{file} names no images")
    return names


def image_of(stem: Path, suffixes: Iterable[str] = (*SUFFIXES, *sorted(OF_IMAGES))) -> Path | None:
    """The image of a path without suffix; None if there is none."""
    return next((file for end in suffixes if (file := stem.with_name(f"{stem.name}{end}")).is_file()), None)


def _read(file: Path, image: Path, reading: Reading) -> dict[str, Any] | None:
    """Source, size, boxes and names of objects of an image; None if it is skipped. image: its path without suffix."""
    source = image_of(image)
    if source is None:
        reading.wrong(f"there is no image {image} ({', '.join(SUFFIXES[:3])})", annotation=False)
        return None
    reading.named.add(source)
    if file.exists() and not file.is_file():
        raise DataError(f"{file} is no file; remove it, or put it elsewhere")
    try:
        root = ElementTree.parse(file).getroot()
        if root.find("size") is None:
            size = reading.measure(source)
        else:
            size = (_side(root, "height"), _side(root, "width"))
            size = reading.measure(source) if size == (0, 0) else size  # as labelImg may write
    except ElementTree.ParseError as error:
        line, column = error.position
        reading.wrong(f"{file} is no valid XML: line {line}, column {column + 1}: {error}", annotation=False)
        return None
    except DataError:
        raise
    except (OSError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        reading.wrong(f"{file} cannot be read: {error}", annotation=False)
        return None
    if not all(0 < side <= LARGEST_SIDE for side in size):
        reading.wrong(f"{file} has the size {size[1]}x{size[0]} (width x height), which no image has", annotation=False)
        return None
    given = source.parent / Path((root.findtext("filename") or "").strip().replace("\\", "/")).name
    if given.stem != source.stem and given.is_file():
        reading.note(OTHER_NAME, f"{given.name} in {file}")
    boxes, names = [], []
    for number, item in enumerate(root.iter("object"), 1):
        try:
            left, top, right, bottom = sides = [float(_text(item, f"bndbox/{side}")) for side in _SIDES]
            if in_fractions([sides]):
                raise ValueError(f"its box is {FRACTIONS}")
            label = _text(item, "name").strip()
        except ValueError as error:
            reading.wrong(f"{file}: object {number}: {error}")
            continue
        box = [left - 1, top - 1, right - left + 1, bottom - top + 1]
        problem = box_problem(box, size)
        if problem or not label:
            reading.wrong(f"{file}: object {number} ({printable(label)}): {problem or 'it has no name'}")
            continue
        if beyond(box, size):
            reading.note(CLIPPED, f"{file}: object {number}")
        boxes.append((max(left - 1, 0.0), max(top - 1, 0.0), min(right, float(size[1])), min(bottom, float(size[0]))))
        names.append(label)
    return {"source": source, "size": size, "boxes": boxes, "names": names}


def _side(root: ElementTree.Element, name: str) -> int:
    """Height or width, a whole number. Raises: ValueError."""
    text = _text(root, f"size/{name}").strip().removesuffix(".0")
    if not text.lstrip("-").isdecimal():
        raise ValueError(f"its {name} {printable(text)!r} is no whole number")
    return int(text)


def _text(element: ElementTree.Element, path: str) -> str:
    """The text of a child. Raises: ValueError if it is missing, or there are several."""
    found = element.findall(path)
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} of {path}; expected one" if found else f"it has no {path}")
    return found[0].text or ""
