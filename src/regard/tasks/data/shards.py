"""WebDataset shards: tar files whose members with the same key, `KEY.jpg` and `KEY.cls`, are one sample.

An index of the members is read first, so every image can be read by its number: order and augmentation are those of
image files, and a run continues in the middle of an epoch.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import DataError
from regard.core.paths import files_below

from .images import SUFFIXES
from .rows import Rows

SUFFIX = frozenset({".tar"})
_BLOCK = 512  # of a tar file: headers and data begin at its multiples


@dataclass(frozen=True, eq=False)
class Members(Rows):
    """Encoded images in shards, as bytes. shard: index into `files`; start, size: of the image's bytes; each (n,)."""

    files: tuple[Path, ...]
    shard: np.ndarray
    start: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, rows: np.ndarray) -> "Members":
        return type(self)(self.files, self.shard[rows], self.start[rows], self.size[rows])

    def item(self, row: int) -> bytes:
        with self.files[self.shard[row]].open("rb") as stream:
            stream.seek(int(self.start[row]))
            return stream.read(int(self.size[row]))


class MemberNames(Rows):
    """The shard and the name of each image, read from its header."""

    def __init__(self, members: Members) -> None:
        self.members = members

    def __len__(self) -> int:
        return len(self.members)

    def take(self, rows: np.ndarray) -> "MemberNames":
        return MemberNames(self.members.take(rows))

    def item(self, row: int) -> str:
        file, start = self.members.files[self.members.shard[row]], int(self.members.start[row])
        with file.open("rb") as stream:
            stream.seek(start - _BLOCK)
            header = stream.read(_BLOCK)
        return f"{header[:100].rstrip(bytes(1)).decode(errors='replace')} in {file}"


def files_of(path: Path) -> list[Path]:
    """The shards of a folder, sorted; [] if it has none."""
    return files_below(path, SUFFIX) if path.is_dir() else []


def words(root: Path, file: Path) -> list[str]:
    """The words of a shard's name and of its folders below `root`, which may name a split."""
    return re.split(r"[^a-z]+", file.relative_to(root).with_suffix("").as_posix().lower())


def read(files: list[Path]) -> tuple[Members, MemberNames, np.ndarray]:
    """Images, their names and labels (n,) int64, in the order of the shards; no image is decoded.

    Raises: DataError with shard and member for a shard that is damaged, or a sample without one image and one label.
    """
    samples = [np.array(list(_samples(file)), np.int64).reshape(-1, 3) for file in files]
    start, size, labels = np.concatenate(samples).T.copy()
    shard = np.repeat(np.arange(len(files), dtype=np.int32), [len(part) for part in samples])
    members = Members(tuple(files), shard, start, size.astype(np.int32))
    return members, MemberNames(members), labels


def _samples(file: Path) -> Iterator[tuple[int, int, int]]:
    """Start, size and label of each image of a shard; the members of a sample stand one after another."""
    key, image, label = "", None, None
    for member, data in _members(file):
        folder, _, name = member.name.rpartition("/")
        stem, _, kind = name.partition(".")
        if f"{folder}/{stem}" != key:
            if key:
                yield _sample(file, key, image, label)
            key, image, label = f"{folder}/{stem}", None, None
        if data is None:
            if image is not None:
                raise DataError(f"{member.name} in {file} is a second image of its sample; give each image a key")
            image = (member.offset_data, member.size)
        elif label is None:
            label = _label(file, member.name, kind, data)
    if key:
        yield _sample(file, key, image, label)


def _sample(file: Path, key: str, image: tuple[int, int] | None, label: int | None) -> tuple[int, int, int]:
    for value, name in ((image, "image"), (label, "label (.cls, or .json with the key label)")):
        if value is None:
            raise DataError(f"sample {key.strip('/')} in {file} has no {name}")
    return (*image, label)  # type: ignore[misc, return-value]


def _members(file: Path) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """The images and labels of a shard; the data of images, which are not read, are None."""
    last = "its beginning"
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                last = member.name
                if not member.isfile() or Path(member.name).name.startswith("."):
                    continue
                suffix = Path(member.name).suffix.lower()
                if suffix in SUFFIXES:
                    yield member, None
                elif suffix in (".cls", ".json"):
                    yield member, archive.extractfile(member).read()  # type: ignore[union-attr]
                archive.members = []  # type: ignore[attr-defined]  # it would keep all
            end = archive.offset
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{file} is damaged after {last} ({error}); write or download it again") from error
    with file.open("rb") as stream:  # tarfile takes a damaged header for the end
        stream.seek(end)
        if stream.read(_BLOCK) != bytes(_BLOCK):
            raise DataError(f"{file} is damaged or cut off after {last}; write or download it again")


def _label(file: Path, name: str, kind: str, data: bytes) -> int | None:
    """A label; None for JSON without one. Raises: DataError for one that is no whole number of 0 or above."""
    value: Any = data.decode(errors="replace").strip()
    try:
        if kind.endswith("json"):
            content = json.loads(value)
            value = content.get("label") if isinstance(content, dict) else None
            if value is None:
                return None
        number = int(value)
    except (ValueError, TypeError):
        number = -1
    if number < 0 or number >= 2**20:
        raise DataError(f"{name} in {file} has the label {str(value)[:40]!r}, expected a whole number from 0 on")
    return number
