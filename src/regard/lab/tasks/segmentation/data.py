"""Images with masks: the user's own folders, camvid, and the generated cued sets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from regard.core import DataError, Problems
from regard.files.paths import files_below, subfolders
from regard.images import digest
from regard.images.folders import SPLITS
from regard.images.images import SUFFIXES, image_errors, mean_and_deviation, read_image, size_of
from regard.images.normalise import Statistics
from regard.images.own import IN_MEMORY
from regard.images.streams import generator
from regard.lab.data import cued
from regard.lab.data.catalog import folder_in_use, folder_of, own_path
from regard.models.segmentation import VOID

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

_MASKS = ("masks", "mask", "annotations", "annotation", "labels", "gtfine")
_IMAGES = ("images", "image", "leftimg8bit")


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


@dataclass(frozen=True, eq=False)
class Canvases(Sequence[Sample]):
    """A split of a cued set."""

    data: str
    split: str

    def __len__(self) -> int:
        return cued.COUNTS[self.split]

    def __getitem__(self, row: int) -> Sample:  # type: ignore[override]
        if not 0 <= row < len(self):
            raise IndexError(row)
        return _canvas(self.data, self.split, row)


@lru_cache(maxsize=64)
def _canvas(data: str, split: str, row: int) -> cued.Canvas:
    return cued.canvas(data, split, row)


class Photo:
    """An image and its mask in files, each decoded at its first use.

    table: the class of each label, -1 of an unknown one. Raises: DataError for an image that cannot be read, a mask of
    another size, a mask in colour, or an unknown label.
    """

    def __init__(self, image_file: Path, mask_file: Path, table: np.ndarray) -> None:
        self.image_file, self.mask_file, self.table = image_file, mask_file, table

    @cached_property
    def image(self) -> np.ndarray:
        return read_image(self.image_file, None, 3)

    @cached_property
    def mask(self) -> np.ndarray:
        raw = read_mask(self.mask_file)
        size = self.image.shape[:2] if "image" in vars(self) else size_of(self.image_file)
        if raw.shape != size:
            raise DataError(
                f"{self.mask_file} has {raw.shape[0]}x{raw.shape[1]} pixels (height x width), its image "
                f"{self.image_file} has {size[0]}x{size[1]}; save the mask in the size of the image"
            )
        mask = self.table[raw]
        if (mask < 0).any():
            labels = np.flatnonzero((self.table >= 0) & (self.table != VOID)).tolist()
            raise DataError(unknown_label(self.mask_file, raw, labels, int(self.table.argmax())))
        return mask.astype(np.uint8)


class Photos(Sequence[Sample]):
    """The photos of a split; all are decoded and checked here if they fit into `IN_MEMORY`, else when they are used.

    labels: of the classes, in their order. void: the label of pixels that do not count. Raises: as `Photo`.
    """

    def __init__(self, pairs: Sequence[tuple[Path, Path]], labels: Sequence[int], void: int) -> None:
        self.pairs = pairs
        self.table = np.full(256, -1, np.int16)
        self.table[list(labels)] = np.arange(len(labels))
        self.table[void] = VOID
        self.decoded: list[Photo] | None = None
        if sum(_bytes(image) for image, _ in pairs) <= IN_MEMORY:
            self.decoded = [Photo(*pair, self.table) for pair in pairs]
            for photo in self.decoded:
                _ = photo.image, photo.mask

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> Photo:  # type: ignore[override]
        return Photo(*self.pairs[row], self.table) if self.decoded is None else self.decoded[row]


def unknown_label(file: Path, mask: np.ndarray, labels: Sequence[int], void: int) -> str:
    """What is wrong with a mask (height, width) that has other labels than these and void; "" if it has none."""
    wrong = np.argwhere(~np.isin(mask, [*labels, void]))
    if not len(wrong):
        return ""
    y, x = wrong[0]
    known = f"{', '.join(map(str, _runs(labels)))} and {void} (void)"
    return (
        f"{file} has the unknown label {mask[y, x]} at row {y}, column {x}; known are {known}: correct the mask, list "
        "all classes in classes.txt, or set task.void to the label of pixels that do not count"
    )


def read_mask(file: Path) -> np.ndarray:
    """The labels (height, width) uint8 of a palette or grey image. Raises: DataError."""
    from PIL import Image, ImageOps

    with image_errors(file, "mask"), Image.open(file) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode not in ("L", "P", "1", "I", "I;16"):
            raise DataError(
                f"{file} is a picture in colour ({image.mode}), not a mask; save it as a palette or grey image "
                "with the class number of each pixel"
            )
        labels = np.asarray(image)
    if labels.dtype != np.uint8:
        if int(labels.max(initial=0)) > 255 or int(labels.min(initial=0)) < 0:
            raise DataError(f"{file} has labels above 255, such as {int(labels.max())}; save it with 8 bits per pixel")
        labels = labels.astype(np.uint8)
    return labels


def load(data: str, void: int, classes: int, kind: str = "") -> MaskSet:
    """A set by name or path; the last two are kept. classes: of the user's own data, 0 = see `own_set`.

    kind: of the digest of the user's own data, see `regard.images.digest`.
    Raises: DataError.
    """
    if data in cued.CUED:
        return _cued(data, folder_in_use())
    named = data in FOLDERS
    path = folder_of(data, LAYOUT) if named else path_of(data)
    names = CAMVID if data == "camvid" else ()
    total = _named_digest(path) if named else own_digest(path, kind)
    return own_set(path, void, classes, total, names, data if named else "")


@lru_cache(maxsize=4)
def _named_digest(path: Path) -> str:
    """The checksum of a named set, computed once in a process: training asks for the set in every step."""
    return digest.of_index(_files(path))


def path_of(data: str) -> Path:
    """The user's own folder. Raises: DataError if it does not exist."""
    return own_path(data, NAMED, f"a folder with {LAYOUT}")


