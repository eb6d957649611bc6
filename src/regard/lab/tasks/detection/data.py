"""Data sets for detection: named ones, and the user's own in the formats of COCO and Pascal VOC."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from regard.core import DataError
from regard.files.paths import files_below
from regard.images import digest as digests
from regard.images.folders import SPLITS
from regard.images.images import SUFFIXES
from regard.images.streams import generator
from regard.lab.data.catalog import folder_in_use, folder_of, own_path
from regard.lab.data.cued import COUNTS, CUED, SOURCES, canvas
from regard.lab.data.cued import SIZE as CUED_SIZE
from regard.lab.data.cued import checksum as cued_checksum
from regard.lab.data.generated import revised

from . import coco, masks, voc
from .scenes import Scene, SceneSet, objects_of

FOLDERS = {name: f"REGARD_DATA/{name}" for name in ("bccd", "nuclei", "coco")}
"""Named sets, which are folders of COCO's format in the data folder."""
NAMED = {**SOURCES, **FOLDERS}


def identity(data: str, with_masks: bool, corrupt: str, kind: str = "") -> str:
    """The data in a run's key: the name of a named set, or a digest of the user's own data.

    The arguments and errors are those of `load`; annotations are checked before the bytes of images are read.
    """
    return revised(data) if data in NAMED else f"own:{digest(path_of(data), with_masks, corrupt, kind)}"


def path_of(data: str) -> Path:
    """The user's own folder. Raises: DataError if `data` is neither a known name nor an existing path."""
    return own_path(data, NAMED, "a folder with train.json and images/ (COCO), or of Pascal VOC")


def load(data: str, with_masks: bool, corrupt: str, kind: str = "") -> SceneSet:
    """A set by name or path. corrupt: "stop" at what is wrong, or "skip" it with a warning.

    kind: of the digest of the user's own data, see `regard.images.digest`. Raises: DataError.
    """
    if data in CUED:
        return _cued(data, with_masks, folder_in_use())
    path = folder_of(data) if data in FOLDERS else path_of(data)
    total = _named_digest(path) if data in FOLDERS else digest(path, with_masks, corrupt, kind)
    return _load(path, data if data in FOLDERS else "", with_masks, corrupt, total)


@lru_cache(maxsize=4)
def _named_digest(path: Path) -> str:
    """The checksum of a named set, computed once in a process: training asks for the set in every step."""
    return digests.of_index(_images(path), _annotations(path))


@lru_cache(maxsize=4)
def _load(path: Path, name: str, with_masks: bool, corrupt: str, total: str) -> SceneSet:
    if name:
        categories, splits = _with_objects(
            path, with_masks, "leave out" if name == "coco" and corrupt == "stop" else corrupt
        )
    else:
        categories, splits = _own_splits(path, with_masks, corrupt)
    return SceneSet(name or f"own:{total}", categories.names, categories.ids, 3, splits, total.ljust(64, "0"))


def _with_objects(path: Path, with_masks: bool, corrupt: str) -> tuple[coco.Categories, dict[str, Sequence[Scene]]]:
    categories, splits = _read_splits(path, with_masks, corrupt)
    for split, scenes in splits.items():
        if not any(len(scene.objects) for scene in scenes):
            raise DataError(f"the {split} split of {path} has no objects in any image")
    return categories, splits


@lru_cache(maxsize=4)
def _own_splits(path: Path, with_masks: bool, corrupt: str) -> tuple[coco.Categories, dict[str, Sequence[Scene]]]:
    """The user's own categories and scenes, read once in a process, as `digest` is."""
    categories, splits = _with_objects(path, with_masks, corrupt)
    _check_classes(path, splits, categories.names)
    return categories, splits


def read_splits(path: Path, with_masks: bool, corrupt: str) -> tuple[tuple[str, ...], dict[str, Sequence[Scene]]]:
    """The names of the classes, and the scenes of each split; no image is read. Raises: DataError."""
    categories, splits = _read_splits(path, with_masks, corrupt)
    return categories.names, splits


def _read_splits(path: Path, with_masks: bool, corrupt: str) -> tuple[coco.Categories, dict[str, Sequence[Scene]]]:
    if voc.is_voc(path):
        if with_masks:
            raise DataError(f"{path} is read as Pascal VOC, for boxes alone; for --task instances use COCO's format")
        categories, found = voc.read_splits(path, corrupt)
        splits: dict[str, Sequence[Scene]] = dict(found)
    else:
        categories, splits = _coco_splits(path, with_masks, corrupt)
    return categories, _divided(splits["train"]) if len(splits) == 1 else splits


