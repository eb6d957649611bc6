"""Lists of images with their classes: a .csv, .tsv or .jsonl file with a column of files and one of labels."""

import codecs
import csv
import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import Any, TextIO
from unicodedata import normalize

import numpy as np

from regard.core import DataError, Problems
from regard.files.atomic import without_repetition
from regard.files.paths import files_below, printable, readable, stamp, subfolders, visible

from .folders import SPLITS, split_of_name
from .images import SUFFIXES, Split, kinds_of_images
from .notes import ELSEWHERE, Notes

FILES = ("file_name", "filename", "file", "image", "img", "path", "filepath", "file_path", "image_path", "image_name")
LABELS = ("label", "class", "target", "category", "fine_label", "class_name", "labels")
"""Names of the columns; the first one that is present is used."""
KINDS = (".csv", ".tsv", ".jsonl")
NAMES = ("labels", "metadata")
"""Of lists, beside those of splits."""
_MAY_SPLIT = ("set", "subset", "is_valid", "is_val", "is_test", "is_train", "partition", "fold", "phase", "usage")
"""Names of columns that tools write for splits."""


def list_files(path: Path) -> dict[Path, str]:
    """The lists of a folder, in it or in the folders of its splits, with the split of each ("" = of all); or a file.

    A file without both columns is no list. Raises: DataError for a file with the name of a list that cannot be read.
    """
    if path.is_file():
        return {path: ""} if path.suffix.lower() in KINDS and _columns(path) else {}
    if not path.is_dir():
        return {}
    here = {path / entry.name: split_of_name(Path(entry.name).stem) for entry in visible(path)}
    splits = ((folder, split_of_name(folder.name)) for folder in subfolders(path))
    inside = {folder / entry.name: split for folder, split in splits if split for entry in visible(folder)}
    for files in (here, inside):
        found = {file: split for file, split in files.items() if file.suffix.lower() in KINDS and _columns(file)}
        if found:
            return found
    return {}


def unread(path: Path) -> str:
    """What is wrong with a table beside images that names them, but is no list by its columns; "" without such a table.

    Images in folders with names of classes need no list.
    """
    entries = visible(path) if path.is_dir() else ()
    tables = [path / entry.name for entry in entries if Path(entry.name).suffix.lower() in KINDS]
    loose: set[str] = set()
    for image in files_below(path, SUFFIXES) if tables else ():
        if image.parent == path or {*image.parent.name.lower().replace("-", "_").split("_")} & _NO_CLASSES:
            loose |= {image.name, image.stem}
    for file in tables:
        rows: list[dict[str, Any]] = []
        with suppress(DataError):
            rows += islice(rows_in(file, strict=False), 20)
        named = [sum(_as_path(str(row.get(name))).name in loose for row in rows) for name in (rows or [{}])[0]]
        if rows and 2 * max(named, default=0) >= len(rows):  # not all: a line may lie before the header
            columns = printable(", ".join(name for name in rows[0] if name))
            return (
                f"{file} names images, but has the columns {columns}: call that of the "
                f"files {FILES[0]}, with their suffixes, and that of the classes {LABELS[0]}, or put it elsewhere"
            )
    return ""


_NO_CLASSES = frozenset({word for names in SPLITS.values() for word in names} | {"image", "images", "img", "imgs"})
"""Words in the names of folders of images that are no class."""


def _columns(file: Path) -> tuple[str, str] | None:
    """The names of the columns of files and of labels; None if what can be read of it lacks one of them."""
    rows: list[dict[str, Any]] = []
    with suppress(DataError):
        rows += islice(rows_in(file, strict=False), 20)
    if not rows or any("\0" in str(name) for name in rows[0]):
        if file.stem.lower() not in NAMES and not split_of_name(file.stem):
            return None
        deque(rows_in(file), 0)  # raises an error that names its fault
        raise DataError(f"{file} has no rows that can be read; correct or remove it")
    lower = {str(name).strip().lower(): str(name) for name in rows[0]}
    found = [next((lower[name] for name in names if name in lower), "") for names in (FILES, LABELS)]
    is_image = found[0] and any(Path(str(row.get(found[0]))).suffix.lower() in SUFFIXES for row in rows)
    return (found[0], found[1]) if is_image and found[1] else None


