"""Sequences of samples whose index is a few arrays.

Worker processes share the arrays with the process that started them. They would copy a list of Python objects little by
little, because each look at an object counts a reference: then the memory of a worker would grow with the data set.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Rows(Sequence[Any]):
    """A sequence that makes its items when they are asked for; a slice is another one."""

    @abstractmethod
    def take(self, rows: np.ndarray) -> "Rows":
        """The items of these indices, none of which is made."""

    @abstractmethod
    def item(self, row: int) -> Any:
        """One item; row: 0 .. len - 1."""

    def __getitem__(self, row: Any) -> Any:
        rows = range(len(self))[row]
        return self.item(rows) if isinstance(rows, int) else self.take(np.array(rows, np.int64))


class Paths(Rows):
    """Paths of files; the index is their bytes and 8 bytes for each."""

    def __init__(self, text: np.ndarray, starts: np.ndarray) -> None:
        self.text, self.starts = text, starts

    @classmethod
    def of(cls, paths: Iterable[Path]) -> "Paths":
        """The paths that another sequence has."""
        return cls._of([str(path).encode() for path in paths])

    @classmethod
    def _of(cls, names: list[bytes]) -> "Paths":
        starts = np.cumsum([0, *map(len, names)])
        return cls(np.frombuffer(b"".join(names), np.uint8), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def _bytes(self, row: int) -> bytes:
        return self.text[self.starts[row] : self.starts[row + 1]].tobytes()

    def item(self, row: int) -> Path:
        return Path(self._bytes(row).decode())

    def take(self, rows: np.ndarray) -> "Paths":
        return self._of([self._bytes(int(row)) for row in rows])


class Subset(Sequence[Any]):
    """Some items of a sequence, by their rows there; those that are made when they are asked for stay unmade."""

    def __init__(self, items: Sequence[Any], rows: Sequence[int] | np.ndarray) -> None:
        self.items, self.rows = items, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return self.items[int(self.rows[index])]


def subset(items: Sequence[Any], rows: slice | np.ndarray) -> Sequence[Any]:
    """The items of a slice or of indices, of a list or of `Rows`."""
    if isinstance(items, Rows):
        return items.take(np.arange(len(items))[rows])
    if isinstance(rows, slice):
        return items[rows]
    return [items[row] for row in rows]
