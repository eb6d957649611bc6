"""Paths that a user gives, checked before a file is touched."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.core.errors import ConfigError, DataError, RegardError


def user_path(text: str | os.PathLike[str], error: type[RegardError] = ConfigError) -> Path:
    """The path that a user gives, with `~` replaced by the home folder; it need not exist.

    Raises: `error` for an empty path, an unknown `~user`, a name that is too long or not UTF-8, a folder on the way
    that may not be entered, and links that form a loop.
    """
    text = os.fspath(text)
    shown = printable(text)
    if not text.strip():
        raise error("the path is empty; give a path, or leave the option out")
    if "\0" in text:
        raise error(f"the path {shown} has a null character")
    check_utf8(Path(text), error)
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise error(f"{shown}: this machine has no such user; write the whole path") from None
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as problem:
        shown = shown if len(shown) < 200 else f"{shown[:80]} ..."
        raise error(f"the path {shown} cannot be used: {problem.strerror}") from problem
    return path


def named_folder(text: str) -> Path | None:
    """The folder that a text names; None if there is none, as for the name of a model or its spelling.

    Raises: ConfigError as `user_path`, for a text without parentheses.
    """
    try:
        path = user_path(text)
    except ConfigError:
        if "(" in text:  # a long spelling
            return None
        raise
    return path if path.is_dir() else None


def check_utf8(path: Path, error: type[RegardError] = DataError) -> None:
    """Raises: `error` if the bytes of a path are not UTF-8; such a name cannot be stored in results."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise error(f"the name {printable(str(path))} is not UTF-8; rename it") from None


def printable(text: str) -> str:
    """A text from outside for a terminal: what is not UTF-8, steers it or turns the direction of text is an escape."""
    text = text.encode(errors="backslashreplace").decode()
    return _STEERING.sub(lambda sign: sign[0].encode("unicode_escape").decode().replace("\\x00", "\\0"), text)


def printable_lines(text: str) -> str:
    """A text of several lines, `printable` but for their ends."""
    return "\n".join(map(printable, text.split("\n")))


_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def visible(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder by name, without hidden ones and those that macOS adds to archives.

    Raises: DataError if the folder may not be read, for a pipe, socket or device, whose reader would wait for ever, and
    for a link to nothing that may have been a folder or a list of files; a reader names the others.
    """
    with readable(folder), os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    shown = [entry for entry in found if not entry.name.startswith((".", "__MACOSX"))]
    special = next((entry.path for entry in shown if _is_special(entry)), None)
    if special is not None:
        raise DataError(
            f"{printable(special)} is a pipe, socket or device, but no file; remove it, or put it elsewhere"
        )
    dead = next((entry.path for entry in shown if _is_dead(entry)), None)
    if dead is not None:
        raise DataError(f"{printable(dead)} is a link to nothing: remove it, or bring back what it leads to")
    return iter(shown)


_LISTS = frozenset({"", ".csv", ".tsv", ".json", ".jsonl", ".txt", ".yaml", ".yml", ".xml", ".gz"})
"""Suffixes of folders and lists, whose absence looks like data without them."""


def _is_dead(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and Path(entry.name).suffix.lower() in _LISTS and not Path(entry.path).exists()


def _is_special(entry: os.DirEntry[str]) -> bool:
    try:
        return not entry.is_file() and not entry.is_dir() and bool(entry.stat())
    except OSError:  # a link that points to nothing, which its reader names
        return False


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, or bytes that are not UTF-8, into a DataError with the path."""
    try:
        yield
    except OSError as problem:
        raise DataError(f"{printable(str(path))} cannot be read: {problem.strerror or problem}") from problem
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} cannot be read: {problem}; save it with the encoding UTF-8") from problem


def stamp(file: Path) -> tuple[int, int]:
    """Size of a file, and its time of change in nanoseconds. Raises: DataError."""
    with readable(file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns


def text_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file. Raises: DataError."""
    with readable(file):
        return file.read_text(encoding="utf-8-sig").splitlines()


def words_in(file: Path) -> list[str]:
    """The lines of a UTF-8 file without spaces around them and without empty ones. Raises: DataError."""
    return [line.strip() for line in text_lines(file) if line.strip()]


def subfolders(folder: Path) -> list[Path]:
    """The visible folders in a folder, by name; links to folders too. Raises: DataError."""
    return [folder / entry.name for entry in visible(folder) if entry.is_dir()]


def files_below(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    """The visible files in a folder and its subfolders whose suffix in lower case is among `suffixes`, sorted.

    Links are followed; one that points to nothing is listed. Raises: DataError for links that form a loop, for names
    that are not UTF-8, and for folders that may not be read.
    """
    return sorted(_files_below(folder, suffixes, ()))


def _files_below(folder: Path, suffixes: frozenset[str], above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    with readable(folder):
        status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise DataError(f"{printable(str(folder))} is a link to a folder that holds it, a loop; remove the link")
    for entry in visible(folder):
        path = folder / entry.name
        with readable(path):
            is_folder = entry.is_dir()
        if is_folder:
            yield from _files_below(path, suffixes, (*above, here))
        elif path.suffix.lower() in suffixes:
            check_utf8(path)
            yield path
