"""Notes: what is unusual in data that are read all the same, counted for `regard data check` and for training."""

import logging
from collections.abc import Container
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
