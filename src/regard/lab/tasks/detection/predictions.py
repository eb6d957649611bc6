"""Predictions of a detector in the original images: boxes and masks, and as data for JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from regard.images.feed import to_tensor
from regard.images.normalise import Statistics, normalise

from .feed import Split, fitted_size, stack_images
from .masks import as_text, encode
from .scenes import Rle
from .score import Found

AT_ONCE = 8
"""Images in one forward pass."""


@dataclass(frozen=True)
class Frame:
    """How a model takes images: their size (height, width), `resize` as in the task, and the normalisation."""

    size: tuple[int, int]
    resize: str
    statistics: Statistics

    def pad(self, images: Tensor, sizes: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """uint8 images (n, C, H, W) normalised on the device, with zeros beside the (height, width) of each."""
        prepared = normalise(images, self.statistics, device)
        for image, (height, width) in zip(prepared, sizes, strict=True):
            image[:, height:] = 0.0
            image[:, :, width:] = 0.0
        return prepared


def predictions_of(frame: Frame, model: nn.Module, split: Split, device: torch.device) -> list[Found]:
    """The predictions in all images of a split, in their order."""
    model.eval()
    found: list[Found] = []
    for start in range(0, len(split), AT_ONCE):
        rows = range(start, min(start + AT_ONCE, len(split)))
        images = stack_images([to_tensor(split.pixels(row)[None])[0] for row in rows])
        found += found_in(frame, model, images, [split.scenes[row].size for row in rows], device)
    return found


def found_in(
    frame: Frame, model: nn.Module, images: Tensor, originals: Sequence[tuple[int, int]], device: torch.device
) -> list[Found]:
    """The predictions in uint8 images (n, C, H, W), resized for the frame, in pixels of the original images."""
    sizes = [fitted_size(original, frame.size, frame.resize) for original in originals]
    with torch.inference_mode():
        predictions = model(frame.pad(images, sizes, device), None, sizes)
        return [
            _in_original(prediction, size, original)
            for prediction, size, original in zip(predictions, sizes, originals, strict=True)
        ]


def _in_original(prediction: Mapping[str, Tensor], size: tuple[int, int], original: tuple[int, int]) -> Found:
    factors = [original[1] / size[1], original[0] / size[0]] * 2
    boxes = prediction["boxes"].float().cpu() * torch.tensor(factors)
    scores, labels = prediction["scores"].float().cpu().numpy(), prediction["labels"].cpu().numpy() - 1
    rles: list[Rle] | None = None
    if "masks" in prediction:
        rles = []
        for first in range(0, len(boxes), 32):  # a mask of the whole image each: few at a time
            part = slice(first, first + 32)
            pasted = paste_masks_in_image(prediction["masks"][part].float().cpu(), boxes[part], original)
            rles += encode((pasted[:, 0] > 0.5).numpy())
    return Found(boxes.numpy(), labels, scores, rles)


def as_json(
    file: str, size: tuple[int, int], found: Found, class_names: Sequence[str], category_ids: Sequence[int]
) -> dict[str, Any]:
    """A prediction as data for JSON: file, size [height, width] and its objects, the highest score first.

    An object has label, category (the number of its class in the annotations), score (4 decimals), box (left, top,
    right, bottom in pixels, 2 decimals) and, with masks, mask, an encoding of COCO.
    """
    objects = []
    for row in np.argsort(-found.scores, kind="stable").tolist():
        label = int(found.labels[row])
        item: dict[str, Any] = {"label": class_names[label], "category": int(category_ids[label])}
        item |= {"score": round(float(found.scores[row]), 4), "box": [round(float(v), 2) for v in found.boxes[row]]}
        if found.masks is not None:
            item["mask"] = as_text(found.masks[row])
        objects.append(item)
    return {"file": file, "size": list(size), "objects": objects}
