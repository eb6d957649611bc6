"""Parquet tables of images and labels, in one file, in a folder, or in parts as on the Hub."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from regard.core import DataError, require
from regard.files.paths import check_utf8, files_below, visible

from . import folders
from .folders import TESTS, TRAINS
from .images import SUFFIXES, Source, Split

log = logging.getLogger("regard.data")

LARGEST_LABEL = 2**20
"""A label of this size or above is no number of a class."""

IMAGES, LABELS = ("img", "image", "picture"), ("label", "class", "target", "fine_label")
"""Names of the columns of a table; the first one that is present is used."""

_SHARD = re.compile(r"-\d+-of-(\d+)$")


def tables_of(path: Path) -> dict[str, list[Path]]:
    """The parquet files of each split: in a folder, or as on the Hub: data/train-00000-of-00001.parquet."""
    if path.suffix == ".parquet" and path.is_file():
        return {"train": [path]}
    if not path.is_dir():
        return {}
    files = [path / entry.name for entry in visible(path) if entry.name.endswith(".parquet")]
    if not files and not files_below(path, SUFFIXES):
        files = files_below(path, frozenset({".parquet"}))
    parts: dict[str, list[Path]] = {}
    for file in files:
        stem = _SHARD.sub("", file.stem.lower())
        parts.setdefault(file.parent.name.lower() if stem.isdigit() else stem, []).append(file)
    for part in parts.values():
        _check_whole(part)
    splits = folders.by_split({part[0]: name for name, part in parts.items()})
    if not splits:
        return {}
    first = next(iter(splits.values()))
    for name, part in parts.items():
        if name not in (*TRAINS, *TESTS):
            raise DataError(
                f"{part[0]} lies beside {first.name}, but has not the name of a split: call it test.parquet "
                "(or val.parquet), or put it elsewhere"
            )
        if len({file.parent for file in part}) > 1:
            raise DataError(f"{part[0]} and {part[-1]} name the same split; give one of their folders as the data")
    for image in files_below(path, SUFFIXES):
        raise DataError(f"{path} has a table ({first.name}) and also {image}; keep one kind of data there")
    by_first = {part[0]: part for part in parts.values()}
    return {split: by_first[file] for split, file in splits.items()}


def _check_whole(files: list[Path]) -> None:
    """Raises: DataError if files of a table that is named in parts, as on the Hub, are missing."""
    numbers = {int(match[1]) for file in files if (match := _SHARD.search(file.stem))}
    if numbers and numbers != {len(files)}:
        raise DataError(
            f"{files[0]} is one of {max(numbers)} parts, {len(files)} of which are there: download the others"
        )


def from_tables(path: Path, reserved: bool) -> tuple[tuple[str, ...], dict[str, Split]]:
    """The classes and the splits of a path; reserved: also "val". Raises: DataError."""
    tables = tables_of(path)
    splits: dict[str, Split] = {}
    classes: tuple[str, ...] = ()
    if not reserved:
        tables.pop("val", None)
    first = next(iter(tables.values()))[0]
    for split, files in tables.items():
        sources, rows, parts = list[Source](), list[str](), list[np.ndarray]()
        for file in files:
            table = read_table(file)
            image, label = (_column(file, table, *kind) for kind in ((IMAGES, "Image"), (LABELS, "ClassLabel")))
            images = image_column(file, table[image])
            for given in table["split"].unique().to_pylist() if "split" in table.column_names else ():
                folders.check_column(str(file), given, split)
            names = class_names(file) or hub_names(file, hub_features(schema_metadata(file)), label)
            if classes and names and names != classes:
                raise DataError(f"{file} has other class_names than {first.name}; make them equal")
            classes = classes or names
            sources += images
            rows += [f"row {row} of {file}" for row in range(len(images))]
            parts.append(_whole_labels(file, label, table[label]))
        splits[split] = sources, rows, np.concatenate(parts)
    labels = next(iter(splits.values()))[2]  # of the training, unless there is a test alone
    if not len(labels):
        raise DataError(f"{first} has no rows")
    count = int(labels.max()) + 1
    return classes or tuple(str(label) for label in range(count)), splits


def schema_metadata(file: Path) -> Mapping[bytes, bytes]:
    """The metadata in the schema of a parquet file."""
    require("pyarrow")
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(file).metadata or {}


def hub_features(metadata: Mapping[bytes, bytes] | None) -> dict[str, dict[str, Any]]:
    """What the library `datasets` notes of each column of a table in its metadata; {} without such notes."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _whole_labels(file: Path, name: str, column: Any) -> np.ndarray:
    """A column of whole numbers as int64. Raises: DataError for missing ones, other types and too large ones."""
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{file}: column {name!r} has no label in row {row} ({column.null_count} in all); fill it in")
    labels = column.to_numpy()
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{file}: column {name!r} holds {'texts' if labels.dtype == object else labels.dtype}, expected one whole "
            "number from 0 for each image, with names in its metadata class_names; lists in .csv take names"
        )
    if len(labels) and int(labels.max()) >= LARGEST_LABEL:
        row = int(labels.argmax())
        raise DataError(f"{file}: label {labels[row]} of row {row} is too large; labels count classes from 0")
    return labels.astype(np.int64)


