"""Training batches of sequences: pure functions of (seed, number of the batch)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.images.order import Part, batch_rows, batches_in_epoch, part_of

from .tokens import Split

EVALUATION_SYMBOLS = 2**15
"""Symbols of a batch in evaluation, so that mechanisms which store all pairs of tokens need at most about 1 GiB."""


@dataclass
class TokenBatches:
    """Training batches. length: symbols of a padded sequence. batch: samples in each. part: of each, this one."""

    split: Split
    length: int
    batch: int
    seed: int
    part: Part = (0, 1)

    @property
    def per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return batches_in_epoch(len(self.split), self.batch)

    def between(self, start: int, stop: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and labels of batches start .. stop-1. The data are in memory, so that workers are not needed."""
        for number in range(start, stop):
            rows = batch_rows(len(self.split), self.batch, self.seed, number)
            yield tensors(self.split, rows[part_of(len(rows), self.part)], self.length)


def tensors(split: Split, rows: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Ids (n, length), or (n, 2, length) of pairs, and labels (n,), int64."""
    return torch.from_numpy(split.ids(rows, length)), torch.from_numpy(split.labels[rows])


def evaluation_batches(split: Split, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples in order."""
    batch = max(1, min(256, EVALUATION_SYMBOLS // (length * (1 + split.pairs))))
    for start in range(0, len(split), batch):
        yield tensors(split, np.arange(start, min(start + batch, len(split))), length)
