"""Folders of small images with masks, whose labels are random."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from layouts_of_boxes import SPLITS, picture

SHAPE = (12, 16)
FOLDERS = ("images/{0}/{1}.png", "masks/{0}/{1}.png")
BESIDE = ("{0}/{1}.png", "{0}annot/{1}.png")
LONG = {"train": "training", "val": "validation", "test": "testing"}


def labels(number: int, classes: int = 3, size: tuple[int, int] = SHAPE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, classes, size).astype(np.uint8)


def mask(path: Path, values: np.ndarray, mode: str = "") -> None:
    """A mask of labels (height, width) or of colours; mode: of the file, "P" with a palette of colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    if mode == "P" and values.ndim == 2:
        image.putpalette([value for label in range(256) for value in (label, 255 - label, 7)])
    elif mode == "P":
        image = image.quantize(3, dither=Image.Dither.NONE)
    elif mode:
        image = image.convert(mode)
    image.save(path)


def pairs(
    root: Path,
    image: str = FOLDERS[0],
    name: str = FOLDERS[1],
    values: Callable[[int], np.ndarray] = labels,
    mode: str = "",
    splits: tuple[tuple[str, range], ...] = SPLITS,
) -> Path:
    """Four training and two further images; {0} stands for the split, {1} for the number, {2} for a longer {0}."""
    for split, numbers in splits:
        for number in numbers:
            picture(root / image.format(split, number, LONG[split]), number, SHAPE[::-1])
            mask(root / name.format(split, number, LONG[split]), values(number), mode)
    return root
