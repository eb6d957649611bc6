"""WebDataset shards: tar files whose members with the same key, `KEY.jpg` and `KEY.cls`, are one sample.

An index of the members is read first, so every image can be read by its number: order and augmentation are those of
image files, and a run continues in the middle of an epoch.
"""

import gzip
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BufferedReader
from pathlib import Path
from tarfile import EOFHeaderError, SubsequentHeaderError  # type: ignore[attr-defined]
from typing import IO, Any, cast

import numpy as np

from regard.core import DataError, StoreError
from regard.files.atomic import parse_json
from regard.files.paths import files_below, printable, stamp

from .folders import SPLITS, TESTS, TRAINS
from .images import SUFFIXES, Split
from .rows import Rows

SUFFIX = frozenset({".tar"})
_BLOCK = 512  # of a tar file: headers and data begin at its multiples
_LABELS = (".cls", ".json")
GZIP = (".tgz", ".tar.gz")
_COMPRESSED = frozenset({".tgz", ".gz", ".bz2", ".xz", ".zst"})


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
    return _read(tuple(files), tuple(map(stamp, files)))


@lru_cache(maxsize=3)  # training, test and val: the data's digest and the training both need the index
def _read(files: tuple[Path, ...], status: tuple[tuple[int, int], ...]) -> tuple[Members, MemberNames, np.ndarray]:
    samples = [np.array([(*at, label) for _, at, label in index(file)], np.int64).reshape(-1, 3) for file in files]
    start, size, labels = np.concatenate(samples).T.copy()
    shard = np.repeat(np.arange(len(files), dtype=np.int32), [len(part) for part in samples])
    members = Members(files, shard, start, size)
    return members, MemberNames(members), labels


def index(file: Path) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Name, (start, size) and label of each image of a shard on disk; no image is read. Raises: DataError."""

    def place(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[int, int]:
        return member.offset_data, member.size

    yield from _samples(file, _members(file, partial(tarfile.open, file, "r:", tarinfo=_Header), place))


def in_order(file: str, stream: BufferedReader) -> Iterator[tuple[str, bytes, int]]:
    """Name, bytes and label of each image of a shard, which is read from its beginning to its end, never backwards.

    file: its name, for messages and for the compression (.tgz, .tar.gz). Raises: DataError, as for a shard on disk.
    """
    content = gzip.GzipFile(fileobj=stream) if file.lower().endswith(GZIP) else stream
    opened = partial(tarfile.open, fileobj=content, mode="r|", tarinfo=_Header)
    yield from _samples(file, _members(file, opened, _content))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    return cast(IO[bytes], archive.extractfile(member)).read()


def _samples(file: Path | str, members: Iterator[tuple[str, bool, Any]]) -> Iterator[tuple[str, Any, int]]:
    """Name, image and label of each sample; the members of a sample stand one after another."""
    key, name, image, label = "", "", None, None
    before: set[str] = set()
    for member, is_image, data in members:
        folder, _, last = member.rpartition("/")
        stem, _, kind = last.partition(".")
        if f"{folder}/{stem}" != key:
            if key:
                yield name, *_sample(file, key, image, label)
            key, image, label = f"{folder}/{stem}", None, None
            if key in before:
                raise DataError(f"sample {printable(stem)} occurs twice in {file}; give each image a key")
            before.add(key)
        if is_image:
            if image is not None:
                raise DataError(f"{printable(member)} in {file} is a second image of its sample; give each image a key")
            name, image = member, data
        else:
            value = _label(file, printable(member), kind.lower(), data)
            if None not in (label, value) and value != label:
                raise DataError(f"sample {printable(stem)} in {file} has the labels {label} and {value}; keep one")
            label = value if label is None else label
    if key:
        yield name, *_sample(file, key, image, label)


def _sample(file: Path | str, key: str, image: Any, label: int | None) -> tuple[Any, int]:
    for value, name in ((image, "image"), (label, "label (.cls, or .json with the key label)")):
        if value is None:
            raise DataError(f"sample {printable(key.strip('/'))} in {file} has no {name}")
    return image, cast(int, label)


class _Header(tarfile.TarInfo):
    """A header that is damaged is an error. tarfile takes it for the end of the archive, after the first one."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        try:
            return super().frombuf(buf, encoding, errors)
        except EOFHeaderError:  # zeros: the end
            raise
        except tarfile.HeaderError as error:
            raise SubsequentHeaderError(str(error)) from error


