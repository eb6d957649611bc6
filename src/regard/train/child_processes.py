"""What child processes are given: their surroundings, and an end when the parent is gone."""

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from regard.core.allocator import ALLOCATOR


def follow_parent() -> None:
    """In a child process: end at once when the parent is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@contextmanager
def surroundings(threads: int, gpus: str = "") -> Iterator[None]:
    """Environment of a child: threads of every numerical library, GPUs that it sees ("": all of this process), and an
    allocator that keeps its pages."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    wanted = dict.fromkeys(names, str(threads))
    wanted |= ALLOCATOR | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
