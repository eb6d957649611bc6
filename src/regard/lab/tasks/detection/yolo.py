"""Data of YOLO's format: a .txt file for each image, whose lines are the class and fractions of the image's sides."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from regard.core import DataError
from regard.files.atomic import without_repetition
from regard.files.paths import files_below, printable, text_lines, visible, words_in
from regard.images.folders import split_of_name
from regard.images.images import SUFFIXES

from .coco import Categories, Content, Reading, box_of, splits_of
from .scenes import Scene

_NAMES = ("classes.txt", "obj.names", "labels/classes.txt", "train/classes.txt")
"""Files with the names of the classes, one a line, where no .yaml has them."""
UNLABELLED = "images without a label file, which count as background"


def label_files(path: Path) -> list[Path]:
    """The names of the classes and the files with labels, if the folder has the format; else none."""
    named = [*_yaml_files(path), *_name_files(path)]
    labels = [label for image in files_below(path, SUFFIXES) if (label := label_of(path, image)).is_file()]
    with_objects = (label for label in labels if label.stat().st_size)
    if not any(_looks_right(label, bool(named)) for label in islice(with_objects, 100)):
        return []
    return [*named, *(file for file in _lists(path).values() if file.is_file()), *labels]


def _name_files(path: Path) -> list[Path]:
    """Those of `_NAMES`; without them and a .yaml, each classes.txt in another folder, where labelImg writes it."""
    known = [path / name for name in _NAMES if (path / name).is_file()]
    if known or _yaml_files(path):
        return known
    return [file for file in files_below(path, frozenset({".txt"})) if file.name == "classes.txt"]


def _yaml_files(path: Path) -> list[Path]:
    """The .yaml files beside the images that have names of classes."""
    files = [path / entry.name for entry in visible(path) if entry.name.lower().endswith((".yaml", ".yml"))]
    return [file for file in files if "names" in _yaml(file)]


class _Texts(yaml.BaseLoader):
    """Takes values as the texts that are written: a class `no` is not False."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if any(key.value == "<<" for key, _ in node.value):
            raise ValueError("it has a merge key, <<: write out what it stands for")
        return without_repetition(
            [(self.construct_object(key), self.construct_object(value)) for key, value in node.value]
        )


