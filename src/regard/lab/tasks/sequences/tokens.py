"""Sequences of symbols of different lengths, and a set of them that is ready for training."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Tokens:
    """Sequences one after the other: symbols (total,) uint8, and where each starts, starts (n + 1,) int64.

    The id of a symbol in a model is the symbol + 1; id 0 is padding.
    """

    symbols: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, sequences: Iterable[bytes | np.ndarray]) -> "Tokens":
        """From single sequences, bytes or uint8."""
        parts = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part for part in sequences]
        starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return cls(np.concatenate(parts) if parts else np.empty(0, np.uint8), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Numbers of symbols, (n,)."""
        return np.diff(self.starts)

    def take(self, rows: np.ndarray) -> "Tokens":
        """The sequences of these indices."""
        return Tokens.of([self.symbols[self.starts[row] : self.starts[row + 1]] for row in rows])

    def pad(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Ids (len(rows), length) int64 of these sequences, cut after `length` symbols and padded with 0."""
        ids = np.zeros((len(rows), length), np.int64)
        for target, row in zip(ids, rows, strict=True):
            part = self.symbols[self.starts[row] : min(self.starts[row + 1], self.starts[row] + length)]
            target[: len(part)] = part
            target[: len(part)] += 1
        return ids


@dataclass(frozen=True, eq=False)
class Split:
    """Sequences and their labels (n,) int64. With `pairs` sample i has the sequences 2 i and 2 i + 1."""

    tokens: Tokens
    labels: np.ndarray
    pairs: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> "Split":
        """The samples of these indices."""
        return Split(self.tokens.take(self._sequences(rows)), self.labels[rows], self.pairs)

    def _sequences(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([2 * rows, 2 * rows + 1], -1).reshape(-1) if self.pairs else rows

    def ids(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Padded ids (len(rows), length), or (len(rows), 2, length) of pairs."""
        ids = self.tokens.pad(self._sequences(rows), length)
        return ids.reshape(len(rows), 2, length) if self.pairs else ids

    def count_truncated(self, length: int) -> int:
        """Number of sequences with more than `length` symbols."""
        return int((self.tokens.lengths > length).sum())

    def counts(self, length: int, vocabulary: int) -> np.ndarray:
        """How often each symbol occurs among the first `length`, (n, vocabulary - 1) float32; a pair counts as one."""
        ids = (self.tokens.pad(np.array([row]), length)[0] for row in range(len(self.tokens)))
        counts = np.stack([np.bincount(row, minlength=vocabulary)[1:vocabulary] for row in ids]).astype(np.float32)
        return counts.reshape(len(self), -1)


@dataclass(frozen=True, eq=False)
class SequenceSet:
    """A set of sequences. alphabet: "bytes", "listops" or "pixels". symbols: number of different ones.

    padded: whether sequences have different lengths. held: training samples that are reserved for tuning, or None.
    checksum: 64 hexadecimal digits of a digest of the data. divided: the test is a part of the user's own training
    table.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    alphabet: str
    symbols: int
    padded: bool
    held: Split | None = None
    checksum: str = field(default="")
    divided: bool = False

    def __post_init__(self) -> None:
        if not self.checksum:
            object.__setattr__(self, "checksum", checksum(self.train, self.test))

    @property
    def pairs(self) -> bool:
        """Whether a sample has two sequences."""
        return self.train.pairs


def checksum(*splits: Split) -> str:
    """64 hexadecimal digits of a digest of sequences and labels."""
    total = hashlib.sha256()
    for split in splits:
        for array in (split.tokens.symbols, split.tokens.starts, split.labels):
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()
