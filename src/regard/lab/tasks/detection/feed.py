"""Images and targets of one size, and the training batches of a run: pure functions of (seed, number of the batch)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from regard.core import DataError
from regard.images.augment import scaled_pixels
from regard.images.feed import LoadedBatches, to_tensor
from regard.images.images import Images, decode, load_or_make, readable_rows
from regard.images.order import Part, batch_rows, batches_in_epoch, part_of
from regard.images.own import IN_MEMORY
from regard.images.streams import generator

from . import masks
from .scenes import Objects, Scene

Batch = tuple[Tensor, list[dict[str, Tensor]], list[tuple[int, int]]]
"""Images (n, C, H, W) uint8, for each image boxes, labels from 1 and masks, and its (height, width)."""
AUGMENTS = ("none", "flip", "flips")
"""No augmentation, horizontal flips, flips in both directions; each with probability 1/2."""
MULTIPLE = 32
"""Sides of images at another scale, and of those that keep their own size, are multiples of so many pixels."""


def fitted_size(original: tuple[int, int], size: tuple[int, int], resize: str) -> tuple[int, int]:
    """(height, width) of an image in its tensor: `size` for "stretch", else of the same shape as before.

    "fit": inside `size`. "sides": the shorter side is that of `size`, unless the longer one would then be longer than
    that of `size`; so landscape and portrait images are equally large, as in torchvision, detectron2 and mmdetection.
    """
    if resize == "stretch":
        return size
    if resize == "sides":
        scale = min(min(size) / min(original), max(size) / max(original))
    else:
        scale = min(size[0] / original[0], size[1] / original[1])
    return max(round(original[0] * scale), 1), max(round(original[1] * scale), 1)


def canvas(original: tuple[int, int], size: tuple[int, int], resize: str) -> tuple[int, int]:
    """(height, width) of an image's tensor: `size`, or for "sides" that of the image, as multiples of `MULTIPLE`."""
    if resize != "sides":
        return size
    height, width = (-(-side // MULTIPLE) * MULTIPLE for side in fitted_size(original, size, resize))
    return height, width


def resize_image(pixels: UInt8[np.ndarray, "h w C"], size: tuple[int, int], resize: str) -> UInt8[np.ndarray, "H W C"]:
    """An image in its `canvas`, bilinear with antialiasing; what it leaves free at the right and the bottom is 0."""
    original = (pixels.shape[0], pixels.shape[1])
    (height, width), whole = fitted_size(original, size, resize), canvas(original, size, resize)
    pixels = scaled_pixels(pixels, (height, width))
    if (height, width) == whole:
        return pixels
    padded = np.zeros((*whole, pixels.shape[-1]), np.uint8)
    padded[:height, :width] = pixels
    return padded


def stack_images(
    images: Sequence[UInt8[Tensor, "C _h _w"]], size: tuple[int, int] = (0, 0)
) -> UInt8[Tensor, "n C H W"]:
    """Images as one tensor of the largest height and width among them and `size`; the rest is 0."""
    height, width = (max(side, *(image.shape[1 + axis] for image in images)) for axis, side in enumerate(size))
    return torch.stack([_pad(image, (height, width)) for image in images])


def _pad(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """A tensor (..., h, w) with zeros at the right and the bottom up to `size`; the same one if it has that size."""
    height, width = pixels.shape[-2:]
    return pixels if (height, width) == size else F.pad(pixels, (0, size[1] - width, 0, size[0] - height))


@dataclass(frozen=True, eq=False)
class Split:
    """The scenes of a split with their images in tensors of `size` (`canvas`), decoded once if they need little memory.

    Raises: DataError with the name of an image that cannot be read, or that has another size than its annotation.
    """

    scenes: Sequence[Scene]
    size: tuple[int, int]
    channels: int
    resize: str = "stretch"
    key: str = ""

    def __len__(self) -> int:
        return len(self.scenes)

    @property
    def in_memory(self) -> bool:
        """Whether all images are decoded once."""
        few = len(self) * self.size[0] * self.size[1] * self.channels <= IN_MEMORY
        return bool(self.key) and few and self.resize != "sides"

    def pixels(self, row: int) -> UInt8[np.ndarray, "H W C"]:
        """An image; all images of one size are decoded at the first call if they need at most `IN_MEMORY` bytes."""
        return self._decoded.pixels[row] if self.in_memory else self._read(self.scenes[row])

    @cached_property
    def _decoded(self) -> Images:
        side = f"{self.size[0]}x{self.size[1]}-{self.resize}"
        return load_or_make(f"detection-{self.key}-{side}", self._read_all)

    def _read_all(self) -> Images:
        pixels = np.empty((len(self), *self.size, self.channels), np.uint8)
        for row, scene in enumerate(self.scenes):
            pixels[row] = self._read(scene)
        return Images(pixels, np.arange(len(self)))

    def _read(self, scene: Scene) -> np.ndarray:
        return resize_image(read_pixels(scene, self.channels), self.size, self.resize)

    def inside(self, scene: Scene) -> tuple[int, int]:
        """(height, width) of the scene's image in its tensor."""
        return fitted_size(scene.size, self.size, self.resize)

    def item(self, row: int) -> tuple[Tensor, dict[str, Tensor], tuple[int, int]]:
        """Image (C, H, W) uint8, target and (height, width) of the image in it; objects of a crowd are left out."""
        scene = self.scenes[row]
        image = to_tensor(self.pixels(row)[None])[0]
        inside = self.inside(scene)
        return image, target_of(scene.objects, scene.size, inside, (image.shape[1], image.shape[2])), inside


def read_pixels(scene: Scene, channels: int) -> UInt8[np.ndarray, "h w C"]:
    """The original image of a scene. Raises: DataError if it cannot be read, or has another size than annotated."""
    try:
        pixels = decode(scene.source, None, channels)
    except Exception as error:  # Pillow raises various errors for a damaged file
        hint = 'repair it, or pass corrupt="skip"'
        raise DataError(f"{scene.name} cannot be read as an image ({error}); {hint}") from error
    if pixels.shape[:2] != scene.size:
        found, annotated = (f"{size[1]}x{size[0]}" for size in (pixels.shape, scene.size))
        raise DataError(f"{scene.name} has {found} pixels (width x height), its annotation says {annotated}")
    return pixels


def readable(scenes: Sequence[Scene], channels: int, key: str) -> list[Scene]:
    """The scenes whose images can be decoded; there is a warning for each other one. key: identifies the images."""
    sources, names = [scene.source for scene in scenes], [scene.name for scene in scenes]
    rows = readable_rows(f"detection-{key}", sources, names, channels)
    return [scenes[int(row)] for row in rows]


def target_of(
    objects: Objects, original: tuple[int, int], inside: tuple[int, int], size: tuple[int, int]
) -> dict[str, Tensor]:
    """A training target: objects of an image of `original` size that is resized to `inside` a tensor of `size`."""
    rows = np.flatnonzero(~objects.crowd)
    scale = np.array([inside[1] / original[1], inside[0] / original[0]] * 2, np.float32)
    boxes = torch.from_numpy(objects.boxes[rows] * scale)
    target = {"boxes": boxes, "labels": torch.from_numpy(objects.labels[rows] + 1)}
    if objects.masks is not None:
        whole = torch.from_numpy(masks.decode([objects.masks[row] for row in rows], original))
        target["masks"] = _pad(_resized_masks(whole, inside), size)
    return target


def _resized_masks(whole: UInt8[Tensor, "n h w"], size: tuple[int, int]) -> UInt8[Tensor, "n H W"]:
    if tuple(whole.shape[1:]) == size or not len(whole):
        return whole if len(whole) else whole.new_zeros(0, *size)
    return F.interpolate(whole[None], size=size, mode="nearest-exact")[0]


@dataclass
class Batches(LoadedBatches):
    """Item t is training batch t of the run.

    batch: images in it. scales: factors of the images' sides, of which each batch has one at random. part: of each
    batch, an item is this one.
    """

    split: Split
    batch: int
    augment: str
    seed: int
    scales: tuple[float, ...] = ()
    part: Part = (0, 1)

    def __post_init__(self) -> None:
        self.per_epoch = batches_in_epoch(len(self.split), self.batch)

    def __getitem__(self, step: int) -> Batch:
        rows = batch_rows(len(self.split), self.batch, self.seed, step)
        rng = generator("augment", self.seed, step)
        flips = rng.random((len(rows), 2)) < 0.5  # the whole batch: its augmentation does not depend on the parts
        scale = float(rng.choice(self.scales)) if self.scales else 1.0
        items = []
        for place in range(len(rows))[part_of(len(rows), self.part)]:
            image, target, inside = self.split.item(int(rows[place]))
            if self.augment != "none" and flips[place, 0]:
                image, target = reflect(image, target, inside, -1)
            if self.augment == "flips" and flips[place, 1]:
                image, target = reflect(image, target, inside, -2)
            items.append((image, target, inside))
        images, targets, insides = (list(part) for part in zip(*items, strict=True))
        whole = stack_images(images, self._size(rows))
        size = (whole.shape[2], whole.shape[3])
        targets = [
            {**target, "masks": _pad(target["masks"], size)} if "masks" in target else target for target in targets
        ]
        batch: Batch = (whole, targets, insides)
        return batch if scale == 1.0 else scale_batch(batch, scale)

    def _size(self, rows: np.ndarray) -> tuple[int, int]:
        """(height, width) of the tensor of a batch, also for a part of it."""
        split = self.split
        if split.resize != "sides":
            return split.size
        sizes = [canvas(split.scenes[int(row)].size, split.size, split.resize) for row in rows]
        return max(height for height, _ in sizes), max(width for _, width in sizes)


def reflect(
    image: Tensor, target: dict[str, Tensor], inside: tuple[int, int], axis: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """An image (C, H, W) and its target reflected: axis -1 exchanges left and right, -2 top and bottom.

    inside: (height, width) of the image in its tensor; the padding stays where it is.
    """
    height, width = inside
    flip = [axis]
    image = image.clone()
    image[:, :height, :width] = image[:, :height, :width].flip(flip)
    first, last, side = (0, 2, width) if axis == -1 else (1, 3, height)
    boxes = target["boxes"].clone()
    boxes[:, first], boxes[:, last] = side - target["boxes"][:, last], side - target["boxes"][:, first]
    changed = {**target, "boxes": boxes}
    if "masks" in target:
        changed["masks"] = target["masks"].clone()
        changed["masks"][:, :height, :width] = target["masks"][:, :height, :width].flip(flip)
    return image, changed


def scale_batch(batch: Batch, scale: float) -> Batch:
    """A batch whose sides are multiplied by about `scale`: the nearest multiples of `MULTIPLE`."""
    images, targets, insides = batch
    old = (images.shape[-2], images.shape[-1])
    new = scaled_size(old, scale)
    factors = (new[0] / old[0], new[1] / old[1])
    images = F.interpolate(images.float(), size=new, mode="bilinear", antialias=True).round().clamp(0, 255).byte()
    changed = []
    for target in targets:
        boxes = target["boxes"] * torch.tensor([factors[1], factors[0]] * 2)
        changed.append({**target, "boxes": boxes})
        if "masks" in target:
            changed[-1]["masks"] = _resized_masks(target["masks"], new)
    insides = [(round(height * factors[0]), round(width * factors[1])) for height, width in insides]
    return images, changed, insides


def scaled_size(size: tuple[int, int], scale: float) -> tuple[int, int]:
    """The sides of `size` times `scale`, as multiples of `MULTIPLE`; a factor of 1 changes nothing."""
    if scale == 1.0:
        return size
    height, width = (max(round(side * scale / MULTIPLE), 1) * MULTIPLE for side in size)
    return height, width
