"""The folder of what Regard can compute again: prepared data, digests, times of this device."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from regard.core import StoreError

from .records import read_record, write_record


def cache_folder() -> Path:
    """`regard` in XDG_CACHE_HOME, or in ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


def read_entries(path: Path) -> dict[str, Any]:
    """What `write_entries` wrote; nothing if the file is missing or damaged."""
    with suppress(StoreError):
        entries = read_record(path).get("entries")
        return entries if isinstance(entries, dict) else {}
    return {}


def write_entries(path: Path, entries: Mapping[str, Any]) -> None:
    """Write what need not be computed again, with a checksum; a cache that cannot be written is done without."""
    with suppress(StoreError):
        write_record(path, {"entries": entries})
