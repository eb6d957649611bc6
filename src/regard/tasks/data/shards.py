"""WebDataset shards: tar files whose members with the same key, `KEY.jpg` and `KEY.cls`, are one sample.

An index of the members is read first, so every image can be read by its number: order and augmentation are those of
image files, and a run continues in the middle of an epoch.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import DataError, StoreError
from regard.core.paths import files_below, printable, readable
from regard.store.files import parse_json

from .images import SUFFIXES
from .rows import Rows

SUFFIX = frozenset({".tar"})
_BLOCK = 512  # of a tar file: headers and data begin at its multiples
_LABELS = (".cls", ".json")
_COMPRESSED = frozenset({".tgz", ".gz", ".bz2", ".xz", ".zst"})
_LARGEST_IMAGE, _LARGEST_LABEL = 2**31 - 1, 2**24
"""Bytes of a member."""


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
    """The shards of a folder, sorted; [] if it has none.

    Raises: DataError if images, tables or compressed shards lie beside shards: they would be left out.
    """
    files = files_below(path, SUFFIX) if path.is_dir() else []
    if files:
        for other in files_below(path, SUFFIXES | _COMPRESSED | {".parquet"}):
            if other.suffix.lower() not in _COMPRESSED - {".tgz"}:
                raise DataError(f"{path} has shards ({files[0].name}) and also {other}; keep one kind of data there")
            if ".tar" in other.suffixes:
                raise DataError(f"{other} is compressed, so its images cannot be read by number; unpack it to .tar")
    return files


def words(root: Path, file: Path) -> list[str]:
    """The words of a shard's name and of its folders below `root`, which may name a split."""
    return re.split(r"[^a-z]+", file.relative_to(root).with_suffix("").as_posix().lower())


def read(files: list[Path]) -> tuple[Members, MemberNames, np.ndarray]:
    """Images, their names and labels (n,) int64, in the order of the shards; no image is decoded.

    Raises: DataError with shard and member for a shard that is damaged, or a sample without one image and one label.
    """
    return _read(tuple(files), tuple(map(_status, files)))


def _status(file: Path) -> tuple[int, int]:
    with readable(file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=2)  # training and test: the data's digest and the training both need the index
def _read(files: tuple[Path, ...], status: tuple[tuple[int, int], ...]) -> tuple[Members, MemberNames, np.ndarray]:
    samples = [np.array(list(_samples(file)), np.int64).reshape(-1, 3) for file in files]
    start, size, labels = np.concatenate(samples).T.copy()
    shard = np.repeat(np.arange(len(files), dtype=np.int32), [len(part) for part in samples])
    members = Members(files, shard, start, size.astype(np.int32))
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
                raise DataError(f"{printable(member.name)} in {file} is a second image of its sample; "
                                "give each image a key")  # fmt: skip
            image = (member.offset_data, member.size)
        else:
            value = _label(file, printable(member.name), kind.lower(), data)
            if None not in (label, value) and value != label:
                raise DataError(f"sample {printable(stem)} in {file} has the labels {label} and {value}; keep one")
            label = value if label is None else label
    if key:
        yield _sample(file, key, image, label)


def _sample(file: Path, key: str, image: tuple[int, int] | None, label: int | None) -> tuple[int, int, int]:
    for value, name in ((image, "image"), (label, "label (.cls, or .json with the key label)")):
        if value is None:
            raise DataError(f"sample {printable(key.strip('/'))} in {file} has no {name}")
    return (*image, label)  # type: ignore[misc, return-value]


def _members(file: Path) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """The images and labels of a shard; the data of images, which are not read, are None."""
    last = "its beginning"
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                last = printable(member.name)
                suffix = Path(member.name).suffix.lower()
                if suffix in (*SUFFIXES, *_LABELS) and not Path(member.name).name.startswith("."):
                    _check_member(file, last, member, _LARGEST_LABEL if suffix in _LABELS else _LARGEST_IMAGE)
                    if member.isfile():
                        stream = archive.extractfile(member) if suffix in _LABELS else None
                        yield member, None if stream is None else stream.read()
                archive.members = []  # type: ignore[attr-defined]  # it would keep all
            end = archive.offset
    except DataError:
        raise
    except (tarfile.TarError, OSError, ValueError) as error:  # ValueError: a header with an odd number
        raise DataError(f"{file} is damaged after {last} ({error}); write or download it again") from error
    _check_end(file, end, last)


def _check_member(file: Path, name: str, member: tarfile.TarInfo, most: int) -> None:
    """Raises: DataError for a link, a device, a file with holes, and one of more than `most` bytes."""
    if member.isdir():
        return
    if not member.isfile() or member.issparse():
        raise DataError(f"{name} in {file} is a link, a device or a file with holes; write the shard with whole files")
    if not 0 <= member.size <= most:
        raise DataError(f"{name} in {file} has {member.size:,} bytes, expected at most {most:,}")


def _check_end(file: Path, end: int, last: str) -> None:
    """Raises: DataError unless nothing but zeros follows; tarfile takes a damaged header for the end."""
    with file.open("rb") as stream:
        stream.seek(end)
        rest = stream.read(_BLOCK)
        if rest != bytes(_BLOCK):
            raise DataError(f"{file} is damaged or cut off after {last}; write or download it again")
        while rest:
            if rest.count(0) < len(rest):
                raise DataError(f"{file} goes on after the end of its archive (files joined?); write it as one archive")
            rest = stream.read(2**20)


def _label(file: Path, name: str, kind: str, data: bytes) -> int | None:
    """A label; None for JSON without one. Raises: DataError for one that is no whole number of 0 or above."""
    value: Any = data.decode(errors="replace").strip()
    if kind.endswith("json"):
        try:
            content = parse_json(f"{name} in {file}", data)
        except StoreError as error:
            raise DataError(f"{name} in {file} is not JSON ({error.__cause__}); write it again") from error
        value = content.get("label") if isinstance(content, dict) else None
        if value is None:
            return None
    text = str(value)
    if type(value) not in (int, str) or not re.fullmatch("[0-9]{1,18}", text) or int(text) >= 2**20:
        raise DataError(f"{name} in {file} has the label {text[:40]!r}, expected a whole number from 0 on")
    return int(text)
