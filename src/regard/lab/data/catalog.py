"""The named data sets and their files, and the meaning of `--data`."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from regard.core import DataError, nearest, require
from regard.files.paths import user_path
from regard.images import imagenet, own, tables
from regard.images.digest import fingerprint
from regard.images.images import Images, ImageSet, Source, check_labels, decode_all, load_or_make, size_before_crop
from regard.images.streams import generator

from .generated import with_revision
from .streamed import load as streamed
from .streamed.names import is_stream


@dataclass(frozen=True, kw_only=True)
class ParquetSet:
    """A set in the data folder: files <name>/train.parquet and <name>/<test>.parquet with columns img and label.

    rows: (train, test) images, which are checked. used: training images; the others are reserved for tuning. raw:
    images are raw bytes of this (height, width) instead of encoded files.
    """

    classes: int
    rows: tuple[int, int]
    used: int
    channels: int = 3
    test: str = "test"
    raw: tuple[int, int] | None = None


PARQUET: dict[str, ParquetSet] = {
    "cifar10": ParquetSet(classes=10, rows=(50_000, 10_000), used=45_000),
    "cifar100_small": ParquetSet(classes=100, rows=(10_000, 5_000), used=10_000),
    "fashion_mnist": ParquetSet(classes=10, rows=(60_000, 10_000), used=55_000, channels=1, raw=(28, 28)),
    "imagenette_small": ParquetSet(classes=10, rows=(2_000, 500), used=2_000, test="val"),
}
# name -> (argument of torchvision's class that chooses a split, its value for training, for the test, classes)
TORCHVISION: dict[str, tuple[str, Any, Any, int]] = {
    "MNIST": ("train", True, False, 10),
    "KMNIST": ("train", True, False, 10),
    "FashionMNIST": ("train", True, False, 10),
    "CIFAR10": ("train", True, False, 10),
    "CIFAR100": ("train", True, False, 100),
    "SVHN": ("split", "train", "test", 10),
    "STL10": ("split", "train", "test", 10),
    "GTSRB": ("split", "train", "test", 43),
    "Flowers102": ("split", "train", "test", 102),
    "FGVCAircraft": ("split", "trainval", "test", 100),
    "OxfordIIITPet": ("split", "trainval", "test", 37),
    "StanfordCars": ("split", "train", "test", 196),
    "Food101": ("split", "train", "test", 101),
    "DTD": ("split", "train", "test", 47),
    "Imagenette": ("split", "train", "val", 10),
}
NAMED: dict[str, str] = {
    **dict.fromkeys(("digits", "digits-canvas"), "scikit-learn, always available"),
    **{name: f"REGARD_DATA/{name}" for name in PARQUET},
    "imagenet": "REGARD_DATA/imagenet/{train,val}",
    **dict.fromkeys(TORCHVISION, "torchvision"),
}
"""Every set that `--data` accepts by name, and where it comes from; anything else is a path of the user's own data."""

SIZES: dict[str, tuple[int, int]] = {
    "digits": (8, 8),
    "digits-canvas": (12, 12),
    **dict.fromkeys(("cifar10", "cifar100_small", "CIFAR10", "CIFAR100", "SVHN"), (32, 32)),
    **dict.fromkeys(("fashion_mnist", "MNIST", "KMNIST", "FashionMNIST"), (28, 28)),
}
"""(height, width) of the images of small sets."""
CHANNELS = 3
"""Of torchvision's sets, ImageNet and the user's own data."""
CANVAS_POSITIONS = 2
"""Number of positions of every test image of digits-canvas."""


def classes_and_channels(data: str) -> tuple[int, int]:
    """(classes, channels) of a named set without reading it; (1000, 3) for the user's own data.

    torchvision's grey sets are read as RGB.
    """
    if data in ("digits", "digits-canvas"):
        return 10, 1
    if data in PARQUET:
        return PARQUET[data].classes, PARQUET[data].channels
    return (TORCHVISION[data][3] if data in TORCHVISION else 1000), CHANNELS


def size_before_centre(data: str, size: tuple[int, int], cut: bool) -> tuple[int, int]:
    """(height, width) of test images of a set before their centre is cropped to `size`; as `load` prepares them."""
    if not cut and data in (*PARQUET, *SIZES, *TORCHVISION):
        return size
    if cut and data in SIZES:
        height, width = SIZES[data]
        return (max(height, 32), max(width, 32)) if data in TORCHVISION else (height, width)
    return size_before_crop(size)


def known_counts(data: str) -> tuple[int, int] | None:
    """Numbers of (training, test) images of a set that is known without reading it, else None."""
    if data in PARQUET:
        return PARQUET[data].used, PARQUET[data].rows[1]
    return {"digits": (898, 899), "digits-canvas": (898, 1798), "imagenet": (1_281_167, 50_000)}.get(data)


