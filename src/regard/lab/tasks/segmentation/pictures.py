"""Masks drawn on images, with the names of their classes."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from regard.models.segmentation import VOID

from ..drawing import LONG_SIDE, colour, font_of

OPACITY = 0.55
GAP = 6


def overlay(
    pixels: UInt8[np.ndarray, "h w C"], mask: UInt8[np.ndarray, "h w"], hidden: Sequence[int] = ()
) -> Image.Image:
    """Classes in their colours over an image; void and hidden classes show the image alone."""
    palette = np.array([colour(index) for index in range(256)], np.float32)
    rgb = np.broadcast_to(pixels, (*pixels.shape[:2], 3)).astype(np.float32)
    mixed = (1 - OPACITY) * rgb + OPACITY * palette[mask]
    plain = np.isin(mask, [VOID, *hidden])[..., None]
    return Image.fromarray(np.where(plain, rgb, mixed).round().astype(np.uint8))


def sheet(
    pixels: UInt8[np.ndarray, "h w C"],
    masks: Sequence[tuple[str, UInt8[np.ndarray, "h w"]]],
    names: Sequence[str],
    hidden: Sequence[int] = (),
) -> Image.Image:
    """The image, and each (title, mask) over it, side by side; below, the colours of the classes that occur."""
    grey = np.full(pixels.shape[:2], VOID, np.uint8)
    panels = [("image", overlay(pixels, grey)), *((title, overlay(pixels, mask, hidden)) for title, mask in masks)]
    factor = max(LONG_SIDE // 2 / max(pixels.shape[:2]), 1)
    width, height = round(pixels.shape[1] * factor), round(pixels.shape[0] * factor)
    font = font_of(max(width // 22, 12))
    line = round(font.size * 1.5)
    present = sorted({int(label) for _, mask in masks for label in np.unique(mask)} - {VOID, *hidden})
    total = len(panels) * (width + GAP) - GAP
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    places, x, row = [], 0, 0
    for label in present:  # the legend, in as many lines as it needs
        wide = round(measure.textlength(names[label], font=font)) + 2 * line
        if x and x + wide > total:
            x, row = 0, row + 1
        places.append((label, x, row))
        x += wide
    page = Image.new("RGB", (total, height + line * (2 + row if present else 1) + 2 * GAP), "white")
    draw = ImageDraw.Draw(page)
    for index, (title, panel) in enumerate(panels):
        left = index * (width + GAP)
        draw.text((left + 2, 0), title, fill="black", font=font)
        page.paste(panel.resize((width, height), Image.Resampling.NEAREST), (left, line))
    for label, left, row in places:
        top = height + line * (1 + row) + GAP
        draw.rectangle((left, top + 3, left + line - 8, top + line - 5), fill=colour(label))
        draw.text((left + line, top), names[label], fill="black", font=font)
    return page


def runs(mask: UInt8[np.ndarray, "h w"]) -> list[list[int]]:
    """A mask as [class, number of pixels] of each run of equal classes, row by row."""
    flat = mask.ravel()
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    lengths = np.diff(np.append(starts, flat.size))
    return [[int(flat[start]), int(length)] for start, length in zip(starts, lengths, strict=True)]


def mask_of(encoded: Sequence[Sequence[int]], size: Sequence[int]) -> UInt8[np.ndarray, "h w"]:
    """The inverse of `runs` for size = (height, width)."""
    labels, lengths = np.array(encoded, np.int64).T
    return np.repeat(labels.astype(np.uint8), lengths).reshape(*size)
