"""Augmentation of a uint8 batch (n, height, width, channels): pure functions of the batch and a generator.

Augmentations of timm and torchvision for single Pillow images are returned by `transform`.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from regard.core import ConfigError, nearest

BATCHWISE = ("none", "flip", "crop", "pad", "shift", "resized")
"""Augmentations of a whole batch. flip: left-right; crop: crop after padding by 4, and flip; pad: crop after padding by
4; shift: crop after padding by 2, and flip; resized: random resized crop, and flip.

For single images: "timm" or "timm:rand-m9-mstd0.5-inc1", timm's transforms with that policy; "randaugment+crop" or
"randaugment+pad", torchvision's default RandAugment (two operations of strength 9 of 30) and then that crop."""

MEAN = (0.485, 0.456, 0.406)
"""Of ImageNet, red, green and blue."""
_PADDING = {"crop": 4, "pad": 4, "shift": 2}
_WITHOUT_FLIP = ("none", "pad")
_RANDAUGMENT = ("randaugment+crop", "randaugment+pad")


def check_augment(name: str) -> None:
    """Check the name of an augmentation. Raises: ConfigError if it is unknown."""
    if name not in BATCHWISE and not by_image(name):
        names = [*BATCHWISE, *_RANDAUGMENT, "timm", "timm:rand-m9-mstd0.5-inc1"]
        raise ConfigError(f"unknown augment {name!r}; {nearest(name, names)}")


def by_image(name: str) -> bool:
    """Whether an augmentation is applied to single images, by `transform`."""
    return name in _RANDAUGMENT or name.split(":")[0] == "timm"


def _unknown_policy(name: str) -> ConfigError:
    return ConfigError(f"timm does not know the policy of augment={name!r}; an example is rand-m9-mstd0.5-inc1")


def transform(name: str, size: tuple[int, int], channels: int) -> Callable[[Any], torch.Tensor]:
    """An augmentation of single images: a Pillow image to a tensor (channels, height, width) in 0 .. 255.

    It uses the global random generators of torch, numpy and Python.
    Raises: ConfigError for a policy that timm does not know.
    """
    if name not in _RANDAUGMENT:
        from timm.data import create_transform

        policy = name.partition(":")[2] or None
        if any(not re.search(r"\d", part) for part in (policy or "").split("-")[1:]):  # which timm passes over
            raise _unknown_policy(name)
        mean = (sum(MEAN) / 3,) if channels == 1 else MEAN  # fills what a policy moves into the image
        try:
            return create_transform(
                (channels, *size), is_training=True, auto_augment=policy, normalize=False, mean=mean
            )
        except (AssertionError, ValueError, IndexError, KeyError) as error:
            raise _unknown_policy(name) from error
    from torchvision import transforms

    crop = transforms.RandomCrop(size, padding=_PADDING["crop"], pad_if_needed=True)
    flip = [] if name.endswith("+pad") else [transforms.RandomHorizontalFlip()]
    return transforms.Compose([transforms.RandAugment(), crop, *flip, transforms.PILToTensor()])


def windows(pixels: np.ndarray, top: np.ndarray, left: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The crop of each image with `size` = (height, width) and upper left corner (top, left); top, left: (n,)."""
    rows = top[:, None] + np.arange(size[0])
    columns = left[:, None] + np.arange(size[1])
    return pixels[np.arange(len(pixels))[:, None, None], rows[:, :, None], columns[:, None, :]]


def centre(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The centre crop of each image."""
    top, left = ((pixels.shape[axis] - size[axis - 1]) // 2 for axis in (1, 2))
    return pixels[:, top : top + size[0], left : left + size[1]]


def random_windows(pixels: np.ndarray, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """A random crop of each image."""
    n, height, width = pixels.shape[:3]
    top = rng.integers(0, height - size[0] + 1, n)
    left = rng.integers(0, width - size[1] + 1, n)
    return windows(pixels, top, left, size)


def pad(pixels: np.ndarray, padding: int) -> np.ndarray:
    """Images padded with zeros on all sides."""
    return np.pad(pixels, ((0, 0), (padding, padding), (padding, padding), (0, 0)))


def random_flips(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each image mirrored left to right with probability 1/2."""
    mirror = rng.random(len(pixels)) < 0.5
    return np.where(mirror[:, None, None, None], pixels[:, :, ::-1], pixels)


def place_on_canvas(pixels: np.ndarray, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Each image at a random position on an empty canvas of `size`."""
    n, height, width, channels = pixels.shape
    canvas = np.zeros((n, *size, channels), np.uint8)
    rows = rng.integers(0, size[0] - height + 1, n)[:, None] + np.arange(height)
    columns = rng.integers(0, size[1] - width + 1, n)[:, None] + np.arange(width)
    canvas[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]] = pixels
    return canvas


def scaled_pixels(pixels: np.ndarray, size: tuple[int, int], smooth: bool = True) -> np.ndarray:
    """One image, uint8 (h, w) or (h, w, C), of another size = (height, width).

    smooth: bilinear with antialiasing, else the nearest pixel.
    """
    if pixels.shape[:2] == size:
        return pixels
    method = Image.Resampling.BILINEAR if smooth else Image.Resampling.NEAREST
    image = Image.fromarray(pixels.squeeze(-1) if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)
    return np.asarray(image.resize((size[1], size[0]), method)).reshape(*size, *pixels.shape[2:])


def resized_crops(pixels: np.ndarray, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Crops of 35-100 % of the area with aspect ratio 3:4 to 4:3, resized to `size` (bilinear, no antialiasing)."""
    n, height, width = pixels.shape[:3]
    area = rng.uniform(0.35, 1.0, n)
    ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), n))
    high, wide = np.minimum(np.sqrt(area / ratio), 1.0), np.minimum(np.sqrt(area * ratio), 1.0)
    shift_y, shift_x = rng.uniform(-1, 1, n) * (1 - high), rng.uniform(-1, 1, n) * (1 - wide)
    theta = np.zeros((n, 2, 3), np.float32)
    theta[:, 0, 0], theta[:, 0, 2], theta[:, 1, 1], theta[:, 1, 2] = wide, shift_x, high, shift_y
    images = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float()
    grid = F.affine_grid(torch.from_numpy(theta), [n, images.shape[1], *size], align_corners=False)
    out = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return out.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def augment_batch(
    pixels: np.ndarray, size: tuple[int, int], augment: str, canvas: bool, rng: np.random.Generator
) -> np.ndarray:
    """A training batch of `size`: placed on a canvas or cropped from larger images, and augmented."""
    if canvas:
        pixels = place_on_canvas(pixels, size, rng)
    if augment == "resized":
        return random_flips(resized_crops(pixels, size, rng), rng)
    if pixels.shape[1:3] != size:
        pixels = random_windows(pixels, size, rng) if augment != "none" else centre(pixels, size)
    elif augment in _PADDING:
        pixels = random_windows(pad(pixels, _PADDING[augment]), size, rng)
    return pixels if augment in _WITHOUT_FLIP else random_flips(pixels, rng)
