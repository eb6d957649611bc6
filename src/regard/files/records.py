"""Records: files with a version and a checksum, which is verified when they are read. Needs no torch.

The checksum is the SHA-256 of all bytes before it: in a JSON file the last entry is "checksum"; a binary file begins
with a line that has the checksum of what follows.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from regard.core import StoreError

from .atomic import json_text, parse_json, read_bytes, read_if_present, write_atomically

VERSION = 2
"""Format version of every file in a store."""
_END = re.compile(rb',\n "checksum": "([0-9a-f]{64})"\n\}\n')
_END_LENGTH = len(b',\n "checksum": "') + 64 + len(b'"\n}\n')
_MAGIC = b"regard checkpoint "
_BEFORE = _MAGIC + b"2, sha256 of what follows: "
_HEADER = re.compile(_BEFORE + rb"([0-9a-f]{64})\n")
_HEADER_LENGTH = len(_BEFORE) + 65


def record_text(value: Mapping[str, Any]) -> str:
    """The JSON text of a record: the value with "version" and, as its last entry, "checksum"."""
    rest = {name: item for name, item in value.items() if name not in ("version", "checksum")}
    body = json_text({"version": VERSION, **rest}).removesuffix("\n}")
    return f'{body},\n "checksum": "{_digest(_encode(body))}"\n}}\n'


def write_record(path: Path | str, value: Mapping[str, Any]) -> None:
    """Write a record atomically. Raises: StoreError."""
    write_atomically(path, record_text(value))


def read_record(path: Path | str, fields: Collection[str] = ()) -> dict[str, Any]:
    """The value of a record, without its checksum.

    fields: all that a record of this version may have; () = any.
    Raises: StoreError if it is missing, damaged, changed by hand, of another version, or has an unknown field.
    """
    return parse_record(path, read_bytes(path), fields)


def read_record_if_present(path: Path | str, fields: Collection[str] = ()) -> dict[str, Any] | None:
    """As `read_record`, None if there is no file."""
    data = read_if_present(path)
    return None if data is None else parse_record(path, data, fields)


def is_record(path: Path | str, data: bytes) -> bool:
    """Whether JSON data are a record, intact or damaged, and no other file. Raises: StoreError if they are no JSON."""
    value = parse_json(path, data)
    return isinstance(value, dict) and bool(value.keys() & {"version", "checksum"})


def parse_record(path: Path | str, data: bytes, fields: Collection[str] = ()) -> dict[str, Any]:
    """The value of a record's text. path: named in errors. Raises: StoreError, as `read_record`."""
    end = _END.fullmatch(data[-_END_LENGTH:])
    if end is not None and _digest(data[:-_END_LENGTH]) != end[1].decode():
        raise StoreError(f"{path} does not fit its checksum; {_REMEDY}")
    value = parse_json(path, data)
    if not isinstance(value, dict) or "version" not in value:
        raise StoreError(f"{path} is no record of Regard; {_REMEDY}")
    if value["version"] != VERSION:
        raise StoreError(
            f"{path} has version {value['version']!r}, this Regard reads {VERSION}; use the Regard that wrote it, or "
            "another folder with --results"
        )
    if end is None:
        raise StoreError(f"{path} does not end with its checksum; {_REMEDY}")
    del value["checksum"]
    if fields:
        check_known_fields(path, value, fields)
    return value


def check_known_fields(path: Path | str, value: Mapping[str, Any], fields: Collection[str]) -> None:
    """Raises: StoreError if a value has a field that is not among `fields`. path: named in errors."""
    if unknown := sorted(set(value) - {*fields, "version"}):
        raise StoreError(f"{path} has {', '.join(map(repr, unknown))}, which this Regard does not know; update Regard")


_REMEDY = "it is damaged, or was changed after it was written: restore it from a copy, or delete it and run again"


def seal(data: bytes) -> bytes:
    """Binary data with a first line that has their checksum."""
    return _BEFORE + _digest(data).encode() + b"\n" + data


def is_sealed(data: bytes) -> bool:
    """Whether binary data begin as `seal` makes them begin."""
    return data.startswith(_MAGIC)


def unseal(path: Path | str, data: bytes) -> bytes:
    """The data of `seal`. path: named in errors. Raises: StoreError if a byte has changed."""
    header = _HEADER.fullmatch(data[:_HEADER_LENGTH])
    if header is None:
        raise StoreError(f"{path} is no checkpoint of this version of Regard, or damaged")
    content = data[_HEADER_LENGTH:]
    if _digest(content) != header[1].decode():
        raise StoreError(f"{path} does not fit its checksum: it is damaged")
    return content


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"cannot write {error.object[error.start :][:20]!r}: it is not Unicode text") from error
