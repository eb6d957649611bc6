"""One run on several devices of one machine: one process each, with equal parts of every batch (DDP).

Batches, augmentation and losses equal those of one device except for rounding, but for means over pixels that count
(segmentation) and boxes (detection), which are taken in each part; mixup pairs images within a part, and dropout
differs between parts. The first process evaluates and writes files; the parent holds the run's lock.
"""

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from regard.core import ConfigError, DeviceError, RegardError

from .child_processes import end_with_parent, process_environment
from .environment import make_fabric, quiet_lightning
from .signals import handle_signals
from .watch import Interrupted, Watch


def check_devices(devices: int, batch: int, device: str) -> None:
    """Raises: DeviceError for more devices than the machine has, or if they cannot divide a batch; ConfigError."""
    check_parts(devices, batch)
    if device != "cpu" and torch.cuda.is_available():
        check_number(devices, torch.cuda.device_count())
    else:
        check_number(devices, max(os.cpu_count() or 1, 2))


def check_parts(devices: int, batch: int) -> None:
    """Raises: DeviceError if a batch cannot be divided into equal parts; ConfigError."""
    if devices < 1:
        raise ConfigError(f"a run needs at least one device, not {devices}")
    if batch % devices:
        lower = next(count for count in range(min(devices, batch), 0, -1) if batch % count == 0)
        raise DeviceError(f"a batch of {batch} cannot be divided into {devices} equal parts; use {lower} devices")


def check_number(devices: int, available: int) -> None:
    """Raises: DeviceError for more devices than the machine has."""
    if devices > available:
        raise DeviceError(f"{devices} devices are requested, this machine has {available}")


def in_processes(
    train: Callable[[Watch, Any], dict[str, Any]], precision: str, device: str, devices: int, watch: Watch
) -> dict[str, Any]:
    """Call `train(watch, fabric)` in `devices` processes, and return what the first of them returns.

    Raises: Interrupted, and what `train` raises.
    """
    from lightning_fabric.strategies import DDPStrategy
    from torch.multiprocessing.spawn import ProcessException

    threads = max(1, torch.get_num_threads() // devices)
    with process_environment(threads):
        messages = multiprocessing.get_context("spawn").SimpleQueue()
    fabric = make_fabric(device, devices, precision, watch.loggers, DDPStrategy(start_method="spawn"))
    silent = dataclasses.replace(watch, report=None, say=None, loggers=())
    with _listen(messages, watch) as errors, _forwarded_signals(), process_environment(threads):
        try:
            outcome = fabric.launch(partial(_process, train, threads, silent, messages))
        except ProcessException as error:
            if errors:
                raise errors[0] from error
            if getattr(error, "signal_name", "") in ("SIGTERM", "SIGINT"):  # sent to the group before it had begun
                raise KeyboardInterrupt from error
            raise
    if "interrupted" in outcome:
        raise Interrupted(outcome["interrupted"])
    return outcome


def _process(
    train: Callable[[Watch, Any], dict[str, Any]], threads: int, watch: Watch, messages: Any, fabric: Any
) -> dict[str, Any]:
    """The work of one process. Only the parent asks it to stop, not the terminal: it has its own process group."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    end_with_parent()
    quiet_lightning()
    torch.set_num_threads(threads)
    if fabric.is_global_zero:
        watch = dataclasses.replace(watch, report=messages.put, say=messages.put)
    try:
        return train(watch, fabric)
    except Interrupted as stop:
        return {"interrupted": str(stop)}
    except RegardError as error:
        messages.put((type(error), str(error)))
        raise


@contextmanager
def _listen(messages: Any, watch: Watch) -> Iterator[list[RegardError]]:
    """Receive messages while the processes run: progress and lines go to `watch`, errors into the list."""
    errors: list[RegardError] = []

    def receive() -> None:
        while (message := messages.get()) is not None:
            if isinstance(message, tuple):
                kind, text = message
                errors.append(kind.__new__(kind, text))  # without __init__, which may want other arguments
            elif (show := watch.say if isinstance(message, str) else watch.report) is not None:
                show(message)

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    try:
        yield errors
    finally:
        messages.put(None)
        receiver.join()


def _forwarded_signals() -> AbstractContextManager[None]:
    """SIGINT and SIGTERM of the parent ask the processes to save a checkpoint and stop; a second one kills them."""
    received: list[int] = []

    def forward(number: int, frame: Any) -> None:
        for child in multiprocessing.active_children():
            if received:
                child.kill()
            else:
                child.terminate()
        if received:
            raise KeyboardInterrupt
        received.append(number)

    return handle_signals(forward, signal.SIGINT, signal.SIGTERM)