def _yaml(file: Path, loader: type[Any] = _Texts) -> dict[str, Any]:
    """The content of a .yaml file; {} if it is no mapping. Raises: DataError if it cannot be read."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8-sig"), loader)
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def label_of(root: Path, image: Path) -> Path:
    """The label file of an image: in the folder labels that mirrors the folder images, or beside it."""
    parts = image.relative_to(root).with_suffix(".txt").parts
    places = [index for index, part in enumerate(parts[:-1]) if part.lower() in ("images", "image")]
    if not places:
        return image.with_suffix(".txt")
    above, below = parts[: places[-1]], parts[places[-1] + 1 :]
    mirrored = [root.joinpath(*above, folder, *below) for folder in ("labels", "Labels", "label")]
    return next((file for file in [*mirrored, image.with_suffix(".txt")] if file.is_file()), mirrored[0])


def _looks_right(file: Path, named: bool) -> bool:
    """Whether the first line of a file is a class and at least four numbers: fractions, unless classes are named."""
    try:
        label, *words = file.read_text(encoding="utf-8-sig").split("\n", 1)[0].split() or [""]
        values = [float(word) for word in words]
        return len(values) >= 4 and float(label).is_integer() and (named or all(-1 <= value <= 2 for value in values))
    except (OSError, ValueError):
        return False


def _lists(path: Path) -> dict[str, Path]:
    """The lists of images train.txt, val.txt and test.txt that a folder has."""
    return {split: file for split in ("train", "val", "test") if (file := path / f"{split}.txt").is_file()}


def read(path: Path, reading: Reading) -> tuple[Categories, dict[str, list[Scene]]]:
    """The categories and the scenes of each split; an image without a label file has no objects.

    An image is of the split that a folder on its way is named after, or whose list names it; without both, all are for
    training. A line is the class, and the box as centre, width and height, or the points of a polygon; polygons have
    boxes, boxes have no masks. Raises: DataError that names the file and the line.
    """
    configs = _yaml_files(path)
    config = _yaml(configs[0]) if configs else {}
    _check_parts(path, config)
    images = files_below(path, SUFFIXES)
    listed: dict[str, list[str]] = {}
    for split, file in _lists(path).items():
        for name in _listed_names(file):
            listed.setdefault(name, []).append(split)
    alike = Counter(image.name for image in images)
    for name in sorted(listed.keys() - alike.keys()):
        reading.notes.add("names in lists without an image, which are not used", path / name)
    splits: dict[str, list[Path]] = {}
    for image in images:
        folders = image.relative_to(path).parts[:-1]
        split = next((split for folder in folders if (split := split_of_name(folder))), "")
        given = listed.get(image.name, [] if listed else ["train"])
        if not split and listed.get(image.name) and alike[image.name] > 1:
            raise DataError(
                f"{alike[image.name]} images are named {image.name}, so that a list does not tell them apart"
            )
        if split and listed.get(image.name) and alike[image.name] == 1 and split not in given:
            raise DataError(f"{image} is of {split} by its folder, and of {given[0]} by a list; correct one of them")
        if not split and len(given) > 1:
            raise DataError(f"{image} has a name of the lists of {' and '.join(given)}; keep one, or rename the image")
        splits.setdefault(split or "".join(given), []).append(image)
    splits.pop("", None)
    labels = {label_of(path, image) for image in images}
    for file in files_below(path, frozenset({".txt"})):
        if file not in labels and _looks_right(file, named=False):
            reading.notes.add("label files without an image, which are not used", file)
    if "train" not in splits:
        raise DataError(f"{path} has no images for training; expected images/train/ and labels/train/")
    found: dict[str, Content] = {}
    classes = 0
    for split, part in splits.items():
        found[split] = _content(path, part, "kpt_shape" in config, reading)
        classes = max([classes, *(entry["category_id"] + 1 for entry in found[split][0]["annotations"])])
    names = _names(path, config, classes)
    _check_names(path, configs, names)
    reading.renamed |= bool(configs) and _names_in(_yaml(configs[0], yaml.SafeLoader)) != _names_in(config)
    used = {entry["category_id"] for content, _ in found.values() for entry in content["annotations"]}
    spelled = config.get("names")
    unnamed = {label for label in used if isinstance(spelled, dict) and str(label) not in spelled}
    categories = [{"id": label, "name": name} for label, name in enumerate(names) if label not in unnamed]
    return splits_of(path, found, categories, reading)


def _names(path: Path, config: dict[str, Any], classes: int) -> list[str]:
    """The names of the classes, else their numbers. Raises: DataError."""
    names = config.get("names")
    given = [*names.values()] if isinstance(names, dict) else names
    is_list = isinstance(given, list) and all(isinstance(name, str) and name.strip() for name in given)
    if names is not None and not is_list:
        raise DataError(f"{_yaml_files(path)[0]} has names that are no texts; expected a list or a mapping of them")
    other = next((key for key in names if not _is_label(key)), None) if isinstance(names, dict) else None
    if other is not None:
        raise DataError(f"{_yaml_files(path)[0]} has a name of {other!r}; expected whole numbers from 0 with names")
    if isinstance(given, list):
        return _names_in(config)
    files = _name_files(path)
    return words_in(files[0]) if files else [str(label) for label in range(classes)]


def _check_names(path: Path, configs: list[Path], names: list[str]) -> None:
    """Raises: DataError for a file that says other names of the classes, or another number of them."""
    contents = {file: _yaml(file) for file in configs}
    others = {file: _names_in(content) for file, content in contents.items()}
    others |= {file: words_in(file) for file in _name_files(path)}
    for file, said in others.items():
        if said != names:
            first = next(iter(others)).relative_to(path)
            raise DataError(f"{file} has other names of classes than {first}; keep one of them")
    for file, content in contents.items():
        number = content.get("nc", str(len(names)))
        if number != str(len(names)):
            raise DataError(f"{file} says nc {number}, but has {len(names)} names; correct one of them")


def _check_parts(path: Path, config: dict[str, Any]) -> None:
    """Raises: DataError if a .yaml file has for a part a folder or list that is there, and is read for another one.

    It may give the images for training a second time, as for the validation of a few images.
    """
    for key in ("train", "val", "test"):
        given = config.get(key) or []
        for text in given if isinstance(given, list) else [str(given)]:
            parts = [part for part in str(text).replace("\\", "/").split("/") if part not in ("", ".", "..")]
            tails = (Path(*parts[start:]) for start in range(len(parts)))
            place = next((tail for tail in tails if os.path.exists(path / tail)), Path())
            told = next((split for part in place.parts if (split := split_of_name(Path(part).stem))), "train")
            again = key != "train" and given == config.get("train")
            if place.parts and (told == "train") != (key == "train") and not again:
                raise DataError(
                    f"{_yaml_files(path)[0]} says {key}: {printable(str(text))}, but parts are read from folders, or "
                    f"lists, called train, val and test: rename {place}"
                )


def _is_label(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 7 and key == str(int(key))


def _names_in(config: dict[str, Any]) -> list[str]:
    """The names in the content of a .yaml file in the order of their numbers, which stand for missing names."""
    names = config.get("names")
    if isinstance(names, list):
        return list(map(str, names))
    numbers = {str(key): str(value) for key, value in names.items()} if isinstance(names, dict) else {}
    count = 1 + max((int(key) for key in numbers if key.isdigit()), default=-1)
    return [numbers.get(str(label), str(label)) for label in range(count)]


def _listed_names(file: Path) -> set[str]:
    """The names of the images that a list of paths names, without their folders."""
    return {line.replace("\\", "/").rpartition("/")[2] for line in words_in(file)} - {""}


def _content(path: Path, images: list[Path], points: bool, reading: Reading) -> tuple[dict[str, list[Any]], list[str]]:
    """Images and annotations as in a COCO file, and the place of each annotation. points: lines have key points."""
    entries: list[Any] = []
    annotations: list[Any] = []
    places: list[str] = []
    longer: dict[str, list[float]] = {}
    for number, image in enumerate(images, 1):
        reading.named.add(image)
        label = label_of(path, image)
        lines = list(_lines(label)) if label.is_file() else []
        if not label.is_file():
            reading.notes.add(UNLABELLED, image)
        try:
            height, width = reading.measure(image)
        except DataError as error:
            reading.wrong(str(error), annotation=False)
            continue
        entries.append(
            {"id": number, "file_name": image.relative_to(path).as_posix(), "height": height, "width": width}
        )
        for place, words in lines:
            try:
                annotation = _annotation(words[:5] if points else words, width, height)
            except ValueError as error:
                reading.wrong(f"{place}: {error}")
                continue
            annotations.append({"image_id": number, **annotation})
            places.append(place)
            if len(words) > 5 and not points:
                longer[place] = [float(word) for word in words[1:]]
    if _are_poses(list(longer.values())):
        raise DataError(f"{next(iter(longer))} and all others have {_POSE}")
    counts = {len(values) for values in longer.values()}
    if len(longer) > 2 and len(counts) == 1 and counts != {8}:  # 8 are the corners of a box
        for place in longer:
            reading.notes.add(
                f"lines of {max(counts)} numbers, which are read as polygons of {max(counts) // 2} points: key points "
                "need kpt_shape in the .yaml file", place,
            )  # fmt: skip
    return {"images": entries, "annotations": annotations}, places


def _lines(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Place and words of each line. Raises: DataError."""
    for number, line in enumerate(text_lines(file), 1):
        if line.strip():
            yield f"{file}: line {number}", line.split()


