"""Texts that a user names or writes: files of a text in each line, and single texts for predictions."""

import gzip
import re
import zlib
from pathlib import Path

from regard.core import DataError, Problems

ENDINGS = re.compile(r"\.(txt|md|csv|tsv|parquet|png|jpg|gz|[a-z]{2})", re.IGNORECASE)
"""Of names that are files and no texts, with the suffixes of languages."""


def file_of(source: str | Path) -> Path | None:
    """The file that a source names; None for a text. Raises: DataError for a path without a file, and no text."""
    text = str(source)
    is_line = len(text) < 1000 and "\n" not in text and "\0" not in text
    try:
        if is_line and Path(text).is_file():
            return Path(text)
    except OSError:  # a text that is too long for a name
        return None
    if isinstance(source, Path) or (is_line and " " not in text and ENDINGS.fullmatch(Path(text).suffix)):
        raise DataError(f"there is no file {text}")
    if not text.strip():
        raise DataError("the text is empty")
    return None


def read_lines(path: Path) -> tuple[str, ...]:
    """The texts of a UTF-8 file (or .gz), one a line; only "\\n" (or "\\r\\n") ends a line. Raises: DataError."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); replace it") from error
    lines = content.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n") if content else []
    sentences, problems = [], Problems()
    for number, line in enumerate(lines, 1):
        try:
            sentence = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x} at position {error.start + 1}"
            problems.append(f"{path}, line {number}: {byte} is not UTF-8; convert the file to UTF-8")
            continue
        if not sentence.strip():
            problems.append(f"{path}, line {number}: the text is empty; remove the line")
        sentences.append(sentence)
    problems.raise_all()
    if not sentences:
        raise DataError(f"{path} has no lines; expected a text in each line")
    return tuple(sentences)
