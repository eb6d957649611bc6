"""Photographs of a turned camera: whether annotations and masks were made before or after the image was turned."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from regard.core import DataError

from .images import TURNED, header
from .notes import Notes

Size = tuple[int, int]
"""(height, width)."""
KEPT = "pictures that EXIF data turn, annotated as they are stored, so that no picture of these data is turned"
UNKNOWN = (
    "pictures that EXIF data turn and are turned, as nothing tells how they were annotated (--exif keep: as stored)"
)


def annotated_as_stored(
    root: Path, images: Iterable[tuple[Path, Any]], size_of: Callable[[Any], Size | None], exif: str, notes: Notes
) -> bool:
    """Whether no image of these data is to be turned upright.

    images: files, and their annotations or masks, of which `size_of` returns the (height, width), None = not known.
    exif: "keep" or "turn" say so, "" = by the images that EXIF data turn by 90 degrees and whose sides differ: their
    annotations have the sides as they are stored, or exchanged. Raises: DataError if some have the one and some the
    other.
    """
    if exif:
        return exif == "keep"
    turned: list[Path] = []
    stored: list[Path] = []
    upright: list[Path] = []
    for file, annotation in images:
        try:
            sides, orientation = header(file)
        except DataError:  # said where the image is decoded
            continue
        if orientation not in range(2, 9):
            continue
        turned.append(file)
        if orientation in TURNED and sides[0] != sides[1]:
            size = size_of(annotation)
            stored += [file] if size == sides else []
            upright += [file] if size == sides[::-1] else []
    if stored and upright:
        listed = (f"{', '.join(map(str, files[:5]))}{', ...' if len(files) > 5 else ''}" for files in (stored, upright))
        raise DataError(
            "of the pictures of {} that EXIF data turn, some are annotated as stored ({}), some upright ({}); annotate "
            "all in one way, or choose with --exif keep or --exif turn".format(root, *listed)
        )
    for file in stored:
        notes.add(KEPT, file)
    if not stored and not upright:
        for file in turned:
            notes.add(UNKNOWN, file)
    return bool(stored)
