"""The shards of a stream: archives, and row groups of tables. Each is read in order, from its beginning.

Their images are counted before the training: by the footers of tables and by the headers of `.tar` files on this
machine, which is quick; compressed and remote archives are read to the end once. The counts stay in the cache.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import DataError
from regard.files.cache import cache_folder, read_entries, write_entries
from regard.images import shards as archives
from regard.images.images import check_labels
from regard.images.progress import ProgressLine

from . import tables
from .files import Found, is_remote, open_file, stamp
from .tables import Columns

THREADS = 8
"""Files that are counted at the same time."""
Sample = tuple[str, bytes, int]
"""Name in its shard, encoded image, label."""
Count = tuple[int, int, int, int]
"""Row group (0 of an archive), images, smallest and largest label."""


@dataclass(frozen=True, eq=False)
class Shards:
    """The shards of a split, a few numbers each, which worker processes share.

    title: of the stream, for messages. file, group: of each shard its index into `files` and its row group, (n,).
    counts: images of each shard, (n,) int64. low, high: its smallest and largest label, (n,). columns: of tables.
    """

    title: str
    files: tuple[str, ...]
    file: np.ndarray
    group: np.ndarray
    counts: np.ndarray
    low: np.ndarray
    high: np.ndarray
    columns: Columns | None

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def images(self) -> int:
        """Number of images of the split."""
        return int(self.counts.sum())

    def name(self, shard: int) -> str:
        """The file of a shard, for messages."""
        return self.files[self.file[shard]]

    def read(self, shard: int, skip: int = 0) -> Iterator[Sample]:
        """The images of a shard in their order, without the first `skip`.

        Raises: DataError for a shard that is damaged, or has another number of images than were counted.
        """
        number, count = skip, int(self.counts[shard])
        for sample in self._samples(shard, skip):
            number += 1
            if number > count:
                break
            yield sample
        if number != count:
            raise DataError(f"{self.name(shard)} has other images than the {count} that were counted; it was changed "
                            "or is damaged: write or download it again")  # fmt: skip

    def _samples(self, shard: int, skip: int) -> Iterator[Sample]:
        file = self.name(shard)
        if self.columns is not None:
            yield from tables.in_order(file, int(self.group[shard]), self.columns, skip)
            return
        with open_file(file) as stream:
            for number, sample in enumerate(archives.in_order(file, stream)):
                if number >= skip:
                    yield sample

    def check(self, split: str, classes: int) -> None:
        """Raises: DataError without images, for a single class, and for a label outside 0 .. classes - 1."""
        if not self.images:
            raise DataError(f"the {split} split of {self.title} has no images")
        for shard in np.flatnonzero((self.low < 0) | (self.high >= classes))[:1].tolist():
            label = self.low[shard] if self.low[shard] < 0 else self.high[shard]
            hint = "; ?test=NAME evaluates another split" if split == "test" else ""
            raise DataError(f"{self.name(shard)}: label {label} is outside 0..{classes - 1} ({classes} classes){hint}")
        check_labels(f"the {split} split of {self.title}", np.array([self.low.min(), self.high.max()]), classes)


def count(found: Found, split: str, columns: Columns | None) -> Shards:
    """The shards of a split with their numbers of images; what was counted before is read from the cache.

    Raises: DataError for files that are damaged or cannot be read.
    """
    files = found.splits[split]
    cache = _Cache(found, split, columns)
    line = ProgressLine()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for progress, (name, entry) in enumerate(pool.map(cache.of, files), 1):
                cache.found[name] = entry
                line.show(f"counting the images of {found.title}: {progress} of {len(files)} files")
    finally:
        cache.save()
    rows = [(number, *row) for number, file in enumerate(files) for row in cache.found[file]["counts"]]
    table = np.array(rows, np.int64).reshape(-1, 5).T
    file, group, counts, low, high = (column.copy() for column in table)
    return Shards(found.title, files, file, group, counts, low, high, columns)


def _count(file: str, columns: Columns | None) -> list[Count]:
    if columns is not None:
        return tables.measure(file, columns)
    if is_remote(file) or not file.lower().endswith(".tar"):
        with open_file(file) as stream:
            labels = [label for _, _, label in archives.in_order(file, stream)]
    else:
        labels = [label for _, _, label in archives.index(Path(file))]
    return [(0, len(labels), min(labels), max(labels))] if labels else []


class _Cache:
    """The counts of a split's files, by file; those of a file that has changed since are not used."""

    def __init__(self, found: Found, split: str, columns: Columns | None) -> None:
        name = hashlib.sha256(f"{found.identity}\0{split}\0{found.title}".encode()).hexdigest()[:16]
        self.path = cache_folder() / "streams" / f"{name}.json"
        self.columns = columns
        self.found: dict[str, Any] = {}
        self.known = read_entries(self.path)

    def of(self, file: str) -> tuple[str, dict[str, Any]]:
        """The file, with its stamp and counts."""
        entry, now = self.known.get(file), list(stamp(file))
        if entry is not None and entry["stamp"] == now:
            return file, entry
        return file, {"stamp": now, "counts": [list(row) for row in _count(file, self.columns)]}

    def save(self) -> None:
        """Write what is known; without a cache the files are counted again."""
        if self.found != self.known:
            write_entries(self.path, {**self.known, **self.found})
