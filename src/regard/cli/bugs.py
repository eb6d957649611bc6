"""Reports of errors that Regard does not expect: a file with the traceback, and one line that names it."""

import errno
import platform
import tempfile
import traceback
from collections.abc import Sequence

_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE)


def report(error: Exception, arguments: Sequence[str], shown: bool = False) -> str:
    """The message of an error; the traceback goes to a new file, or with `shown` to standard error.

    What is wrong with the machine (a full disk, missing rights, too little memory) is no bug and has no file.
    """
    described = " ".join(f"{type(error).__name__}: {error}".split())
    described = described if len(described) <= 300 else f"{described[:300]} ..."
    if shown:
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return f"{described}; check the disk, the permissions and --results, and repeat the command"
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    ):
        return f"this machine has too little memory ({described}); choose smaller sizes or batches"
    place = "the traceback is above" if shown else _write_report(error, arguments)
    return f"{described}; this is a bug of Regard, or of a module of --import: {place}"


def _write_report(error: Exception, arguments: Sequence[str]) -> str:
    from regard import __version__

    lines = [
        f"regard {__version__}, Python {platform.python_version()}, {platform.platform()}\n",
        f"command: regard {' '.join(map(repr, arguments))}\n\n",
        *traceback.format_exception(error),
    ]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="regard-bug-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.writelines(lines)
    except OSError as problem:
        return f"repeat the command with --traceback ({problem.strerror}: no file could be written)"
    return f"{file.name} has the traceback; please report it"
