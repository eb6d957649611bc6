"""ImageNet in the data folder, in the layout of torchvision's ImageFolder; images are decoded batch by batch."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import DataError
from regard.files.paths import subfolders, visible

from .augment import MEAN
from .images import SUFFIXES, Images, ImageSet, size_before_crop
from .own import Lazy
from .rows import Paths

log = logging.getLogger("regard.data")

CLASSES, TRAIN, TEST = 1000, 1_281_167, 50_000
LAYOUT = (
    "expected {root}/train/CLASS/*.JPEG and {root}/val/CLASS/*.JPEG with the same class folders, such as n01440764, "
    "as torchvision's ImageFolder reads them"
)
NORMAL = (list(MEAN), [0.229, 0.224, 0.225])
"""The usual mean and standard deviation per channel of ImageNet, of pixels between 0 and 1."""


class OriginalSizes(Lazy):
    """Images of any size on disk: an index gives images of one size, `original` an image in its original size."""

    remedy = "download it again"

    def original(self, row: int) -> np.ndarray:
        """One image (height, width, 3) in its original size. Raises: DataError with the name of a damaged image."""
        return self._decode_row(row, None)


def load(root: Path, size: tuple[int, int]) -> ImageSet:
    """The folders `root`/train and `root`/val; images are resized to 8/7 of `size` (224: 256), then cropped.

    The checksum is of the classes and file names; no image is read for it.
    Raises: DataError with the expected layout, for missing or empty folders, or if the classes differ.
    """
    layout = LAYOUT.format(root=root)
    for folder in (root, root / "train", root / "val"):
        if not folder.is_dir():
            raise DataError(f"imagenet needs {folder}, which does not exist; {layout}")
    classes = _classes(root / "train", layout)
    if classes != (val_classes := _classes(root / "val", layout)):
        different = sorted(set(classes) ^ set(val_classes))
        raise DataError(f"train and val of {root} have different classes: {', '.join(different[:5])}; {layout}")
    total = hashlib.sha256()
    splits = {}
    for split in ("train", "val"):
        files, labels = _files(root / split, classes, total)
        paths = Paths.of(files)
        splits[split] = Images(OriginalSizes(paths, paths, size_before_crop(size)), labels)
    numbers = (len(classes), len(splits["train"]), len(splits["val"]))
    if numbers != (CLASSES, TRAIN, TEST):
        log.warning(
            "%s has %d classes, %d training and %d validation images; ImageNet-1k has %d, %d and %d",
            root, *numbers, CLASSES, TRAIN, TEST,
        )  # fmt: skip
    return ImageSet("imagenet", classes, splits["train"], splits["val"], total.hexdigest())


def _classes(folder: Path, layout: str) -> tuple[str, ...]:
    classes = tuple(path.name for path in subfolders(folder))
    if len(classes) < 2:
        has_images = any(path.suffix.lower() in SUFFIXES for path in folder.iterdir())
        reason = "its images are not in class folders" if has_images else f"it has {len(classes)} class folders"
        raise DataError(f"{folder} cannot be used, {reason}; {layout}")
    return classes


def _files(folder: Path, classes: tuple[str, ...], total: Any) -> tuple[list[Path], np.ndarray]:
    """Files and labels, sorted by class and name; the digest `total` is updated with the relative names."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = [
            folder / name / entry.name
            for entry in visible(folder / name)
            if Path(entry.name).suffix.lower() in SUFFIXES
        ]
        if not images:
            raise DataError(f"{folder / name} has no images; download the class again or remove it from train and val")
        files += images
        labels += [label] * len(images)
        total.update("".join(f"{folder.name}/{name}/{file.name}\n" for file in images).encode())
    return files, np.array(labels, np.int64)