def data_root() -> Path:
    """The folder with a subfolder for each set. Raises: DataError without a folder in --data-root or REGARD_DATA."""
    root = folder_in_use()
    if not root:
        raise DataError(
            "no data folder: pass --data-root PATH or set REGARD_DATA to a folder with a subfolder for each set"
        )
    path = user_path(root, DataError)
    if not path.is_dir():
        raise DataError(f"the data folder {path} does not exist; check --data-root or REGARD_DATA")
    return path


def folder_in_use() -> str:
    """What --data-root or REGARD_DATA names, "" for none: a part of the key of whatever is cached from its sets."""
    return os.environ.get("REGARD_DATA", "")


def identity(data: str, kind: str = "", reserved: bool = False) -> str:
    """The data in a run's key: the name of a named set, the commit of one on the hub, or a digest; never a path.

    The user's own files are looked at each time, and `load` then gives the present ones.
    kind, reserved: of the digest, see `regard.images.own.digest`.
    Raises: DataError if it is neither a known name nor an existing path.
    """
    if is_stream(data):
        return streamed.identity(data, kind)
    return with_revision(data) if data in NAMED else f"own:{own.present_digest(path_of(data), kind, reserved)}"


def path_of(data: str) -> Path:
    """The user's own folder or table. Raises: DataError if `data` is neither a known name nor an existing path."""
    if data.startswith(("pipe:", "http://", "https://", "s3://", "gs://")):
        raise DataError(
            f"{data} is not read; streams are hf://OWNER/NAME, and stream:FOLDER with shards that were downloaded"
        )
    expected = "a folder of class folders, a list of images (.csv), a parquet file, or a folder of parquet files"
    return own_path(data, NAMED, expected, (".parquet", *own.LISTS))


def own_path(data: str, names: Iterable[str], expected: str, suffixes: Sequence[str] = ()) -> Path:
    """The user's own folder, or file with one of these suffixes.

    names: of the sets that are no paths. expected: what there should be, as a noun. Raises: DataError.
    """
    path = user_path(data, DataError)
    is_file = path.suffix.lower() in suffixes
    if path.is_dir() or (is_file and path.exists()):
        return path.resolve()
    if path.exists() or is_file or "/" in data or "\\" in data:
        raise DataError(f"{data} {'is a file' if path.exists() else 'does not exist'}; expected {expected}")
    raise DataError(f"unknown data set {data!r} (and no such path); {nearest(data, names)}")


def folder_of(name: str, expected: str = "images and annotations") -> Path:
    """The folder of a named set in the data folder. Raises: DataError if there is none."""
    path = data_root() / name
    if not path.is_dir():
        raise DataError(
            f"{name} needs the folder {path}, which does not exist; expected {expected} there: point --data-root or "
            "REGARD_DATA to its parent"
        )
    return path.resolve()


def parquet_files(name: str, *splits: str) -> list[Path]:
    """The tables of a named set in the data folder. Raises: DataError if one is missing."""
    files = [data_root() / name / f"{split}.parquet" for split in splits]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"{name} needs {file}, which does not exist; point --data-root or REGARD_DATA to its folder"
            )
    return files


def load(
    data: str,
    size: tuple[int, int],
    *,
    cut: bool = False,
    corrupt: Literal["stop", "skip"] = "stop",
    download: bool = False,
    kind: str = "",
    reserved: bool = False,
) -> ImageSet:
    """A set by name or path, decoded for images of size = (height, width); the last two sets are cached.

    cut: images keep their own size, to be cropped to `size`; torchvision's sets of files then have images of 8/7 of
    `size`, as ImageNet and the user's own data always have. corrupt: stop at a damaged image, or skip it. download:
    torchvision's sets if they are missing. kind, reserved: of the user's own data, see
    `own.load`. Raises: DataError.
    """
    if is_stream(data):
        return _load_stream(data, size, kind, streamed.identity(data, kind))
    key = data if data in NAMED else str(path_of(data))
    root = folder_in_use() if data in NAMED else own.digest(path_of(data), kind, reserved)
    return _load(key, size, cut, corrupt, download, root, kind, reserved)


def load_scored(
    data: str, size: tuple[int, int], corrupt: str, kind: str, trained: str
) -> tuple[tuple[str, ...], Images | None]:
    """The classes of the user's own data, and their images of the test, or all of them; decoded as for `load`.

    trained: the name of the data of a training; there are no images if they are these. Raises: DataError.
    """
    path = path_of(data)
    total = own.present_digest(path, kind, whole=True)
    if trained.removeprefix("own:").removesuffix(own.RESERVED) in (total, own.DIVIDED + total):
        return (), None
    classes, split = own.read_scored(path)
    return classes, own.from_files(split, size_before_crop(size), corrupt, f"own4-{total}-scored")


