"""A stream as a data set: training images in order, and a test split that is written into the cache once."""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np

from regard.core import DataError
from regard.files.arrays import add_digest, is_whole, read_array, write_array
from regard.files.cache import cache_folder
from regard.files.paths import user_path
from regard.images import own
from regard.images import shards as archives
from regard.images.digest import forget_if_changed
from regard.images.images import ImageSet, size_before_crop
from regard.images.progress import ProgressLine
from regard.images.shards import Members

from .feed import Stream
from .files import Found, find, is_remote, is_table, stamp
from .names import parse
from .shards import Shards, count
from .tables import columns_of

log = logging.getLogger("regard.data")


@lru_cache(maxsize=4)
def _find_splits(data: str, kind: str) -> Found:
    return find(parse(data), kind)


def identity(data: str, kind: str = "") -> str:
    """A stream in a run's key: its files' digest, or its name and commit on the hub, with the user's choices.

    kind: of the digest. Raises: DataError, MissingExtra.
    """
    return _present(data, kind).identity


def _present(data: str, kind: str) -> Found:
    """The files as they are now; those of the hub as they were when this process first asked for them."""
    if not (name := parse(data)).hub:
        forget_if_changed(user_path(name.place, DataError), _find_splits)
    return _find_splits(data, kind)


def splits(data: str, kind: str = "") -> tuple[tuple[str, ...], dict[str, Shards]]:
    """The classes, and the counted shards of "train" and "test". Raises: DataError, MissingExtra."""
    found = _present(data, kind)
    columns = columns_of(found.splits["train"][0], parse(data)) if is_table(found.splits["train"][0]) else None
    counted = {split: count(found, split, columns) for split in ("train", "test")}
    numbers = range(int(counted["train"].high.max(initial=-1)) + 1)
    classes = (columns.classes if columns is not None else ()) or tuple(map(str, numbers))
    for split, shards in counted.items():
        shards.check(split, len(classes))
    return classes, counted


def load(data: str, size: tuple[int, int], kind: str = "") -> ImageSet:
    """A stream for images of `size` = (height, width); RGB of 8/7 of it, which are cropped later.

    Nothing of the training split is read here but its counts. Raises: DataError, MissingExtra.
    """
    classes, counted = splits(data, kind)
    found, train = _present(data, kind), counted["train"]
    single = np.count_nonzero(train.low == train.high)
    if len(train) > 1 and 2 * single > len(train):
        log.warning("%d of %d shards of %s have one class only: write them in mixed order, since a stream mixes only "
                    "images that lie near each other", single, len(train), found.title)  # fmt: skip
    before = size_before_crop(size)
    stamps = [stamp(file) for file in found.splits["test"]]
    key = "stream1-" + hashlib.sha256(f"{found.identity} {stamps}".encode()).hexdigest()[:16]
    test = own.from_files(_test_split(found, counted["test"], key), before, "stop", f"{key}-test")
    stream = Stream.of(train, len(classes), before)
    return ImageSet(found.identity, classes, stream, test, hashlib.sha256(found.identity.encode()).hexdigest())


def _test_split(found: Found, shards: Shards, key: str) -> tuple[Members, Sequence[str], np.ndarray]:
    """Images, names and labels of a test split, of which every image can be read by its number.

    `.tar` files of this machine are read in place; all others are copied into one file in the cache.
    """
    files = found.splits["test"]
    if all(file.lower().endswith(".tar") and not is_remote(file) for file in files):
        return archives.read([Path(file) for file in files])
    path = cache_folder() / "streams" / f"{key}-test.bytes"
    index = path.with_suffix(".npy")
    table = read_array(index)
    if table is None or table.shape != (shards.images, 3) or not is_whole(path):
        table = _copy(shards, path, index)
    start, length, labels = table.T.copy()
    members = Members((path,), np.zeros(len(table), np.int32), start, length)
    return members, [f"image {row} of the test split of {found.title}" for row in range(len(table))], labels


def _copy(shards: Shards, path: Path, index: Path) -> np.ndarray:
    """Start, bytes and label of each image, (n, 3), after all have been written one after another."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w+b") as target:
            table = np.array(list(_write(shards, target)), np.int64).reshape(-1, 3)
            add_digest(target, path.name)
        part.replace(path)
        write_array(index, table)
    except OSError as error:
        raise DataError(f"the test split of {shards.title} cannot be kept in {path.parent}: {error}") from error
    return table


def _write(shards: Shards, target: IO[bytes]) -> Iterator[tuple[int, int, int]]:
    line = ProgressLine()
    for shard in range(len(shards)):
        for _, image, label in shards.read(shard):
            yield target.tell(), target.write(image), label
            line.show(f"keeping the test split of {shards.title}: {target.tell() / 1e6:.0f} MB")
