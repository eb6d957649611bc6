"""Signal handlers for the duration of a block."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handle_signals(handler: Callable[[int, Any], None] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Install a handler for some signals, and restore the former handlers at the end of the block.

    Only the main thread may install handlers: in other threads nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in former_handlers.items():
            signal.signal(number, former)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block; processes that begin in it do not get it at all."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def interrupt(number: int, frame: object) -> None:
    """A handler: stop as after Ctrl-C. Raises: KeyboardInterrupt."""
    raise KeyboardInterrupt