@lru_cache(maxsize=2)
def _load_stream(data: str, size: tuple[int, int], kind: str, identity: str) -> ImageSet:
    """Of the files with this identity."""
    return streamed.load(data, size, kind)


@lru_cache(maxsize=2)
def _load(
    data: str, size: tuple[int, int], cut: bool, corrupt: str, download: bool, root: str, kind: str, reserved: bool
) -> ImageSet:
    if data in ("digits", "digits-canvas"):
        canvas = data == "digits-canvas"
        image_set = digits(None if cut or canvas else size, canvas=size if canvas else None)
    elif data in PARQUET:
        image_set = parquet_set(data, None if cut else size, corrupt)
    elif data == "imagenet":
        image_set = imagenet.load(data_root() / "imagenet", size)
    elif data in TORCHVISION:
        image_set = torchvision_set(data, size, cut, corrupt, download)
    else:
        image_set = own.load(Path(data), size, corrupt, root, kind, reserved)
    for split in (image_set.train, image_set.test):
        height, width = split.pixels.shape[1:3]
        if (height < size[0] or width < size[1]) and not image_set.canvas:
            raise DataError(
                f"images of {image_set.name} have {height}x{width} pixels, the task needs {size[0]}x{size[1]}"
            )
    return image_set


def digits(size: tuple[int, int] | None = None, *, canvas: tuple[int, int] | None = None) -> ImageSet:
    """scikit-learn's 1,797 digits of 8 x 8 in a fixed permutation: 898 for training, 899 for the test.

    size: (height, width) to which they are resized (bicubic). canvas: (height, width) of an empty image on which
    training places each digit at random, and the test at two fixed positions.
    Raises: DataError if the canvas is smaller than 8 x 8.
    """
    require("sklearn")

    from sklearn.datasets import load_digits

    if canvas is not None and min(canvas) < 8:
        raise DataError(f"digits have 8x8 pixels and do not fit a canvas of {canvas[0]}x{canvas[1]}")
    bunch = load_digits()
    order = generator("digits").permutation(len(bunch.target))
    pixels = np.round(bunch.images[order] * (255 / 16)).astype(np.uint8)[..., None]
    labels = bunch.target[order].astype(np.int64)
    checksum = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    if size is not None:
        pixels = decode_all((list(pixels), range(len(pixels)), labels), size, 1).pixels
    train, test = Images(pixels[:898], labels[:898]), Images(pixels[898:], labels[898:])
    if canvas is not None:
        from regard.images.augment import place_on_canvas

        canvases = [
            place_on_canvas(test.pixels, canvas, generator("digits-canvas", index)) for index in range(CANVAS_POSITIONS)
        ]
        test = Images(np.concatenate(canvases), np.tile(test.labels, CANVAS_POSITIONS))
    names = tuple(str(digit) for digit in range(10))
    return ImageSet(
        "digits" if canvas is None else "digits-canvas", names, train, test, checksum, None, canvas is not None
    )


def parquet_set(name: str, size: tuple[int, int] | None, corrupt: str) -> ImageSet:
    """A named set in the data folder. Raises: DataError for a missing, damaged or incomplete file."""
    spec = PARQUET[name]
    files = parquet_files(name, "train", spec.test)
    sums = [file_checksum(file) for file in files]
    _check_checksums(data_root(), files, sums)
    train, test = (
        _parquet_split(name, file, total, rows, size, corrupt)
        for file, total, rows in zip(files, sums, spec.rows, strict=True)
    )
    names = tables.class_names(files[0]) or tuple(str(label) for label in range(spec.classes))
    used = spec.used if len(train) >= spec.rows[0] else len(train) * spec.used // spec.rows[0]
    held = train.take(slice(used, None)) if used < len(train) else None
    checksum = hashlib.sha256("".join(sums).encode()).hexdigest()
    return ImageSet(name, names, train.take(slice(0, used)), test, checksum, held)


