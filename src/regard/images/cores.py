"""The cores of a run: how many processes or threads decode its images."""

import multiprocessing
import os
import re
import shutil
from contextlib import suppress

import torch

MOST = 8
"""More would wait for the disk, or for memory."""


def decoders() -> int:
    """Processes or threads that decode images: one for each core of this process, at most `MOST`.

    Of torchrun's processes each has an equal share of the machine's cores; the cores of any other run are torch's
    threads.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = int(given) if re.fullmatch("[1-9][0-9]{0,5}", given) else 1
    if processes == 1:
        return min(torch.get_num_threads(), MOST)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable // processes, MOST))


def loaders(batch: int) -> int:
    """Processes of a data loader that decodes: `decoders()`, if their batches of so many bytes fit the shared memory.

    Each prepares two, and half of the shared memory stays free: that of a container may be small. A single process
    would save little: 0. So it is where processes are not forked (macOS, Python 3.14): there a user's script is run
    again in each, and has to be written for it.
    """
    if (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) != "fork":
        return 0
    number = decoders()
    with suppress(OSError):  # not every system has it
        number = min(number, shutil.disk_usage("/dev/shm").free // (4 * batch))
    return number if number > 1 else 0
