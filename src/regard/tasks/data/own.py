"""The user's own data: a folder of class folders, or parquet with an image column and a label column."""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from regard.core import DataError

from .images import Images, ImageSet, Source, cached, check_labels, decode, decode_all, larger, readable_rows
from .streams import generator

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
IN_MEMORY = 4 * 2**30
"""Bytes of decoded pixels up to which a split is decoded once; larger ones are decoded batch by batch."""

_TRAINS, _TESTS = ("train", "training"), ("test", "val", "valid", "validation")  # in any case; the first is taken
_IMAGES, _LABELS = ("img", "image", "picture"), ("label", "class", "target", "fine_label")


class Lazy:
    """Looks like an array of pixels (n, height, width, 3) uint8; every access decodes the images that it asks for.

    Raises: DataError that names a damaged image when it is met.
    """

    def __init__(self, sources: Sequence[Source], names: Sequence[str], size: tuple[int, int]) -> None:
        self.sources, self.names, self.size = sources, names, size
        self.shape = (len(sources), *size, 3)

    def __len__(self) -> int:
        return len(self.sources)

    def part(self, rows: slice | np.ndarray) -> "Lazy":
        """The same for a part of the images: a slice, or their numbers."""
        if isinstance(rows, slice):
            return type(self)(self.sources[rows], self.names[rows], self.size)
        return type(self)([self.sources[row] for row in rows], [self.names[row] for row in rows], self.size)

    def __getitem__(self, rows: Any) -> np.ndarray:
        chosen = np.arange(len(self))[rows]
        if chosen.ndim == 0:
            return self._image(int(chosen))
        return (
            np.stack([self._image(int(row)) for row in chosen])
            if len(chosen)
            else np.empty((0, *self.shape[1:]), np.uint8)
        )

    def _image(self, row: int) -> np.ndarray:
        try:
            return decode(self.sources[row], self.size, 3)
        except Exception as error:  # Pillow raises many kinds for a damaged file
            raise DataError(f"{self.names[row]} cannot be read as an image ({error}); repair or remove it") from error


@lru_cache(maxsize=16)
def digest(path: Path) -> str:
    """12 hex digits that say which data these are: of a folder the relative paths, sizes and first 4 KiB of its images,
    of parquet the whole files. Where the data lie does not matter. Raises: DataError if there are none."""
    total = hashlib.sha256()
    tables = _tables(path)
    if tables:
        for split, file in sorted(tables.items()):
            with file.open("rb") as stream:
                total.update(split.encode() + hashlib.file_digest(stream, "sha256").digest())
        return total.hexdigest()[:12]
    for file in _image_files(path):
        size, head = fingerprint(file)
        total.update(f"{file.relative_to(path).as_posix()}\0{size}\0{head}\n".encode())
    return total.hexdigest()[:12]


def fingerprint(file: Path) -> tuple[int, str]:
    """Size and digest of the beginning; a file that cannot be opened is named when its image is decoded."""
    try:
        with file.open("rb") as stream:
            return file.stat().st_size, hashlib.sha256(stream.read(4096)).hexdigest()
    except OSError:
        return 0, ""


def load(path: Path, size: tuple[int, int], corrupt: str) -> ImageSet:
    """A folder or parquet of the user, as RGB of 8/7 of `size`, from which training and test cut windows of `size`.

    Splits are called train or training, and test, val, valid or validation, in any case: folders of class folders, or
    .parquet files. Where there are several of the second kind the first in this order is the test and the others are
    not used. Without one every fifth image of a fixed permutation is the test.
    Raises: DataError.
    """
    tables = _tables(path)
    classes, splits = _from_tables(tables) if tables else _from_folders(path)
    if len(splits) == 1:
        splits = _divide(*splits["train"])
    total = digest(path)
    made = {}
    for split, (sources, names, labels) in splits.items():
        check_labels(f"the {split} split of {path}", labels, len(classes))
        made[split] = from_files(sources, names, labels, larger(size), corrupt, f"own3-{total}-{split}")
    return ImageSet(f"own:{total}", classes, made["train"], made["test"], total)


_Split = tuple[list[Source], list[str], np.ndarray]


def from_files(
    sources: list[Source], names: list[str], labels: np.ndarray, size: tuple[int, int], corrupt: str, key: str
) -> Images:
    """Images of one size, decoded and kept, or decoded one at a time where all would not fit in memory.

    key: says which files these are, for the cache. Raises: DataError.
    """
    if len(sources) * size[0] * size[1] * 3 > IN_MEMORY:
        if corrupt == "skip":
            rows = readable_rows(key, sources, lambda row: names[row], 3)
            sources, names, labels = [sources[row] for row in rows], [names[row] for row in rows], labels[rows]
        return Images(Lazy(sources, names, size), labels)
    whole = f"{key}-{size[0]}x{size[1]}-{corrupt}"
    return cached(whole, lambda: decode_all(sources, labels, lambda row: names[row], size, 3, corrupt))


def _divide(sources: list[Source], names: list[str], labels: np.ndarray) -> dict[str, _Split]:
    order = generator("own", "split").permutation(len(sources))
    test, train = np.sort(order[::5]), np.sort(np.delete(order, np.s_[::5]))
    return {
        name: ([sources[row] for row in rows], [names[row] for row in rows], labels[rows])
        for name, rows in (("train", train), ("test", test))
    }


