"""Arrays in files of the cache, each with the SHA-256 of its name and bytes at its end: neither damage nor the file of
another set passes for an image.

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


def add_digest(file: IO[bytes], name: str) -> None:
    """Write the digest of a name and of the bytes of a file, open for reading and writing, behind them."""
    file.flush()
    file.seek(0)
    total = hashlib.sha256(name.encode())
    while part := file.read(2**22):
        total.update(part)
    file.write(total.digest())


def is_whole(path: Path) -> bool:
    """Whether a file that `add_digest` ended is there, unchanged and under its name; another is named in a warning."""
    try:
        with path.open("rb") as file:
            left, total = os.fstat(file.fileno()).st_size - DIGEST, hashlib.sha256(path.name.encode())
            while left > 0 and (part := file.read(min(left, 2**22))):
                total.update(part)
                left -= len(part)
            whole = file.read() == total.digest()
    except OSError:
        return False
    if not whole:
        log.warning("%s of the cache is damaged or of another set, and is made again", path)
    return whole


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a temporary file beside the target and rename it; the temporary file is deleted if that fails."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.save(file, array)
            add_digest(file, path.name)
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
