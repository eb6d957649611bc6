"""Training batches of sequences: pure functions of (seed, number of the batch)."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from regard.tasks.data.streams import generator

from .tokens import Split

EVALUATION_SYMBOLS = 2**15
"""Symbols of a batch in evaluation, so that mechanisms which store all pairs of tokens need at most about 1 GiB."""


@dataclass
class TokenBatches:
    """batch: samples in a batch; length: symbols of a padded sequence."""

    split: Split
    length: int
    batch: int
    seed: int
    _orders: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def per_epoch(self) -> int:
        """Number of batches in an epoch; a last, smaller batch is left out."""
        return max(len(self.split) // self.batch, 1)

    def rows(self, number: int) -> np.ndarray:
        """Indices of the samples of a batch."""
        epoch, index = divmod(number, self.per_epoch)
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = generator("order", self.seed, epoch).permutation(len(self.split))
        return self._orders[epoch][index * self.batch : (index + 1) * self.batch]

    def between(self, start: int, stop: int, part: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and labels of batches start .. stop-1. part: (index, count) of equal parts of each batch."""
        index, count = part
        for number in range(start, stop):
            rows = self.rows(number)
            yield tensors(self.split, rows[index * len(rows) // count : (index + 1) * len(rows) // count], self.length)


def tensors(split: Split, rows: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Ids (n, length), or (n, 2, length) of pairs, and labels (n,), int64."""
    return torch.from_numpy(split.ids(rows, length)), torch.from_numpy(split.labels[rows])


def evaluation_batches(split: Split, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples in order."""
    batch = max(1, min(256, EVALUATION_SYMBOLS // (length * (1 + split.pairs))))
    for start in range(0, len(split), batch):
        yield tensors(split, np.arange(start, min(start + batch, len(split))), length)
