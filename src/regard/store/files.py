"""Atomic files: each is either complete or absent. Everything in the store is written with these functions."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from regard.core import StoreError


def write_atomically(path: Path | str, data: bytes | str) -> None:
    """Write a file so that after a crash it has either its old or its new content.

    The content is written to a temporary file beside the target and synced; then it is renamed and the folder synced.
    Text is written as UTF-8. Missing folders are created.
    Raises: StoreError without permission, if the disk is full, or if the target is a folder.
    """
    target = Path(path)
    content = data.encode() if isinstance(data, str) else data
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    with store_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)


def write_json(path: Path | str, value: Any) -> None:
    """`write_atomically` of a value as readable JSON. NaN and infinities are written as null."""
    write_atomically(path, json.dumps(_finite(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> Any:
    """The content of a JSON file.

    Raises: StoreError if it is missing, may not be read, or is not JSON.
    """
    with store_errors(Path(path), "read"):
        content = Path(path).read_bytes()
    try:
        return json.loads(content.decode())
    except ValueError as error:
        raise StoreError(
            f"{path} is not JSON ({error}); it is damaged or another program wrote it: delete it or run again"
        ) from error


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
    """Turn an OSError of the block into a StoreError with the file's name and a remedy."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot {verb} {path}: {error.strerror or error}; {_advice(error)}") from error


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space and repeat the command: finished runs are kept"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to with --results, or change its permissions"
    if error.errno == errno.ENOENT:
        return "check the path"
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
