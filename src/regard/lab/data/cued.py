"""cued: generated images in which a cue says which items are wanted, for segmentation, detection and instances.

A grey canvas of 6 x 6 slots of 14 x 14 pixels. One slot shows the cue, 12 others show items of three kinds, each kind
3 to 6 times, with another brightness and noise; the items of the cue's kind match. All kinds are alike without the cue,
so that a network that does not compare items with the cue can only guess. Every canvas is a pure function of its data
set, split and index. Items of different splits are different images.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8

from regard.core import DataError
from regard.images.images import Images
from regard.images.streams import generator

from .catalog import data_root, digits, folder_in_use, parquet_set


@dataclass(frozen=True, kw_only=True)
class CuedSet:
    """A variant. items: the source of item images. by_class: a kind is a class (other images of the cue's class match),
    not one image. anywhere: the cue is in a random slot, with a white frame; else in the first."""

    items: str = "fashion_mnist"
    by_class: bool = False
    anywhere: bool = False


CUED: dict[str, CuedSet] = {
    "cued": CuedSet(),
    "cued-class": CuedSet(by_class=True),
    "cued-random": CuedSet(anywhere=True),
    "cued-digits": CuedSet(items="digits"),
}
"""The variants by name, as `--data` takes them. cued-digits needs no data folder."""
SOURCES = {
    name: f"generated from {'scikit-learn' if variant.items == 'digits' else 'REGARD_DATA/fashion_mnist'}"
    for name, variant in CUED.items()
}

CLASSES = ("background", "match")
COUNTS = {"train": 38_400, "val": 512, "test": 512}
"""Number of canvases of each split."""
SIDE, SLOTS = 14, 6
"""Pixels of a slot's side, and slots of a canvas' side."""
SIZE = (SIDE * SLOTS, SIDE * SLOTS)
"""(height, width) of a canvas."""
ITEMS, KINDS, FEWEST = 12, 3, 3
"""Items and kinds of items of a canvas, and the smallest number of items of a kind."""
VISIBLE = 26
"""Darker pixels of an item image are left out; the others are its mask, and get the brightness and the noise."""


@dataclass(frozen=True, eq=False)
class Canvas:
    """One sample. image: pixels; instances: the mask of each matching item, without overlap, in the order of slots."""

    image: UInt8[np.ndarray, "84 84 1"]
    instances: Bool[np.ndarray, "n 84 84"]

    @cached_property
    def mask(self) -> UInt8[np.ndarray, "84 84"]:
        """The class of each pixel: 1 where an item matches, 0 elsewhere."""
        return np.asarray(self.instances.any(0), np.uint8)

    @cached_property
    def boxes(self) -> Float[np.ndarray, "n 4"]:
        """The tight box of each instance in pixels: left, top, right, bottom (exclusive), float32."""
        boxes = np.empty((len(self.instances), 4), np.float32)
        for box, instance in zip(boxes, self.instances, strict=True):
            rows, columns = np.flatnonzero(instance.any(1)), np.flatnonzero(instance.any(0))
            box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        return boxes


@dataclass(frozen=True, eq=False)
class _Items:
    """Item images of a split: tiles (n, 14, 14) uint8, and the rows of each class."""

    tiles: np.ndarray
    rows: list[np.ndarray]


def canvas(data: str, split: str, index: int) -> Canvas:
    """Canvas `index` of a split: "train", "val" or "test". Raises: DataError without the item images."""
    variant, items = CUED[data], _items(CUED[data].items, split)
    rng = generator(data, split, index)
    slots = rng.permutation(np.arange(0 if variant.anywhere else 1, SLOTS**2))[: ITEMS + 1]
    cue_slot, places = (slots[0], slots[1:]) if variant.anywhere else (0, slots[:ITEMS])
    kinds = np.concatenate([np.arange(KINDS).repeat(FEWEST), rng.integers(0, KINDS, ITEMS - KINDS * FEWEST)])
    cue, rows = _choose(items, variant.by_class, kinds, rng)
    tiles = items.tiles[rows]
    bright = tiles * rng.uniform(0.7, 1.3, (ITEMS, 1, 1)).astype(np.float32)
    noisy = bright + (tiles > 0) * 255 * np.float32(0.05) * rng.standard_normal(tiles.shape, dtype=np.float32)
    board = np.zeros((SLOTS**2, SIDE, SIDE), np.uint8)
    board[places] = noisy.clip(0, 255)
    board[cue_slot] = _frame(items.tiles[cue]) if variant.anywhere else items.tiles[cue]
    image = board.reshape(SLOTS, SLOTS, SIDE, SIDE).swapaxes(1, 2).reshape(*SIZE, 1)
    matching = np.flatnonzero(kinds == 0)
    matching = matching[np.argsort(places[matching])]
    instances = np.zeros((len(matching), *SIZE), bool)
    for instance, item in zip(instances, matching, strict=True):
        top, left = SIDE * (places[item] // SLOTS), SIDE * (places[item] % SLOTS)
        instance[top : top + SIDE, left : left + SIDE] = tiles[item] > 0
    return Canvas(image, instances)


class Canvases(Sequence[Any]):
    """A split, whose samples are made when they are indexed: `sample` of the data set, the split and the index."""

    def __init__(self, data: str, split: str, sample: Callable[[str, str, int], Any]) -> None:
        self.data, self.split, self.sample = data, split, sample

    def __len__(self) -> int:
        return COUNTS[self.split]

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.sample(self.data, self.split, index)


def checksum(data: str) -> str:
    """64 hexadecimal digits of a digest of the item images and of this generator's constants. Raises: DataError."""
    total = hashlib.sha256(repr((2, data, CUED[data], COUNTS, SIDE, SLOTS, ITEMS, KINDS, FEWEST, VISIBLE)).encode())
    for split in COUNTS:
        total.update(_items(CUED[data].items, split).tiles.tobytes())
    return total.hexdigest()


def _choose(
    items: _Items, by_class: bool, kinds: np.ndarray, rng: np.random.Generator
) -> tuple[np.integer, np.ndarray]:
    """The rows of the cue and of the items of these kinds; kind 0 is the cue's."""
    if not by_class:
        chosen = rng.integers(0, len(items.tiles), KINDS)
        while len(set(chosen.tolist())) < KINDS:
            chosen = rng.integers(0, len(items.tiles), KINDS)
        return chosen[0], chosen[kinds]
    classes = rng.permutation(len(items.rows))[:KINDS]
    pools = [items.rows[label] for label in classes]
    draws = rng.random(ITEMS + 1)  # the last one is the cue, of kind 0
    rows = [pools[kind][int(draw * len(pools[kind]))] for kind, draw in zip([*kinds, 0], draws, strict=True)]
    return rows[-1], np.array(rows[:-1])


def _frame(tile: np.ndarray) -> np.ndarray:
    """A tile with a white frame of one pixel."""
    framed = np.full_like(tile, 255)
    framed[1:-1, 1:-1] = tile[1:-1, 1:-1]
    return framed


def _items(source: str, split: str) -> _Items:
    """The item images of a split; those of "val" are the training images that are reserved for tuning."""
    return _items_in(source, split, folder_in_use() if source != "digits" else "")


@lru_cache(maxsize=6)
def _items_in(source: str, split: str, folder: str) -> _Items:
    images = (_digit_tiles if source == "digits" else _garment_tiles)(split)
    shown = (images.pixels >= VISIBLE).any((1, 2))
    tiles, labels = images.pixels[shown], images.labels[shown]
    tiles = np.where(tiles >= VISIBLE, tiles, np.uint8(0))
    return _Items(tiles, [np.flatnonzero(labels == label) for label in np.unique(labels)])


def _garment_tiles(split: str) -> Images:
    """Fashion-MNIST, 28 x 28, averaged to 14 x 14."""
    try:
        data_root()
    except DataError as error:
        raise DataError(f"cued is made of fashion_mnist: {error}; --data cued-digits needs no data folder") from error
    garments = parquet_set("fashion_mnist", None, "stop")
    images = {"train": garments.train, "val": garments.held, "test": garments.test}[split]
    if images is None:
        raise DataError("fashion_mnist has no images reserved for tuning")
    pixels = np.asarray(images.pixels).reshape(-1, SIDE, 2, SIDE, 2).mean((2, 4), dtype=np.float32)
    return Images(pixels.round().astype(np.uint8), images.labels)


def _digit_tiles(split: str) -> Images:
    """scikit-learn's digits, 8 x 8, enlarged to 14 x 14."""
    images = digits((SIDE, SIDE))
    train = images.train
    part = {"train": train.take(slice(0, 798)), "val": train.take(slice(798, None)), "test": images.test}[split]
    return Images(part.pixels[..., 0], part.labels)
