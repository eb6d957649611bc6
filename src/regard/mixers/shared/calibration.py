"""Times of the executions on this device, as `regard bench --calibrate` measured them: a JSON file in the cache folder.

{"format": 1, "device": name, "versions": {...}, "rows": [{"mechanism", "dtype", "trains", "sizes": [tokens, m, top],
"seconds": {execution: seconds}}]}. A file for another device or other versions, or one that cannot be read, counts as
none, with one warning.
"""

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regard.core.cache import cache_folder

from .native import instruction_set, processor_name

FORMAT = 1
FAR = math.log(2.5)
"""A size that was measured counts for one that differs by less than this factor, in each number."""
Sizes = tuple[int, int, int]
"""Tokens, m and top, as in `Situation`."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of each execution of one mechanism at one size."""

    mechanism: str
    dtype: str
    trains: bool
    sizes: Sizes
    seconds: dict[str, float]


def device_name(device: torch.device) -> str:
    """The name under which times of a device are kept."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name("model name")


def versions() -> dict[str, str]:
    """What times depend on beside the device."""
    return {"regard": version("regard"), "torch": torch.__version__, "kernels": instruction_set()}


def calibration_file(device: torch.device) -> Path:
    """Where the times of a device are kept; it may not exist."""
    name = sha256(device_name(device).encode()).hexdigest()[:16]
    return cache_folder() / "executions" / f"{name}.json"


def write_calibration(device: torch.device, rows: Sequence[Measured]) -> Path:
    """Keep these times in place of earlier ones; `fastest` uses them from now on. Raises: OSError."""
    path = calibration_file(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "device": device_name(device), "versions": versions(), "rows": [vars(r) for r in rows]}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
    calibration.cache_clear()
    fastest.cache_clear()
    return path


@cache
def calibration(device: torch.device) -> tuple[Measured, ...]:
    """The times of a device; none, with a warning, if the file is damaged or was written elsewhere."""
    try:
        path = calibration_file(device)
    except RuntimeError:  # a user without a home folder
        return ()
    try:
        content = json.loads(path.read_text())
        if (content["format"], content["device"]) != (FORMAT, device_name(device)):
            raise ValueError("another device or format")
        if content["versions"] != versions():
            raise ValueError("other versions")
        return tuple(_row(row) for row in content["rows"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(
            f"{path} does not count ({type(error).__name__}: {error}); `regard bench --calibrate` writes it anew",
            stacklevel=2,
        )
        return ()


@cache
def fastest(
    mechanism: str, device: torch.device, dtype: torch.dtype, trains: bool, sizes: Sizes, possible: tuple[str, ...]
) -> str | None:
    """The fastest of the possible executions at the measured size that is nearest; None if there is none near."""
    near = [
        (max(map(_distance, row.sizes, sizes)), row.seconds)
        for row in calibration(device)
        if (row.mechanism, row.dtype, row.trains) == (mechanism, str(dtype).removeprefix("torch."), trains)
    ]
    distance, seconds = min(near, key=lambda row: row[0], default=(math.inf, {}))
    known = {name: seconds[name] for name in possible if name in seconds}
    return min(known, key=lambda name: known[name]) if distance <= FAR and known else None


def _distance(one: int, other: int) -> float:
    return abs(math.log(max(one, 1) / max(other, 1)))


def _row(row: Any) -> Measured:
    """Raises: ValueError, KeyError, TypeError, AttributeError for a row that this version cannot have written."""
    tokens, m, top = (_number(int, x) for x in row["sizes"])
    seconds = {str(name): _number(float, value) for name, value in row["seconds"].items()}
    if not isinstance(row["trains"], bool):
        raise ValueError(f"trains is true or false, not {row['trains']!r}")
    return Measured(
        mechanism=str(row["mechanism"]), dtype=str(row["dtype"]), trains=row["trains"], sizes=(tokens, m, top),
        seconds=seconds,
    )  # fmt: skip


def _number(kind: type, value: Any) -> Any:
    if not (type(value) is kind and isinstance(value, int | float) and 0 <= value < math.inf):
        raise ValueError(f"not a number of this kind: {value!r}")
    return value
