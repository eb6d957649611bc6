"""Data sets for detection: named ones, and the user's own in the formats of COCO and Pascal VOC."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from regard.core import DataError, Problems
from regard.files.paths import files_below
from regard.images import digest as digests
from regard.images.images import SUFFIXES, AsStored, size_of
from regard.images.notes import Notes, warn_of_copies
from regard.images.streams import BY_NAME, held_out
from regard.images.turned import annotated_as_stored
from regard.lab.data import cued
from regard.lab.data.catalog import folder_in_use, folder_of, own_path
from regard.lab.data.generated import with_revision

from ..class_scores import check_subset
from . import coco, masks, voc
from .coco import Reading
from .feed import fitted_size
from .formats import Splits, format_of
from .scenes import Scene, SceneSet, objects_of

FOLDERS = {name: f"REGARD_DATA/{name}" for name in ("bccd", "nuclei", "coco")}
"""Named sets, which are folders of COCO's format in the data folder."""
NAMED = {**cued.SOURCES, **FOLDERS}


@dataclass(frozen=True)
class Choices:
    """How the user's own data are read: fields of the task. corrupt: "stop" at what is wrong, or "skip" it with a
    warning. exif: as for `regard.images.turned.annotated_as_stored`. digest: see `regard.images.digest`. outlines: see
    `Reading`. whole: without a division and without the checks of what a training needs, to be scored."""

    with_masks: bool = False
    corrupt: str = "stop"
    exif: str = ""
    digest: str = ""
    outlines: bool = False
    whole: bool = False


def identity(data: str, with_masks: bool, corrupt: str, kind: str = "", exif: str = "") -> str:
    """The data in a run's key: the name of a named set, or the `digest` of the user's own data.

    It ends in "@2" where something is read that older versions skipped, and in "@3" where classes have other names.

    The arguments and errors are those of `load`; annotations are checked before the bytes of images are read.
    """
    if data in NAMED:
        return with_revision(data)
    path, choices = path_of(data), Choices(with_masks, corrupt, exif, kind)
    own = present_splits(path, choices)
    return f"own:{digest(path, choices)}{'@2' if corrupt == 'skip' and own.mended else ''}{'@3' if own.renamed else ''}"


def path_of(data: str) -> Path:
    """The user's own folder. Raises: DataError if `data` is neither a known name nor an existing path."""
    return own_path(data, NAMED, "a folder with annotations of COCO, Pascal VOC, YOLO or labelme")


def load(data: str, with_masks: bool, corrupt: str, kind: str = "", exif: str = "", whole: bool = False) -> SceneSet:
    """A set by name or path; the other arguments are for the user's own data, see `Choices`. Raises: DataError."""
    if data in cued.CUED:
        return _load_cued(data, with_masks, folder_in_use())
    choices = Choices(with_masks, corrupt, exif, kind, whole=whole)
    path = folder_of(data) if data in FOLDERS else path_of(data)
    total = _named_digest(path) if data in FOLDERS else digest(path, choices)
    return _load(path, data if data in FOLDERS else "", choices, total)


@lru_cache(maxsize=4)
def _named_digest(path: Path) -> str:
    """The checksum of a named set, computed once in a process: training asks for the set in every step."""
    return digests.of_index(_images(path), _annotations(path))


@lru_cache(maxsize=4)
def _load(path: Path, name: str, choices: Choices, total: str) -> SceneSet:
    checksum = total.ljust(64, "0")
    if name:
        corrupt = "leave out" if name == "coco" and choices.corrupt == "stop" else choices.corrupt
        reading = Reading(corrupt, choices.with_masks, "turn")
        categories, splits = _divide(path, *format_of(path).read(path, reading))
        for split, scenes in splits.items():
            if not any(len(scene.objects) for scene in scenes):
                raise DataError(f"the {split} split of {path} has no objects in any image")
    else:
        own = own_splits(path, choices)
        categories, splits = own.categories, own.splits
        warn_of_copies({split: [scene.source for scene in scenes] for split, scenes in splits.items()})
        if own.mended or own.as_stored or own.divided or choices.whole:  # prepared images need another key
            marks = f"{total}-{own.mended}-{own.as_stored}-{choices.whole}"
            checksum = hashlib.sha256(marks.encode()).hexdigest()
    return SceneSet(name or f"own:{total}", categories.names, categories.ids, 3, splits, checksum)


