"""Batches of sentences of similar lengths, with about the same number of tokens in each."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from regard.core import DataError
from regard.images.streams import generator

from .networks.translator import PAD, START
from .texts import Sentences
from .vocabulary import Vocabulary

MULTIPLE = 8
"""Numbers of sentences in a batch are multiples of this where possible, so that devices get equal parts."""

TOGETHER = 10_000
"""Sentences that are encoded at once; the tokenizer needs about 30 times the memory of their tokens."""

Batch = tuple[Int[Tensor, "B M"], Int[Tensor, "B N"], Int[Tensor, "B N"], float]
"""Source, target from `START`, the tokens that follow it up to `END`, and the number by which the loss is divided."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """Sentences as tokens, each with `END` at the end."""

    source: Sequence[Sequence[int]]
    target: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longer of the two sentences of a pair, (n,)."""
        pairs = zip(self.source, self.target, strict=True)
        return np.array([max(len(source), len(target)) for source, target in pairs])


@lru_cache(maxsize=8)
def encode(sentences: Sentences, vocabulary: Vocabulary, longest: int) -> Encoded:
    """Raises: DataError for a sentence of more than `longest` tokens, with its file and line."""
    sides: list[list[array]] = []
    for lines, file in zip((sentences.source, sentences.target), sentences.files, strict=True):
        numbers = sentences.lines or range(1, len(lines) + 1)
        sides.append([])
        for first in range(0, len(lines), TOGETHER):
            part = slice(first, first + TOGETHER)
            for number, tokens in zip(numbers[part], vocabulary.encode(lines[part]), strict=True):
                check_length(tokens, longest, f"{file}, line {number}")
                sides[-1].append(array("i", tokens))
    return Encoded(*sides)


def check_length(tokens: Sequence[int], longest: int, where: str) -> None:
    """Raises: DataError for a sentence of more than `longest` tokens. where: its file and line."""
    if len(tokens) > longest:
        raise DataError(
            f"{where}: the sentence has {len(tokens)} tokens, more than longest={longest}; shorten it, or allow it "
            f"with --set task.longest={len(tokens)}"
        )


class Batches:
    """The training batches of a run: number i is a pure function of (seed, i).

    sentences: in a batch on average: a batch has at most sentences * mean length tokens, with its padding, on the side
    with the longer sentences. Pairs are sorted by length, in a new random order among equal lengths in each epoch, cut
    into batches at the same places in each epoch, and the batches are shuffled.
    part: (index, count) of equal parts of each batch; an empty part has one sentence without labels.
    """

    def __init__(self, pairs: Encoded, sentences: int, seed: int, part: tuple[int, int] = (0, 1)) -> None:
        self.pairs, self.seed, self.part = pairs, seed, part
        self.lengths = pairs.lengths
        self.cuts = cuts(np.sort(self.lengths), sentences * float(self.lengths.mean()))

    @property
    def per_epoch(self) -> int:
        return len(self.cuts) - 1

    def between(self, start: int, stop: int, workers: int = 0) -> Iterator[Batch]:
        """Batches start .. stop - 1. Workers are not needed."""
        for epoch in range(start // self.per_epoch, -(-stop // self.per_epoch)):
            rows = self._epoch(epoch)
            first = epoch * self.per_epoch
            for number in range(max(start, first), min(stop, first + self.per_epoch)):
                yield self._batch(rows[number - first])

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        rng = generator("translation", self.seed, epoch)
        order = rng.permutation(len(self.pairs))
        order = order[np.argsort(self.lengths[order], kind="stable")]
        batches = [order[a:b] for a, b in zip(self.cuts[:-1], self.cuts[1:], strict=True)]
        return [batches[index] for index in rng.permutation(len(batches))]

    def _batch(self, rows: np.ndarray) -> Batch:
        index, count = self.part
        tokens = sum(len(self.pairs.target[row]) for row in rows) / count
        own = rows[index::count]
        source, target, labels = tensors(self.pairs, own if len(own) else rows[:1])
        return source, target, labels if len(own) else torch.full_like(labels, PAD), tokens


def cuts(lengths: np.ndarray, tokens: float) -> list[int]:
    """Where sorted lengths are cut into batches of at most so many tokens; the first is 0, the last the number."""
    places = [0]
    while places[-1] < len(lengths):
        first = places[-1]
        most = lengths[first : first + int(tokens // lengths[first]) + 1]
        rows = max(int(np.searchsorted(np.arange(1, len(most) + 1) * most, tokens, side="right")), 1)
        if rows >= MULTIPLE and first + rows < len(lengths):
            rows -= rows % MULTIPLE
        places.append(first + rows)
    return places


def evaluation_batches(pairs: Encoded, sentences: int = 96) -> Iterator[tuple[np.ndarray, Tensor, Tensor, Tensor]]:
    """Batches of similar source lengths: the rows, source, target and labels."""
    order = np.argsort([len(tokens) for tokens in pairs.source], kind="stable")
    for first in range(0, len(order), sentences):
        rows = order[first : first + sentences]
        yield rows, *tensors(pairs, rows)


def tensors(pairs: Encoded, rows: np.ndarray) -> tuple[Int[Tensor, "B M"], Int[Tensor, "B N"], Int[Tensor, "B N"]]:
    """Source, target from `START`, and labels up to `END`, of some pairs."""
    labels = [pairs.target[row] for row in rows]
    return (
        pad([pairs.source[row] for row in rows]),
        pad([[START, *tokens[:-1]] for tokens in labels]),
        pad(labels),
    )


def pad(sentences: Sequence[Sequence[int]]) -> Int[Tensor, "B N"]:
    """Sentences of tokens, filled up with `PAD`."""
    longest = max(map(len, sentences))
    return torch.tensor([[*tokens, *[PAD] * (longest - len(tokens))] for tokens in sentences])
