"""Images with masks: the user's own folders, camvid, and the generated cued sets."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from regard.core import DataError
from regard.files.paths import files_below, words_in
from regard.images import digest
from regard.images.images import SUFFIXES, AsStored, mean_and_deviation, read_image, size_of
from regard.images.normalise import Statistics
from regard.images.notes import Notes, warn_of_copies
from regard.images.own import IN_MEMORY
from regard.images.streams import BY_NAME
from regard.images.turned import annotated_as_stored
from regard.lab.data import cued
from regard.lab.data.catalog import folder_in_use, folder_of, own_path
from regard.models.segmentation import VOID

from ..class_scores import check_subset
from .layouts import (
    LAYOUT,
    NO_COLOURS,
    Colours,
    Drawn,
    Layout,
    Mask,
    differing_palettes,
    divide,
    grey,
    is_whole,
    read_layout,
    read_mask,
)

Photographs = list[tuple[Path | AsStored, Mask]]
"""Images and masks of a split."""

CAMVID = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
FOLDERS = {
    "camvid": "REGARD_DATA/camvid",
    "ade20k": "REGARD_DATA/ade20k/{images,masks}/{train,val} with classes.txt, set task.void=0",
    "cityscapes": "REGARD_DATA/cityscapes/{images,masks}/{train,val}, masks of the 19 training ids",
}
"""Named sets, which are folders like the user's own in the data folder."""
NAMED = {**cued.SOURCES, **FOLDERS}


@runtime_checkable
class Sample(Protocol):
    """An image with its mask."""

    @property
    def image(self) -> np.ndarray:
        """uint8 pixels (height, width, channels)."""
        ...

    @property
    def mask(self) -> np.ndarray:
        """uint8 classes (height, width), `VOID` where a pixel does not count."""
        ...


