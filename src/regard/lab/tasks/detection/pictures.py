"""Predictions drawn on an image."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from ..drawing import canvas, colour, font_of
from .masks import decode

SHOWN = 0.5
"""Objects with a lower score are not drawn."""
OPACITY = 0.45
"""Of the colour of a mask."""


def draw_prediction(pixels: UInt8[np.ndarray, "h w C"], prediction: Mapping[str, Any]) -> Image.Image:
    """A prediction of `predict` on its image: masks, boxes, labels and scores in the colours of the classes."""
    items = [item for item in prediction["objects"] if item["score"] >= SHOWN]
    image, factor = canvas(_tint(pixels, [item for item in items if "mask" in item]))
    draw = ImageDraw.Draw(image)
    font = font_of(max(image.width // 60, 11))
    for item in items:
        left, top, right, bottom = (factor * value for value in item["box"])
        shade = colour(item["category"] - 1)
        draw.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), outline=shade, width=2)
        if len(items) <= 40:  # more captions would cover the image
            caption = f"{item['label']} {100 * item['score']:.0f}"
            place = draw.textbbox((left + 3, top + 2), caption, font=font)
            draw.rectangle((place[0] - 2, place[1] - 1, place[2] + 2, place[3] + 1), fill=shade)
            draw.text((left + 3, top + 2), caption, fill="black", font=font)
    return image


def _tint(pixels: np.ndarray, items: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The pixels with the colour of the class on the mask of each item, and the outline of each mask."""
    if not items:
        return pixels
    values = np.broadcast_to(pixels, (*pixels.shape[:2], 3)).astype(np.float32).copy()
    height, width = items[0]["mask"]["size"]
    rles = [{**item["mask"], "counts": item["mask"]["counts"].encode()} for item in items]
    for mask, item in zip(decode(rles, (height, width)).astype(bool), items, strict=True):
        shade = colour(item["category"] - 1)
        values[mask] += OPACITY * (np.array(shade, np.float32) - values[mask])
        values[_outline(mask)] = shade
    return values.round().astype(np.uint8)


def _outline(mask: np.ndarray) -> np.ndarray:
    """The pixels of a mask that have a neighbour outside it."""
    padded = np.pad(mask, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner
