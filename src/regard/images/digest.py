"""The digest of the user's own files, which stands for them in the key of a run.

`bytes` reads every byte; what was read once is kept in the cache until a file changes. `index` takes names, sizes and
the first 4 KiB: it is fast, and does not notice a change elsewhere in a file.
"""

import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from regard.core import ConfigError, DataError
from regard.files.cache import cache_folder, read_entries, write_entries
from regard.files.paths import readable

from .progress import ProgressLine

VERSION = 2
"""Of `of_files`; a part of the identity. Version 1 had no such part, and was that of `index`."""
KINDS = ("bytes", "index")
LIMIT = 20 * 10**9
"""Bytes above which the user chooses the kind."""
NO_FILES: Mapping[str, Path] = MappingProxyType({})
UNSETTLED = 2.0
"""A file that was changed so few seconds ago can change again without another time stamp: it is not cached."""
QUICK, SELDOM = 0.1, 20
"""Looking for changed files may take long. When it took more than QUICK seconds, `Look` waits SELDOM times as long
before it looks again, and takes the files for unchanged until then."""


def relative(root: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Files by their names relative to a folder."""
    return {file.relative_to(root).as_posix(): file for file in files}


def identity_of(root: Path, files: Mapping[str, Path], kind: str = "", texts: Mapping[str, Path] = NO_FILES) -> str:
    """The text for the key of a run, such as "2-bytes-0123456789ab": version, kind, 12 hexadecimal digits.

    root: of the data, for messages and the cache. files: by the names that count, which are not absolute paths.
    texts: files that are read whole in any case, such as annotations.
    kind: "bytes", "index", or "" for "bytes" up to `LIMIT`.
    Raises: DataError above `LIMIT` without a kind; ConfigError for an unknown one.
    """
    if kind not in ("", *KINDS):
        raise ConfigError(f"digest is one of {', '.join(KINDS)}, not {kind!r}")
    if not kind:
        size = sum(_status(file)[0] for file in files.values())
        if size > LIMIT:
            raise DataError(
                f"{root} has {size / 1e9:.1f} GB in {len(files)} files; choose how a run recognises them: --digest "
                "bytes reads all of them once (later what has changed), --digest index takes names, sizes and the "
                "first 4 KiB and does not notice other changes (in Python: the field digest of the task)"
            )
    total = of_index(files, texts) if kind == "index" else of_bytes(root, {**texts, **files})
    return f"{VERSION}-{kind or 'bytes'}-{total}"


def of_index(files: Mapping[str, Path], texts: Mapping[str, Path] = NO_FILES) -> str:
    """12 hexadecimal digits of a digest of names, sizes and first 4 KiB; of texts, of names and all bytes."""
    total = hashlib.sha256()
    for name, file in texts.items():
        with readable(file), file.open("rb") as stream:
            total.update(name.encode() + hashlib.file_digest(stream, "sha256").digest())
    for name, file in files.items():
        size, head = fingerprint(file)
        total.update(f"{name}\0{size}\0{head}\n".encode())
    return total.hexdigest()[:12]


def fingerprint(file: Path) -> tuple[int, str]:
    """Size and digest of the first 4 KiB; a file that cannot be opened raises an error when its image is decoded."""
    try:
        with file.open("rb") as stream:
            return file.stat().st_size, hashlib.sha256(stream.read(4096)).hexdigest()
    except OSError:
        return 0, ""


def of_bytes(root: Path, files: Mapping[str, Path]) -> str:
    """12 hexadecimal digits of a digest of names and all bytes.

    The progress is shown on standard error from the second second on. Files that cannot be opened count as empty; they
    raise an error when they are decoded.
    """
    cache = _Cache(root, sum(_status(file)[0] for file in files.values()))
    total = hashlib.sha256()
    try:
        for name, file in files.items():
            total.update(f"{name}\0{cache.digest(name, file)}\n".encode())
    except BaseException:
        cache.found = {**cache.known, **cache.found}
        raise
    finally:
        cache.save()
    return total.hexdigest()[:12]


class Look:
    """The state of all files below a folder, or of one file, when they were last looked at; nothing is read."""

    def __init__(self, path: Path) -> None:
        self.path, self.state, self.again = path, "", 0.0

    def has_changed(self) -> bool:
        """Whether the files may have changed since the last call; True the first time."""
        start = time.monotonic()
        if start < self.again:
            return False
        before, total, newest = self.state, hashlib.sha256(), 0
        for line, changed in _states(os.fspath(self.path), frozenset()):
            total.update(line)
            newest = max(newest, changed)
        settled = time.time_ns() - newest > UNSETTLED * 1e9
        self.state = total.hexdigest() if settled else ""
        took = time.monotonic() - start
        self.again = start + SELDOM * took if took > QUICK else 0.0
        return not settled or self.state != before


@lru_cache(maxsize=16)
def _look(path: Path, *caches: Any) -> Look:
    """One for each group of caches, so that none takes a change away from another."""
    return Look(path)


def forget_if_changed(path: Path, *caches: Any) -> None:
    """Clear what was read of the files below a path, in functions with a cache, if they may have changed since."""
    if _look(path, *caches).has_changed():
        for cache in caches:
            cache.cache_clear()


def _states(path: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[bytes, int]]:
    """Name, size and times of each file, and its time of change; links are followed, but not in a loop."""
    with suppress(OSError):
        status = os.stat(path)
        state = f"\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n"
        yield os.fsencode(path) + state.encode(), status.st_ctime_ns
        if not stat.S_ISDIR(status.st_mode) or (here := (status.st_dev, status.st_ino)) in above:
            return
        with os.scandir(path) as entries:
            names = sorted(entry.path for entry in entries if not entry.name.startswith("."))
        for name in names:
            yield from _states(name, above | {here})


class _Cache:
    """Digests of the files below a folder, by name, size and times of change.

    A damaged cache, a file that was changed or replaced and one with a time that was set back are noticed; a false
    digest that somebody wrote with these and a new checksum is not: who may write the cache decides what is read anew.
    total: bytes of the files, of which the read share is shown.
    """

    def __init__(self, root: Path, total: int) -> None:
        name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
        self.path = cache_folder() / "digests" / f"{name}.json"
        self.known = read_entries(self.path)
        self.found: dict[str, list[Any]] = {}
        self.root, self.total, self.done, self.line = root, total, 0, ProgressLine()

    def digest(self, name: str, file: Path) -> str:
        """The SHA-256 of a file; "" if it cannot be read."""
        status = list(_status(file))
        entry = self.known.get(name)
        if entry is not None and entry[:3] == status:
            self.found[name] = entry
            self._add(status[0])
            return entry[3]
        total = hashlib.sha256()
        try:
            with file.open("rb") as stream:
                while part := stream.read(2**22):
                    total.update(part)
                    self._add(len(part))
        except OSError:
            return ""
        settled = time.time_ns() - max(status[1:]) > UNSETTLED * 1e9
        if settled and list(_status(file)) == status:
            self.found[name] = [*status, total.hexdigest()]
        return total.hexdigest()

    def _add(self, number: int) -> None:
        self.done += number
        self.line.show(f"reading {self.root} for the run's key: {self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB")

    def save(self) -> None:
        """Write what is known, if it has changed; without a cache the files are read again the next time."""
        if self.found != self.known:
            write_entries(self.path, self.found)


def _status(file: Path) -> tuple[int, int, int]:
    """Size and both times of change in nanoseconds; the second one cannot be set. Zeros if there is no file."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
