"""Parquet files of a stream: which columns hold images and labels, and their rows in order."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from regard.core import DataError, require
from regard.images import tables

from .files import is_remote, open_file, stamp
from .names import Name

ROWS = 32
"""Rows that are read at once."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are read. classes: names of the classes, () = only their numbers are known."""

    image: str
    label: str
    classes: tuple[str, ...]


def columns_of(file: str, name: Name) -> Columns:
    """The columns that the user chooses, else those that the file itself calls an image and a class label.

    Files without such notes (the features of the library `datasets`) have the columns of the user's own tables.
    Raises: DataError, with all columns, if there is none, or if there are several.
    """
    schema = metadata(file).schema.to_arrow_schema()
    notes = tables.hub_features(schema.metadata)
    image = _column(file, schema.names, name, "image", [key for key in notes if notes[key].get("_type") == "Image"])
    label = _column(
        file, schema.names, name, "label", [key for key in notes if notes[key].get("_type") == "ClassLabel"]
    )
    classes = tables.hub_names(file, notes, label) or (tables.class_names(Path(file)) if not is_remote(file) else ())
    return Columns(image, label, classes)


def _column(file: str, names: Sequence[str], name: Name, kind: str, noted: list[str]) -> str:
    chosen = name.choice(kind)
    usual = tables.IMAGES if kind == "image" else tables.LABELS
    found = [chosen] if chosen else noted or [key for key in usual if key in names][:1]
    if len(found) != 1 or names.count(found[0]) != 1:
        problem = f"several columns of {kind}s ({', '.join(found)})" if len(found) > 1 else f"no column of {kind}s"
        problem = f"no column {chosen}, or several" if chosen else problem
        raise DataError(f"{file} has {problem}; its columns are {', '.join(names)}: choose with ?{kind}=COLUMN")
    return found[0]


def metadata(file: str) -> Any:
    """The footer of a parquet file. Raises: DataError if it is damaged or cannot be read."""
    return _metadata(file, stamp(file))


@lru_cache(maxsize=64)
def _metadata(file: str, stamp: tuple[int, ...]) -> Any:
    require("pyarrow")
    from pyarrow.parquet import read_metadata

    with _errors(file), open_file(file) as stream:
        return read_metadata(stream)


@contextmanager
def _errors(file: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:  # those of pyarrow are among these kinds
        reason = str(error).partition("\n")[0]
        raise DataError(f"{file} cannot be read as parquet ({reason}); write or download it again") from error


def measure(file: str, columns: Columns) -> list[tuple[int, int, int, int]]:
    """(row group, rows, smallest label, largest label) of each row group with rows, if possible from the footer."""
    found = []
    footer = metadata(file)
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        rows = group.num_rows
        parts = (group.column(index) for index in range(group.num_columns))
        noted = next((part.statistics for part in parts if part.path_in_schema == columns.label), None)
        if rows and noted is not None and noted.has_min_max and noted.null_count == 0:
            low, high = noted.min, noted.max
        elif rows:
            labels = [label for _, part in _batches(file, number, [columns.label]) for label in part[0]]
            low, high = (None, None) if None in labels else (min(labels), max(labels))
        if rows:
            found.append((number, rows, _whole(file, columns, low), _whole(file, columns, high)))
    return found


def _whole(file: str, columns: Columns, label: Any) -> int:
    if isinstance(label, bool) or not isinstance(label, int) or label >= tables.LARGEST_LABEL:
        raise DataError(f"{file}: column {columns.label!r} has the label {label!r:.40}, expected a whole number from "
                        "0 on; ?label=COLUMN chooses another column")  # fmt: skip
    return label


def in_order(file: str, group: int, columns: Columns, skip: int) -> Iterator[tuple[str, bytes, int]]:
    """Name, image's bytes and label of each row of a row group, without the first `skip`. Raises: DataError."""
    for first, (images, labels) in _batches(file, group, [columns.image, columns.label], skip):
        for row, (image, label) in enumerate(zip(images, labels, strict=True), first):
            name = f"row {row} of row group {group}"
            if not isinstance(image, bytes):
                raise DataError(f"{name} of {file} has no image bytes in {columns.image!r}, but "
                                f"{type(image).__name__}; ?image=COLUMN chooses another column")  # fmt: skip
            yield name, image, _whole(file, columns, label)


def _batches(file: str, group: int, names: list[str], skip: int = 0) -> Iterator[tuple[int, list[list[Any]]]]:
    """The number of the first row and the values of each column, a few rows at a time.

    Raises: DataError for a file that is damaged or lacks a column, and for a missing label.
    """
    require("pyarrow")
    from pyarrow.parquet import ParquetFile

    with _errors(file), open_file(file) as stream:
        table = ParquetFile(stream, metadata=metadata(file), pre_buffer=False, buffer_size=2**20)
        if group >= table.num_row_groups:
            raise DataError(f"{file} has no row group {group}, and had it when it was counted; write it again")
        missing = [name for name in names if name not in table.schema_arrow.names]
        if missing:
            raise DataError(f"{file} has no column {missing[0]}; its columns are {', '.join(table.schema_arrow.names)}")
        first = 0
        for batch in table.iter_batches(ROWS, row_groups=[group], columns=names, use_threads=False):
            start, first = first, first + len(batch)
            if first <= skip:
                continue
            kept = batch.slice(max(skip - start, 0))
            yield max(start, skip), [_values(kept.column(name)) for name in names]


def _values(column: Any) -> list[Any]:
    """The values of a column; of structs of the library `datasets` their field `bytes`."""
    is_struct = hasattr(column, "field") and column.type.get_field_index("bytes") >= 0
    return (column.field("bytes") if is_struct else column).to_pylist()