def _members(
    file: Path | str, opened: Callable[[], tarfile.TarFile], image_of: Callable[[tarfile.TarFile, tarfile.TarInfo], Any]
) -> Iterator[tuple[str, bool, Any]]:
    """Images and labels of a shard: name, whether it is an image, and what `image_of` returns or the label's bytes."""
    last = "its beginning"
    try:
        with opened() as archive:
            for member in archive:
                last = printable(member.name)
                suffix = Path(member.name).suffix.lower()
                if suffix in (*SUFFIXES, *_LABELS) and not Path(member.name).name.startswith("."):
                    is_image = suffix in SUFFIXES
                    if not member.isfile() and not member.isdir():
                        raise DataError(f"{last} in {file} is a link, not a file; write the shard with whole files")
                    if member.isfile():
                        yield member.name, is_image, (image_of if is_image else _content)(archive, member)
                archive.members = []  # type: ignore[attr-defined]  # it would keep all
            _check_end(file, archive)
    except DataError:
        raise
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:  # ValueError: an odd number
        raise DataError(f"{file} is damaged after {last} ({error}); write or download it again") from error


def _check_end(file: Path | str, archive: tarfile.TarFile) -> None:
    """Raises: DataError unless nothing but the zeros of one record follows the end of the archive."""
    stream, zeros = cast(IO[bytes], archive.fileobj), 0
    while rest := stream.read(2**20):
        if rest.count(0) < len(rest):
            raise DataError(f"{file} goes on after the end of its archive (files joined?); write it as one archive")
        zeros += len(rest)
    if zeros > tarfile.RECORDSIZE:
        raise DataError(f"{file} ends in {zeros} zero bytes (a download that stopped?); write or download it again")


def _label(file: Path | str, name: str, kind: str, data: bytes) -> int | None:
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


def from_shards(path: Path, reserved: bool) -> tuple[tuple[str, ...], dict[str, Split]]:
    """Shards in folders train and test, or with these words in their names; labels are numbers."""
    parts = split_of_shards(path, files_of(path))
    if not reserved:
        parts.pop("val", None)
    splits = {name: read(part) for name, part in parts.items()}
    for name, (_, _, labels) in splits.items():
        if not len(labels):
            raise DataError(f"the {name} shards of {path} have no image; expected members KEY.jpg and KEY.cls")
    classes = tuple(str(label) for label in range(int(splits["train"][2].max()) + 1))
    return classes, dict(splits)


def split_of_shards(path: Path, files: list[Path], tests: tuple[str, ...] = TESTS) -> dict[str, list[Path]]:
    """The shards of "train" and, if there are some, of "test", and of "val" beside it, by the words in their names and
    folders; without the words of `TRAINS` those without any word are for training.

    tests: words of the test; the first one that is present is used. Raises: DataError without shards for training, and
    for one without a word beside them.
    """
    kinds: dict[str, list[Path]] = {}
    for file in files:
        found = [word for word in words(path, file) if word in (*TRAINS, *TESTS, *tests)]
        if len({word in TRAINS for word in found}) > 1:
            raise DataError(f"{file} has the words {found[0]} and {found[-1]} in its path; keep that of its split")
        kinds.setdefault(found[0] if found else "", []).append(file)
    train = [file for name in TRAINS for file in kinds.get(name, [])]
    if train and "" in kinds:
        raise DataError(
            f"{kinds[''][0]} lies beside {train[0].name}, but has no word of a split in its path: put train or test "
            "(or val) into its name, or put it elsewhere"
        )
    train = train or kinds.get("", [])
    test = next((name for name in tests if name in kinds), "")
    val = next((name for name in SPLITS["val"] if name in kinds and test in SPLITS["test"]), "")
    if not train:
        raise DataError(f"{path} has shards for the test only; name those for training, or their folder, train")
    parts = {"train": train, "test": kinds[test] if test else [], "val": kinds[val] if val else []}
    return {name: part for name, part in parts.items() if part}