def rows_in(file: Path, strict: bool = True) -> Iterator[dict[str, Any]]:
    """The rows of a list by the names of its columns. Raises: DataError.

    strict: refuse a name that occurs twice, a row with more fields than the header, a file or label with a line break,
    a row that is damaged, and bytes that are not UTF-8. Otherwise damaged rows are left out, and UTF-16 is read too.
    """
    try:
        with readable(file):
            encoding = "utf-16" if not strict and _is_utf_16(file) else "utf-8-sig"
            with file.open(encoding=encoding, errors="strict" if strict else "replace", newline="") as stream:
                is_json = file.suffix.lower() == ".jsonl"
                mark = "\t" if file.suffix.lower() == ".tsv" else ""
                yield from _rows_of_json(stream, strict) if is_json else _rows_of_table(stream, mark, strict)
    except DataError:
        raise
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _is_utf_16(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _rows_of_json(stream: TextIO, strict: bool) -> Iterator[dict[str, Any]]:
    for line, text in enumerate(stream, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text, object_pairs_hook=without_repetition if strict else None)
        except (ValueError, RecursionError) as error:
            if strict:
                raise ValueError(f"line {line}: {error}") from error
            continue
        yield row if isinstance(row, dict) else {}


def _rows_of_table(stream: TextIO, mark: str, strict: bool) -> Iterator[dict[str, Any]]:
    """mark: between the fields, "" = the most frequent one of the header."""
    head = stream.readline()
    stream.seek(0)
    mark = mark or max(",;\t|", key=head.count)
    table = csv.DictReader(stream, delimiter=mark)
    names = [name.strip().lower() for name in table.fieldnames or () if name.strip()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if strict and twice is not None:
        raise ValueError(f"line 1 has the column {printable(twice)!r} twice; rename or remove one")
    while True:
        try:
            fields = next(table, None)
        except csv.Error as error:
            if strict:
                raise ValueError(f'line {table.line_num + 1}: {error}; is a quote (") before it not closed?') from error
            continue
        if fields is None:
            return
        if strict and any(fields.get(None, ())):
            place = f"line {table.line_num} has more fields than the header"
            raise ValueError(f"{place}; put a text with {mark!r} into quotes")
        broken = next((name for name, value in fields.items() if _is_broken(name, value)), None)
        if strict and broken is not None:
            begin = table.line_num - len(str(fields[broken]).splitlines()) + 1
            place = f"line {begin} begins a {printable(broken)} that goes on to line {table.line_num}"
            raise ValueError(f'{place}; close or remove the quote (")')
        yield fields


def _is_broken(name: str | None, value: object) -> bool:
    """Whether a field of a file or label has a line break, as behind a quote that is not closed."""
    return str(name).strip().lower() in (*FILES, *LABELS) and len(str(value).strip().splitlines()) > 1


_EXPECTED = "expected a file and one label (none and nan count as empty)"

Rows = dict[str, list[tuple[Path, str]]]
"""The images and labels of each split."""


@lru_cache(maxsize=4)
def _read(path: Path, status: tuple[tuple[int, int], ...]) -> tuple[Rows, list[tuple[str, Path]]]:
    """The rows; names and images of those that are not where the list says."""
    root = path if path.is_dir() else path.parent
    problems = Problems()
    below = images_by_name(root)
    splits: Rows = {}
    elsewhere: list[tuple[str, Path]] = []
    said: dict[Path, tuple[str, str, str]] = {}
    for file, split in list_files(path).items():
        columns = _columns(file)
        assert columns is not None
        for number, row in enumerate(rows_in(file), 1 + (file.suffix.lower() != ".jsonl")):
            place, name, label = f"{file}, line {number}", row.get(columns[0]), row.get(columns[1])
            if name in (None, "") or is_empty(label) or isinstance(label, list | dict):
                problems.append(f"{place}: {_EXPECTED}, not {printable(str(row))[:80]}")
                continue
            own = _split_of(row)
            if split and own != split and any(str(name).strip().lower() == "split" for name in row):
                problems.append(f"{place}: its column split does not say {split}, as the file's name does")
                continue
            given = split or own
            found = find_image(file, root, str(name), below)
            if not given:
                problems.append(f"{place}: its split is none of {', '.join(SPLITS)}")
            elif isinstance(found, str):
                problems.append(f"{place}: {found}")
            else:
                here = (str(label).strip(), given, place)
                before = said.setdefault(found, here)
                if before[:2] != here[:2]:
                    problems.append(
                        f"{place}: {found} is {printable(here[0])!r} of {given}, but {printable(before[0])!r} of "
                        f"{before[1]} in {before[2]}; keep one"
                    )
                splits.setdefault(given, []).append((found, here[0]))
                elsewhere += [(str(name), found)] if is_elsewhere(file, str(name), found) else []
    problems.raise_all()
    names = iter(whole_numbers([label for part in splits.values() for _, label in part]))
    return {split: [(file, next(names)) for file, _ in part] for split, part in splits.items()}, elsewhere


def is_empty(label: object) -> bool:
    """Whether a cell has no value, as tools write it."""
    return str(label).strip().lower() in ("", "none", "nan")


def whole_numbers(labels: list[str]) -> list[str]:
    """The labels, such as 1.0 as 1, where all are whole numbers: tools write both for one class."""
    if not all(re.fullmatch(r"-?\d+(\.0*)?", label, re.ASCII) for label in labels):
        return labels
    return [label.partition(".")[0] for label in labels]


def _split_of(row: dict[str, str]) -> str:
    """The split in the column `split`, "train" without that column, "" for another word or none."""
    given = next((value for name, value in row.items() if str(name).strip().lower() == "split"), "train")
    return next((split for split, names in SPLITS.items() if str(given).strip().lower() in names), "")


def images_by_name(folder: Path) -> dict[str, list[Path]]:
    """The images in a folder and its subfolders, by their names, composed (NFC): a Mac decomposes letters with accents.

    Raises: DataError as `files_below`.
    """
    below: dict[str, list[Path]] = defaultdict(list)
    for image in files_below(folder, SUFFIXES):
        below[normalize("NFC", image.name)].append(image)
    return below


def find_image(file: Path, root: Path, name: str, below: dict[str, list[Path]]) -> Path | str:
    """The image that a list names, or what is wrong. below: all images below the root, by their names."""
    shown, path = printable(name), _as_path(name)
    if path.is_absolute() or PureWindowsPath(name).drive:
        return f"{shown} is an absolute path; write it from the folder of the list on"
    if path.suffix.lower() not in SUFFIXES:
        return f"{shown} is no image: expected {kinds_of_images()}"
    if ".." not in path.parts:
        for folder in (file.parent, file.parent / "images", root, root / "images"):
            if (folder / path).is_file():
                return folder / path
    elif (there := (file.parent / path).resolve()).is_file() and there.is_relative_to(root.resolve()):
        return root / there.relative_to(root.resolve())
    found = below.get(normalize("NFC", path.name), [])
    if len(found) == 1:
        return found[0]
    return (
        f"there is no image {shown}"
        if not found
        else f"{len(found)} images have the name {shown}; write its folder too"
    )


def is_elsewhere(file: Path, name: str, image: Path) -> bool:
    """Whether `find_image` took an image that does not lie in the folders that its name in the list begins with."""
    path = _as_path(name)
    parts = tuple(part for part in path.parts if part != "..")
    if len(parts) == 1 < len(path.parts):  # names no folder but that above the list
        return (file.parent / path).resolve() != image.resolve()
    return image.parts[-len(parts) :] != parts


def _as_path(name: str) -> Path:
    return Path(name.strip().replace("\\", "/"))


def rows_of(path: Path) -> Rows:
    """The images and labels of each split, "train" alone where nothing tells a split; no image is opened.

    Raises: DataProblems with file and line for each row without an image or label.
    """
    return _read_again(path)[0]


def _read_again(path: Path) -> tuple[Rows, list[tuple[str, Path]]]:
    """`_read`, anew if the lists have changed."""
    return _read(path, tuple(map(stamp, list_files(path))))


def lists_of(path: Path) -> dict[Path, str]:
    """`list_files`, unless class folders say the same: of the splits that the lists name, or without any of all images.

    Raises: DataError for lists without splits of images in several folders of splits.
    """
    found = list_files(path)
    if not found or path.is_file():
        return found
    try:
        rows = rows_of(path)
    except DataError:
        return found
    named = {split: {image for image, _ in part} for split, part in rows.items()}
    images = set[Path]().union(*named.values())
    folders = {split for image in images if (split := _split_of_folder(path, image))}
    if all(image.parent.name == label and image.parent != path for part in rows.values() for image, label in part):
        placed: dict[str, set[Path]] = {}
        for image in files_below(path, SUFFIXES):
            placed.setdefault(_split_of_folder(path, image) or "train", set()).add(image)
        whole = len(named) == 1 and images == set().union(*placed.values())
        if whole or all(part == placed.get(split) for split, part in named.items()):
            return {}
    if len(named) == 1 and len(folders) > 1:
        raise DataError(
            f"{next(iter(found))} names images of the folders {' and '.join(sorted(folders))}, but no split; "
            "add a column split, or remove the list if the folders have all"
        )
    return found


def _split_of_folder(path: Path, image: Path) -> str:
    """The split that the first folder on the way to an image is named after; "" for none."""
    first = image.relative_to(path).parts[0].lower()
    return next((split for split, names in SPLITS.items() if first in names), "")


def warn_of_others(path: Path) -> None:
    """Warn of images that no list names, or one several times, of those that are not where the list says, and of those
    in the folder of another class or split than that of the list."""
    root, notes, (rows, elsewhere) = path if path.is_dir() else path.parent, Notes(), _read_again(path)
    for name, image in elsewhere:
        notes.add(ELSEWHERE, f"{image} for {name}")
    for file in list_files(path):
        given, taken = next(rows_in(file)), _columns(file) or ("", "")
        for name, names in zip(taken, (FILES, LABELS), strict=True):
            for other in given:
                if other != name and str(other).strip().lower() in names:
                    notes.add("columns of files or labels beside those taken", f"{other} of {file}, not {name}")
        for other in given:
            if str(other).strip().lower() in _MAY_SPLIT:
                notes.add("columns that may say splits, which only a column split does", f"{other} of {file}")
    labels = {label for part in rows.values() for _, label in part}
    for split, part in rows.items():
        for image, number in Counter(image for image, _ in part).items():
            if number > 1:
                notes.add(f"images that are listed more than once for {split}, and count as often", image)
        for image, label in part:
            if image.parent.name in labels - {label}:
                place = f"{image}, which is {label}"
                notes.add("images in the folder of another class than that of the list, which decides", place)
            if _split_of_folder(root, image) not in ("", split):
                place = f"{image}, which is for {split}"
                notes.add("images in the folder of another split than that of the list, which decides", place)
    notes.add_unnamed(root, {image for part in rows.values() for image, _ in part})
    notes.warn()


def read(path: Path, reserved: bool = False) -> tuple[tuple[str, ...], dict[str, Split]]:
    """The classes, sorted by number or by name, and the images of each split; of a single one that is not "train",
    "test" alone.

    reserved: also of "val" beside a test. Raises: DataError.
    """
    rows = rows_of(path)
    if "train" not in rows and len(rows) == 1:
        rows = {"test": next(iter(rows.values()))}
    elif "train" not in rows:
        raise DataError(f"{path} has lists of {', '.join(rows)}, but none of images for training")
    elif "test" not in rows and "val" in rows:
        rows = {"train": rows["train"], "test": rows["val"]}
    rows = {split: part for split, part in rows.items() if reserved or split != "val"}
    labels = {label for part in rows.values() for _, label in part}
    numbers = all(label.isascii() and label.isdigit() for label in labels)
    classes = sorted(labels, key=lambda label: (int(label), label) if numbers else (0, label))
    place = {label: number for number, label in enumerate(classes)}
    splits: dict[str, Split] = {}
    for split, part in rows.items():
        files = [image for image, _ in part]
        splits[split] = (files, list(map(str, files)), np.array([place[label] for _, label in part], np.int64))
    return tuple(classes), splits
