"""Images as sequences of grey values, row by row: the image task of the Long Range Arena, on named sets of images."""

import math
from pathlib import Path

import numpy as np

from regard.core import ConfigError
from regard.images.images import Images, read_image
from regard.lab.data import catalog

from .tokens import SequenceSet, Split, Tokens

NAMED = {name: catalog.NAMED[name] for name in ("digits", *catalog.PARQUET)}
LEVELS = 256
GREY = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue (ITU-R BT.601), as Pillow converts to grey."""


def side(length: int) -> int:
    """The side of the square image with so many pixels. Raises: ConfigError if there is none."""
    root = math.isqrt(length)
    if root * root != length:
        near = ", ".join(str(number * number) for number in (root, root + 1))
        raise ConfigError(f"length is the number of pixels of a square image here; nearest to {length}: {near}")
    return root


def load(name: str, length: int) -> SequenceSet:
    """A set of `NAMED`, resized so that an image has `length` pixels. Raises: DataError, ConfigError."""
    size = (side(length), side(length))
    images = catalog.load(name, size)
    held = None if images.held is None else _split(images.held)
    return SequenceSet(
        name, images.classes, _split(images.train), _split(images.test), "pixels", LEVELS, False, held, images.checksum
    )


def _split(images: Images) -> Split:
    parts = (np.asarray(images.pixels[start : start + 4096]) for start in range(0, len(images), 4096))
    grey = np.concatenate([_grey(part).reshape(len(part), -1) for part in parts])
    starts = np.arange(len(grey) + 1, dtype=np.int64) * grey.shape[1]
    return Split(Tokens(grey.reshape(-1), starts), images.labels)


def _grey(pixels: np.ndarray) -> np.ndarray:
    return pixels[..., 0] if pixels.shape[-1] == 1 else np.rint(pixels @ GREY).astype(np.uint8)


def encode(source: str | Path, length: int) -> np.ndarray:
    """The grey values (length,) uint8 of an image file, resized and cropped to a square. Raises: DataError."""
    return read_image(source, (side(length), side(length)), 1).reshape(-1)
