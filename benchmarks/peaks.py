"""Peak memory of a pass, measured in a process of its own; Linux only, which counts a process's peak in /proc."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock


def apart(run: Callable[..., Any], *arguments: object, **settings: str) -> Any:
    """What a function of a script returns in a fresh process, with these environment variables besides."""
    with mock.patch.dict(os.environ, settings), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, arguments)


def added(run: Callable[[], object]) -> int:
    """Bytes that a call adds at its peak to what the process holds before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _bytes("VmRSS")
    run()
    return _bytes("VmHWM") - before


def _bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
