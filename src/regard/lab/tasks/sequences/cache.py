"""Generated samples on the disk: arrays under a checksum, in parts, so that an interrupted generation continues.

Parts are pure functions of their index. Processes that generate the same set at the same time start at different parts
and read those that others have written.
"""

import io
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from regard.core import StoreError
from regard.files.atomic import read_if_present, write_atomically
from regard.files.cache import cache_folder
from regard.files.records import seal, unseal
from regard.lab.data.generated import REVISIONS

from .tokens import Split, Tokens

log = logging.getLogger("regard.data")


def load_or_make(key: str, parts: int, make: Callable[[int], Split]) -> Split:
    """The parts 0 .. parts-1 that `make` returns, joined; read from `cache_folder()` where they are stored.

    If the cache cannot be written, there is a warning and the samples stay in memory.
    """
    folder = cache_folder() / "sequences"
    found: dict[int, Split] = {}
    started, made, warned = time.monotonic(), 0, False
    for index in sorted(range(parts), key=lambda index: (index + os.getpid()) % parts):
        path = folder / f"{key}-{index:04d}of{parts}.part"
        part = _read(path)
        if part is None:
            part = make(index)
            made += 1
            try:
                _write(path, part)
            except StoreError as error:
                if not warned:
                    log.warning("generated sequences are not cached: %s", error)
                warned = True
            if made in (1, 10) or made % 50 == 0:
                per_part = (time.monotonic() - started) / made
                log.info("%s: about %.0f s of generation left", key, per_part * (parts - len(found) - 1))
        found[index] = part
    return concatenate([found[index] for index in range(parts)])


def generated_splits(name: str, sizes: tuple[int, int, int], part: int, make: Callable[[str], Split]) -> list[Split]:
    """The splits train, held and test of a generated set. make: returns `part` samples of a seed, such as "held0"."""

    def split_of(split: str, size: int) -> Split:
        return load_or_make(f"{name}-{REVISIONS[name]}-{split}", -(-size // part), lambda n: make(f"{split}{n}"))

    return [split_of(split, size) for split, size in zip(("train", "held", "test"), sizes, strict=True)]


def concatenate(splits: list[Split]) -> Split:
    """The samples of several splits, one after the other."""
    lengths = np.concatenate([split.tokens.lengths for split in splits])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    symbols = np.concatenate([split.tokens.symbols for split in splits])
    return Split(Tokens(symbols, starts), np.concatenate([split.labels for split in splits]), splits[0].pairs)


def _read(path: Path) -> Split | None:
    """A stored part, or None if there is none that can be read."""
    try:
        data = read_if_present(path)
        if data is None:
            return None
        with np.load(io.BytesIO(unseal(path, data)), allow_pickle=False) as arrays:
            starts, labels = arrays["starts"], arrays["labels"]
            return Split(Tokens(arrays["symbols"], starts), labels, pairs=len(starts) - 1 == 2 * len(labels))
    except Exception as error:  # zipfile has errors of its own for a damaged file
        log.warning("%s is damaged (%s) and is generated again", path, error)
        return None


def _write(path: Path, part: Split) -> None:
    content = io.BytesIO()
    np.savez(content, symbols=part.tokens.symbols, starts=part.tokens.starts, labels=part.labels)
    write_atomically(path, seal(content.getvalue()))