def _image_files(path: Path) -> list[Path]:
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and not file.is_dir())
    if not files:
        raise DataError(f"{path} has no images ({', '.join(sorted(SUFFIXES))}); expected one folder a class")
    return files


def _from_folders(path: Path) -> tuple[tuple[str, ...], dict[str, _Split]]:
    if not path.is_dir():
        raise DataError(f"{path} is neither a folder of class folders nor a .parquet file")
    _image_files(path)
    roots = _split_folders(path)
    for folder in (folder for root in roots.values() for folder in sorted(root.iterdir()) if folder.is_dir()):
        if folder.name.lower() in (*_TRAINS, *_TESTS) and _has_folders(folder):
            raise DataError(
                f"{folder} is called like a split, has folders itself, and lies where class folders are expected; "
                f"expected {path}/train/CLASS and, if there is a test, {path}/test/CLASS (or val)"
            )
    classes = tuple(sorted(folder.name for folder in roots["train"].iterdir() if folder.is_dir()))
    if len(classes) < 2:
        found = f"one class folder only ({classes[0]})" if classes else "no class folders"
        raise DataError(f"{roots['train']} has {found}; classification needs at least two, each with its images")
    splits: dict[str, _Split] = {}
    for split, root in roots.items():
        unknown = sorted(folder.name for folder in root.iterdir() if folder.is_dir() and folder.name not in classes)
        if unknown:
            raise DataError(f"{root} has classes that training has not: {', '.join(unknown[:5])}")
        files = [
            (file, label)
            for label, name in enumerate(classes)
            if (root / name).is_dir()
            for file in _image_files(root / name)
        ]
        splits[split] = ([f for f, _ in files], [str(f) for f, _ in files], np.array([y for _, y in files], np.int64))
    return classes, splits


def _split_folders(path: Path) -> dict[str, Path]:
    """The folders of training and test; `path` itself is that of training where it has no such folder.

    A folder "train" of loose images beside folders of other names is a class.
    """
    folders = {folder: folder.name.lower() for folder in sorted(path.iterdir()) if folder.is_dir()}
    found = _called(folders)
    if "train" in found and (_has_folders(found["train"]) or set(folders.values()) <= {*_TRAINS, *_TESTS}):
        return found
    return {"train": path}


def _has_folders(path: Path) -> bool:
    return any(inner.is_dir() for inner in path.iterdir())


def _called(paths: dict[Path, str]) -> dict[str, Path]:
    """Training and test among paths with the names that they go by. Raises: DataError if one could be either of two."""
    found: dict[str, Path] = {}
    for split, kinds in (("train", (_TRAINS,)), ("test", tuple((word,) for word in _TESTS))):
        for words in kinds:
            named = [path for path, name in paths.items() if name in words]
            if len(named) > 1:
                raise DataError(f"{named[0]} and {named[1].name} are one split by their names; keep or rename one")
            if named:
                found.setdefault(split, named[0])
    return found


def _tables(path: Path) -> dict[str, Path]:
    if path.suffix == ".parquet" and path.is_file():
        return {"train": path}
    if not path.is_dir():
        return {}
    tables = {file: file.stem.lower() for file in sorted(path.glob("*.parquet")) if file.is_file()}
    found = _called(tables)
    return found if "train" in found else {}


def _from_tables(tables: dict[str, Path]) -> tuple[tuple[str, ...], dict[str, _Split]]:
    splits: dict[str, _Split] = {}
    names: tuple[str, ...] = ()
    for split, file in tables.items():
        table = read_table(file)
        image, label = (_column(file, table, known) for known in (_IMAGES, _LABELS))
        labels = table[label].to_numpy()
        if labels.dtype.kind not in "iu":
            raise DataError(f"{file}: column {label!r} holds {labels.dtype}, expected whole numbers from 0")
        sources = image_column(file, table[image])
        names = names or class_names(file)
        splits[split] = (sources, [f"row {row} of {file}" for row in range(len(sources))], labels.astype(np.int64))
    if not len(splits["train"][2]):
        raise DataError(f"{tables['train']} has no rows")
    count = int(splits["train"][2].max()) + 1
    return names or tuple(str(label) for label in range(count)), splits


def read_table(file: Path) -> Any:
    """A parquet file as a pyarrow table. Raises: DataError if it is damaged."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as parquet ({error}); get it again") from error


def image_column(file: Path, column: Any) -> list[Source]:
    """Encoded images of a column of bytes, or of structs with `bytes`, as Hugging Face writes. Raises: DataError."""
    values = column.to_pylist()
    sources = [value.get("bytes") if isinstance(value, dict) else value for value in values]
    for row, source in enumerate(sources):
        if not isinstance(source, bytes):
            raise DataError(f"row {row} of {file} has no image bytes but {type(source).__name__}")
    return cast(list[Source], sources)


def class_names(file: Path) -> tuple[str, ...]:
    """The names in the schema's metadata (`class_names`, a JSON list), or an empty tuple. Raises: DataError."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_schema(file).metadata or {}
    try:
        names = json.loads(metadata.get(b"class_names", b"[]"))
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file}: class_names in its metadata is no JSON list of words; correct it or leave it out")
    return tuple(names)


def _column(file: Path, table: Any, known: tuple[str, ...]) -> str:
    for name in known:
        if name in table.column_names:
            return name
    raise DataError(f"{file} has columns {', '.join(table.column_names)}; expected one of {', '.join(known)}")
