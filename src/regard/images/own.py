"""The user's own data: class folders, lists of images, WebDataset shards, or parquet with images and labels."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch.utils.data import get_worker_info

from regard.core import DataError
from regard.files.paths import subfolders

from . import digest as digests
from . import folders, lists, shards, tables
from .cores import decoders
from .folders import TESTS
from .images import (
    Check,
    Images,
    ImageSet,
    Source,
    Split,
    check_labels,
    decode,
    decode_all,
    load_or_make,
    readable_rows,
    size_before_crop,
    unreadable,
)
from .notes import warn_of_copies
from .rows import Paths, subset
from .streams import generator

log = logging.getLogger("regard.data")

LISTS = lists.KINDS
"""Suffixes of lists of images."""

IN_MEMORY = 4 * 2**30
"""A split is decoded once if its pixels need at most so many bytes; a larger one is decoded batch by batch."""

DIVIDED = "of_each_class-"
"""In the identity of data that are divided into training and test here: how."""

RESERVED = "@2"
"""At the end of the identity of data whose own part "val" is validated on."""


class Lazy:
    """Like an array of pixels (n, height, width, channels) uint8, but images are decoded when they are indexed.

    Several images are decoded by `decoders()` threads, except in a process of a data loader, which is one of several.
    Raises: DataError with the name of a damaged image when it is decoded.
    """

    remedy = "repair or remove it"
    """For a damaged image."""

    def __init__(
        self, sources: Sequence[Source], names: Sequence[object], size: tuple[int, int], channels: int = 3
    ) -> None:
        self.sources, self.names, self.size = sources, names, size
        self.shape = (len(sources), *size, channels)

    def __len__(self) -> int:
        return len(self.sources)

    def part(self, rows: slice | np.ndarray) -> "Lazy":
        """The same for a part of the images: a slice, or their indices."""
        return type(self)(subset(self.sources, rows), subset(self.names, rows), self.size, self.shape[-1])

    def __getitem__(self, rows: Any) -> np.ndarray:
        indices = np.arange(len(self))[rows]
        if indices.ndim == 0:
            return self._decode_row(int(indices), self.size)
        if not len(indices):
            return np.empty((0, *self.shape[1:]), np.uint8)
        threads = 1 if get_worker_info() is not None else min(decoders(), len(indices))
        with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
            images = (pool.map if pool else map)(lambda row: self._decode_row(row, self.size), indices.tolist())
            return np.stack(list(images))

    def _decode_row(self, row: int, size: tuple[int, int] | None) -> np.ndarray:
        try:
            return decode(self.sources[row], size, self.shape[-1])
        except Exception as error:  # Pillow raises various errors for a damaged file
            raise DataError(f"{self.names[row]} {unreadable(self.sources[row], error)}; {self.remedy}") from error


@lru_cache(maxsize=16)
def digest(path: Path, kind: str = "", reserved: bool = False, whole: bool = False) -> str:
    """What stands for the data in the key of a run (`digests.identity_of`); it does not depend on their path.

    Of a folder: its images or shards; of parquet: the tables; of lists: they and the images that they name. Data
    without a test split have `DIVIDED` before it. reserved: of a run that validates on the user's own part "val"; where
    there is one, it ends in `RESERVED`, as older versions validated on training images. whole: of data that are scored,
    whose splits need not be those of a training.
    Raises: DataError if there are no data, or their folders or shards are refused, before all bytes are read.
    """
    archives, parts, texts = shards.files_of(path), tables.tables_of(path), lists.lists_of(path)
    root = path if path.is_dir() else path.parent
    splits = parts or (["all", ""] if whole else _given_splits(path, reserved)[1])
    if parts:
        files = {split if len(part) == 1 else f"{split}/{file.name}": file
                 for split, part in parts.items() if reserved or split != "val" for file in part}  # fmt: skip
    elif texts:
        files = digests.relative(root, sorted({image for part in lists.rows_of(path).values() for image, _ in part}))
    else:
        files = digests.relative(root, archives or folders.image_files(path))
    total = digests.identity_of(path, files, kind, digests.relative(root, texts))
    return f"{DIVIDED if len(splits) == 1 and not whole else ''}{total}{RESERVED * (reserved and 'val' in splits)}"


def present_digest(path: Path, kind: str = "", reserved: bool = False, whole: bool = False) -> str:
    """`digest`, which is kept in this process, computed anew if the files have changed meanwhile. Raises: DataError."""
    digests.forget_if_changed(path if path.suffix not in lists.KINDS else path.parent, digest)
    return digest(path, kind, reserved, whole=True) if whole else digest(path, kind, reserved)  # as others name it


def load(
    path: Path, size: tuple[int, int], corrupt: str, total: str = "", kind: str = "", reserved: bool = False
) -> ImageSet:
    """The user's own data as RGB images of 8/7 of `size`, which are cropped to `size` later.

    A split is a folder of class folders, a .parquet file, or what a list calls so. Its name is one of `folders.SPLITS`,
    in upper or lower case: the first of `TRAINS` that is there is the training split, the first of `TESTS` the test
    split. Without a test split, every fifth image of each class is for the test: the same ones each time, and none of a
    class of one image. Hidden files and folders are left out. Images that no split or class has are refused.

    total: the `digest` of the data of this kind, "" = it is computed. Nothing is cached under the digest of files that
    have changed since. reserved: whether a part "val" beside the test is read as `ImageSet.held`.
    Raises: DataError, also for a class without a training image, and if the files have changed.
    """
    total = total or digest(path, kind, reserved)
    classes, splits = read_splits(path, reserved)
    current = partial(digest, path, kind, reserved)
    return image_set(path, classes, splits, size, corrupt, total, f"own4-{total}-{{}}", current)


def image_set(
    path: Path, classes: tuple[str, ...], splits: Mapping[str, Split], size: tuple[int, int], corrupt: str, total: str,
    key: str, current: partial[str], channels: int = 3,
) -> ImageSet:  # fmt: skip
    """What is listed of each split, as images of 8/7 of `size`. key: of a split's cache, whose name replaces {}.

    total: the digest of the files. current: computes it, with a cache. Raises: as `load`.
    """

    def check() -> None:
        cast(Any, current.func).cache_clear()
        if current() != total:
            raise DataError(f"the files of {path} have changed since they were first read: start again")

    images, divided = {}, total.startswith(DIVIDED)
    warn_of_copies({split: part[0] for split, part in splits.items()})
    for split, part in splits.items():
        labels = part[2]
        drawn = ", a fifth of its images," if split == "test" and divided else ""
        check_labels(f"the {split} split of {path}{drawn}", labels, len(classes))
        check_classes(path, classes, labels, splits["train"][2])
        images[split] = from_files(part, size_before_crop(size), corrupt, key.format(split), check, channels)
        check_readable(path, split, classes, labels, images[split].labels)
    return ImageSet(f"own:{total}", classes, images["train"], images["test"], total, images.get("val"), divided=divided)


def read_splits(path: Path, reserved: bool = False) -> tuple[tuple[str, ...], dict[str, Split]]:
    """The classes, and sources, names and labels of the images of "train" and "test"; no image is decoded.

    reserved: and of "val", if it is beside a test. Raises: DataError.
    """
    classes, splits = _given_splits(path, reserved)
    if "train" not in splits:
        raise DataError(f"{path} has a test alone; a training needs a part train too (`regard eval` takes a test)")
    folders.warn_of_alike(path, classes)
    read = reader_of(path).read
    if read is lists.read:
        lists.warn_of_others(path)
    elif path.is_dir() and read is folders.from_folders:
        folders.warn_of_other_files(path)
    if not reserved and _has_reserved(path):
        log.warning("val of %s is its validation part, which --val 0.1 takes; the test is test", path)
    if len(splits) > 1:
        return classes, splits
    if read is lists.read:
        name, number = Counter(map(str, splits["train"][1])).most_common(1)[0]
        if number > 1:
            raise DataError(
                f"{name} is listed {number} times, and without a split copies would lie in training and test: list "
                "each image once, or add a column split"
            )
    return classes, divide(*splits["train"])


def _has_reserved(path: Path) -> bool:
    """Whether there is a part "val" beside a test."""
    if found := tables.tables_of(path):
        return "val" in found
    if lists.lists_of(path):
        return {"val", "test"} <= lists.rows_of(path).keys()
    if not path.is_dir():
        return False
    archives = shards.files_of(path)
    return "val" in (shards.split_of_shards(path, archives) if archives else folders.split_folders(path))


def reader_of(path: Path) -> "Reader":
    """The reader of the user's own data. Raises: DataError for shards beside tables, and for `lists.unread`."""
    shards.files_of(path)
    reader = next(known for known in READERS if known.files(path))
    if reader.read is folders.from_folders and (wrong := lists.unread(path)):
        raise DataError(wrong)
    return reader


