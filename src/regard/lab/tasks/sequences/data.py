"""The named sets of sequences, what is known of them without reading them, and the meaning of `--data`."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from regard.images.digest import forget_if_changed
from regard.lab.data import catalog
from regard.lab.data.generated import with_revision

from . import listops, matching, pathfinder, pixels, text
from .tokens import SequenceSet

NAMED = {
    **dict.fromkeys((*listops.LISTOPS, *pathfinder.PATHFINDER), "generated"),
    matching.NAME: "generated",
    "imdb": "REGARD_DATA/imdb",
    "aan": "REGARD_DATA/aan",
    **pixels.NAMED,
}
"""Every set that `--data` accepts by name, and where it comes from; anything else is a path of the user's own texts."""

LENGTHS = {"listops": 2048, "aan": 4000, "listops-mini": 96, "cifar10": 256, matching.NAME: matching.LENGTH}
TEXT_LENGTH = 512
AAN = (147_086, 17_437)
"""Published numbers of (training, test) pairs."""


@dataclass(frozen=True)
class Facts:
    """What a model depends on. alphabet: "listops", "pixels" or "bytes". vocabulary: number of ids, with padding."""

    classes: int
    alphabet: str
    vocabulary: int
    padded: bool
    pairs: bool


def default_length(data: str) -> int:
    """Symbols of a padded sequence: the whole one, 256 pixels of CIFAR-10, 512 bytes of texts."""
    if data in pathfinder.PATHFINDER:
        return pathfinder.PATHFINDER[data].side ** 2
    if data in pixels.NAMED and data not in LENGTHS:
        return int(np.prod(catalog.SIZES.get(data, (32, 32))))
    return LENGTHS.get(data, TEXT_LENGTH)


def known_facts(data: str) -> Facts:
    """The facts of a named set without reading it; those of single texts with two classes for the user's own data."""
    if data in listops.LISTOPS:
        return Facts(10, "listops", len(listops.SYMBOLS) + 1, True, False)
    if data in pathfinder.PATHFINDER:
        return Facts(2, "pixels", pixels.LEVELS + 1, False, False)
    if data in pixels.NAMED:
        return Facts(catalog.classes_and_channels(data)[0], "pixels", pixels.LEVELS + 1, False, False)
    return Facts(2, "bytes", text.BYTES + 1, True, data in (matching.NAME, "aan"))


def facts_of(sequences: SequenceSet) -> Facts:
    """The facts of a set that was read."""
    return Facts(
        len(sequences.classes), sequences.alphabet, sequences.symbols + 1, sequences.padded, sequences.pairs
    )  # fmt: skip


def known_counts(data: str) -> tuple[int, int] | None:
    """Numbers of (training, test) samples of a named set that are known without reading it, else None."""
    specs: dict[str, Any] = {**listops.LISTOPS, **pathfinder.PATHFINDER}
    sizes = {name: spec.sizes for name, spec in specs.items()} | {matching.NAME: matching.SIZES}
    if data in sizes:
        train, _, test = sizes[data]
        return train, test
    return {"aan": AAN, "imdb": (25_000 - text.IMDB_HELD, 25_000)}.get(data) or catalog.known_counts(data)


def identity(data: str) -> str:
    """The data in a run's key: the name of a named set, or a digest of the user's own tables. Raises: DataError."""
    return with_revision(data) if data in NAMED else f"own:{_digest(path_of(data))}"


def path_of(data: str) -> Path:
    """The user's own table or folder. Raises: DataError if `data` is neither a known name nor an existing table."""
    expected = (
        f"a table ({', '.join(text.SUFFIXES)}) with columns text and label, or a folder with tables train and test"
    )
    return catalog.own_path(data, NAMED, expected, text.SUFFIXES)


def load(data: str, length: int) -> SequenceSet:
    """A set by name or path. length: of a sequence; images are resized to it. Raises: DataError, ConfigError."""
    if data in NAMED:
        return _load(data, length if data in pixels.NAMED else 0, catalog.folder_in_use())
    path = path_of(data)
    return _load(str(path), 0, _digest(path))


def _digest(path: Path) -> str:
    """`text.digest`, which is kept in this process, computed anew if the files have changed meanwhile."""
    forget_if_changed(path, text.digest, _load)
    return text.digest(path)


@lru_cache(maxsize=2)
def _load(data: str, length: int, root: str) -> SequenceSet:
    if data in listops.LISTOPS:
        return listops.load(data)
    if data in pathfinder.PATHFINDER:
        return pathfinder.load(data)
    if data in pixels.NAMED:
        return pixels.load(data, length)
    named = {matching.NAME: matching.load, "imdb": text.imdb, "aan": text.aan}
    return named[data]() if data in named else text.own(Path(data))