def _annotation(words: list[str], width: int, height: int) -> dict[str, Any]:
    """Category, box and polygon of a line. Raises: ValueError that says what is wrong."""
    try:
        label, values = float(words[0]), [float(word) for word in words[1:]]
    except ValueError:
        raise ValueError(f"{printable(' '.join(words)[:60])!r} is not a class and numbers") from None
    if not label.is_integer() or not 0 <= label < 2**20:
        raise ValueError(f"its class is {words[0]}, expected a whole number from 0 on")
    if not all(map(math.isfinite, values)):
        raise ValueError("it has coordinates that are no finite numbers")
    if not all(-1 <= value <= 2 for value in values):
        raise ValueError("it has coordinates in pixels; expected fractions of the image's width and height")
    if len(values) == 4:
        x, y, w, h = values
        box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
        return {"category_id": int(label), "bbox": box}
    if len(values) < 6 or len(values) % 2:
        raise ValueError(
            f"it has {len(values)} numbers behind the class; expected 4 of a box, or pairs of a polygon; key points "
            "need kpt_shape in the .yaml file"
        )
    polygon = [value * (height if index % 2 else width) for index, value in enumerate(values)]
    return {"category_id": int(label), "bbox": box_of([polygon]), "segmentation": [polygon]}


_POSE = "a box and key points with their visibility: write kpt_shape, such as [17, 3], into the .yaml file of the data"


def _are_poses(lines: list[list[float]]) -> bool:
    """Whether the numbers of all lines are a box and key points (x, y, visibility 0, 1 or 2), not pairs of a polygon.

    A few short polygons at the borders of their images may look so, and are not taken for poses.
    """
    flags = [values[6::3] for values in lines if len(values) % 3 == 1 and len(values) > 6]
    certain = len(lines) > 2 or any(len(each) > 3 for each in flags)
    return len(flags) == len(lines) > 0 and certain and all(flag in (0, 1, 2) for each in flags for flag in each)
