"""Images of a classification set: decoded once into uint8 arrays, in memory or memory-mapped from a cache on disk."""

import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import DataError
from regard.files.arrays import read_array, write_array
from regard.files.cache import cache_folder

log = logging.getLogger("regard.data")

SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".bmp", ".gif", ".webp", ".avif", ".tif", ".tiff", ".jp2", ".tga", ".ppm",
    ".pgm", ".pbm", ".pnm",
})  # fmt: skip
"""Of files that are read as images."""


FORMATS = ("JPEG", "MPO", "PNG", "BMP", "DIB", "GIF", "WEBP", "AVIF", "TIFF", "JPEG2000", "TGA", "PPM")
"""Of Pillow, in which they are read; others, such as PostScript, would start programs."""


def kinds_of_images() -> str:
    """The suffixes of images for a message: the usual ones, and how many more are read."""
    usual = (".jpg", ".png", ".tif", ".bmp", ".webp")
    return f"{', '.join(usual)} or one of {len(SUFFIXES) - len(usual)} other suffixes"


DARK = 2**12
"""Images of 16 bits whose values are all below this one probably hold 12 bits or fewer."""
TURNED = (5, 6, 7, 8)
"""Values of the EXIF orientation that exchange height and width."""


@dataclass(frozen=True)
class AsStored:
    """The file of an image that is not turned upright, whatever its EXIF data say."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


class Several(ABC):
    """Several images of one size as one, whose channels are those of the first, then those of the second, and so on."""

    @abstractmethod
    def parts(self) -> "Sequence[Source]":
        """The images."""


Source = bytes | Path | AsStored | np.ndarray | Several
"""An encoded image, the path of its file, pixels, or several of these."""
Split = tuple[Sequence[Source], Sequence[object], np.ndarray]
"""Sources, names and labels of the images of a split."""
Check = Callable[[], None]
"""Raises an error if a key of the cache is no longer that of the files."""


class Chosen:
    """Some rows of an array of pixels, which stay where they are until they are indexed."""

    def __init__(self, pixels: np.ndarray, rows: np.ndarray) -> None:
        self.pixels, self.rows = pixels, rows
        self.shape = (len(rows), *pixels.shape[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, rows: slice | np.ndarray) -> "Chosen":
        """The same for a part of the rows."""
        return Chosen(self.pixels, self.rows[rows])

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.pixels[self.rows[rows]]


@dataclass(frozen=True, eq=False)
class Images:
    """One split: pixels (n, height, width, channels) uint8 and labels (n,) int64.

    pixels: an array, or a sequence like one: `Chosen`, or one that decodes images when they are indexed (`own.Lazy`).
    """

    pixels: Any
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: slice | np.ndarray) -> "Images":
        """The images of a slice or of indices; nothing is decoded, or read from a memory-mapped array."""
        part = getattr(self.pixels, "part", None)
        if part is None:
            part = self.pixels.__getitem__
            if isinstance(self.pixels, np.memmap) and isinstance(rows, np.ndarray):
                return Images(Chosen(self.pixels, rows), self.labels[rows])
        return Images(part(rows), self.labels[rows])


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A classification set that is ready for training.

    held: training images that are reserved for tuning, or None. canvas: training places each image at random on an
    empty image of the task's size. checksum: 64 hexadecimal digits of a digest of the data. divided: the test is a part
    of the user's own data, which have no test split.
    """

    name: str
    classes: tuple[str, ...]
    train: Images
    test: Images
    checksum: str
    held: Images | None = None
    canvas: bool = False
    divided: bool = False

    @property
    def channels(self) -> int:
        """1 (grey) or 3 (red, green, blue)."""
        return self.train.pixels.shape[-1]

    @cached_property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation per channel, of pixels in 0 .. 1, over at most 5,000 evenly spaced images."""
        pixels, step = self.train.pixels, -(-len(self.train.pixels) // 5000)
        blocks = range(0, len(pixels), 64 * step)
        return mean_and_deviation(pixels[start : start + 64 * step : step] for start in blocks)


def mean_and_deviation(blocks: Iterable[np.ndarray]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel, of pixels in 0 .. 1, at least 0.001. blocks: uint8, (..., channels).

    Values are counted, so that one block at a time is in memory.
    """
    counts: np.ndarray | int = 0
    for block in blocks:
        channels = np.moveaxis(np.asarray(block), -1, 0)
        counts = counts + np.stack([np.bincount(channel.ravel(), minlength=256) for channel in channels])
    values = (np.arange(256, dtype=np.float32) / 255).astype(np.float64)
    shares = counts / np.sum(counts, -1, keepdims=True)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(-1))
    return [float(m) for m in mean], [max(float(s), 1e-3) for s in std]