LAYOUT = (
    "train/ with images and trainannot/ (and test/ and testannot/) with a mask of the same name for each, or "
    "images/train/ and masks/train/ (or annotations/)"
)


@lru_cache(maxsize=2)
def _cued(data: str, folder: str) -> MaskSet:
    splits: dict[str, Sequence[Sample]] = {split: Canvases(data, split) for split in cued.COUNTS}
    return MaskSet(data, cued.CLASSES, 1, splits, cued.checksum(data), ignored=(0,))


def class_labels(
    path: Path, folder: Path, found: Callable[[], set[int]], void: int, classes: int, names: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], list[int]]:
    """Names and labels of the classes, see `own_set`. folder: of the training masks. found: reads their labels; called
    only where nothing else tells the classes. Raises: DataError."""
    names = names or _names(path)
    first = 1 if void == 0 else 0
    if names and classes and len(names) != classes:
        raise DataError(f"{path / 'classes.txt'} has {len(names)} lines, task.classes is {classes}")
    number = len(names) or classes or _counted(folder, found(), void, first)
    labels = list(range(first, number + first))
    if labels and labels[-1] >= VOID or number < 2:
        hint = f"; label {void} is void and does not count (task.void)" if number < 2 else ""
        raise DataError(f"{path} has {number} classes; expected 2 to {VOID - first}{hint}")
    if void in labels:
        raise DataError(f"task.void={void} is the label of class {void - first} of {number}; it has to be another one")
    return names or tuple(str(label) for label in labels), labels


@lru_cache(maxsize=2)
def own_set(path: Path, void: int, classes: int, digest: str, names: tuple[str, ...] = (), name: str = "") -> MaskSet:
    """A folder of images and masks.

    The classes are the lines of classes.txt, or `classes` of them, or the labels of the training masks from 0 to the
    largest. With void = 0 they start at label 1. digest: of the folder's present contents. name: of a named set.
    Raises: DataError, also for a class that only masks of the test have.
    """
    pairs = find_pairs(path)
    train = pairs["train"]
    names, labels = class_labels(path, train[0][1].parent, lambda: _labels_in(train), void, classes, names)
    files = {id(items): Photos(items, labels, void) for items in pairs.values()}  # "test" may be "val"
    splits: dict[str, Sequence[Sample]] = {split: files[id(items)] for split, items in pairs.items()}
    if not name:
        _check_classes(path, splits, names, void)
    return MaskSet(name or f"own:{digest}", names, 3, splits, digest)


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


@lru_cache(maxsize=16)
def own_digest(path: Path, kind: str = "") -> str:
    """What stands for a folder's images, masks and classes.txt in the key of a run.

    Raises: DataError, for folders and a classes.txt that `own_set` refuses before all bytes of the images are read.
    """
    find_pairs(path)
    _names(path)
    return digest.identity_of(path, _files(path), kind)


def _files(path: Path) -> dict[str, Path]:
    """All images and masks, and classes.txt if there is one, by their relative names."""
    names = path / "classes.txt"
    return digest.relative(path, [*files_below(path, SUFFIXES), *([names] if names.is_file() else [])])


