"""Memory of this machine, and the error for what is larger, before memory is asked for. Needs no torch."""

import functools
import os
from pathlib import Path

from .errors import ConfigError

_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@functools.cache
def memory_bytes() -> int:
    """Bytes of this machine's memory, or of its part that a control group leaves to this process.

    2^40 where the system does not say (Windows).
    """
    limits = [2**40]
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in map(Path, _GROUP_LIMITS):
        text = file.read_text().strip() if os.access(file, os.R_OK) else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def check_bytes(what: str, number: int) -> None:
    """Raises ConfigError if `number` bytes are more than this machine's memory. what: the subject of the message."""
    if number > memory_bytes():
        raise ConfigError(
            f"{what} needs {number:,} bytes, more than this machine's memory of {memory_bytes():,}; "
            "choose smaller sizes"
        )
