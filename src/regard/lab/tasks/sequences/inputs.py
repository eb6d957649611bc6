"""Single inputs for predictions: lines of text as symbols."""

import numpy as np

from regard.core import DataError

from . import listops
from .data import Facts


def encode(line: str, facts: Facts, where: str) -> list[np.ndarray]:
    """The symbols (n,) uint8 of a line, two arrays for a pair. where: its place, for errors. Raises: DataError."""
    parts = line.split("\t") if facts.pairs else [line]
    if len(parts) != 1 + facts.pairs:
        raise DataError(f"{where} has {len(parts)} texts; expected two with a tab between them")
    if any(not part.strip() for part in parts):
        raise DataError(f"{where} has an empty text")
    if facts.alphabet == "listops":
        return [listops.encode(part, where) for part in parts]
    return [np.frombuffer(part.encode(), np.uint8) for part in parts]