@dataclass(frozen=True, eq=False)
class OwnSplits:
    """The user's own categories and scenes. mended, renamed: as in `Reading`. as_stored: EXIF data turn no image.
    divided: into training and validation, here."""

    categories: coco.Categories
    splits: Splits
    mended: bool
    renamed: bool
    as_stored: bool
    divided: bool


def present_splits(path: Path, choices: Choices) -> OwnSplits:
    """`own_splits`, read anew if the files have changed meanwhile. Raises: DataError."""
    digests.forget_if_changed(path, own_splits, digest, _load)
    return own_splits(path, choices)


@lru_cache(maxsize=4)
def own_splits(path: Path, choices: Choices) -> OwnSplits:
    """The user's own data, read once in a process, as `digest` is. Raises: DataError for what no training can use."""
    own = read_own(path, choices)
    if not choices.whole:
        problems = Problems(training_problems(path, own.categories.names, own.splits))
        problems.raise_all()
    return own


def read_own(path: Path, choices: Choices) -> OwnSplits:
    """The user's own categories and scenes; no image is decoded. What is unusual is one warning for each kind.

    Raises: DataError.
    """
    reading = Reading(choices.corrupt, choices.with_masks, choices.exif, choices.outlines)
    try:
        categories, splits = format_of(path).read(path, reading)
        reading.notes.add_unnamed(path / voc.IMAGES if voc.is_voc(path) else path, reading.named)
        _note_shared(splits, reading.notes)
        images = ((scene.file, scene) for scenes in splits.values() for scene in scenes)
        as_stored = annotated_as_stored(path, images, reading.annotated_size, choices.exif, reading.notes)
        if as_stored:
            splits = {split: [_keep_as_stored(scene, reading) for scene in scenes] for split, scenes in splits.items()}
        divided = not choices.whole and len(splits) == 1
        if not choices.whole:
            if "train" not in splits:
                raise DataError(
                    f"{path} has a split {', '.join(splits)}, but no train.json or other images for training"
                )
            categories, splits = _divide(path, categories, splits)
            _note_classes(categories.names, splits, reading.notes)
        _count_crowds(splits, reading.notes)
    finally:
        reading.notes.warn()
    return OwnSplits(categories, splits, reading.mended, reading.renamed, as_stored, divided)


def _keep_as_stored(scene: Scene, reading: Reading) -> Scene:
    """A scene whose image is not turned."""
    source = AsStored(scene.file)
    return replace(scene, source=source, size=reading.annotated_size(scene) or size_of(source))


def _note_shared(splits: Splits, notes: Notes) -> None:
    first: dict[Path, str] = {}
    for split, scenes in splits.items():
        for scene in scenes:
            if (before := first.setdefault(scene.file, split)) != split:
                notes.add(f"images that are in {before} and in {split}", scene.name)


def _note_classes(names: Sequence[str], splits: Splits, notes: Notes) -> None:
    """Count what may be a slip of the pen."""
    first: dict[str, str] = {}
    for name in names:
        if (before := first.setdefault(name.strip().casefold(), name)) != name:
            notes.add("classes whose names differ in case or blanks alone", f"{before!r} and {name!r}")
    labels = [scene.objects.labels for scenes in splits.values() for scene in scenes]
    numbers = np.bincount(np.concatenate(labels), minlength=len(names)).tolist()
    for name, number in zip(names, numbers, strict=True):
        if number == 1:
            notes.add("classes with a single object", repr(name))


def _count_crowds(splits: Splits, notes: Notes) -> None:
    total = sum(len(scene.objects) for scenes in splits.values() for scene in scenes)
    for scenes in splits.values():
        for scene in scenes:
            for _ in range(int(scene.objects.crowd.sum())):
                notes.add(
                    f"crowds (iscrowd 1) among {total} objects, which are not learned and not searched for", scene.name
                )


def tiny(split: str, scenes: Sequence[Scene], size: tuple[int, int], resize: str) -> str:
    """A sentence on objects with a side of less than a pixel when images are resized; "" without any."""
    number = total = 0
    for scene in scenes:
        inside = fitted_size(scene.size, size, resize)
        sides = scene.objects.boxes[:, 2:] - scene.objects.boxes[:, :2]
        scaled = sides * (inside[1] / scene.size[1], inside[0] / scene.size[0])
        number += int((scaled < 1).any(1).sum())
        total += len(sides)
    if not number:
        return ""
    return (
        f"{number} of {total} objects of {split} ({100 * number / total:.0f} %) have a side of less than a pixel in "
        f"images of {size[0]}x{size[1]}: take larger images (--size), or tiles"
    )


