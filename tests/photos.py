"""Small images: folders of one colour each, a folder a class; pixels of pictures in pages."""

import base64
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def decoded(text: str) -> np.ndarray:
    """The pixels of an image file in base64."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def class_folders(
    root: Path,
    names: Iterable[str] = ("cat", "dog"),
    images: int = 4,
    width: int = 12,
    height: int = 12,
    mode: str = "RGB",
) -> Path:
    """Images 0.png, 1.png, ... of each class, from 100 times its number upwards in steps of 9."""
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number in range(images):
            value = (100 * label + 9 * number) % 256
            Image.new(mode, (width, height), value if mode == "L" else (value,) * 3).save(root / name / f"{number}.png")
    return root