def find_pairs(path: Path) -> dict[str, list[tuple[Path, Path]]]:
    """The images and masks of the splits "train" and "test", and "val" if there is one.

    Without a folder for the test, "test" is "val"; without any split every fifth image of a fixed permutation is for
    the test. Raises: DataError with the name of an image without a mask, or a mask without an image; for empty folders.
    """
    folders = find_folders(path)
    problems = Problems()
    splits = {split: _pairs(*both, problems) for split, both in folders.items()}
    problems.raise_all()
    if "all" in splits:
        pairs = splits["all"]
        if len(pairs) < 2:
            raise DataError(f"{path} has only one image; training and test need one each")
        order = generator("own", "split").permutation(len(pairs))
        return {"train": [pairs[row] for row in sorted(np.delete(order, np.s_[::5]))],
                "test": [pairs[row] for row in sorted(order[::5])]}  # fmt: skip
    if "train" not in splits or len(splits) < 2:
        found = ", ".join(splits) or "none"
        raise DataError(f"{path} needs folders of images and masks for training and test; found {found}: {LAYOUT}")
    splits.setdefault("test", splits.get("val", []))
    return splits


def find_folders(path: Path) -> dict[str, tuple[Path, Path]]:
    """(images, masks) of each split, or of "all"."""
    children = {child.name.lower(): child for child in subfolders(path)}
    found: dict[str, tuple[Path, Path]] = {}
    images = next((children[name] for name in _IMAGES if name in children), None)
    masks = next((children[name] for name in _MASKS if name in children), None)
    if images is not None and masks is not None:
        of_images, of_masks = (
            {child.name.lower(): child for child in subfolders(folder)} for folder in (images, masks)
        )
        for split, names in SPLITS.items():
            name = next((name for name in names if name in of_images), None)
            if name is not None and name not in of_masks:
                raise DataError(f"{of_images[name]} has images, but there is no folder {masks / of_images[name].name}")
            if name is not None:
                found[split] = (of_images[name], of_masks[name])
        return found or {"all": (images, masks)}
    for split, names in SPLITS.items():
        for name in (name for name in names if name in children):
            inner = {child.name.lower(): child for child in subfolders(children[name])}
            pictures = next((inner[part] for part in _IMAGES if part in inner), children[name])
            beside = [inner[part] for part in _MASKS if part in inner]
            beside += [
                children[name + end] for end in ("annot", "_masks", "masks", "_labels") if name + end in children
            ]
            if not beside:
                raise DataError(f"{children[name]} has no masks: there is no folder {path / (name + 'annot')}")
            found.setdefault(split, (pictures, beside[0]))
    return found


def _pairs(images: Path, masks: Path, problems: Problems) -> list[tuple[Path, Path]]:
    """Images and masks with the same relative path, without suffix; files without partner are added to the problems.

    Raises: DataError.
    """
    of_images, of_masks = _by_stem(images), _by_stem(masks)
    for name, file in of_images.items():
        if name not in of_masks:
            problems.append(
                f"{file} has no mask: there is no {masks / name}.png (.png or another image); add or remove it"
            )
    for name, file in of_masks.items():
        if file.suffix.lower() in (".jpg", ".jpeg"):
            problems.append(f"the mask {file} is a JPEG, whose compression changes labels; save masks as PNG")
        if name not in of_images:
            problems.append(f"the mask {file} has no image {images / name}.jpg; add or remove it")
    return [(file, of_masks[name]) for name, file in of_images.items() if name in of_masks]


def _by_stem(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for file in files_below(folder, SUFFIXES):
        name = file.relative_to(folder).with_suffix("").as_posix()
        if name in files:
            raise DataError(f"{files[name]} and {file.name} have the same name; remove or rename one of them")
        files[name] = file
    if not files:
        raise DataError(f"{folder} has no images ({', '.join(sorted(SUFFIXES))})")
    return files


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
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}; save it with the encoding UTF-8") from error
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not names:
        raise DataError(f"{file} names no class; write a class in each line, or remove it")
    double = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if double is not None:
        raise DataError(f"{file} names the class {double!r} twice")
    return names


def _labels_in(pairs: Sequence[tuple[Path, Path]]) -> set[int]:
    found: set[int] = set()
    for _, file in pairs:
        found.update(np.flatnonzero(np.bincount(read_mask(file).ravel())).tolist())
    return found


def _counted(folder: Path, found: set[int], void: int, first: int) -> int:
    """The number of classes, whose labels in masks begin at `first`. Raises: DataError for a label that is left out."""
    largest = max(found - {void}, default=0)
    missing = next((label for label in range(first, largest) if label not in found), None)
    if missing is not None:
        raise DataError(
            f"masks of {folder} have label {largest}, but none has label {missing}; correct them, list all "
            "classes in classes.txt, or set task.classes to their number"
        )
    return largest + 1 - first


def _bytes(image: Path) -> int:
    """The bytes of a decoded image with its mask. An image that cannot be opened raises an error when it is decoded."""
    try:
        height, width = size_of(image)
    except DataError:
        return 0
    return height * width * 4


def _runs(labels: Sequence[int]) -> list[str]:
    return [f"{labels[0]} to {labels[-1]}"] if len(labels) > 3 else [str(label) for label in labels]