def _divide(path: Path, categories: coco.Categories, splits: Splits) -> tuple[coco.Categories, Splits]:
    """Training and validation: without another split a fifth of the scenes is `held_out`."""
    if len(splits) > 1:
        return categories, splits
    scenes = splits["train"]
    held = held_out(path, [scene.source for scene in scenes])
    if len(held) == len(scenes):
        raise DataError("there is one image only; training and validation need at least one each")
    return categories, {
        "train": [scene for row, scene in enumerate(scenes) if row not in held],
        "val": [scene for row, scene in enumerate(scenes) if row in held],
    }


def training_problems(path: Path, names: tuple[str, ...], splits: Splits) -> list[str]:
    """What a training does not do with: a split without objects, a class without objects to learn."""
    problems = []
    found: dict[str, set[int]] = {}
    crowds = Counter(label for scene in splits["train"] for label in scene.objects.labels[scene.objects.crowd].tolist())
    for split, scenes in splits.items():
        single = [scene.objects.labels[~scene.objects.crowd] for scene in scenes]
        found[split] = {int(label) for labels in single for label in labels}
        if not found[split]:
            crowd = any(len(scene.objects) for scene in scenes)
            problems.append(f"the {split} split of {path} has no objects in any image{f' but {_CROWDS}' * crowd}")
    for label, number in crowds.items():
        if label not in found["train"] and found["train"]:
            problems.append(f"all {number} objects of {names[label]} in the train split of {path} are {_CROWDS}")
    for split, labels in found.items():
        for label in sorted(labels - found["train"] - set(crowds)) if found["train"] else ():
            problems.append(
                f"{names[label]} has objects in the {split} split of {path}, but in no training image; add training "
                "images of it, or remove the category"
            )
    return problems


_CROWDS = "crowds, which are not learned: CVAT writes iscrowd 1 with every mask; set it to 0 for single objects"


def with_classes(data: str, scene_set: SceneSet, names: Sequence[str]) -> SceneSet:
    """A set with the classes that a model was trained on, of which it has some. Raises: DataError if it has others."""
    if list(scene_set.classes) == list(names):
        return scene_set
    used = {int(label) for scenes in scene_set.splits.values() for scene in scenes for label in scene.objects.labels}
    check_subset(data, [name for label, name in enumerate(scene_set.classes) if label in used], names)
    place = {name: label for label, name in enumerate(names)}
    table = np.array([place.get(name, -1) for name in scene_set.classes], np.int64)
    splits = {
        split: [replace(scene, objects=replace(scene.objects, labels=table[scene.objects.labels])) for scene in scenes]
        for split, scenes in scene_set.splits.items()
    }
    return replace(scene_set, classes=tuple(names), splits=splits)


@lru_cache(maxsize=16)
def digest(path: Path, choices: Choices) -> str:
    """What stands for a folder's annotations and images in the key of a run, whatever its path; with `BY_NAME` before
    it where these are divided here.

    Raises: DataError, for annotations that `load` refuses before all bytes of the images are read.
    """
    own = own_splits(path, choices)
    return BY_NAME * own.divided + digests.identity_of(path, _images(path), choices.digest, _annotations(path))


def _images(path: Path) -> dict[str, Path]:
    """All images of a folder by their relative names."""
    return digests.relative(path, files_below(path, SUFFIXES))


def _annotations(path: Path) -> dict[str, Path]:
    """The annotation files by their relative names."""
    return digests.relative(path, format_of(path).files(path))


def _scene(with_masks: bool, data: str, split: str, index: int) -> Scene:
    made = cued.canvas(data, split, index)
    rles = masks.encode(made.instances)
    areas = [float(instance.sum()) for instance in made.instances]
    objects = objects_of(made.boxes.tolist(), [0] * len(rles), (), areas, rles if with_masks else None)
    return Scene(f"{data} {split} {index}", made.image, cued.SIZE, objects, index + 1)


@lru_cache(maxsize=4)
def _load_cued(data: str, with_masks: bool, folder: str) -> SceneSet:
    sample = partial(_scene, with_masks)
    splits: dict[str, Sequence[Scene]] = {split: cued.Canvases(data, split, sample) for split in cued.COUNTS}
    return SceneSet(data, ("match",), (1,), 1, splits, cued.checksum(data))
