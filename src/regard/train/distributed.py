"""One run on several devices of a machine: a process for each, which train on equal parts of every batch (DDP).

Batches, their augmentation and the losses are those of one device but for rounding; mixup pairs images within a part,
and dropout draws differ from part to part. The first process evaluates and writes; the parent holds the run's lock.
"""

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from regard.core import ConfigError, DeviceError, RegardError

from .child_processes import follow_parent, surroundings
from .environment import hush
from .loop import Interrupted, Watch
from .signals import handled


def check_devices(devices: int, batch: int, device: str) -> None:
    """Raises: ConfigError if the machine has fewer devices, or a batch cannot be cut into equal parts."""
    if devices < 1:
        raise ConfigError(f"a run needs at least one device, not {devices}")
    if batch % devices:
        lower = next(count for count in range(devices, 0, -1) if batch % count == 0)
        raise ConfigError(f"a batch of {batch} cannot be cut into {devices} equal parts; use {lower} devices")
    if device != "cpu" and torch.cuda.is_available():
        check_number(devices, torch.cuda.device_count())


def check_number(devices: int, there: int) -> None:
    """Raises: DeviceError for more devices than there are."""
    if devices > there:
        raise DeviceError(f"{devices} devices are asked for, this machine has {there}")


def in_processes(
    train: Callable[[Watch, Any], dict[str, Any]], precision: str, device: str, devices: int, watch: Watch
) -> dict[str, Any]:
    """Call `train(watch, fabric)` in `devices` processes, and return what the first of them returns.

    Raises: Interrupted, and what `train` raises.
    """
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy
    from torch.multiprocessing.spawn import ProcessException

    told = multiprocessing.get_context("spawn").SimpleQueue()
    threads = max(1, torch.get_num_threads() // devices)
    fabric: Any = Fabric(
        accelerator=device,
        devices=devices,
        strategy=DDPStrategy(start_method="spawn"),
        precision=precision,  # type: ignore[arg-type]
        loggers=list(watch.loggers),
    )
    silent = dataclasses.replace(watch, report=None, loggers=())
    with _hearing(told, watch) as errors, _passing_signals(), surroundings(threads):
        try:
            outcome = fabric.launch(partial(_process, train, threads, silent, told))
        except ProcessException as error:
            if errors:
                raise errors[0] from error
            raise
    if "interrupted" in outcome:
        raise Interrupted(outcome["interrupted"])
    return outcome


def _process(
    train: Callable[[Watch, Any], dict[str, Any]], threads: int, watch: Watch, told: Any, fabric: Any
) -> dict[str, Any]:
    """What each process does. A request to stop comes from the parent alone, not from the terminal."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    follow_parent()
    hush()
    torch.set_num_threads(threads)
    if fabric.is_global_zero:
        watch = dataclasses.replace(watch, report=told.put)
    try:
        return train(watch, fabric)
    except Interrupted as stop:
        return {"interrupted": str(stop)}
    except RegardError as error:
        told.put((type(error), str(error)))
        raise


@contextmanager
def _hearing(told: Any, watch: Watch) -> Iterator[list[RegardError]]:
    """Hand progress on while the processes run; the list gets their errors."""
    errors: list[RegardError] = []

    def listen() -> None:
        while (news := told.get()) is not None:
            if isinstance(news, tuple):
                errors.append(news[0](news[1]))
            elif watch.report is not None:
                watch.report(news)

    ear = threading.Thread(target=listen, daemon=True)
    ear.start()
    try:
        yield errors
    finally:
        told.put(None)
        ear.join()


@contextmanager
def _passing_signals() -> Iterator[None]:
    """SIGINT and SIGTERM of the parent ask the processes to stop with a checkpoint; the second one ends them."""
    asked: list[int] = []

    def hand_on(number: int, frame: Any) -> None:
        for child in multiprocessing.active_children():
            if asked:
                child.kill()
            else:
                child.terminate()
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    with handled(hand_on, signal.SIGINT, signal.SIGTERM):
        yield
