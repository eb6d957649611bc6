"""moving_digits: generated clips with a digit that moves and one that rests, and a question: which of the two?

Two digits of different classes lie at random places of a black square. One moves by a fixed step from frame to frame,
in one of eight directions, and comes back at the other side. In half of the clips a small white square rests somewhere,
too: then the answer is the class of the digit that moves, else of the one that rests. One frame does not show who
moves, and the places of a digit do not show whether there is a square. Digits of different splits are different images.
"""

import hashlib
from functools import lru_cache

import numpy as np

from regard.images.images import Images, ImageSet
from regard.images.streams import generator

from .catalog import digits

NAME = "moving_digits"
SOURCE = "generated from scikit-learn's digits"
STEPS = np.array([(y, x) for y in (-2, 0, 2) for x in (-2, 0, 2) if (y, x) != (0, 0)])
"""Rows and columns of pixels from frame to frame."""
FRAMES, SIDE, ITEM, MARK = 8, 28, 8, 4
"""Frames of a clip; pixels of a side of a frame, of a digit, and of the white square."""
COUNTS = {"train": 16_000, "held": 1_000, "test": 1_000}
"""Clips of each split; those of "held" are reserved for tuning."""


@lru_cache(maxsize=1)
def load() -> ImageSet:
    """Clips as images (28, 28, 8), frame by frame. Raises: MissingExtra without scikit-learn."""
    found = digits()
    parts = {"train": found.train.take(slice(0, 798)), "held": found.train.take(slice(798, None)), "test": found.test}
    clips = {split: _clips(split, images) for split, images in parts.items()}
    constants = (NAME, FRAMES, SIDE, ITEM, MARK, STEPS.tolist(), sorted(COUNTS.items()))
    total = hashlib.sha256(repr((1, found.checksum, constants)).encode()).hexdigest()
    return ImageSet(NAME, found.classes, clips["train"], clips["test"], total, clips["held"])


def _clips(split: str, images: Images) -> Images:
    number, rng = COUNTS[split], generator(NAME, split)
    moving, resting = _of_different_classes(images.labels, number, rng)
    steps = STEPS[rng.integers(0, len(STEPS), number)]
    marked = rng.random(number) < 0.5
    square = np.where(marked, np.uint8(255), np.uint8(0))[:, None, None].repeat(MARK, 1).repeat(MARK, 2)
    shown = [(images.pixels[moving][..., 0], steps), (images.pixels[resting][..., 0], 0 * steps), (square, 0 * steps)]
    frames = np.zeros((number, FRAMES, SIDE, SIDE), np.uint8)
    clip = np.arange(number)[:, None, None]
    for tiles, by in shown:
        start, side = rng.integers(0, SIDE, (number, 2)), tiles.shape[1]
        for frame in range(FRAMES):
            rows, columns = ((start + frame * by)[:, axis, None] + np.arange(side) for axis in (0, 1))
            place = (clip, frame, rows[:, :, None] % SIDE, columns[:, None] % SIDE)
            frames[place] = np.maximum(frames[place], tiles)
    labels = np.where(marked, images.labels[moving], images.labels[resting])
    return Images(np.ascontiguousarray(frames.transpose(0, 2, 3, 1)), labels)


def _of_different_classes(labels: np.ndarray, number: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The rows of two images of different classes for each clip."""
    pools = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    classes = rng.permuted(np.tile(np.arange(len(pools)), (number, 1)), axis=1)[:, :2]
    sizes = np.array([len(pool) for pool in pools])
    drawn = (rng.random((number, 2)) * sizes[classes]).astype(np.int64)
    rows = np.stack([np.resize(pool, sizes.max()) for pool in pools])[classes, drawn]
    return rows[:, 0], rows[:, 1]
