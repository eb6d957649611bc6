"""Texts as bytes: IMDb reviews, and the user's own tables with the columns text and label, or text1, text2 and label.

A table is a parquet, .csv or .tsv file (UTF-8, with a header). A folder has the tables train and test, or val.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import DataError, Problems
from regard.files.paths import readable, visible
from regard.images.folders import SPLITS, check_column
from regard.images.lists import is_empty, whole_numbers
from regard.images.streams import generator
from regard.images.tables import read_table
from regard.lab.data.catalog import data_root, file_checksum, parquet_files

from .tokens import SequenceSet, Split, Tokens

SUFFIXES = (".parquet", ".csv", ".tsv")
BYTES = 256
IMDB_HELD = 2500
"""The last training reviews are reserved for tuning."""


@dataclass(frozen=True)
class Row:
    """One sample of a table: its texts (one, or the two of a pair), its label as it is written, and its place."""

    texts: tuple[str, ...]
    label: str
    place: str


def aan() -> SequenceSet:
    """The pairs of papers of the ACL Anthology Network that cite one another or not (Long Range Arena, Retrieval).

    They are tables train, val and test with the columns text1, text2 and label, in the folder aan of the data folder.
    Raises: DataError.
    """
    folder = data_root() / "aan"
    if not folder.is_dir():
        raise DataError(
            f"aan needs the folder {folder} with the tables train, val and test: the pairs of the Long Range Arena's "
            "release (new_aan_pairs.*.tsv), with the columns text1, text2 and label"
        )
    return replace(own(folder), name="aan")


def imdb() -> SequenceSet:
    """The 50,000 IMDb reviews (Maas et al. 2011) in the data folder, as they are: with <br /> tags.

    123 texts of the training reviews occur in the test too, as in the original. Raises: DataError.
    """
    files = parquet_files("imdb", "train", "test")
    problems = Problems()
    train, test = (_split(list(_rows(file, problems)), ("0", "1"), problems) for file in files)
    problems.raise_all()
    if len(train) <= IMDB_HELD:
        raise DataError(f"{files[0]} has {len(train)} reviews, imdb has 25,000; download the file again")
    used = len(train) - IMDB_HELD
    held = train.take(np.arange(used, len(train)))
    total = sha256("".join(map(file_checksum, files)).encode()).hexdigest()
    names = ("negative", "positive")
    return SequenceSet("imdb", names, train.take(np.arange(used)), test, "bytes", BYTES, True, held, total)


def is_table(path: Path) -> bool:
    """Whether a path is a table, or a folder of tables."""
    return _is_file(path) or (path.is_dir() and any(_is_file(path / entry.name) for entry in visible(path)))


def _is_file(path: Path) -> bool:
    """Whether a path is a table."""
    return path.suffix.lower() in SUFFIXES and path.is_file()


def tables(path: Path) -> dict[str, Path]:
    """The tables of the splits "train", "test" and "val" that a folder has; a single file is "train".

    Raises: DataError if there is no training split, or two files name one split.
    """
    if _is_file(path):
        return {"train": path}
    if not path.is_dir():
        raise DataError(f"{path} is no table: expected a file that ends in {', '.join(SUFFIXES)}")
    found: dict[str, Path] = {}
    for file in filter(_is_file, (path / entry.name for entry in visible(path))):
        split = next((split for split, names in SPLITS.items() if file.stem.lower() in names), "")
        if split in found:
            raise DataError(f"{found[split]} and {file.name} name the same split; remove or rename one of them")
        if split:
            found[split] = file
    if "train" not in found:
        raise DataError(
            f"{path} has no table of the training split; expected train.csv, train.tsv or train.parquet, and test.* or "
            "val.* beside it"
        )
    return found


@lru_cache(maxsize=16)
def digest(path: Path) -> str:
    """12 hexadecimal digits of a digest of the user's tables, whatever their path is. Raises: DataError."""
    total = sha256()
    for split, file in sorted(tables(path).items()):
        with readable(file), file.open("rb") as stream:
            total.update(f"{split}{file.suffix.lower()}".encode() + file_digest(stream, "sha256").digest())
    return total.hexdigest()[:12]