def decode(source: Source, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    """One image as (height, width, channels) uint8; size: resize the shorter side and crop the centre; None: as is.

    An image whose EXIF data say that the camera was turned is turned upright.
    Raises: OSError, SyntaxError or ValueError of Pillow for a damaged image; ValueError for pixels of 32 bits.
    """
    from PIL import Image, ImageOps

    if isinstance(source, Several):
        parts = source.parts()
        return np.concatenate([_decode_part(part, size, channels // len(parts)) for part in parts], -1)
    if isinstance(source, np.ndarray):
        image = Image.fromarray(source.squeeze())
    else:
        image = open_image(source.path if isinstance(source, AsStored) else source)
        if left_out := omissions(image):
            _warn_of_lost(left_out)
        if not isinstance(source, AsStored):
            image = ImageOps.exif_transpose(image)
    image = _eight_bits(image).convert("L" if channels == 1 else "RGB")
    if size is not None and image.size != (size[1], size[0]):
        image = fit(image, size)
    return np.asarray(image, dtype=np.uint8).reshape(image.size[1], image.size[0], channels)


def unreadable(source: Source, error: Exception) -> str:
    """What is said of an image, or of a clip, that cannot be decoded."""
    return f"cannot be read as {'a clip' if isinstance(source, Several) else 'an image'} ({error})"


def _decode_part(part: Source, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    try:
        return decode(part, size, channels)
    except Exception as error:  # Pillow raises various errors for a damaged file
        raise ValueError(f"{part.name}: {error}" if isinstance(part, Path) else str(error)) from error


def open_image(file: bytes | Path) -> Any:
    """A Pillow image, of which the header is read. Raises: OSError, which says what the user can do."""
    from PIL import Image, UnidentifiedImageError

    try:
        Image.init()
        known = [name for name in FORMATS if name in Image.OPEN]
        return Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=known)
    except UnidentifiedImageError as error:  # whose own text names an address in memory
        raise OSError(_no_image(file)) from error
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0) // 10**6
        raise OSError(f"it has more than {most} million pixels: shrink it, or cut it into tiles") from error


def omissions(image: Any) -> str:
    """What `decode` leaves out of an opened Pillow image: pages, and channels beyond the first three; "" = nothing.

    The opacity of a PNG, GIF or WebP is not counted, which photographs do not have.
    """
    pages = getattr(image, "n_frames", 1) - 1
    bands = getattr(image, "tag_v2", {}).get(_SAMPLES, 1)
    used = 1 if bands < 3 else 4 if image.mode == "CMYK" else 3
    parts = [f"channels {used + 1} to {bands}" if bands > used + 1 else f"channel {bands}"] if bands > used else []
    return " and ".join([*parts, *([f"all pages but the first of {pages + 1}"] if pages else [])])


_SAMPLES = 277
"""The tag of TIFF with the number of channels."""


def _no_image(source: Any) -> str:
    """Why Pillow cannot open bytes or a file: TIFF may have channels that it does not know."""
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    if content[:4] not in (b"II*\0", b"MM\0*"):
        return "its bytes are of no image format that Pillow reads"
    from PIL import TiffImagePlugin

    tags = TiffImagePlugin.ImageFileDirectory_v2(content[:8])
    stream = io.BytesIO(content)
    try:
        stream.seek(tags.next)
        tags.load(stream)
    except Exception:  # of a damaged file
        return "it is a damaged TIFF"
    return (
        f"it is a TIFF of {tags.get(_SAMPLES, 1)} channels, which Pillow does not read: save three of them as an image"
    )


@lru_cache(maxsize=1)  # once in a process
def _warn_of_lost(what: str) -> None:
    logging.getLogger("regard.pixels").warning(
        "an image has more than is read: %s are left out (`regard data check` counts such images)", what
    )


def read_image(source: str | Path | AsStored | Several, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    """`decode` of a file. Raises: DataError with its name if it does not exist or cannot be read."""
    with image_errors(source):
        return decode(Path(source) if isinstance(source, str) else source, size, channels)


@contextmanager
def image_errors(source: str | Path | AsStored | Several, kind: str = "image") -> Iterator[None]:
    """Errors of a missing or damaged file become a DataError with its name. kind: what a missing file would be."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"there is no {kind} {source}") from error
    except DataError:
        raise
    except Exception as error:  # Pillow raises various errors for a damaged file
        raise DataError(f"{source} cannot be read as an image: {error}") from error


def size_of(file: Path | AsStored) -> tuple[int, int]:
    """(height, width) of an image as `decode` gives it, from its header. Raises: DataError as `read_image`."""
    if isinstance(file, AsStored):
        return header(file.path)[0]
    size, orientation = header(file)
    return size[::-1] if orientation in TURNED else size


def header(file: Path) -> tuple[tuple[int, int], int]:
    """(height, width) of an image as it is stored, and its EXIF orientation. Raises: DataError as `read_image`."""
    from PIL import ExifTags

    with image_errors(file), open_image(file) as image:
        return (image.height, image.width), image.getexif().get(ExifTags.Base.Orientation, 1)


def _eight_bits(image):
    """A Pillow image of 16 bits per pixel by its upper 8 bits, others unchanged; Pillow would clip values above 255.

    There is a warning for the first image that may have fewer than 16 bits.
    Raises: ValueError for pixels of 32 bits, whose range is not known.
    """
    from PIL import Image

    if image.mode not in ("F", "I") and not image.mode.startswith("I;16"):
        return image
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() >= 2**16:
        raise ValueError("it has pixels of 32 bits, whose range is not known: save it with 8 or 16 bits")
    if 0 < pixels.max() < DARK:
        _warn_of_darkness()
    return Image.fromarray((pixels >> 8).astype(np.uint8))


@lru_cache(maxsize=1)  # once in a process
def _warn_of_darkness() -> None:
    logging.getLogger("regard.pixels").warning(  # one image is no problem of the data
        "an image of 16 bits has only values below %d of 65535 and is read as almost black; if all images are like it "
        "(`regard data check`), they hold fewer bits: save them with 8 bits, or multiplied to the full range",
        DARK,
    )


def size_before_crop(size: tuple[int, int]) -> tuple[int, int]:
    """8/7 of (height, width), from which training and test crop images of `size`."""
    return size[0] * 8 // 7, size[1] * 8 // 7


def fit(image, size: tuple[int, int]):
    """A Pillow image resized (bicubic, same aspect ratio) until it covers size = (height, width), then cropped."""
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (size[1], size[0]), method=Image.Resampling.BICUBIC)


def decode_all(split: Split, size: tuple[int, int] | None, channels: int, corrupt: str = "stop") -> Images:
    """Decode a split. corrupt: "stop" at the first image that cannot be read, or "skip" it with a warning.

    Raises: DataError with the name of a damaged image; if images differ in size without `size`; if none is readable.
    """
    (sources, names, labels), kept = split, list[int]()
    for row, image in _decode_readable(sources, names, size, channels, corrupt):
        if not kept:
            pixels = np.empty((len(sources), *image.shape), np.uint8)
        if image.shape != (shape := pixels.shape[1:]):
            raise DataError(
                f"{names[row]} has shape {image.shape}, the others {shape}; all images need the same size here"
            )
        pixels[len(kept)] = image
        kept.append(row)
    return Images(pixels[: len(kept)], labels[kept])


def _decode_readable(
    sources: Sequence[Source], names: Sequence[object], size: tuple[int, int] | None, channels: int, corrupt: str
) -> Iterator[tuple[int, np.ndarray]]:
    """Index and pixels of the readable images. Raises: DataError as `decode_all`."""
    any_read = False
    for row, source in enumerate(sources):
        try:
            image = decode(source, size, channels)
        except Exception as error:  # Pillow raises various errors for a damaged file
            if corrupt != "skip":
                hint = 'repair or remove it, or pass corrupt="skip"'
                raise DataError(f"{names[row]} {unreadable(source, error)}; {hint}") from error
            log.warning("skipped %s: %s", names[row], error)
            continue
        any_read = True
        yield row, image
    if not any_read:
        raise DataError("no image could be read")


def check_labels(name: str, labels: np.ndarray, classes: int, least: int = 2) -> None:
    """Check labels. Raises: DataError without images, for fewer than `least` classes, or for a label outside
    0 .. classes-1."""
    if not len(labels):
        raise DataError(f"{name} has no images")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        row = int(np.flatnonzero((labels < 0) | (labels >= classes))[0])
        raise DataError(
            f"{name}: label {int(labels[row])} of row {row} is outside 0..{classes - 1} ({classes} classes)"
        )
    if low == high and least > 1:
        raise DataError(f"{name} has only one class (label {low}); classification needs at least two")


def load_or_make(key: str, make: Callable[[], Images]) -> Images:
    """The images that `make` returns, stored as .npy files in `cache_folder()` and memory-mapped from then on.

    If the cache cannot be written, there is a warning and the images stay in memory.
    """
    folder = cache_folder() / "images"
    pixels, labels = folder / f"{key}.pixels.npy", folder / f"{key}.labels.npy"
    if (found := _read_cache(pixels, labels)) is not None:
        return found
    images = make()
    if _keep({pixels: images.pixels, labels: images.labels}, "decoded images are"):
        return Images(np.load(pixels, mmap_mode="r"), images.labels)
    return images


def _read_cache(pixels: Path, labels: Path) -> Images | None:
    """The images of the cache, if both files are whole."""
    first, second = read_array(pixels, mapped=True), read_array(labels)
    return None if first is None or second is None or len(first) != len(second) else Images(first, second)


def readable_rows(
    key: str, sources: Sequence[Source], names: Sequence[object], channels: int, check: Check = lambda: None
) -> np.ndarray:
    """The indices of the images that can be decoded, each tried once; stored as a .npy file like `load_or_make`.

    check: called before they are stored. There is a warning for each damaged image. Raises: DataError if no image can
    be decoded.
    """
    path = cache_folder() / "images" / f"{key}.rows.npy"
    if (found := read_array(path)) is not None:
        return found
    rows = np.array([row for row, _ in _decode_readable(sources, names, None, channels, "skip")], np.int64)
    check()
    _keep({path: rows}, "the list of readable images is")
    return rows


def _keep(arrays: Mapping[Path, np.ndarray], what: str) -> bool:
    """Whether arrays were written to the cache; without that there is a warning."""
    try:
        for path, array in arrays.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_array(path, array)
    except OSError as error:
        log.warning("%s not cached: %s", what, error)
        return False
    return True
