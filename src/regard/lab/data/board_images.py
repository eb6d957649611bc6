"""The small images that boards show: garments of Fashion-MNIST and digits of scikit-learn, in three separate splits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from regard.core import DataError
from regard.images.images import Images

from .catalog import data_root, digits, folder_in_use, parquet_set, torchvision_set

HEIGHT, WIDTH = 14, 7
"""Pixels of an image, half a cell."""


@dataclass(frozen=True, eq=False)
class BoardImages:
    """Images of a split, float32 between 0 and 255. shown: garments (n, 14, 7), no two equal; digits: those of each
    class."""

    shown: np.ndarray
    digits: list[np.ndarray]


def board_images(garments: bool, split: str, download: bool) -> BoardImages:
    """The images of a split; none is in two splits, "val" has images that are reserved for tuning.

    garments: False shows digits in their place. download: Fashion-MNIST if it is missing. Raises: DataError.
    """
    return _board_images(garments, split, download, folder_in_use() if garments else "")


@lru_cache(maxsize=6)
def _board_images(garments: bool, split: str, download: bool, folder: str) -> BoardImages:
    source = digits()
    pixels = np.concatenate([source.train.pixels, source.test.pixels])[..., 0]
    labels = np.concatenate([source.train.labels, source.test.labels])
    parts = {"train": slice(0, 1_297), "val": slice(1_297, 1_397), "test": slice(1_397, None)}
    pools = {name: _enlarge(pixels[part]) for name, part in parts.items()}
    drawn = [pools[split][labels[parts[split]] == label] for label in range(10)]
    return BoardImages(_unseen(_garments(download, folder) if garments else pools, split), drawn)


def _unseen(pools: Mapping[str, np.ndarray], split: str) -> np.ndarray:
    """The images of a split that no later one has ("train" is before "val", "val" before "test"), each once."""
    order = list(pools)
    later = {tile.tobytes() for name in order[order.index(split) + 1 :] for tile in pools[name]}
    kept = {tile.tobytes(): row for row, tile in enumerate(pools[split]) if tile.tobytes() not in later}
    return pools[split][sorted(kept.values())]


def _enlarge(pixels: np.ndarray) -> np.ndarray:
    """Images of 8 x 8 pixels, 14 x 7, bilinear, float32."""
    return _weights(8, HEIGHT) @ pixels.astype(np.float32) @ _weights(8, WIDTH).T


def _weights(here: int, there: int) -> np.ndarray:
    """The weights (there, here) of bilinear interpolation between the centres of pixels."""
    at = ((np.arange(there) + 0.5) * here / there - 0.5).clip(0, here - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(here))).astype(np.float32)


@lru_cache(maxsize=2)
def _garments(download: bool, folder: str) -> dict[str, np.ndarray]:
    """Fashion-MNIST, 28 x 28 averaged to 14 x 7, by split. Raises: DataError."""
    train, held, test = _fashion(download)
    shown = {}
    for split, images in (("train", train), ("val", held), ("test", test)):
        pixels = np.asarray(images.pixels)[..., 0].reshape(-1, HEIGHT, 2, WIDTH, 4)
        shown[split] = pixels.mean((2, 4), dtype=np.float32)
        shown[split] = shown[split][shown[split].mean((1, 2)) > 10]  # nearly black ones cannot be told apart
    return shown


def garments_here() -> bool:
    """Whether Fashion-MNIST is in the data folder, in files of its own or in torchvision's."""
    try:
        root = data_root()
    except DataError:
        return False
    return (root / "fashion_mnist").exists() or (root / "torchvision" / "FashionMNIST").exists()


def _fashion(download: bool) -> tuple[Images, Images, Images]:
    """Training, tuning and test images, of the data folder's own files, else of torchvision's."""
    hint = "digit_boards(...) needs no data folder"
    try:
        root = data_root()
        if (root / "fashion_mnist").exists():
            found = parquet_set("fashion_mnist", None, "stop")
            if found.held is None:
                raise DataError("fashion_mnist has no images reserved for tuning")
            return found.train, found.held, found.test
        found = torchvision_set("FashionMNIST", (28, 28), False, "stop", download)
    except DataError as error:
        raise DataError(f"boards are made of Fashion-MNIST: {error}; {hint}") from error
    train = found.train
    return train.take(slice(0, 55_000)), train.take(slice(55_000, None)), found.test
