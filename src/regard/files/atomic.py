"""Files of the store: each is either complete or absent.

Everything in the store is written with these functions. A temporary file has a name that cannot be guessed, and must
not exist before; a symbolic link in its place, or in the place of a file to which lines are added, is not followed.
"""

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from regard.core import StoreError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
TEMPORARY = ".part"
"""End of the names of temporary files; one that is left was of a process that was killed."""


def write_atomically(path: Path | str, data: bytes | str) -> None:
    """Write a file so that after a crash it has either its old or its new content.

    The content is written to a temporary file beside the target and synced; then it is renamed and the folder synced.
    Text is written as UTF-8. Missing folders are created. Several threads and processes can write one file: the last
    one's content remains. A link to a file is replaced by the file.
    Raises: StoreError without permission, if the disk is full, if text is not Unicode, or if the target, links
    followed, is a folder, pipe, socket or device, or is a link such as /dev/stdout.
    """
    with prepare_write(path, data) as replace:
        replace()


def check_writable(path: Path | str) -> None:
    """Check, before long work, that `write_atomically` can write a file. Missing folders are created.

    Raises: StoreError, as `write_atomically`.
    """
    with prepare_write(path, b""):
        pass


_OTHER_PATH = "give the path of a file, or leave the option out"


def _check_file(path: Path, verb: str) -> None:
    """Raises: StoreError if a path, links followed, is a pipe, socket or device; IsADirectoryError for a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if os.path.exists(path) and not path.is_file():
        remedy = _OTHER_PATH if verb == "write" else "put a file in its place, or give the path of one"
        raise StoreError(f"cannot {verb} {path}: it is a pipe, socket or device, but no file; {remedy}")


@contextmanager
def prepare_write(path: Path | str, data: bytes | str) -> Iterator[Any]:
    """Write the temporary file of `write_atomically`; the block calls the yielded function to put it into place.

    Without that call the temporary file is deleted. Raises: StoreError, as `write_atomically`.
    """
    target = Path(path)
    part = target.parent / f".{secrets.token_hex(12)}{TEMPORARY}"
    with store_errors(target):
        content = data.encode() if isinstance(data, str) else data
        _check_file(target, "write")
        if target.is_symlink():
            link = os.path.join(os.path.realpath(target.parent), os.readlink(target))
            if link.startswith(("/proc/", "/dev/fd/", "/dev/std")):  # also if it is a file now
                raise StoreError(f"cannot write {path}: it is a link to {link}; {_OTHER_PATH}")
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with store_errors(target), open(os.open(part, _NEW | _NO_LINK | _BINARY, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

        def replace() -> None:
            with store_errors(target):
                part.replace(target)
            sync_folder(target.parent)

        yield replace
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def append(path: Path, text: str) -> None:
    """Add text to a file, which is created if it is missing, and sync it.

    Raises: StoreError, also if the file is a link.
    """
    with store_errors(path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK | _BINARY, 0o666)
        with open(handle, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(handle)


def read_bytes(path: Path | str) -> bytes:
    """The content of a file. Raises: StoreError if it is missing, may not be read, or is a folder, pipe or device."""
    data = read_if_present(path)
    if data is None:
        raise StoreError(f"cannot read {path}: there is no such file; check the path")
    return data


def read_if_present(path: Path | str) -> bytes | None:
    """The content of a file, None if there is none. Raises: StoreError, as `read_bytes`."""
    with store_errors(Path(path), "read"):
        _check_file(Path(path), "read")  # the reader of a pipe or of /dev/zero would never end
        try:
            return Path(path).read_bytes()
        except FileNotFoundError:
            return None


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Let one thread or process at a time execute the block for a folder, which is created; others wait.

    Without effect where the file system has no locks. Raises: StoreError if the folder cannot be made or read.
    """
    with store_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = None if fcntl is None else os.open(folder, os.O_RDONLY)
    try:
        if handle is not None:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def json_text(value: Any) -> str:
    """A value as readable JSON; NaN and infinities become null."""
    return json.dumps(_finite(value), indent=1, allow_nan=False, ensure_ascii=False)


def read_json(path: Path | str) -> Any:
    """The content of a JSON file.

    Raises: StoreError if it is missing, may not be read, or is not JSON.
    """
    return parse_json(path, read_bytes(path))


def parse_json(path: Path | str, data: bytes) -> Any:
    """The value of a JSON text in which no name occurs twice in an object and whole numbers fit into 64 bits.

    path: named in errors. Raises: StoreError if it is not JSON.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=without_repetition, parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{path} is not JSON ({error}); it is damaged or another program wrote it: delete it or run again"
        ) from error


def _parse_int(digits: str) -> int:
    """Raises: ValueError for a number that later arithmetic in floating point may not hold."""
    if len(digits) > 20:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The names and values of an object. Raises: ValueError for a name that occurs twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in an object")
    return value


def sync_folder(folder: Path) -> None:
    """Write a rename in a folder to the disk, so that it survives a power failure, if the system supports it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def store_errors(path: Path, verb: str = "write") -> Iterator[None]:
    """Turn an OSError of the block into a StoreError with the file's name and a remedy.

    So is the ValueError of a path that no file can have, or of text that is not Unicode.
    """
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot {verb} {path}: {error.strerror or error}; {_advice(error)}") from error
    except ValueError as error:
        name = str(path).encode(errors="backslashreplace").decode()
        raise StoreError(f"cannot {verb} {name!r}: {error}; use names of ordinary characters") from error


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space and repeat the command: finished runs are kept"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to with --results, or change its permissions"
    if error.errno == errno.ENOENT:
        return "check the path"
    if error.errno == errno.ELOOP:
        return "it is a symbolic link, which is not followed: delete the link"
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return "a file is where a folder is needed, or the reverse; choose another path"
    return "check the disk and repeat the command"


def _finite(value: Any) -> Any:
    """JSON has no NaN: such numbers become null."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