def _parquet_split(name: str, file: Path, total: str, rows: int, size: tuple[int, int] | None, corrupt: str) -> Images:
    spec = PARQUET[name]

    def read_sources() -> tuple[list[Source], list[str], np.ndarray]:
        table = tables.read_table(file)
        if len(table) != rows:
            raise DataError(f"{file} has {len(table)} rows, {name} has {rows}; download the file again")
        labels = table["label"].to_numpy().astype(np.int64)
        check_labels(str(file), labels, spec.classes)
        sources = tables.image_column(file, table["img"])
        if spec.raw is not None:
            sources = [np.frombuffer(cast(bytes, source), np.uint8).reshape(*spec.raw, 1) for source in sources]
        return sources, names, labels

    key, names = f"{name}-{file.stem}-{total[:16]}", [f"row {row} of {file}" for row in range(rows)]
    if size is not None and own.too_large(rows, size, spec.channels):
        return own.from_files(read_sources(), size, corrupt, key, channels=spec.channels)
    side = "native" if size is None else f"{size[0]}x{size[1]}"
    images = load_or_make(f"{key}-{side}-{corrupt}", lambda: decode_all(read_sources(), size, spec.channels, corrupt))
    own.warn_of_skipped(rows, len(images), names)
    return images


@lru_cache(maxsize=16)
def file_checksum(file: Path) -> str:
    """The SHA-256 of a file, 64 hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_checksums(root: Path, files: list[Path], sums: list[str]) -> None:
    listed = root / "SHA256SUMS"
    if not listed.is_file():
        return
    lines = [line.split(maxsplit=1) for line in listed.read_text().splitlines() if line.strip()]
    expected = {name: total for total, name in lines}
    for file, total in zip(files, sums, strict=True):
        if expected.get(str(file.relative_to(root)), total) != total:
            raise DataError(
                f"{file} differs from its checksum in {listed}: it is damaged or changed; download it again"
            )


def torchvision_set(name: str, size: tuple[int, int], cut: bool, corrupt: str, download: bool) -> ImageSet:
    """A set of torchvision in <data folder>/torchvision, as RGB.

    Sets that are arrays are read at once, and resized when they are used if they need more than `own.IN_MEMORY`; images
    in files are decoded as in `own.load`. cut: images of arrays keep
    their size (those below 32 x 32 are enlarged to it), images in files have 8/7 of `size`.
    Raises: DataError if the set is missing and not downloaded, or an image is damaged.
    """
    import torchvision

    root = data_root() / "torchvision"
    argument, train, test, count = TORCHVISION[name]
    dataset_class: Callable[..., Any] = getattr(torchvision.datasets, name)
    splits, total = [], hashlib.sha256()
    for split in (train, test):
        try:
            dataset = dataset_class(root=str(root), download=download, **{argument: split})
        except (RuntimeError, OSError, ValueError) as error:
            hint = "" if download else "; pass --download (download=True) to download it"
            raise DataError(f"torchvision's {name} cannot be read in {root}{hint} ({error})") from error
        if hasattr(dataset, "data"):
            part = _array_split(name, dataset, None if cut else size)
            lazy = isinstance(part.pixels, own.Lazy)
            for array in (*(part.pixels.sources if lazy else [part.pixels]), part.labels):
                total.update(np.ascontiguousarray(array).data)
        else:
            files, labels = _files(dataset)
            digest = _files_checksum(files, labels)
            total.update(digest.encode())
            file_size, key = size_before_crop(size) if cut else size, f"{name}-{split}-{digest[:16]}-upright"
            part = own.from_files((files, files, labels), file_size, corrupt, key)
        check_labels(name, part.labels, count)
        splits.append(part)
    classes = tuple(map(str, getattr(dataset, "classes", range(count))))
    return ImageSet(name, classes, splits[0], splits[1], total.hexdigest())


def _array_split(name: str, dataset: Any, size: tuple[int, int] | None) -> Images:
    items = [dataset[i] for i in range(len(dataset))]
    labels = np.array([label for _, label in items], np.int64)
    pixels = [np.asarray(image.convert("RGB")) for image, _ in items]
    if size is None:
        size = (max(32, pixels[0].shape[0]), max(32, pixels[0].shape[1]))
    names = [f"image {row} of {name}" for row in range(len(pixels))]
    if own.too_large(len(pixels), size):
        return Images(own.Lazy(pixels, names, size), labels)
    return decode_all((pixels, names, labels), size, CHANNELS)


def _files(dataset: Any) -> tuple[list[Path], np.ndarray]:
    """The images' files and labels, which torchvision's sets have in one of these attributes; no file is opened."""
    pairs = getattr(dataset, "_samples", None)
    if pairs is None:
        files = dataset._images if hasattr(dataset, "_images") else dataset._image_files
        pairs = list(zip(files, dataset._labels, strict=True))
    return [Path(file) for file, _ in pairs], np.array([label for _, label in pairs], np.int64)


def _files_checksum(files: list[Path], labels: np.ndarray) -> str:
    """64 hexadecimal digits of a digest of the names, sizes, first 4 KiB and labels of images."""
    total = hashlib.sha256()
    for file, label in zip(files, labels, strict=True):
        size, head = fingerprint(file)
        total.update(f"{file.name}\0{size}\0{head}\0{label}\n".encode())
    return total.hexdigest()
