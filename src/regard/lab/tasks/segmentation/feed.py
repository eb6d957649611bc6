"""Training batches of images with masks: pure functions of the seed and the batch's number."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.images.augment import scaled_pixels
from regard.images.feed import LoadedBatches, to_tensor
from regard.images.order import Part, batch_rows, batches_in_epoch, part_of
from regard.images.streams import generator
from regard.models.segmentation import VOID

from .data import Sample

AUGMENTS = ("none", "crop", "scale", "scale+colour")
"""none: the centre crop; crop: a random crop, mirrored with probability 1/2; scale: the same of an image that is
resized by a random factor; scale+colour: and with a random brightness, contrast and saturation."""


@dataclass
class Batches(LoadedBatches):
    """Item t is training batch t of the run: images (n, C, h, w) uint8 and masks (n, h, w) uint8.

    size: (height, width) of crops. shorter: side to which images are resized first. scales: range of random factors.
    part: of each batch, an item is this one.
    """

    split: Sequence[Sample]
    size: tuple[int, int]
    shorter: int
    scales: tuple[float, float]
    batch: int
    augment: str
    seed: int
    part: Part = (0, 1)

    def __post_init__(self) -> None:
        self.per_epoch = batches_in_epoch(len(self.split), self.batch)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        epoch = step // self.per_epoch
        rows = batch_rows(len(self.split), self.batch, self.seed, step)
        pairs = [self._sample(int(row), epoch) for row in rows[part_of(len(rows), self.part)]]
        images, masks = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
        return to_tensor(images), torch.from_numpy(masks)

    def _sample(self, row: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        rng = generator("augment", self.seed, epoch, row)
        sample = self.split[row]
        image, mask = sample.image, sample.mask
        factor = rng.uniform(*self.scales) if self.augment.startswith("scale") else 1.0
        target = fitted_size(image.shape[:2], self.shorter, factor)
        image, mask = scaled_pixels(image, target), scaled_pixels(mask, target, smooth=False)
        image, mask = pad(image, self.size, 0), pad(mask, self.size, VOID)
        spare = [side - crop for side, crop in zip(mask.shape, self.size, strict=True)]
        if self.augment == "none":
            top, left = (side // 2 for side in spare)
        else:
            top, left = (int(rng.integers(0, side + 1)) for side in spare)
        window = np.s_[top : top + self.size[0], left : left + self.size[1]]
        image, mask = image[window], mask[window]
        if self.augment != "none" and rng.random() < 0.5:
            image, mask = image[:, ::-1], mask[:, ::-1]
        return jitter_colours(image, rng) if self.augment.endswith("colour") else image, mask


def fitted_size(shape: tuple[int, ...], shorter: int, factor: float = 1.0) -> tuple[int, int]:
    """(height, width) of an image whose shorter side becomes factor * shorter."""
    scale = factor * shorter / min(shape)
    return max(round(shape[0] * scale), 1), max(round(shape[1] * scale), 1)


def pad(pixels: np.ndarray, size: tuple[int, int], value: int) -> np.ndarray:
    """Pixels with a border of this value below and to the right, at least of `size`."""
    missing = [max(side - now, 0) for side, now in zip(size, pixels.shape, strict=False)]
    if not any(missing):
        return pixels
    return np.pad(pixels, [(0, side) for side in missing] + [(0, 0)] * (pixels.ndim - 2), constant_values=value)


def jitter_colours(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random brightness (+- 1/8), contrast and saturation (factors 0.5 to 1.5), each with probability 1/2."""
    pixels = image.astype(np.float32)
    shift, contrast, saturation = rng.uniform(-32, 32), rng.uniform(0.5, 1.5), rng.uniform(0.5, 1.5)
    use = rng.random(3) < 0.5
    if use[0]:
        pixels = pixels + np.float32(shift)
    if use[1]:
        pixels = (pixels - pixels.mean()) * np.float32(contrast) + pixels.mean()
    if use[2]:
        grey = pixels.mean(-1, keepdims=True)
        pixels = grey + (pixels - grey) * np.float32(saturation)
    return pixels.clip(0, 255).astype(np.uint8)
