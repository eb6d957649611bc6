"""Arrays in files of the cache, each with the SHA-256 of its bytes at its end: damage never passes for an image.

A reader of .npy files takes no notice of the last 32 bytes, so that an array can still be mapped into memory.
"""

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import IO

import numpy as np

log = logging.getLogger("regard")
DIGEST = hashlib.sha256().digest_size


def add_digest(file: IO[bytes]) -> None:
    """Write the digest of the bytes of a file, open for reading and writing, behind them."""
    file.flush()
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
    file.seek(0, os.SEEK_END)
    file.write(digest)


def is_whole(path: Path) -> bool:
    """Whether a file that `add_digest` ended is there and unchanged; a damaged one is named in a warning."""
    try:
        with path.open("rb") as file:
            left, total = os.fstat(file.fileno()).st_size - DIGEST, hashlib.sha256()
            while left > 0 and (part := file.read(min(left, 2**22))):
                total.update(part)
                left -= len(part)
            whole = file.read() == total.digest()
    except OSError:
        return False
    if not whole:
        log.warning("%s of the cache is damaged and is made again", path)
    return whole


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a temporary file beside the target and rename it; the temporary file is deleted if that fails."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.save(file, array)
            add_digest(file)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def read_array(path: Path, mapped: bool = False) -> np.ndarray | None:
    """The array of `write_array`, or None if there is no whole one. mapped: into memory, instead of a copy."""
    try:
        return np.load(path, mmap_mode="r" if mapped else None) if is_whole(path) else None
    except (ValueError, EOFError) as error:
        log.warning("%s of the cache holds no array (%s) and is made again", path, error)
        return None
