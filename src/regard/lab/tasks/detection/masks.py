"""Masks as run-length encodings of COCO, by faster-coco-eval."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8

from regard.core import require

from .scenes import Rle

LARGEST = 2**24
"""Coordinates of a polygon are smaller than this."""


def _library() -> Any:
    require("faster_coco_eval")

    from faster_coco_eval.core import mask

    return mask


def encode(masks: Bool[np.ndarray, "n h w"]) -> list[Rle]:
    """Masks as compressed encodings."""
    if not len(masks):
        return []
    return list(_library().encode(np.asfortranarray(masks.transpose(1, 2, 0).astype(np.uint8))))


def decode(rles: Sequence[Rle], size: tuple[int, int]) -> UInt8[np.ndarray, "n h w"]:
    """Encodings of masks of one size (height, width) as arrays of 0 and 1."""
    if not len(rles):
        return np.zeros((0, *size), np.uint8)
    return np.ascontiguousarray(_library().decode(list(rles)).transpose(2, 0, 1))


def area(rle: Rle) -> int:
    """Number of pixels of a mask."""
    return int(_library().area([rle])[0])


def box_of(segmentation: Any, size: tuple[int, int]) -> list[float] | None:
    """[left, top, width, height] of the mask of an annotation; None if it is wrong or empty."""
    try:
        left, top, width, height = _library().toBbox([from_annotation(segmentation, size)])[0].tolist()
    except ValueError:
        return None
    return [left, top, width, height] if width and height else None


def as_text(rle: Rle) -> dict[str, Any]:
    """An encoding for JSON: its counts as a string."""
    counts = rle["counts"]
    return {
        "size": [int(side) for side in rle["size"]],
        "counts": counts.decode() if isinstance(counts, bytes) else counts,
    }


def from_annotation(segmentation: Any, size: tuple[int, int]) -> Rle:
    """The mask of an annotation: polygons, or an encoding with or without compression.

    size: (height, width) of the image. Raises: ValueError that says what is wrong.
    """
    if isinstance(segmentation, dict):
        return _from_rle(segmentation, size)
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError("segmentation is neither a list of polygons nor an encoding {size, counts}")
    for polygon in segmentation:
        numbers = isinstance(polygon, list) and all(
            isinstance(value, int | float) and abs(value) < LARGEST for value in polygon
        )
        if not numbers or len(polygon) < 6 or len(polygon) % 2:
            raise ValueError("a polygon is a list of at least three points x, y, x, y, ...")
    polygons = [[float(value) for value in polygon] for polygon in segmentation]
    return dict(_library().merge(_library().frPyObjects(polygons, *size)))


def _from_rle(segmentation: dict[str, Any], size: tuple[int, int]) -> Rle:
    sides, counts = segmentation.get("size"), segmentation.get("counts")
    if not isinstance(sides, list | tuple) or list(sides) != list(size):
        found = "x".join(map(str, sides)) if isinstance(sides, list) else sides
        raise ValueError(f"its mask has {found} pixels (height x width), the image has {size[0]}x{size[1]}")
    if isinstance(counts, list):
        if (
            any(not isinstance(count, int) or isinstance(count, bool) or count < 0 for count in counts)
            or sum(counts) != size[0] * size[1]
        ):
            raise ValueError(f"the counts of its mask are not whole numbers with the sum {size[0] * size[1]}")
        return dict(_library().frPyObjects({"size": list(size), "counts": counts}, *size))
    if not isinstance(counts, str | bytes):
        raise ValueError("its mask has no counts")
    packed = counts.encode(errors="replace") if isinstance(counts, str) else counts
    if sum(run_lengths(packed)) != size[0] * size[1]:
        raise ValueError(f"the counts of its mask have not the sum {size[0] * size[1]}: they are damaged")
    return {"size": list(size), "counts": packed}


def run_lengths(counts: bytes) -> list[int]:
    """The run lengths of compressed counts (COCO's variant of LEB128 with differences). Raises: ValueError."""
    lengths: list[int] = []
    value = shift = 0
    for byte in counts:
        code = byte - 48
        if not 0 <= code < 64:
            raise ValueError("the counts of its mask have a character that no encoding has")
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            if code & 16:
                value -= 1 << shift
            lengths.append(value + lengths[-2] if len(lengths) > 2 else value)
            value = shift = 0
    if shift or any(length < 0 for length in lengths):
        raise ValueError("the counts of its mask are damaged")
    return lengths
