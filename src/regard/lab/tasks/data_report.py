"""What a check of data reports, and the pictures that it has read: their sizes, modes and copies."""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from regard.images.images import DARK, Source, decode, omissions, open_image
from regard.images.notes import Notes
from regard.images.progress import ProgressLine

LARGE = 89_000_000
"""Pixels of an image that most readers warn of."""
SKIPPED = "skipped: "
"""The beginning of a reader's warning of what it skips, at which a training stops unless it skips too."""


@dataclass
class DataReport:
    """What was found. kind: the task. rows: for each split and class (or language) its counts and ranges. problems:
    what stops a training. warnings: what makes its score doubtful, such as duplicates between training and test. hints:
    what else the data are for."""

    kind: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)


@contextmanager
def collect_into(report: DataReport) -> Iterator[None]:
    """What the readers of the block skip becomes a problem, what else they warn of a warning."""

    def emit(record: logging.LogRecord) -> None:
        said = record.getMessage()
        (report.problems if said.startswith(SKIPPED) else report.warnings).append(said.removeprefix(SKIPPED))

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    log = logging.getLogger("regard.data")
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate


class Pictures:
    """Sizes, modes and copies of the images that are read."""

    def __init__(self, report: DataReport, total: int) -> None:
        self.report, self.total, self.read, self.line = report, total, 0, ProgressLine()
        self.copies: dict[bytes, dict[str, str]] = defaultdict(dict)
        self.largest: dict[str, list[int]] = defaultdict(list)
        self.notes = Notes()

    def add(self, split: str, source: Source, name: str, where: str = "") -> tuple[tuple[int, int], str] | None:
        """(height, width) and mode of an image, or None with a problem if it cannot be read.

        where: a part in which copies are no warning; "" = the split.
        """
        self.read += 1
        self.line.show(f"{self.read} of {self.total} images read")
        try:
            content = source if isinstance(source, bytes) else Path(str(source)).read_bytes()
            shape = decode(source, None, 3).shape
        except Exception as error:  # Pillow raises various errors for a damaged file
            self.report.problems.append(f"{name} cannot be read as an image: {error}")
            return None
        self.copies[hashlib.sha256(content).digest()].setdefault(where or split, name)
        mode, largest, left_out = _mode(content)
        if shape[0] * shape[1] > LARGE:
            self.notes.add(
                f"images of more than {LARGE // 10**6} million pixels, which are slow: shrink or tile them", name
            )
        if left_out:
            self.notes.add(f"images of which {left_out} are left out", name)
        self.largest[split] += [] if largest is None else [largest]
        return (shape[0], shape[1]), mode

    def compare(self) -> None:
        """Add warnings of images that are in several splits, of parts of images that are not read, and of splits whose
        16 bits are hardly used."""
        self.report.warnings += self.notes.sentences()
        for split, largest in self.largest.items():
            if largest and max(largest) < DARK:
                self.report.warnings.append(
                    f"no value of the {len(largest)} images of 16 bits of {split} is above {max(largest)} of 65535: "
                    "they are read as almost black; save them with 8 bits, or multiplied to the full range"
                )
        for places in self.copies.values():
            if len(places) > 1:
                self.report.warnings.append(f"the same image in {join_places(places)}")


def _mode(content: bytes) -> tuple[str, int | None, str]:
    """The mode of an image, the largest value of one with 16 bits, and what `decode` leaves out."""
    with open_image(content) as image:
        left_out = omissions(image)
        return image.mode, int(np.asarray(image).max()) if image.mode.startswith("I") else None, left_out


def different_sizes(what: str, *sizes: tuple[int, ...]) -> str:
    """A sentence."""
    shown = " and ".join("x".join(map(str, size)) for size in sizes)
    return f"{what} have different sizes (height x width): {shown}"


def join_places(places: dict[str, str]) -> str:
    """Split and name of each."""
    return " and ".join(f"{split}: {name}" for split, name in places.items())


def ranges(found: Sequence[tuple[tuple[int, int], str]]) -> dict[str, Any]:
    """Smallest and largest sides (height x width), and modes with their numbers."""
    if not found:
        return {"smallest": None, "largest": None, "modes": ""}
    sides = np.array([size for size, _ in found])
    modes = Counter(mode for _, mode in found)
    return {
        "smallest": "x".join(map(str, sides.min(0))), "largest": "x".join(map(str, sides.max(0))),
        "modes": ", ".join(f"{mode} {number}" for mode, number in modes.most_common()),
    }  # fmt: skip
