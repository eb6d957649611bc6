"""The user's own data: class folders, lists of images, WebDataset shards, or parquet with images and labels."""

import json
import logging
import re
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

from regard.core import DataError, require
from regard.files.paths import check_utf8, files_below, subfolders, visible

from . import digest as digests
from . import folders, lists, shards
from .cores import decoders
from .folders import SPLITS, TESTS, TRAINS
from .images import (
    SUFFIXES,
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

LARGEST_LABEL = 2**20
"""A label of this size or above is no number of a class."""

IMAGES, LABELS = ("img", "image", "picture"), ("label", "class", "target", "fine_label")
"""Names of the columns of a table; the first one that is present is used."""


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
    archives, tables, texts = shards.files_of(path), _tables(path), lists.lists_of(path)
    root = path if path.is_dir() else path.parent
    splits = tables or (["all", ""] if whole else _given_splits(path, reserved)[1])
    if tables:
        files = {split if len(part) == 1 else f"{split}/{file.name}": file
                 for split, part in tables.items() if reserved or split != "val" for file in part}  # fmt: skip
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
    if tables := _tables(path):
        return "val" in tables
    if lists.lists_of(path):
        return {"val", "test"} <= lists.rows_of(path).keys()
    archives = shards.files_of(path)
    return path.is_dir() and "val" in (split_of_shards(path, archives) if archives else folders.split_folders(path))


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


def _from_shards(path: Path, reserved: bool) -> tuple[tuple[str, ...], dict[str, Split]]:
    """Shards in folders train and test, or with these words in their names; labels are numbers."""
    parts = split_of_shards(path, shards.files_of(path))
    if not reserved:
        parts.pop("val", None)
    splits = {name: shards.read(part) for name, part in parts.items()}
    for name, (_, _, labels) in splits.items():
        if not len(labels):
            raise DataError(f"the {name} shards of {path} have no image; expected members KEY.jpg and KEY.cls")
    classes = tuple(str(label) for label in range(int(splits["train"][2].max()) + 1))
    return classes, dict(splits)


def split_of_shards(path: Path, files: list[Path], tests: tuple[str, ...] = TESTS) -> dict[str, list[Path]]:
    """The shards of "train" and, if there are some, of "test", and of "val" beside it, by the words in their names and
    folders; without the words of `TRAINS` those without any word are for training.

    tests: words of the test; the first one that is present is used. Raises: DataError without shards for training, and
    for one without a word beside them.
    """
    kinds: dict[str, list[Path]] = {}
    for file in files:
        found = [word for word in shards.words(path, file) if word in (*TRAINS, *TESTS, *tests)]
        if len({word in TRAINS for word in found}) > 1:
            raise DataError(f"{file} has the words {found[0]} and {found[-1]} in its path; keep that of its split")
        kinds.setdefault(found[0] if found else "", []).append(file)
    train = [file for name in TRAINS for file in kinds.get(name, [])]
    if train and "" in kinds:
        raise DataError(
            f"{kinds[''][0]} lies beside {train[0].name}, but has no word of a split in its path: put train or test "
            "(or val) into its name, or put it elsewhere"
        )
    train = train or kinds.get("", [])
    test = next((name for name in tests if name in kinds), "")
    val = next((name for name in SPLITS["val"] if name in kinds and test in SPLITS["test"]), "")
    if not train:
        raise DataError(f"{path} has shards for the test only; name those for training, or their folder, train")
    parts = {"train": train, "test": kinds[test] if test else [], "val": kinds[val] if val else []}
    return {name: part for name, part in parts.items() if part}


def _tables(path: Path) -> dict[str, list[Path]]:
    """The parquet files of each split: in a folder, or as on the Hub: data/train-00000-of-00001.parquet."""
    if path.suffix == ".parquet" and path.is_file():
        return {"train": [path]}
    if not path.is_dir():
        return {}
    files = [path / entry.name for entry in visible(path) if entry.name.endswith(".parquet")]
    if not files and not files_below(path, SUFFIXES):
        files = files_below(path, frozenset({".parquet"}))
    parts: dict[str, list[Path]] = {}
    for file in files:
        stem = _SHARD.sub("", file.stem.lower())
        parts.setdefault(file.parent.name.lower() if stem.isdigit() else stem, []).append(file)
    for part in parts.values():
        _check_whole(part)
    splits = folders.by_split({part[0]: name for name, part in parts.items()})
    if not splits:
        return {}
    first = next(iter(splits.values()))
    for name, part in parts.items():
        if name not in (*TRAINS, *TESTS):
            raise DataError(
                f"{part[0]} lies beside {first.name}, but has not the name of a split: call it test.parquet "
                "(or val.parquet), or put it elsewhere"
            )
        if len({file.parent for file in part}) > 1:
            raise DataError(f"{part[0]} and {part[-1]} name the same split; give one of their folders as the data")
    for image in files_below(path, SUFFIXES):
        raise DataError(f"{path} has a table ({first.name}) and also {image}; keep one kind of data there")
    by_first = {part[0]: part for part in parts.values()}
    return {split: by_first[file] for split, file in splits.items()}


_SHARD = re.compile(r"-\d+-of-(\d+)$")


def _check_whole(files: list[Path]) -> None:
    """Raises: DataError if files of a table that is named in parts, as on the Hub, are missing."""
    numbers = {int(match[1]) for file in files if (match := _SHARD.search(file.stem))}
    if numbers and numbers != {len(files)}:
        raise DataError(
            f"{files[0]} is one of {max(numbers)} parts, {len(files)} of which are there: download the others"
        )


def _from_tables(path: Path, reserved: bool) -> tuple[tuple[str, ...], dict[str, Split]]:
    tables = _tables(path)
    splits: dict[str, Split] = {}
    classes: tuple[str, ...] = ()
    if not reserved:
        tables.pop("val", None)
    first = next(iter(tables.values()))[0]
    for split, files in tables.items():
        sources, rows, parts = list[Source](), list[str](), list[np.ndarray]()
        for file in files:
            table = read_table(file)
            image, label = (_column(file, table, *kind) for kind in ((IMAGES, "Image"), (LABELS, "ClassLabel")))
            images = image_column(file, table[image])
            names = class_names(file) or hub_names(file, hub_features(schema_metadata(file)), label)
            if classes and names and names != classes:
                raise DataError(f"{file} has other class_names than {first.name}; make them equal")
            classes = classes or names
            sources += images
            rows += [f"row {row} of {file}" for row in range(len(images))]
            parts.append(_whole_labels(file, label, table[label]))
        splits[split] = sources, rows, np.concatenate(parts)
    labels = next(iter(splits.values()))[2]  # of the training, unless there is a test alone
    if not len(labels):
        raise DataError(f"{first} has no rows")
    count = int(labels.max()) + 1
    return classes or tuple(str(label) for label in range(count)), splits


def schema_metadata(file: Path) -> Mapping[bytes, bytes]:
    """The metadata in the schema of a parquet file."""
    require("pyarrow")
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(file).metadata or {}


def hub_features(metadata: Mapping[bytes, bytes] | None) -> dict[str, dict[str, Any]]:
    """What the library `datasets` notes of each column of a table in its metadata; {} without such notes."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _whole_labels(file: Path, name: str, column: Any) -> np.ndarray:
    """A column of whole numbers as int64. Raises: DataError for missing ones, other types and too large ones."""
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{file}: column {name!r} has no label in row {row} ({column.null_count} in all); fill it in")
    labels = column.to_numpy()
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{file}: column {name!r} holds {'texts' if labels.dtype == object else labels.dtype}, expected one whole "
            "number from 0 for each image, with names in its metadata class_names; lists in .csv take names"
        )
    if len(labels) and int(labels.max()) >= LARGEST_LABEL:
        row = int(labels.argmax())
        raise DataError(f"{file}: label {labels[row]} of row {row} is too large; labels count classes from 0")
    return labels.astype(np.int64)


def read_table(file: Path) -> Any:
    """A parquet file as a pyarrow table. Raises: DataError if it is damaged."""
    require("pyarrow")

    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{file} cannot be read as parquet ({reason}); download it again") from error


def image_column(file: Path, column: Any) -> list[Source]:
    """Encoded images of a column of bytes, or of structs with a field `bytes`, like Hugging Face. Raises: DataError."""
    values = column.to_pylist()
    sources = [value.get("bytes") if isinstance(value, dict) else value for value in values]
    for row, source in enumerate(sources):
        if not isinstance(source, bytes):
            raise DataError(f"row {row} of {file} has no image bytes but {type(source).__name__}")
    return cast(list[Source], sources)


def class_names(file: Path) -> tuple[str, ...]:
    """The names in the schema's metadata (`class_names`, a JSON list), or an empty tuple. Raises: DataError."""
    try:
        names = json.loads(schema_metadata(file).get(b"class_names", b"[]"))
    except (ValueError, RecursionError):
        names = None
    return _distinct_texts(f"{file}: class_names in its metadata", names)


def hub_names(file: Path | str, features: Mapping[str, Mapping[str, Any]], label: str) -> tuple[str, ...]:
    """The names in `hub_features` of a column of labels, () = there are none. Raises: DataError."""
    names = features.get(label, {}).get("names", [])
    return _distinct_texts(f"{file}: names of {label!r} in its metadata of the Hub", names)


def _distinct_texts(place: str, names: Any) -> tuple[str, ...]:
    """Names of classes. Raises: DataError unless they are a list of distinct texts that are not empty."""
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise DataError(f"{place} is not a JSON list of texts that are not empty; correct or remove it")
    for name in names:
        check_utf8(Path(name), DataError)
    if len(set(names)) < len(names):
        raise DataError(f"{place} has a name twice; correct or remove it")
    return tuple(names)


def _column(file: Path, table: Any, names: tuple[str, ...], kind: str) -> str:
    """The first of these columns that a table has, else the only one of this kind by the Hub's metadata."""
    for name in names:
        if table.column_names.count(name) > 1:
            raise DataError(f"{file} has several columns {name}; remove or rename all but one")
        if name in table.column_names:
            if others := [other for other in names if other in table.column_names and other != name]:
                log.warning("%s has the columns %s and %s; %s is taken", file, name, ", ".join(others), name)
            return name
    known = [name for name, feature in hub_features(schema_metadata(file)).items() if feature.get("_type") == kind]
    if len(known) == 1 and known[0] in table.column_names:
        return known[0]
    raise DataError(f"{file} has columns {', '.join(table.column_names)}; expected one of {', '.join(names)}")


READERS = (
    Reader("parquet", _tables, _from_tables),
    Reader("WebDataset shards", shards.files_of, _from_shards),
    Reader("lists of images", lists.lists_of, lists.read),
    Reader("class folders", lambda path: True, folders.from_folders),
)
"""The first one that fits is taken."""
