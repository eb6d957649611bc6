"""Small streams of images: tables as the library `datasets` writes them, and archives of WebDataset."""

import gzip
import io
import tarfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image


@cache
def encoded(number: int) -> bytes:
    """A PNG image of its own for each number, of different heights; its upper left pixel says the number."""
    pixels = np.random.default_rng(number).integers(0, 255, (20 + number % 3, 40, 3), np.uint8)
    pixels[:4, :4] = (number // 256, number % 256, 7)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write_table(file: Path, numbers: Iterable[int], group: int = 10, classes: int = 3) -> Path:
    """Images with the labels number % classes, `group` in a row group."""
    from datasets import ClassLabel, Dataset, Features, disable_progress_bars
    from datasets import Image as ImageColumn

    rows = list(numbers)
    features = Features({"image": ImageColumn(), "label": ClassLabel(names=[f"class {n}" for n in range(classes)])})
    content = {
        "image": [{"bytes": encoded(number), "path": None} for number in rows],
        "label": [number % classes for number in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    disable_progress_bars()
    Dataset.from_dict(content, features=features).to_parquet(file, batch_size=group)
    return file


def write_members(file: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """An archive of files with their names; compressed if its own name ends so."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    file.parent.mkdir(parents=True, exist_ok=True)
    data = content.getvalue()
    file.write_bytes(gzip.compress(data) if file.suffix in (".gz", ".tgz") else data)
    return file


def write_archive(file: Path, numbers: Iterable[int], classes: int = 3) -> Path:
    """Images with the labels number % classes."""
    members = [
        (f"{number:04d}{suffix}", data)
        for number in numbers
        for suffix, data in ((".png", encoded(number)), (".cls", str(number % classes).encode()))
    ]
    return write_members(file, members)


def write_stream(folder: Path, kind: str = "parquet", sizes: Iterable[int] = (26, 30, 20, 24), test: int = 12) -> Path:
    """A stream of shards of these sizes, and a test split; kind: parquet, tar or tar.gz."""
    write = write_table if kind == "parquet" else write_archive
    first = 0
    for number, size in enumerate(sizes):
        write(folder / f"train-{number:02d}.{kind}", range(first, first + size))
        first += size
    write(folder / f"test-00.{kind}", range(first, first + test))
    return folder


def equal_batches(first: Iterable[tuple], second: Iterable[tuple]) -> bool:
    """Whether all tensors of two rows of batches are equal."""
    return all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def joined(parts: list[list[tuple]]) -> list[tuple]:
    """Whole batches from their parts."""
    return [tuple(torch.cat(tensors) for tensors in zip(*each, strict=True)) for each in zip(*parts, strict=True)]
