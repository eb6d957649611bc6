"""The trivial answer: every connected component of Otsu's threshold is an object of the most frequent class."""

import numpy as np
from jaxtyping import UInt8

from .masks import encode
from .score import Found

SMALLEST = 10
"""Components with fewer pixels are left out."""


def otsu(grey: UInt8[np.ndarray, "h w"]) -> int:
    """The threshold with the largest variance between the pixels up to it and those above (Otsu 1979)."""
    counts = np.bincount(grey.ravel(), minlength=256).astype(np.float64)
    below, moments = counts.cumsum(), (counts * np.arange(256)).cumsum()
    above, total = below[-1] - below, moments[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = below * above * (moments / below - (total - moments) / above) ** 2
    return int(np.nan_to_num(variance, posinf=0.0).argmax())


def components(pixels: UInt8[np.ndarray, "h w C"], label: int, most: int, with_masks: bool) -> Found:
    """The connected components of the rarer side of the threshold, at most `most`, the largest ones; all of score 1."""
    from scipy import ndimage

    grey = pixels.mean(-1).round().astype(np.uint8)
    bright = grey > otsu(grey)
    foreground = bright if bright.mean() <= 0.5 else ~bright
    marked, number = ndimage.label(foreground)
    areas = np.bincount(marked.ravel(), minlength=number + 1)[1:]
    order = np.argsort(-areas, kind="stable")[:most]
    chosen = order[areas[order] >= SMALLEST]
    slices = ndimage.find_objects(marked)
    boxes = [(slices[i][1].start, slices[i][0].start, slices[i][1].stop, slices[i][0].stop) for i in chosen]
    masks = encode(np.stack([marked == i + 1 for i in chosen])) if with_masks and len(chosen) else []
    return Found(
        np.asarray(boxes, np.float32).reshape(-1, 4),
        np.full(len(chosen), label, np.int64),
        np.ones(len(chosen), np.float32),
        masks if with_masks else None,
    )
