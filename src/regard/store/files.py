"""Files that are either whole or absent: everything in the store is written through here."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from regard.core import StoreError


def write_atomically(path: Path | str, data: bytes | str) -> None:
    """Write beside the target, sync, rename, sync the folder: after a crash the old or the new content is there.

    Text is written as UTF-8. Missing folders are made.
    Raises: StoreError without permission, with a full disk, or where a folder stands in the place of the file.
    """
    target = Path(path)
    content = data.encode() if isinstance(data, str) else data
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    with explained(target):
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
    with explained(Path(path), "read"):
        content = Path(path).read_bytes()
    try:
        return json.loads(content.decode())
    except ValueError as error:
        raise StoreError(
            f"{path} is not JSON ({error}); it is damaged or not of this program: delete it or run again"
        ) from error


def sync_folder(folder: Path) -> None:
    """Make a rename in a folder survive a power cut, where the system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def explained(path: Path, verb: str = "write") -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that names the file and what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot {verb} {path}: {error.strerror or error}; {_advice(error)}") from error


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space and repeat the command: what is finished is kept"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to with --results, or change its permissions"
    if error.errno == errno.ENOENT:
        return "check the path"
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return "a file stands where a folder is needed, or the reverse; choose another path"
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
