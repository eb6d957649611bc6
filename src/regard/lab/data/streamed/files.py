"""Which files a stream has, and what stands for it in the key of a run."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.core import DataError, NetworkError, require
from regard.files import paths
from regard.files.paths import files_below, readable, user_path
from regard.images import digest as digests
from regard.images.folders import TESTS, TRAINS
from regard.images.shards import GZIP, split_of_shards

from .names import Name

TABLE = ".parquet"
SUFFIXES = (TABLE, ".tar", *GZIP)
BUFFER = 2**20
"""Bytes that are read at least of a file of the hub."""
SECONDS = 10.0
"""The longest that the hub is waited for before training."""


@dataclass(frozen=True)
class Found:
    """A stream whose files are known.

    title: for messages. identity: for the key of a run, without a path. splits: the names of the files of "train" and
    "test": paths, or addresses that `open_file` reads.
    """

    title: str
    identity: str
    splits: dict[str, tuple[str, ...]]


def is_table(file: str) -> bool:
    """Whether a file is a table; else it is an archive."""
    return file.lower().endswith(TABLE)


def is_remote(file: str) -> bool:
    """Whether a file is an address instead of a path."""
    return "://" in file


def open_file(file: str) -> io.BufferedReader:
    """A file of a stream. Raises: DataError if it cannot be opened, or later if the network fails."""
    if not is_remote(file):
        with readable(Path(file)):
            return Path(file).open("rb")
    from huggingface_hub import HfFileSystem

    with _network(file):
        stream = HfFileSystem().open(file, "rb")
    return io.BufferedReader(Remote(file, stream), BUFFER)


class Remote(io.RawIOBase):
    """A file of the hub, whose errors name it: those of the network are of many kinds."""

    def __init__(self, file: str, stream: Any) -> None:
        self.file, self.stream = file, stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self.stream.tell())

    def seek(self, place: int, whence: int = 0) -> int:
        return int(self.stream.seek(place, whence))

    def readinto(self, target: Any) -> int:
        with _network(self.file):
            data = self.stream.read(len(target))
        target[: len(data)] = data
        return len(data)


@contextmanager
def _network(file: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = f"{file} cannot be read over the network ({_first_line(error)})"
        raise NetworkError(f"{reason}; when it can, the same command continues") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def stamp(file: str) -> tuple[int, ...]:
    """Size and time of change of a file of this machine; () for an address, whose content its commit says."""
    return () if is_remote(file) else paths.stamp(Path(file))


def find(name: Name, kind: str = "") -> Found:
    """The files of a stream. kind: of the digest of a folder's files, "" = "index" (`regard.images.digest`).

    Raises: DataError if there are none, if they are of several kinds, without a test split, or if the hub does not
    answer; MissingExtra for a set of the hub without the package `datasets`.
    """
    found = at_commit(name, _commit(name)) if name.hub else _in_folder(name, kind)
    _check(found, name)
    return found


def _check(found: Found, name: Name) -> None:
    """Raises: DataError without a split, and for files of several kinds or of another one."""
    for split in ("train", "test"):
        if split not in found.splits:
            word = name.choice("test") or "test (or val)" if split == "test" else split
            raise DataError(f"{found.title} has no {word} split; a stream needs train and test, each with shards of "
                            "its own, and ?test=NAME chooses another one")  # fmt: skip
    files = [file for part in found.splits.values() for file in part]
    kinds = {is_table(file) for file in files}
    other = next((file for file in files if not file.lower().endswith(SUFFIXES)), files[0])
    if len(kinds) > 1 or not other.lower().endswith(SUFFIXES):
        raise DataError(f"{found.title} has files of other kinds ({other}); a stream is read from .parquet files, or "
                        "from .tar or .tar.gz archives")  # fmt: skip
    column = next((key for key in ("image", "label") if name.choice(key)), "")
    if column and not any(kinds):
        raise DataError(f"{found.title} has archives, which have no columns; leave {column}={name.choice(column)} out")


def _in_folder(name: Name, kind: str) -> Found:
    path = user_path(name.place, DataError)
    if not path.is_dir():
        raise DataError(f"{name.place} is no folder; stream: reads a folder with .parquet or .tar files")
    path = path.resolve()
    files = [
        file
        for file in files_below(path, frozenset({TABLE, ".tar", ".tgz", ".gz"}))
        if file.name.lower().endswith(SUFFIXES)
    ]
    if not files:
        raise DataError(f"{path} has no shards; a stream is read from {', '.join(SUFFIXES)} files")
    chosen = name.choice("test").lower()
    parts = split_of_shards(path, files, (chosen,) if chosen else TESTS)
    parts.pop("val", None)
    used = sorted(file for part in parts.values() for file in part)
    total = digests.identity_of(path, digests.relative(path, used), kind or "index")
    splits = {split: tuple(map(str, part)) for split, part in parts.items()}
    return Found(str(path), f"stream:{total}{name.chosen}", splits)


def at_commit(name: Name, commit: str) -> Found:
    """The files of a set of the hub at a commit, as `datasets` finds them. Raises: DataError, MissingExtra."""
    require("datasets", "streams")

    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(name.place, name.choice("config") or None, revision=commit)
    except Exception as error:  # of datasets, of the hub and of the network
        raise DataError(_reason(name, error)) from error
    files = {str(split): tuple(map(str, part)) for split, part in dict(builder.config.data_files or {}).items()}
    chosen = name.choice("test")
    wanted = {"train": TRAINS, "test": (chosen,) if chosen else TESTS}
    found = {split: next((word for word in words if word in files), "") for split, words in wanted.items()}
    splits = {split: files[word] for split, word in found.items() if word}
    return Found(f"{name.place} of the Hugging Face hub", f"hf:{name.place}@{commit}{name.chosen}", splits)


def _commit(name: Name) -> str:
    """The commit that a revision stands for now. Raises: DataError, MissingExtra."""
    require("datasets", "streams")

    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name.place, revision=name.revision or None, timeout=SECONDS).sha)
    except Exception as error:  # of the hub and of the network
        raise DataError(_reason(name, error)) from error


def _reason(name: Name, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{name.place} is gated: accept its terms on the hub's page and log in (`hf auth login`)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the Hugging Face hub has no data set {name.place} that you may read; check the name, or `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.place} has no revision {name.revision!r}"
    text = _first_line(error)
    if isinstance(error, ValueError | errors.HfHubHTTPError):
        return f"{name.place} of the Hugging Face hub cannot be read: {text}"
    return (
        f"the Hugging Face hub cannot be reached ({text}); hf:// needs the network: check it, or download {name.place} "
        "and name its folder, stream:FOLDER"
    )