@dataclass(frozen=True, eq=False)
class MaskSet:
    """A segmentation set. ignored: classes that are not counted in the main metric, such as cued's background."""

    name: str
    classes: tuple[str, ...]
    channels: int
    splits: dict[str, Sequence[Sample]]
    checksum: str
    ignored: tuple[int, ...] = ()

    @property
    def reserved(self) -> str | None:
        """The split that is neither trained on nor tested."""
        return "val" if "val" in self.splits and self.splits["val"] is not self.splits["test"] else None

    @cached_property
    def statistics(self) -> Statistics:
        """Mean and deviation per channel over at most 200 evenly spaced training images."""
        train = self.splits["train"]
        rows = range(0, len(train), -(-len(train) // 200))
        return mean_and_deviation(train[row].image.reshape(-1, self.channels) for row in rows)


@lru_cache(maxsize=64)
def _canvas(data: str, split: str, row: int) -> cued.Canvas:
    return cued.canvas(data, split, row)


class Photo:
    """An image and its mask, each decoded at its first use.

    table: the class of each label, -1 of an unknown one. colours: as for `read_mask`. Raises: DataError for an image
    that cannot be read, a mask of another size, a mask in unknown colours, or an unknown label.
    """

    def __init__(
        self, image_file: Path | AsStored, mask_file: Mask, table: np.ndarray, colours: Colours = NO_COLOURS
    ) -> None:
        self.image_file, self.mask_file, self.table, self.colours = image_file, mask_file, table, colours

    @cached_property
    def image(self) -> np.ndarray:
        return read_image(self.image_file, None, 3)

    @cached_property
    def mask(self) -> np.ndarray:
        raw = read_mask(self.mask_file, self.colours)
        size = self.image.shape[:2] if "image" in vars(self) else size_of(self.image_file)
        if raw.shape != size:
            raise DataError(
                f"{self.mask_file} has {raw.shape[0]}x{raw.shape[1]} pixels (height x width), its image "
                f"{self.image_file} has {size[0]}x{size[1]}; save the mask in the size of the image"
            )
        mask = self.table[raw]
        if (mask < 0).any():
            labels = np.flatnonzero((self.table >= 0) & (self.table != VOID)).tolist()
            void = np.flatnonzero(self.table == VOID)
            raise DataError(unknown_label(self.mask_file, raw, labels, int(void[0]) if len(void) else None))
        return mask.astype(np.uint8)


class Photos(Sequence[Sample]):
    """The photos of a split; all are decoded and checked here if they fit into `IN_MEMORY`, else when they are used.

    labels: of the classes, in their order. void: the label of pixels that do not count, None = there is none. layout:
    its colours, and whether further labels do not count either. Raises: as `Photo`.
    """

    def __init__(
        self, pairs: Sequence[tuple[Path | AsStored, Mask]], labels: Sequence[int], void: int | None, layout: Layout
    ) -> None:
        self.pairs, self.colours = pairs, layout.colours
        self.table = np.full(256, VOID if layout.others else -1, np.int16)
        self.table[list(labels)] = np.arange(len(labels))
        if void is not None:
            self.table[void] = VOID
        self.decoded: list[Photo] | None = None
        if sum(_bytes(image) for image, _ in pairs) <= IN_MEMORY:
            self.decoded = [Photo(*pair, self.table, self.colours) for pair in pairs]
            for photo in self.decoded:
                _ = photo.image, photo.mask

    def with_table(self, table: np.ndarray) -> "Photos":
        """The same photos with other classes for their labels."""
        new = copy(self)
        new.table, new.decoded = table, None
        return new

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> Photo:  # type: ignore[override]
        return Photo(*self.pairs[row], self.table, self.colours) if self.decoded is None else self.decoded[row]


def unknown_label(file: Mask, mask: np.ndarray, labels: Sequence[int], void: int | None) -> str:
    """What is wrong with a mask (height, width) that has other labels than these and void; "" if it has none."""
    known = [*labels, *([] if void is None else [void])]
    wrong = np.argwhere(~np.isin(mask, known))
    if not len(wrong):
        return ""
    y, x = wrong[0]
    shown = ", ".join(map(str, _runs(labels))) + (f" and {void} (void)" if void is not None else "")
    return (
        f"{file} has the unknown label {mask[y, x]} at row {y}, column {x}; known are {shown}: correct the mask, list "
        "all classes in classes.txt, or set task.void to the label of pixels that do not count"
    )


def load(data: str, void: int, classes: int, kind: str = "", exif: str = "", whole: bool = False) -> MaskSet:
    """A set by name or path; the other arguments are kept. classes: of the user's own data, 0 = see `own_set`.

    kind: of the digest of the user's own data, see `regard.images.digest`. exif: as for
    `regard.images.turned.annotated_as_stored`. whole: not divided, and not checked for a training, to be scored.
    Raises: DataError.
    """
    if data in cued.CUED:
        return _load_cued(data, folder_in_use())
    named = data in FOLDERS
    path = folder_of(data, LAYOUT) if named else path_of(data)
    total = _named_digest(path) if named else own_digest(path, kind, whole)
    return own_set(path, void, classes, total, data if named else "", "turn" if named else exif, whole)


@lru_cache(maxsize=4)
def _named_digest(path: Path) -> str:
    """The checksum of a named set, computed once in a process: training asks for the set in every step."""
    return digest.of_index(_files(path))


def path_of(data: str) -> Path:
    """The user's own folder. Raises: DataError if it does not exist."""
    return own_path(data, NAMED, f"a folder with {LAYOUT}")


@lru_cache(maxsize=2)
def _load_cued(data: str, folder: str) -> MaskSet:
    splits: dict[str, Sequence[Sample]] = {split: cued.Canvases(data, split, _canvas) for split in cued.COUNTS}
    return MaskSet(data, cued.CLASSES, 1, splits, cued.checksum(data), ignored=(0,))


def class_labels(
    path: Path, folder: Path, found: Callable[[], set[int]], layout: Layout, void: int, classes: int
) -> tuple[tuple[str, ...], list[int], int | None]:
    """Names and labels of the classes, and the label of void, None if there is none; see `own_set`.

    folder: of the training masks. found: reads their labels; called only where nothing else tells the classes, and for
    two classes. layout: whose names and labels have precedence over those of the masks; names without labels also over
    those of classes.txt. Raises: DataError.
    """
    names = (() if layout.labels else layout.names) or _names(path)
    first = 1 if void == 0 else 0
    if layout.labels:
        labels = list(layout.labels)
        if names and len(names) != len(labels):
            raise DataError(f"{path / 'classes.txt'} has {len(names)} lines, but the data have {len(labels)} classes")
        if layout.colours and names and names != layout.names:
            raise DataError(
                f"{path / 'classes.txt'} has other names, or another order, than the list of colours, "
                f"{', '.join(layout.names)}: remove it, or correct one of them"
            )
        names = names or layout.names
    else:
        if names and classes and len(names) != classes:
            raise DataError(f"{path / 'classes.txt'} has {len(names)} lines, task.classes is {classes}")
        number = len(names) or classes
        if number in (0, 2) and first == 0 and found() == {0, 255}:
            return names or ("0", "255"), [0, 255], None
        number = number or _count_classes(folder, found(), void, first)
        labels = list(range(first, number + first))
    if labels and labels[-1] >= VOID or len(labels) < 2:
        hint = f"; label {void} is void and does not count (task.void)" if len(labels) < 2 else ""
        some = "one class" if len(labels) == 1 else f"{len(labels)} classes"
        raise DataError(f"{path} has {some}; expected 2 to {VOID - first}{hint}")
    if void in labels:
        given = f"task.void={void} is the label of class {void - first} of {len(labels)}"
        raise DataError(f"{given}; it has to be another one")
    return names or tuple(str(label) for label in labels), labels, void


PALETTES = (
    "masks in whose palettes a number has different colours: classes are numbers, unless classes.csv lists colours"
)


def layout_of(path: Path, void: int, exif: str, whole: bool = False) -> tuple[Layout, dict[str, Photographs]]:
    """The layout of the user's own data, and its splits; what is unusual is one warning for each kind.

    The images are `AsStored` where EXIF data turn none. Raises: DataError.
    """
    notes = Notes()
    try:
        layout = read_layout(path, notes, void)
        pairs = layout.pairs if whole else divide(path, layout.pairs)
        if not layout.colours and (two := differing_palettes([mask for _, mask in chain(*layout.pairs.values())])):
            notes.add(PALETTES, f"{two[0]} and {two[1]}")
        keep = annotated_as_stored(path, chain(*layout.pairs.values()), _mask_size, exif, notes)
        read: dict[int, Photographs] = {  # "test" may be "val"
            id(part): [(AsStored(file) if keep else file, mask) for file, mask in part] for part in pairs.values()
        }
    finally:
        notes.warn()
    return layout, {split: read[id(part)] for split, part in pairs.items()}


def _mask_size(mask: Mask) -> tuple[int, int] | None:
    try:
        return mask.scene.size if isinstance(mask, Drawn) else size_of(mask)
    except DataError:
        return None


@lru_cache(maxsize=2)
def own_set(
    path: Path, void: int, classes: int, digest: str, name: str = "", exif: str = "", whole: bool = False
) -> MaskSet:
    """The user's own images and masks.

    The classes are the lines of classes.txt, or those of a list of colours or of annotated polygons, or `classes` of
    them, or the labels of the training masks from 0 to the largest; the labels 0 and 255 alone are two classes. With
    void = 0 they start at label 1. digest: of the folder's present contents. name: of a named set. exif, whole: as for
    `load`. Raises: DataError, also for a class that only masks of the test have.
    """
    layout, pairs = layout_of(path, void, exif, whole)
    if name:  # its masks and classes are known
        layout = replace(layout, names=CAMVID if name == "camvid" else (), labels=(), colours=NO_COLOURS)
    train = pairs.get("train") or next(iter(pairs.values()))
    labels_in = partial(_labels_in, train, layout.colours)
    names, labels, unused = class_labels(path, place_of(train[0][1]), labels_in, layout, void, classes)
    files = {id(items): Photos(items, labels, unused, layout) for items in pairs.values()}
    splits: dict[str, Sequence[Sample]] = {
        split: files[id(items)] for split, items in pairs.items()
    }  # "test" may be "val"
    if not name and not whole:
        _check_classes(path, splits, names, void)
        warn_of_copies({split: [image for image, _ in items] for split, items in pairs.items()})
    return MaskSet(name or f"own:{digest}", names, 3, splits, digest)


def place_of(mask: Mask) -> Path:
    """The folder of a mask, for messages."""
    return mask.parent if isinstance(mask, Path) else Path(mask.scene.name).parent


def _check_classes(path: Path, splits: dict[str, Sequence[Sample]], names: tuple[str, ...], void: int) -> None:
    """Raises: DataError for a class of test masks that no training mask has, and for a single class in training masks.
    Masks that are not in memory stay unread; `regard data check` reads them all."""
    found = {
        name: {int(label) for photo in split.decoded for label in np.unique(photo.mask)} - {VOID}
        for name, split in splits.items()
        if isinstance(split, Photos) and split.decoded is not None
    }
    if "train" in found and len(found["train"]) < 2:
        learned = ", ".join(names[label] for label in sorted(found["train"])) or "no class"
        raise DataError(f"the training masks of {path} have pixels of {learned} alone{_void_hint(splits, void)}")
    only = found.get("test", set()) - found["train"] if "train" in found else set()
    if only:
        raise DataError(
            f"class {names[min(only)]} is in masks of the test of {path}, but in no training mask; add training images "
            "of it, or mark it as void"
        )


def with_classes(data: str, mask_set: MaskSet, names: Sequence[str]) -> MaskSet:
    """The user's own set with the classes that a model was trained on, of which it has some. Raises: DataError."""
    if list(mask_set.classes) == list(names) or not mask_set.name.startswith("own:"):
        return mask_set
    check_subset(data, mask_set.classes, names)
    place = np.array([names.index(name) for name in mask_set.classes], np.int16)
    splits: dict[str, Sequence[Sample]] = {}
    for split, photos in mask_set.splits.items():
        assert isinstance(photos, Photos)
        table = np.where(photos.table < 0, -1, np.append(place, [VOID] * 256)[photos.table])
        splits[split] = photos.with_table(table.astype(np.int16))
    return replace(mask_set, classes=tuple(names), splits=splits)


@lru_cache(maxsize=16)
def own_digest(path: Path, kind: str = "", whole: bool = False) -> str:
    """What stands for a folder's images, masks and names of classes in the key of a run; with `BY_NAME` before it where
    these are divided here.

    Raises: DataError, for folders and a classes.txt that `own_set` refuses before all bytes of the images are read.
    """
    layout = read_layout(path, Notes())
    if not whole:
        divide(path, layout.pairs)
    _names(path)
    total = digest.identity_of(path, _files(path), kind, digest.relative(path, layout.texts))
    divided = BY_NAME * (not whole and is_whole(layout.pairs))
    return f"{divided}{total}{'@3' * layout.renamed}{'@4' * grey(layout.colours)}"


def _files(path: Path) -> dict[str, Path]:
    """All images and masks, and classes.txt if there is one, by their relative names."""
    names = path / "classes.txt"
    return digest.relative(path, [*files_below(path, SUFFIXES), *([names] if names.is_file() else [])])


def _void_hint(splits: dict[str, Sequence[Sample]], void: int) -> str:
    """What to do where masks of two labels have the second one as void."""
    train = splits["train"]
    if not any((photo.mask == VOID).any() for photo in train):
        return "; segmentation needs at least two"
    return f", and of {void}, which is void and does not count: write objects as 1, or set task.void to another label"


def _names(path: Path) -> tuple[str, ...]:
    """The lines of classes.txt, or nothing without such a file. Raises: DataError."""
    file = path / "classes.txt"
    if not file.exists():
        return ()
    names = tuple(words_in(file))
    if not names:
        raise DataError(f"{file} names no class; write a class in each line, or remove it")
    double = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if double is not None:
        raise DataError(f"{file} names the class {double!r} twice")
    return names


def _labels_in(pairs: Sequence[tuple[Any, Mask]], colours: Colours) -> set[int]:
    found: set[int] = set()
    for _, mask in pairs:
        found.update(np.flatnonzero(np.bincount(read_mask(mask, colours).ravel())).tolist())
    return found


def _count_classes(folder: Path, found: set[int], void: int, first: int) -> int:
    """The number of classes, whose labels in masks begin at `first`. Raises: DataError for a label that is left out."""
    largest = max(found - {void}, default=0)
    missing = next((label for label in range(first, largest) if label not in found), None)
    if missing is not None:
        raise DataError(
            f"masks of {folder} have label {largest}, but none has label {missing}; correct them, list all "
            "classes in classes.txt, or set task.classes to their number"
            + (", or set task.void=0, with which classes begin at label 1" if missing == first == 0 else "")
        )
    return largest + 1 - first


def _bytes(image: Path | AsStored) -> int:
    """The bytes of a decoded image with its mask. An image that cannot be opened raises an error when it is decoded."""
    try:
        height, width = size_of(image)
    except DataError:
        return 0
    return height * width * 4


def _runs(labels: Sequence[int]) -> list[str]:
    return [f"{labels[0]} to {labels[-1]}"] if len(labels) > 3 else [str(label) for label in labels]
