"""Training batches of a run: images, order and augmentation depend on (seed, epoch, step) only.

So a run that was stopped continues with the same batches, with any number of loader workers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from regard.core import DataError

from .augment import augment_batch, centre
from .imagenet import OriginalSizes
from .images import Images
from .order import Part, batch_rows, batches_in_epoch, part_of
from .own import Lazy
from .streams import generator, seed_all

EVALUATED = 256 * 224 * 224
"""Largest number of pixels of an evaluation batch of several images: larger images come in smaller batches."""


class LoadedBatches(Dataset):
    """Training batches of a run, of which item t is batch t. per_epoch: their number in an epoch."""

    per_epoch: int

    def between(self, start: int, stop: int, workers: int = 0) -> Iterator[Any]:
        """Batches start .. stop-1, loaded by `workers` processes, or by this one if 0."""
        return iterate(DataLoader(self, None, sampler=range(start, stop), num_workers=workers, collate_fn=_identity))


def _identity(batch: Any) -> Any:
    """The loader's default would turn tuples into lists."""
    return batch


@dataclass
class Batches(LoadedBatches):
    """Item t is training batch t of the run: images (n, C, h, w) uint8, or float32 of a transform, and labels (n,).

    size: (height, width) of a batch's images. batch: images in a batch. transform: of single Pillow images, or None.
    part: of each batch, an item is this one.
    """

    images: Images
    size: tuple[int, int]
    batch: int
    augment: str
    seed: int
    canvas: bool = False
    transform: Callable | None = None
    part: Part = (0, 1)

    def __post_init__(self) -> None:
        self.per_epoch = batches_in_epoch(len(self.images), self.batch)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        rows = batch_rows(len(self.images), self.batch, self.seed, step)
        part = part_of(len(rows), self.part)
        labels = torch.from_numpy(self.images.labels[rows[part]])
        if self.transform is not None:
            return torch.stack([self._transform_row(row, step) for row in rows[part].tolist()]), labels
        pixels = self._pixels(rows, part)
        rng = generator("augment", self.seed, step // self.per_epoch, step)
        return to_tensor(augment_batch(pixels, self.size, self.augment, self.canvas, rng)[part]), labels

    def _pixels(self, rows: np.ndarray, part: slice) -> np.ndarray:
        """The whole batch, whose augmentation does not depend on the parts; of other parts, no image is decoded."""
        images = self.images.pixels
        if not isinstance(images, Lazy) or self.part[1] == 1:
            return images[rows]
        pixels = np.zeros((len(rows), *images.shape[1:]), np.uint8)
        pixels[part] = images[rows[part]]
        return pixels

    def _transform_row(self, row: int, step: int) -> Tensor:
        """The transform of an image, in its original size if the set has it."""
        pixels = self.images.pixels
        image = Image.fromarray((pixels.original(row) if isinstance(pixels, OriginalSizes) else pixels[row]).squeeze())
        seed_all("sample", self.seed, step // self.per_epoch, row)
        return self.transform(image)  # type: ignore[misc]


def iterate(loader: DataLoader) -> Iterator[Any]:
    """The items of a loader. What a worker process raises is raised here as there, without the worker's traceback.

    Raises: DataError.
    """
    try:
        yield from loader
    except DataError as error:
        _, worker, text = str(error).partition("Original Traceback")
        if not worker:
            raise
        raise type(error)(text.rpartition(f"{type(error).__name__}: ")[2].strip()) from error


def evaluation_batches(images: Images, size: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """All images in order, cropped at the centre: (n, C, h, w) uint8 and labels (n,), with `EVALUATED` pixels at most.

    Batches have at most 256 images.
    """
    batch = max(1, min(256, EVALUATED // (size[0] * size[1])))
    for start in range(0, len(images), batch):
        pixels = centre(images.pixels[start : start + batch], size)
        yield to_tensor(pixels), torch.from_numpy(images.labels[start : start + batch])


def to_tensor(pixels: np.ndarray) -> Tensor:
    """(n, h, w, C) uint8 as a tensor (n, C, h, w)."""
    return torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2).contiguous()
