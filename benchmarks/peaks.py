"""Peak memory of a pass, measured in a fresh process; Linux only."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any
from unittest import mock


def in_fresh_process(run: Callable[..., Any], *arguments: object, **settings: str) -> Any:
    """The result of a function in a fresh process with additional environment variables."""
    with mock.patch.dict(os.environ, settings), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, arguments)


def peak_growth(run: Callable[[], object]) -> int:
    """Bytes by which a call's peak exceeds the memory of the process before it. Raises: OSError if not on Linux."""
    from regard.measure.memory import peak_growth as growth

    peak = growth(run)
    if peak is None:
        raise OSError("peaks of memory are known on Linux only")
    return peak
