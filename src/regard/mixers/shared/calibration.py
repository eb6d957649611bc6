"""Times of the executions on this device, as `regard bench --calibrate` measured them: a record in the cache folder.

{"device": name, "versions": {...}, "rows": [{"mechanism", "dtype", "trains", "sizes": [tokens, m, top], "seconds":
{execution: seconds}}]}. A file for another device or other versions, or one that is damaged or was changed by hand,
counts as none, with one warning.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch

from regard.core import StoreError
from regard.files.cache import cache_folder
from regard.files.records import VERSION, read_record_if_present, write_record

from .native import instruction_set, processor_name

FIELDS = ("device", "versions", "rows")
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
    """Keep these times in place of earlier ones; `fastest` uses them from now on. Raises: StoreError."""
    path = calibration_file(device)
    write_record(path, {"device": device_name(device), "versions": versions(), "rows": [vars(row) for row in rows]})
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
        content = read_record_if_present(path, FIELDS)
        if content is None:
            return ()
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise StoreError("it has no checksum")
        if content["device"] != device_name(device) or content["versions"] != versions():
            raise StoreError("it is of another device or other versions")
        return tuple(Measured(**row | {"sizes": tuple(row["sizes"])}) for row in content["rows"])
    except (StoreError, LookupError, TypeError) as error:
        warnings.warn(f"{path} does not count ({error}); `regard bench --calibrate` writes it anew", stacklevel=2)
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
