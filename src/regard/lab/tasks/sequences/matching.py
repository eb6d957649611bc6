"""Pairs of texts that say the same of x, or not: a small stand-in for the retrieval task of the Long Range Arena.

    b4f1x7c0a9..., k2x7r3d5m1...  ->  same

A text is a row of 1 to 8 facts, each a letter and a digit, in random order; one is about x. To answer, a network has
to bind the digit to the letter before it in each text, and to compare two texts that meet after their encodings only.
"""

import numpy as np

from regard.images.streams import generator

from .cache import generated_splits
from .text import BYTES
from .tokens import SequenceSet, Split, Tokens

NAME = "matching-mini"
FACTS, DIGITS = 8, 5
"""Of a text, and of the values of a fact."""
SIZES = (20_000, 1_000, 1_000)
"""Pairs for training, tuning and the test."""
PART = 1000
"""Pairs in a stored part."""
LENGTH = 2 * FACTS
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwyz", np.uint8)


def samples(seed: str, count: int) -> Split:
    """`count` pairs, half of which agree on x; a pure function of the arguments."""
    rng = generator("matching", seed)
    labels = rng.permutation(np.arange(count) % 2).astype(np.int64)
    texts = []
    for same in labels:
        first = int(rng.integers(DIGITS))
        second = first if same else (first + int(rng.integers(1, DIGITS))) % DIGITS
        texts += [_text(rng, digit, int(rng.integers(1, FACTS + 1))) for digit in (first, second)]
    return Split(Tokens.of(texts), labels, True)


def _text(rng: np.random.Generator, digit: int, facts: int) -> bytes:
    text = np.stack([rng.permutation(LETTERS)[:facts], rng.integers(0, DIGITS, facts) + ord("0")], 1)
    text[rng.integers(facts)] = ord("x"), digit + ord("0")
    return text.astype(np.uint8).tobytes()


def load() -> SequenceSet:
    """The pairs, generated once and then read from the cache."""
    train, held, test = generated_splits(NAME, SIZES, PART, lambda seed: samples(seed, PART))
    return SequenceSet(NAME, ("different", "same"), train, test, "bytes", BYTES, True, held)
