"""ImageNet below the data folder, as torchvision's ImageFolder reads it; images are decoded batch by batch."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import DataError

from .images import Images, ImageSet, decode, larger
from .own import SUFFIXES, Lazy

log = logging.getLogger("regard.data")

CLASSES, TRAIN, TEST = 1000, 1_281_167, 50_000
LAYOUT = (
    "expected {root}/train/CLASS/*.JPEG and {root}/val/CLASS/*.JPEG with the same class folders, such as n01440764, "
    "as torchvision's ImageFolder reads them"
)
NORMAL = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
"""Mean and deviation per channel with which everyone normalises ImageNet, of pixels between 0 and 1."""


class Whole(Lazy):
    """Images of any size on disk: an access gives windows of one size, `whole` the images as they are."""

    def whole(self, row: int) -> np.ndarray:
        """One image (height, width, 3) in its own size. Raises: DataError that names a damaged image."""
        return self._decoded(row, None)

    def _image(self, row: int) -> np.ndarray:
        return self._decoded(row, self.size)

    def _decoded(self, row: int, size: tuple[int, int] | None) -> np.ndarray:
        try:
            return decode(self.sources[row], size, 3)
        except Exception as error:  # Pillow raises many kinds for a damaged file
            raise DataError(f"{self.names[row]} cannot be read as an image ({error}); get it again") from error


def load(root: Path, size: tuple[int, int]) -> ImageSet:
    """The folders `root`/train and `root`/val; images cover 8/7 of `size` (224: 256), whose centre the test cuts.

    The checksum is of the classes and the files' names, for which no image is read.
    Raises: DataError that says the layout, for missing folders, empty ones, or classes that differ.
    """
    layout = LAYOUT.format(root=root)
    for folder in (root, root / "train", root / "val"):
        if not folder.is_dir():
            raise DataError(f"imagenet needs {folder}, which does not exist; {layout}")
    classes = _classes(root / "train", layout)
    if classes != (found := _classes(root / "val", layout)):
        odd = sorted(set(classes) ^ set(found))
        raise DataError(f"train and val of {root} have different classes: {', '.join(odd[:5])}; {layout}")
    total = hashlib.sha256()
    made = {}
    for split in ("train", "val"):
        files, labels = _files(root / split, classes, total)
        names = [str(file) for file in files]
        made[split] = Images(Whole(files, names, larger(size)), labels)
    numbers = (len(classes), len(made["train"]), len(made["val"]))
    if numbers != (CLASSES, TRAIN, TEST):
        log.warning(
            "%s has %d classes, %d training and %d validation images; ImageNet-1k has %d, %d and %d",
            root, *numbers, CLASSES, TRAIN, TEST,
        )  # fmt: skip
    return ImageSet("imagenet", classes, made["train"], made["val"], total.hexdigest())


def _classes(folder: Path, layout: str) -> tuple[str, ...]:
    classes = tuple(sorted(one.name for one in folder.iterdir() if one.is_dir()))
    if len(classes) < 2:
        loose = any(one.suffix.lower() in SUFFIXES for one in folder.iterdir())
        has = "its images lie loose: sort them into class folders" if loose else f"it has {len(classes)} class folders"
        raise DataError(f"{folder} cannot be used, {has}; {layout}")
    return classes


def _files(folder: Path, classes: tuple[str, ...], total: Any) -> tuple[list[Path], np.ndarray]:
    """Files and labels by class and name; their relative names go into the digest."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        own = sorted(file for file in (folder / name).iterdir() if file.suffix.lower() in SUFFIXES)
        if not own:
            raise DataError(f"{folder / name} has no images; get the class again or remove it from train and val")
        files += own
        labels += [label] * len(own)
        total.update("".join(f"{folder.name}/{name}/{file.name}\n" for file in own).encode())
    return files, np.array(labels, np.int64)
