"""Peak memory of a pass, measured in a fresh process; Linux only, where /proc has the peak of a process."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock


def in_fresh_process(run: Callable[..., Any], *arguments: object, **settings: str) -> Any:
    """The result of a function in a fresh process with additional environment variables."""
    with mock.patch.dict(os.environ, settings), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, arguments)


def peak_growth(run: Callable[[], object]) -> int:
    """Bytes by which a call's peak exceeds the memory of the process before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _bytes("VmRSS")
    run()
    return _bytes("VmHWM") - before


def _bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
