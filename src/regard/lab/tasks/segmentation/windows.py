"""Scores of images of any size, from windows of the size that the network was trained for."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from regard.images.normalise import Statistics, normalise
from regard.models.segmentation.segmenter import enlarge

WINDOWS = 32
"""Largest number of windows in a forward pass."""


def positions(side: int, window: int, step: int) -> list[int]:
    """Starts of windows that cover a side; the last one ends where the side ends."""
    return [*range(0, max(side - window, 0), step), max(side - window, 0)]


def window_scores(
    model: nn.Module, images: Float[Tensor, "B C h w"], size: tuple[int, int], stride: float
) -> Float[Tensor, "B K h w"]:
    """The mean of the scores of all windows that contain a pixel, float32.

    images: not smaller than windows of size = (height, width). stride: between windows, as a fraction of their side.
    """
    steps = [max(int(stride * side), 1) for side in size]
    tops, lefts = (positions(images.shape[axis], size[axis], steps[axis]) for axis in (-2, -1))
    corners = [(top, left) for top in tops for left in lefts]
    if len(corners) == 1:
        return model(images).float()
    total, count = images.new_zeros(0), images.new_zeros(images.shape[-2:])
    each = max(WINDOWS // len(images), 1)
    for start in range(0, len(corners), each):
        group = corners[start : start + each]
        crops = torch.cat([images[..., top : top + size[0], left : left + size[1]] for top, left in group])
        for (top, left), scores in zip(group, model(crops).float().chunk(len(group)), strict=True):
            if not len(total):
                total = scores.new_zeros(*scores.shape[:2], *images.shape[-2:])
            total[..., top : top + size[0], left : left + size[1]] += scores
            count[top : top + size[0], left : left + size[1]] += 1
    return total / count


def classes_of(
    model: nn.Module,
    images: UInt8[Tensor, "B C h w"],
    statistics: Statistics,
    size: tuple[int, int],
    stride: float,
    original: tuple[int, int],
    device: torch.device,
) -> UInt8[Tensor, "B H W"]:
    """The class of each pixel at the original (height, width); scores are enlarged, not classes.

    Images that are smaller than a window get a black border below and to the right, as in training. Scores of one image
    at a time are enlarged: those of large photographs need much memory.
    """
    height, width = images.shape[-2:]
    images = nn.functional.pad(images, (0, max(size[1] - width, 0), 0, max(size[0] - height, 0)))
    with torch.inference_mode():
        scores = window_scores(model, normalise(images, statistics, device), size, stride)[..., :height, :width]
        return torch.cat([enlarge(one, original).argmax(1).to(torch.uint8).cpu() for one in scores.split(1)])