def read_scored(path: Path) -> tuple[tuple[str, ...], Split]:
    """The classes and the images of the test, which may be alone; all images of data without splits.

    Raises: DataError.
    """
    reader = reader_of(path)
    classes, splits = reader.read(alone(path), False)
    if reader.read is lists.read:
        lists.warn_of_others(path)
    split = splits["test"] if "test" in splits else splits["train"]
    check_labels(str(path), split[2], len(classes), least=1)
    return classes, split


def alone(path: Path) -> Path:
    """The folder of the only split of class folders, if it is a test; else the path itself."""
    inside = subfolders(path) if path.is_dir() else []
    return inside[0] if len(inside) == 1 and inside[0].name.lower() in TESTS else path


@dataclass(frozen=True)
class Reader:
    """A layout of images with classes. files: truthy if the data have it. read: the classes and the splits of a path,
    "train" alone where there is no test; with True also "val", if it is beside a test."""

    name: str
    files: Callable[[Path], Any]
    read: Callable[[Path, bool], tuple[tuple[str, ...], dict[str, Split]]]


def _given_splits(path: Path, reserved: bool) -> tuple[tuple[str, ...], dict[str, Split]]:
    """`read_splits`, with "train" alone where there is no test split."""
    classes, splits = reader_of(path).read(path, reserved)
    unlabelled = [split for split in ("test", "val") if split in splits and _without_labels(splits[split][2])]
    for split in unlabelled:
        log.warning("the %s split of %s has no labels (all are -1), and is not used", split, path)
        del splits[split]
    if "test" not in splits and "val" in splits:
        splits["test"] = splits.pop("val")
    return classes, splits


