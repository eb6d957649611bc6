"""Predictions drawn on images: captions, and one colour for each class."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

LONG_SIDE = 640
"""Smaller images are enlarged to about this side, in whole multiples, before text is drawn on them."""


def colour(index: int) -> tuple[int, int, int]:
    """The colour of a class, the same in every picture: hues at distances of the golden ratio."""
    import colorsys

    red, green, blue = colorsys.hsv_to_rgb((0.58 + index * 0.61803398875) % 1.0, 0.75, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def canvas(pixels: np.ndarray) -> tuple[Image.Image, int]:
    """uint8 pixels (h, w, 1 or 3) as an RGB image, and the whole factor by which it was enlarged."""
    image = Image.fromarray(pixels.squeeze()).convert("RGB")
    factor = max(LONG_SIDE // max(image.size), 1)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST), factor


def font_of(size: int) -> ImageFont.FreeTypeFont:
    """matplotlib's DejaVu Sans, which has the letters of most alphabets; Pillow's own font has ASCII alone.

    Raises: MissingExtra.
    """
    import matplotlib

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)


def add_caption(pixels: np.ndarray, lines: Sequence[str]) -> Image.Image:
    """An image with lines of text on a white strip below it."""
    image, _ = canvas(pixels)
    font = font_of(max(image.width // 32, 12))
    height = round(font.size * 1.4)
    page = Image.new("RGB", (image.width, image.height + height * len(lines) + 8), "white")
    page.paste(image)
    draw = ImageDraw.Draw(page)
    for row, line in enumerate(lines):
        draw.text((6, image.height + 4 + row * height), line, fill="black", font=font)
    return page
