"""The folder of what Regard can compute again: prepared data, digests, times of this device."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`regard` in XDG_CACHE_HOME, or in ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