def own(path: Path) -> SequenceSet:
    """The user's own texts. A text has one or more characters; a label is a word or a number, the name of its class.

    Without a test split, val is the test; without both, every fifth row of a fixed permutation. With both, val is
    reserved for tuning. Raises: DataError, which names file and row.
    """
    files = tables(path)
    problems = Problems()
    rows = {split: list(_rows(file, problems, split)) for split, file in files.items()}
    problems.raise_all()
    names = iter(whole_numbers([row.label for part in rows.values() for row in part]))
    rows = {split: [replace(row, label=next(names)) for row in part] for split, part in rows.items()}
    for split, file in files.items():
        if not rows[split]:
            raise DataError(f"{file} has no rows")
    for split, file in files.items():
        if len(rows[split][0].texts) != len(rows["train"][0].texts):
            raise DataError(f"{file} and {files['train'].name} differ: one has pairs of texts, the other single ones")
    if "test" not in rows and "val" in rows:
        rows["test"] = rows.pop("val")
    divided = "test" not in rows
    if divided:
        order = generator("divide").permutation(len(rows["train"]))
        everything = rows["train"]
        rows["train"] = [everything[i] for i in np.sort(order[len(order) // 5 :])]
        rows["test"] = [everything[i] for i in np.sort(order[: len(order) // 5])]
    classes = _class_names({row.label for row in rows["train"]})
    if len(classes) < 2:
        raise DataError(f"{files['train']} has one label only, {classes[0]!r}; classification needs at least two")
    if not rows["test"]:
        raise DataError(f"{files['train']} has too few rows ({len(rows['train'])}) to reserve every fifth for the test")
    splits = {split: _split(items, classes, problems) for split, items in rows.items()}
    problems.raise_all()
    name = f"own:{digest(path)}"
    return SequenceSet(
        name, classes, splits["train"], splits["test"], "bytes", BYTES, True, splits.get("val"), divided=divided
    )


def _class_names(labels: set[str]) -> tuple[str, ...]:
    """Labels in the order of their numbers if all are whole numbers, else of the alphabet."""
    if all(len(label) < 1000 and label.removeprefix("-").isdecimal() for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


def _split(rows: list[Row], names: tuple[str, ...], problems: Problems) -> Split:
    """The rows as tokens; a label that is not among the names is added to the problems."""
    numbers = {name: index for index, name in enumerate(names)}
    for row in rows:
        if row.label not in numbers:
            shown = ", ".join(names[:10])
            problems.append(f"{row.place}: label {row.label!r} does not occur in the training split, which has {shown}")
    tokens = Tokens.of([text.encode() for row in rows for text in row.texts])
    return Split(tokens, np.array([numbers.get(row.label, 0) for row in rows], np.int64), len(rows[0].texts) == 2)


def _rows(file: Path, problems: Problems, split: str = "") -> Iterator[Row]:
    """The checked rows of a table; rows count from 1, without the header. What is wrong in a row is added to the
    problems. split: of the user's own table, which a column `split` must not contradict. Raises: DataError."""
    records = _parquet(file) if file.suffix.lower() == ".parquet" else _csv(file)
    header = next(records)
    columns = ("text",) if "text" in header else ("text1", "text2")
    missing = [name for name in (*columns, "label") if name not in header]
    if missing:
        shown = ", ".join(map(str, header)) or "none"
        raise DataError(
            f"{file} has no column {' and no column '.join(missing)} (it has {shown}); expected text and label, or "
            "text1, text2 and label"
        )
    double = next((name for name in (*columns, "label") if header.count(name) > 1), None)
    if double is not None:
        raise DataError(f"{file} has several columns {double}; remove or rename all but one")
    places = [header.index(name) for name in columns]
    label = header.index("label")
    column = header.index("split") if split and "split" in header else None
    for number, record in enumerate(records, 1):
        place = f"{file}, row {number}"
        if len(record) != len(header):
            problems.append(
                f"{place} has {len(record)} fields, the header has {len(header)}; put texts with separators or line "
                'breaks in double quotes, and write a double quote inside as ""'
            )
            continue
        with problems.collect():
            if column is not None:
                check_column(place, record[column], split)
            texts = tuple(_text(record[index], f"{place}, column {header[index]}") for index in places)
            yield Row(texts, _label(record[label], place), place)


def _text(item: Any, place: str) -> str:
    if not isinstance(item, str):
        raise DataError(f"{place} is {type(item).__name__}, not a text")
    if not item.strip():
        raise DataError(f"{place} is empty; remove the row")
    try:
        item.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place} has a character that UTF-8 cannot hold ({error.reason})") from error
    return item


def _label(item: Any, place: str) -> str:
    if isinstance(item, float) and item.is_integer():
        item = int(item)
    if is_empty(item) or isinstance(item, float) or not isinstance(item, str | int):
        raise DataError(f"{place}: the label is {item!r}; expected a word (not none or nan) or a whole number")
    return str(int(item) if isinstance(item, bool) else item).strip()


def _parquet(file: Path) -> Iterator[list[Any]]:
    table = read_table(file)
    yield list(table.column_names)
    for start in range(0, len(table), 1000):
        columns = [column.to_pylist() for column in table.slice(start, 1000).columns]
        yield from map(list, zip(*columns, strict=True))


def _csv(file: Path) -> Iterator[list[Any]]:
    """Header and rows of a table with commas, or tabs in .tsv. Raises: DataError."""
    row = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
            header = next(reader, None)
            if header is None:
                raise DataError(f"{file} is empty; expected a header with text and label")
            yield [name.strip().lower() for name in header]
            for record in reader:
                row += 1
                if record:
                    yield record
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} has bytes that are no UTF-8 after row {row} ({error.reason}); save it with the encoding UTF-8"
        ) from error
    except csv.Error as error:
        if "field limit" in str(error):
            most = f"{csv.field_size_limit():,}"
            raise DataError(
                f"{file}, row {row + 1} has a text of more than {most} characters, the most in a CSV; save the table "
                "as parquet"
            ) from error
        raise DataError(f'{file}, row {row + 1} cannot be read ({error}); write a double quote inside as ""') from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
