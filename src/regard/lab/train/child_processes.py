"""Child processes: their environment variables, and their end when the parent process ends."""

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

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


LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_NAME",
    "LT_CLI_USED", "LT_ACCELERATOR", "LT_DEVICES", "LT_NUM_NODES", "LT_PRECISION", "LT_STRATEGY",
    "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE",
)  # fmt: skip
"""Variables in which launchers and schedulers say which of many processes this one is, or Lightning's command line what
it shall do: Fabric believes them."""


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables with the number of threads of numerical libraries."""


def process_environment(threads: int, gpus: str = "") -> AbstractContextManager[None]:
    """Environment variables for child processes that start in the block, which is none of a launcher's.

    threads: of each numerical library. gpus: CUDA_VISIBLE_DEVICES, "" = those of this process. The memory allocator
    keeps freed pages (`regard.core.allocator`). Python does not search the current folder first, where a file may have
    the name of a module of its own; queues and pools start a process too, so that they are made in the block.
    """
    visible = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    own = {**dict.fromkeys(THREADS, str(threads)), **ALLOCATOR, "PYTHONSAFEPATH": "1", **visible}
    return environment_variables({**dict.fromkeys(LAUNCHERS), **own})


def without_launcher() -> AbstractContextManager[None]:
    """Hide `LAUNCHERS` in the block: a run that is one process takes no notice of a scheduler around it."""
    return environment_variables(dict.fromkeys(LAUNCHERS))


@contextmanager
def environment_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in the block; None = without the variable."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
