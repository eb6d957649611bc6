"""Images of a classification set: decoded once into uint8 arrays, kept in memory or mapped from a cache on disk."""

import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from regard.core import DataError

log = logging.getLogger("regard.data")

Source = bytes | Path | np.ndarray
"""An encoded image, the file that has one, or pixels."""


@dataclass(frozen=True, eq=False)
class Images:
    """One split: pixels (n, height, width, channels) uint8 and labels (n,) int64.

    pixels: an array, or what looks like one and decodes images when asked for them (`own.Lazy`).
    """

    pixels: Any
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: slice | np.ndarray) -> "Images":
        """A part: a slice, as views, or the numbers of images; where they are decoded when asked for, nothing is."""
        part = getattr(self.pixels, "part", None)
        return Images(self.pixels[rows] if part is None else part(rows), self.labels[rows])


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A classification set that is ready for training.

    train, test and held (rows kept back from training, for tuning; None if there are none). canvas: a training image is
    placed anywhere on an empty image of the task's size. checksum: 64 hex digits of what was read. mean and std: per
    channel, of pixels between 0 and 1.
    """

    name: str
    classes: tuple[str, ...]
    train: Images
    test: Images
    checksum: str
    held: Images | None = None
    canvas: bool = False

    @property
    def channels(self) -> int:
        """1 (grey) or 3 (red, green, blue)."""
        return self.train.pixels.shape[-1]

    @cached_property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation per channel of at most 5,000 training images, evenly chosen."""
        pixels = self.train.pixels
        some = np.asarray(pixels[:: -(-len(pixels) // 5000)], dtype=np.float32) / 255
        mean, std = some.mean((0, 1, 2), dtype=np.float64), some.std((0, 1, 2), dtype=np.float64)
        return [float(m) for m in mean], [max(float(s), 1e-3) for s in std]


def decode(source: Source, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    """One image as (height, width, channels) uint8; size: resize the shorter side and cut the centre; None keeps it.

    Raises: OSError, SyntaxError or ValueError of Pillow for a damaged image; ValueError for pixels of 32 bits.
    """
    from PIL import Image

    opened = Image.fromarray(source.squeeze()) if isinstance(source, np.ndarray) else None
    if opened is None:
        opened = Image.open(io.BytesIO(source) if isinstance(source, bytes) else cast(Path, source))
    image = _eight_bits(opened).convert("L" if channels == 1 else "RGB")
    if size is not None and image.size != (size[1], size[0]):
        image = fit(image, size)
    return np.asarray(image, dtype=np.uint8).reshape(image.size[1], image.size[0], channels)


def _eight_bits(image):
    """A Pillow image of 16 bits a pixel by its upper 8, others as they are; Pillow would cut off all above 255.

    Raises: ValueError for other wide pixels, whose range is not known.
    """
    from PIL import Image

    if image.mode not in ("F", "I") and not image.mode.startswith("I;16"):
        return image
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() >= 2**16:
        raise ValueError("it has pixels of 32 bits, whose range is not known: save it with 8 or 16 bits")
    return Image.fromarray((pixels >> 8).astype(np.uint8))


def larger(size: tuple[int, int]) -> tuple[int, int]:
    """8/7 of (height, width), from which training and test cut windows of `size`."""
    return size[0] * 8 // 7, size[1] * 8 // 7


def fit(image, size: tuple[int, int]):
    """A Pillow image resized (bicubic, both ratios kept) until it covers size = (height, width), then cut."""
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (size[1], size[0]), method=Image.Resampling.BICUBIC)


def decode_all(
    sources: Sequence[Source],
    labels: np.ndarray,
    name_of: Callable[[int], str],
    size: tuple[int, int] | None,
    channels: int,
    corrupt: str = "stop",
) -> Images:
    """Decode a split. corrupt: "stop" at the first image that cannot be read, or "skip" it with a warning.

    Raises: DataError that names the image; or if images differ in size and no size is given; or if nothing is left.
    """
    shape: tuple[int, ...] | None = None
    pixels, kept, row = np.empty(0, np.uint8), [], 0
    for i, image in _decoded(sources, name_of, size, channels, corrupt):
        if shape is None:
            shape = image.shape
            pixels = np.empty((len(sources), *shape), np.uint8)
        if image.shape != shape:
            raise DataError(
                f"{name_of(i)} has shape {image.shape}, the others {shape}; images of one size are needed here"
            )
        pixels[row] = image
        kept.append(i)
        row += 1
    return Images(pixels[:row], labels[kept])


def _decoded(
    sources: Sequence[Source], name_of: Callable[[int], str], size: tuple[int, int] | None, channels: int, corrupt: str
) -> Iterator[tuple[int, np.ndarray]]:
    """Number and pixels of the images that can be read. Raises: DataError as `decode_all`."""
    any_read = False
    for row, source in enumerate(sources):
        try:
            image = decode(source, size, channels)
        except Exception as error:  # Pillow raises many kinds for a damaged file
            if corrupt != "skip":
                hint = 'repair or remove it, or pass corrupt="skip"'
                raise DataError(f"{name_of(row)} cannot be read as an image ({error}); {hint}") from error
            log.warning("skipped %s: %s", name_of(row), error)
            continue
        any_read = True
        yield row, image
    if not any_read:
        raise DataError("no image could be read")


def check_labels(name: str, labels: np.ndarray, classes: int) -> None:
    """Raises: DataError for no images, one class only, or a label outside 0 .. classes-1."""
    if not len(labels):
        raise DataError(f"{name} has no images")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        row = int(np.flatnonzero((labels < 0) | (labels >= classes))[0])
        raise DataError(
            f"{name}: label {int(labels[row])} of row {row} is outside 0..{classes - 1} ({classes} classes)"
        )
    if low == high:
        raise DataError(f"{name} has one class only (label {low}); classification needs at least two")


def cache_folder() -> Path:
    """Where decoded arrays are kept: `regard` below XDG_CACHE_HOME, or below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


def cached(key: str, make: Callable[[], Images]) -> Images:
    """What `make` returns, kept as .npy files below `cache_folder()` and mapped into memory from the second time on.

    A cache that cannot be written or read costs a warning and time, nothing else.
    """
    folder = cache_folder() / "images"
    pixels, labels = folder / f"{key}.pixels.npy", folder / f"{key}.labels.npy"
    try:
        found = Images(np.load(pixels, mmap_mode="r"), np.load(labels))
        if found.pixels.ndim == 4 and len(found.pixels) == len(found.labels):
            return found
    except (OSError, ValueError, EOFError):
        pass
    made = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, array in ((pixels, made.pixels), (labels, made.labels)):
            _save(path, array)
    except OSError as error:
        log.warning("decoded images are not cached: %s", error)
        return made
    return Images(np.load(pixels, mmap_mode="r"), np.load(labels))


def readable_rows(key: str, sources: Sequence[Source], name_of: Callable[[int], str], channels: int) -> np.ndarray:
    """The numbers of the images that can be decoded, each of which is tried once; kept as a .npy file like `cached`.

    Damaged ones are named in warnings. Raises: DataError if nothing is left.
    """
    path = cache_folder() / "images" / f"{key}.rows.npy"
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        pass
    found = np.array([row for row, _ in _decoded(sources, name_of, None, channels, "skip")], np.int64)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(path, found)
    except OSError as error:
        log.warning("which images can be read is not cached: %s", error)
    return found


def _save(path: Path, array: np.ndarray) -> None:
    """Write beside the target and rename; nothing is left beside it if the disk is full."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.save(file, array)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
