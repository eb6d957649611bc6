"""Predictions drawn on an image."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from ..drawing import canvas, colour, font_of
from .masks import decode

OPACITY = 0.45
"""Of the colour of a mask."""
MOST_CAPTIONS = 40
"""More would cover the image: the colours are then explained below it."""


def draw_prediction(pixels: UInt8[np.ndarray, "h w C"], prediction: Mapping[str, Any]) -> Image.Image:
    """A prediction of `predict` on its image: masks, boxes, labels and scores in the colours of the classes."""
    items = prediction["objects"]
    image, factor = canvas(_tint(pixels, [item for item in items if "mask" in item]))
    draw = ImageDraw.Draw(image)
    font = font_of(max(image.width // 60, 11))
    for item in items:
        left, top, right, bottom = (factor * value for value in item["box"])
        shade = colour(item["category"] - 1)
        draw.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), outline=shade, width=2)
        if len(items) <= MOST_CAPTIONS:
            caption = f"{item['label']} {100 * item['score']:.0f}"
            x, y, end, low = draw.textbbox((0, 0), caption, font=font, stroke_width=2)
            wide, high = end - x + 1, low - y + 1
            row = top - high if top >= high else min(bottom, image.height - high)  # beside the object, not on it
            place = max(min(left, image.width - wide), 0) - x, row - y
            draw.text(place, caption, fill=shade, font=font, stroke_width=2, stroke_fill="black")
    if len(items) <= MOST_CAPTIONS:
        return image
    return _with_legend(image, {item["label"]: colour(item["category"] - 1) for item in items})


def _with_legend(image: Image.Image, colours: Mapping[str, tuple[int, int, int]]) -> Image.Image:
    """The image above a strip with the names of classes in their colours; names that do not fit are left out."""
    font = font_of(max(image.width // 50, 12))
    page = Image.new("RGB", (image.width, image.height + 2 * round(font.size)), "black")
    page.paste(image)
    draw, left = ImageDraw.Draw(page), 6.0
    for label, shade in sorted(colours.items()):
        end = left + draw.textlength(label, font=font)
        if end > page.width:
            break
        draw.text((left, image.height + font.size / 2), label, fill=shade, font=font)
        left = end + font.size
    return page


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
