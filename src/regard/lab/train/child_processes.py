"""Child processes: their environment variables, and their end when the parent process ends."""

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from regard.core import ConfigError
from regard.core.allocator import ALLOCATOR

MOST_WORKERS = 1024
"""Processes beside this one; a larger number is a slip, and would use up the machine's processes."""


def check_workers(workers: int | None) -> None:
    """Raises: ConfigError for a number of worker processes that no machine has; None is the usual number."""
    if workers is not None and not 0 <= workers <= MOST_WORKERS:
        raise ConfigError(f"--workers is 0 or more, at most {MOST_WORKERS}, not {workers}")


def end_with_parent() -> None:
    """In a child process: exit at once when the parent process ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@contextmanager
def process_environment(threads: int, gpus: str = "") -> Iterator[None]:
    """Environment variables for child processes that start in the block.

    threads: of each numerical library. gpus: CUDA_VISIBLE_DEVICES, "" = those of this process. The memory allocator
    keeps freed pages (`regard.core.allocator`).
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    values = dict.fromkeys(names, str(threads))
    values |= ALLOCATOR | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