def read_table(file: Path) -> Any:
    """A parquet file as a pyarrow table. Raises: DataError if it is damaged."""
    require("pyarrow")

    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{file} cannot be read as parquet ({reason}); download it again") from error


def image_column(file: Path, column: Any) -> list[Source]:
    """Encoded images of a column of bytes, or of structs with a field `bytes`, like Hugging Face. Raises: DataError."""
    values = column.to_pylist()
    sources = [value.get("bytes") if isinstance(value, dict) else value for value in values]
    for row, source in enumerate(sources):
        if not isinstance(source, bytes):
            raise DataError(f"row {row} of {file} has no image bytes but {type(source).__name__}")
    return cast(list[Source], sources)


def class_names(file: Path) -> tuple[str, ...]:
    """The names in the schema's metadata (`class_names`, a JSON list), or an empty tuple. Raises: DataError."""
    try:
        names = json.loads(schema_metadata(file).get(b"class_names", b"[]"))
    except (ValueError, RecursionError):
        names = None
    return _distinct_texts(f"{file}: class_names in its metadata", names)


def hub_names(file: Path | str, features: Mapping[str, Mapping[str, Any]], label: str) -> tuple[str, ...]:
    """The names in `hub_features` of a column of labels, () = there are none. Raises: DataError."""
    names = features.get(label, {}).get("names", [])
    return _distinct_texts(f"{file}: names of {label!r} in its metadata of the Hub", names)


def _distinct_texts(place: str, names: Any) -> tuple[str, ...]:
    """Names of classes. Raises: DataError unless they are a list of distinct texts that are not empty."""
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise DataError(f"{place} is not a JSON list of texts that are not empty; correct or remove it")
    for name in names:
        check_utf8(Path(name), DataError)
    if len(set(names)) < len(names):
        raise DataError(f"{place} has a name twice; correct or remove it")
    return tuple(names)


def _column(file: Path, table: Any, names: tuple[str, ...], kind: str) -> str:
    """The first of these columns that a table has, else the only one of this kind by the Hub's metadata."""
    for name in names:
        if table.column_names.count(name) > 1:
            raise DataError(f"{file} has several columns {name}; remove or rename all but one")
        if name in table.column_names:
            if others := [other for other in names if other in table.column_names and other != name]:
                log.warning("%s has the columns %s and %s; %s is taken", file, name, ", ".join(others), name)
            return name
    known = [name for name, feature in hub_features(schema_metadata(file)).items() if feature.get("_type") == kind]
    if len(known) == 1 and known[0] in table.column_names:
        return known[0]
    raise DataError(f"{file} has columns {', '.join(table.column_names)}; expected one of {', '.join(names)}")