def annotation_files(path: Path) -> dict[str, Path]:
    """The annotation files of a folder of COCO's format by split, in the folder or in `annotations`.

    A file has the name of its split, or this name and a year at its end: "instances_val2017.json".
    """
    for folder in (path, path / "annotations"):
        files = sorted(folder.glob("*.json"))
        found: dict[str, Path] = {}
        for split, names in SPLITS.items():
            for name in names:
                stems = {file.stem.lower(): file for file in files}
                matches = [stem for stem in stems if stem == name or stem.rstrip("0123456789") == f"instances_{name}"]
                if len(matches) > 1:
                    raise DataError(f"{folder} has several annotation files of {split}: {', '.join(matches)}.json")
                if matches:
                    found.setdefault(split, stems[matches[0]])
        if found:
            return found
    return {}


def _coco_splits(path: Path, with_masks: bool, corrupt: str) -> tuple[coco.Categories, dict[str, Sequence[Scene]]]:
    files = annotation_files(path)
    if "train" not in files:
        raise DataError(
            f"{path} has no train.json (or annotations/instances_train*.json), and no Annotations and ImageSets/Main "
            "of Pascal VOC; expected one of these formats"
        )
    splits: dict[str, Sequence[Scene]] = {}
    categories: coco.Categories | None = None
    for split, file in files.items():
        end = file.stem.removeprefix("instances_")
        folders = [path / "images", path / "images" / end, path / end, path]
        found, splits[split] = coco.read_scenes(file, [f for f in folders if f.is_dir()], with_masks, corrupt)
        if categories is not None and found != categories:
            raise DataError(f"{file} has other categories than {files['train']}: {_difference(found, categories)}")
        categories = found
    assert categories is not None
    return categories, splits


def _difference(one: coco.Categories, other: coco.Categories) -> str:
    pairs = [dict(zip(part.ids, part.names, strict=True)) for part in (one, other)]
    number = next(n for n in sorted({*pairs[0], *pairs[1]}) if pairs[0].get(n) != pairs[1].get(n))
    return f"category {number} is {pairs[0].get(number)!r} here and {pairs[1].get(number)!r} there"


def _divided(scenes: Sequence[Scene]) -> dict[str, Sequence[Scene]]:
    """Training and validation: every fifth scene of a fixed permutation is for the validation."""
    order = generator("detection", "split").permutation(len(scenes))
    held = set(order[::5].tolist())
    if len(held) == len(scenes):
        raise DataError("there is one image only; training and validation need at least one each")
    return {
        "train": [scene for row, scene in enumerate(scenes) if row not in held],
        "val": [scene for row, scene in enumerate(scenes) if row in held],
    }


def _check_classes(path: Path, splits: dict[str, Sequence[Scene]], names: tuple[str, ...]) -> None:
    """Raises: DataError for a class that has objects, but none in training images."""
    found = {
        split: {int(label) for scene in scenes for label in scene.objects.labels} for split, scenes in splits.items()
    }
    for split, labels in found.items():
        if only := labels - found["train"]:
            raise DataError(
                f"{names[min(only)]} has objects in the {split} split of {path}, but in no training image; add "
                "training images of it, or remove the category"
            )


@lru_cache(maxsize=16)
def digest(path: Path, with_masks: bool, corrupt: str, kind: str = "") -> str:
    """What stands for a folder's annotations and images in the key of a run, whatever its path.

    Raises: DataError, for annotations that `load` refuses before all bytes of the images are read.
    """
    _own_splits(path, with_masks, corrupt)
    return digests.identity_of(path, _images(path), kind, _annotations(path))


def _images(path: Path) -> dict[str, Path]:
    """All images of a folder by their relative names."""
    return digests.relative(path, files_below(path, SUFFIXES))


def _annotations(path: Path) -> dict[str, Path]:
    """The annotation files by their relative names."""
    texts = [*annotation_files(path).values()]
    if voc.is_voc(path):
        texts = [*sorted((path / "ImageSets" / "Main").glob("*.txt")), *sorted((path / "Annotations").glob("*.xml"))]
    return digests.relative(path, texts)


class _Canvases(Sequence[Scene]):
    """The canvases of a generated set, made when they are indexed."""

    def __init__(self, data: str, split: str, with_masks: bool) -> None:
        self.data, self.split, self.with_masks = data, split, with_masks

    def __len__(self) -> int:
        return COUNTS[self.split]

    def __getitem__(self, index: int) -> Scene:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        made = canvas(self.data, self.split, index)
        rles = masks.encode(made.instances)
        areas = [float(instance.sum()) for instance in made.instances]
        objects = objects_of(made.boxes.tolist(), [0] * len(rles), (), areas, rles if self.with_masks else None)
        return Scene(f"{self.data} {self.split} {index}", made.image, CUED_SIZE, objects, index + 1)


@lru_cache(maxsize=4)
def _cued(data: str, with_masks: bool, folder: str) -> SceneSet:
    splits: dict[str, Sequence[Scene]] = {split: _Canvases(data, split, with_masks) for split in COUNTS}
    return SceneSet(data, ("match",), (1,), 1, splits, cued_checksum(data))