def _without_labels(labels: np.ndarray) -> bool:
    return bool(len(labels)) and bool((labels == -1).all())


def check_classes(path: Path, classes: tuple[str, ...], test: np.ndarray, train: np.ndarray) -> None:
    """Raises: DataError for a class that only the test has; test, train: labels."""
    missing = np.setdiff1d(test, train)
    if len(missing):
        name = classes[missing[0]]
        raise DataError(
            f"class {name} of {path} has images for the test only; add training images, or remove the class"
        )


def check_readable(path: Path, split: str, classes: tuple[str, ...], labels: np.ndarray, readable: np.ndarray) -> None:
    """Raises: DataError for a class of which nothing can be read. labels, readable: of all, and of what was read."""
    lost = np.setdiff1d(labels, readable)
    if len(lost):
        raise DataError(f"no {split} image of class {classes[lost[0]]} in {path} can be read; repair or remove it")


def too_large(number: int, size: tuple[int, int], channels: int = 3) -> bool:
    """Whether so many images of a size are decoded when they are used."""
    return number * size[0] * size[1] * channels > IN_MEMORY


def from_files(
    split: Split, size: tuple[int, int], corrupt: str, key: str, check: Check = lambda: None, channels: int = 3
) -> Images:
    """Images of one size, decoded and cached, or decoded when they are used if they need more than `IN_MEMORY`.

    key: identifies the files in the cache. check: called before anything is cached. Raises: DataError.
    """
    sources, names, labels = split
    number = len(sources)
    if too_large(number, size, channels):
        if corrupt == "skip":
            rows = readable_rows(key, sources, names, channels, check)
            warn_of_skipped(number, len(rows), names)
            sources, names, labels = subset(sources, rows), subset(names, rows), labels[rows]
        log.warning(
            "%d images of %dx%d need more than %d GB, and are decoded in every epoch: files of about that size are "
            "read fastest", number, *size, IN_MEMORY // 2**30,
        )  # fmt: skip
        if isinstance(sources, list) and isinstance(sources[0], Path):
            paths = Paths.of(cast(list[Path], sources))
            return Images(Lazy(paths, paths, size, channels), labels)
        return Images(Lazy(sources, names, size, channels), labels)

    def make() -> Images:
        images = decode_all(split, size, channels, corrupt)
        check()
        return images

    images = load_or_make(f"{key}-{size[0]}x{size[1]}-{corrupt}", make)
    warn_of_skipped(number, len(images), names)
    return images


def warn_of_skipped(number: int, readable: int, names: Sequence[object]) -> None:
    """Also where the readable images are in the cache, and none is tried again."""
    if readable < number:
        text = "%d of %d images, from %s to %s, cannot be read and are left out (`regard data check` names your own)"
        log.warning(text, number - readable, number, names[0], names[number - 1])


def divide(sources: Sequence[Source], names: Sequence[object], labels: np.ndarray) -> dict[str, Split]:
    """A random fifth of the images of each class, and at least one where it has two, is for the test."""
    order = generator("own", "split").permutation(len(sources))
    order = order[np.argsort(labels[order], kind="stable")]
    classes = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    counts = [max(round(len(rows) / 5), int(len(rows) > 1)) for rows in classes]
    test = np.sort(np.concatenate([rows[:count] for rows, count in zip(classes, counts, strict=True)]))
    train = np.setdiff1d(order, test)
    return {
        name: (subset(sources, rows), subset(names, rows), labels[rows])
        for name, rows in (("train", train), ("test", test))
    }


READERS = (
    Reader("parquet", tables.tables_of, tables.from_tables),
    Reader("WebDataset shards", shards.files_of, shards.from_shards),
    Reader("lists of images", lists.lists_of, lists.read),
    Reader("class folders", lambda path: True, folders.from_folders),
)
"""The first one that fits is taken."""
