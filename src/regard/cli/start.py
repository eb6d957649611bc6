"""The entry point of the `regard` command: Ctrl-C ends it in one line, also while it loads its modules.

Until the command line is loaded, an interrupt ends the process at once; from then on it is a KeyboardInterrupt, so that
a run keeps its checkpoint. Python itself answers an interrupt before this file is read.
"""

import io
import logging
import os
import signal
import sys
import warnings
from typing import Any, TextIO

from .exit_codes import INTERRUPTED, MESSAGE


def _quit(number: int, frame: object) -> None:
    os.write(2, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the command line of `sys.argv`, and exit with its code."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in a background job of a shell
    if not ignored:
        signal.signal(signal.SIGINT, _quit)
    _open_standard_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        print("regard: the current folder does not exist any more; change to another one", file=sys.stderr)
        sys.exit(2)
    from regard.files.paths import printable_lines

    from .app import main as run

    class Printable(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable_lines(super().format(record))

    if logging.lastResort is not None:  # which writes warnings to standard error
        logging.lastResort.setFormatter(Printable())
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *about, **more: printable_lines(plain(*about, **more))

    interrupts: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        if not ignored:
            signal.signal(signal.SIGINT, interrupt)
        code = run(interrupts)
    except KeyboardInterrupt:  # between two lines of this function, or while the message is printed
        print(MESSAGE, file=sys.stderr)
        code = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code == INTERRUPTED:  # the end of Python makes a further Ctrl-C deadly again
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


class _Stream(io.FileIO):
    """A standard stream whose reader may go away (`| head`): the work goes on, and what it then writes is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def _open_standard_streams() -> None:
    """Give closed standard streams something to write to, and files and pipes the encoding UTF-8.

    A terminal keeps its encoding; what it cannot show is written as an escape.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    sys.stdout, sys.stderr = _tolerant(sys.stdout), _tolerant(sys.stderr)


def _tolerant(stream: TextIO) -> TextIO:
    raw, encoding = _Stream(stream.fileno(), "w", closefd=False), stream.encoding if stream.isatty() else "utf-8"
    at_once = bool(stream.line_buffering or getattr(stream, "write_through", False))  # the latter with `python -u`
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=at_once)
