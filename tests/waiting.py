"""Waiting for what another process does."""

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(
    look: Callable[[], Found], process: subprocess.Popen[str] | None = None, *, seconds: float = 240.0
) -> Found:
    """What `look` finds first; the test fails after so many seconds, or when the process ends before."""
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until, "nothing has happened"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)
    return found
