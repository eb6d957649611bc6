"""Single inputs for predictions: lines of text as symbols."""

from pathlib import Path

import numpy as np

from regard.core import DataError

from . import listops
from .data import Facts

ENDINGS = (".txt", ".md", ".csv", ".tsv", ".parquet", ".png", ".jpg")


def file_of(source: str | Path) -> Path | None:
    """The file that a source names; None for a text. Raises: DataError for a path without a file."""
    text = str(source)
    is_line = len(text) < 1000 and "\n" not in text and "\0" not in text
    if is_line and Path(text).is_file():
        return Path(text)
    if isinstance(source, Path) or (is_line and " " not in text and Path(text).suffix.lower() in ENDINGS):
        raise DataError(f"there is no file {text}")
    return None


def read_lines(file: Path) -> list[str]:
    """The lines of a text file. Raises: DataError if it has none, or is no UTF-8."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is no text in UTF-8 ({error.reason})") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    lines = [line.removesuffix("\r") for line in (lines[:-1] if not lines[-1] else lines)]
    if not lines:
        raise DataError(f"{file} has no lines; expected a text in each line")
    return lines


def encoded(line: str, facts: Facts, where: str) -> list[np.ndarray]:
    """The symbols (n,) uint8 of a line, two arrays for a pair. where: its place, for errors. Raises: DataError."""
    parts = line.split("\t") if facts.pairs else [line]
    if len(parts) != 1 + facts.pairs:
        raise DataError(f"{where} has {len(parts)} texts; expected two with a tab between them")
    if any(not part.strip() for part in parts):
        raise DataError(f"{where} has an empty text")
    if facts.alphabet == "listops":
        return [listops.encode(part, where) for part in parts]
    return [np.frombuffer(part.encode(), np.uint8) for part in parts]
