"""Notes: what is unusual in data that are read all the same, counted for `regard data check` and for training."""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from regard.files.paths import files_below, printable

from .images import SUFFIXES

log = logging.getLogger("regard.data")

ELSEWHERE = "images that are not where the list or annotation says, found by their names"


class Notes:
    """What a reader does with data that are not as they should be: for each kind of thing its number and a place."""

    def __init__(self) -> None:
        self.places: dict[str, list[str]] = {}

    def add(self, kind: str, place: object) -> None:
        """Count one thing. kind: a clause such as "boxes that reach beyond their image and are clipped"."""
        self.places.setdefault(kind, []).append(printable(str(place)))

    def add_unnamed(self, folder: Path, named: Container[Path]) -> None:
        """Count the images below a folder that no list or annotation names. Raises: DataError as `files_below`."""
        for image in files_below(folder, SUFFIXES):
            if image not in named:
                self.add("images that no list or annotation names, which are not used", image)

    def sentences(self) -> list[str]:
        """One for each kind."""
        return [f"{kind}: {len(places)}, the first: {places[0]}" for kind, places in self.places.items()]

    def warn(self) -> None:
        """One warning for each kind, one after another."""
        for sentence in self.sentences():
            log.warning("%s", sentence)


def warn_of_copies(splits: Mapping[str, Iterable[object]]) -> None:
    """Warn of files of the training that lie in another split, too, byte by byte. Only files of one size are read.

    splits: the images of "train" and others; what is no path is left out.
    """
    alike: dict[int, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for split, images in splits.items():
        for image in images:
            with suppress(OSError):
                if isinstance(image, Path):
                    alike[image.stat().st_size][split].append(image)
    notes = Notes()
    for parts in alike.values():
        learned = {_digest(file): file for file in parts["train"]} if len(parts) > 1 and parts["train"] else {}
        for split, files in parts.items():
            for file in files if learned and split != "train" else ():
                if (same := learned.get(_digest(file))) and same != file:  # of one file in two lists, the reader warns
                    kind = f"images of {split} that are in train, too, so that their scores are no test"
                    notes.add(kind, f"{file} is {same}")
    notes.warn()


def _digest(file: Path) -> bytes:
    """That of a file's bytes; of its name if it cannot be read."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()
    except OSError:
        return str(file).encode()
