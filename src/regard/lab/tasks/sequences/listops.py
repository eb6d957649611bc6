"""ListOps (Nangia and Bowman 2018; Long Range Arena, Tay et al. 2021): nested lists of digits; the value is the label.

    [MAX 2 9 [MIN 4 7 ] 0 ]  ->  9

MIN, MAX, MED (of an even number of values the lower whole number of the mean of the middle two) and SM (sum modulo 10).
A node above the largest depth is an operator with probability 1/4, else a digit; the root is an operator. The brackets
of the published files carry no information and are left out. Generated here: the samples are not the published ones.
"""

import random
from dataclasses import dataclass

import numpy as np

from regard.core import DataError
from regard.images.streams import number

from .cache import generated_splits
from .tokens import SequenceSet, Split, Tokens

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*map(str, range(10)), *OPERATORS, "]")
"""The symbols 0 .. 14; a digit is its own symbol."""
CLOSE = len(SYMBOLS) - 1
OPERATOR = 0.25
"""Probability that a node is an operator."""
PART = 1000
"""Samples in a stored part."""


@dataclass(frozen=True, kw_only=True)
class ListOps:
    """What is generated. depth: largest, of nested operators. arguments: largest number, at least 2. shortest,
    longest: numbers of symbols that are kept. sizes: numbers of samples for training, tuning and the test."""

    name: str
    depth: int
    arguments: int
    shortest: int
    longest: int
    sizes: tuple[int, int, int]


LISTOPS = {
    spec.name: spec
    for spec in (
        ListOps(name="listops", depth=9, arguments=10, shortest=501, longest=1999, sizes=(96_000, 2_000, 2_000)),
        ListOps(name="listops-mini", depth=5, arguments=5, shortest=16, longest=96, sizes=(20_000, 1_000, 1_000)),
    )
}


def value(operator: int, values: list[int]) -> int:
    """The value of an operator's symbol on digits."""
    name = SYMBOLS[operator]
    if name == "[MIN":
        return min(values)
    if name == "[MAX":
        return max(values)
    if name == "[SM":
        return sum(values) % 10
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def tree(rng: random.Random, spec: ListOps) -> tuple[bytes, int] | None:
    """The symbols of a random tree and its value; None if its length is not kept."""
    symbols = bytearray()
    open_lists: list[tuple[int, int, list[int]]] = []  # operator, number of its arguments, their values so far
    while len(symbols) <= spec.longest:
        depth = len(open_lists) + 1
        if depth == 1 or (depth <= spec.depth and rng.random() < OPERATOR):
            symbols.append(10 + int(len(OPERATORS) * rng.random()))
            open_lists.append((symbols[-1], 2 + int((spec.arguments - 1) * rng.random()), []))
            continue
        result = int(10 * rng.random())
        symbols.append(result)
        while open_lists:  # a value may end its list, whose value may end the list around it
            operator, arguments, values = open_lists[-1]
            values.append(result)
            if len(values) < arguments:
                break
            open_lists.pop()
            symbols.append(CLOSE)
            result = value(operator, values)
        if not open_lists:
            return (bytes(symbols), result) if spec.shortest <= len(symbols) <= spec.longest else None
    return None


def samples(spec: ListOps, seed: str, count: int) -> Split:
    """`count` trees that differ from each other; a pure function of the arguments."""
    rng, kept = random.Random(number("listops", spec.name, seed)), dict[bytes, int]()
    while len(kept) < count:
        found = tree(rng, spec)
        if found is not None:
            kept.setdefault(*found)
    return Split(Tokens.of(kept), np.array(list(kept.values()), np.int64))


def load(name: str) -> SequenceSet:
    """A set of `LISTOPS`, generated once and then read from the cache. No sample is in two splits."""
    spec = LISTOPS[name]
    splits = generated_splits(name, spec.sizes, PART, lambda seed: samples(spec, seed, PART))
    seen: set[bytes] = set()
    for index in (2, 1, 0):  # a tree that was drawn twice stays in the test split
        splits[index] = splits[index].take(_unseen(splits[index], seen)[: spec.sizes[index]])
    train, held, test = splits
    return SequenceSet(name, SYMBOLS[:10], train, test, "listops", len(SYMBOLS), True, held)


def _unseen(split: Split, seen: set[bytes]) -> np.ndarray:
    """The rows of samples that are not in `seen`, each once; they are added to it."""
    starts, symbols = split.tokens.starts, split.tokens.symbols
    rows = []
    for row in range(len(split)):
        text = symbols[starts[row] : starts[row + 1]].tobytes()
        if text not in seen:
            seen.add(text)
            rows.append(row)
    return np.array(rows)


def encode(text: str, name: str) -> np.ndarray:
    """The symbols (n,) uint8 of a text such as "[MAX 2 9 ]". name: of the text, for errors. Raises: DataError."""
    symbols = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    words = text.replace("(", " ").replace(")", " ").split()
    for place, word in enumerate(words):
        if word not in symbols:
            raise DataError(
                f"{name}: word {place + 1} is {word!r}; ListOps has {' '.join(SYMBOLS)}, separated by spaces"
            )
    if not words:
        raise DataError(f"{name} is empty; expected a list such as [MAX 2 9 [MIN 4 7 ] 0 ]")
    return np.array([symbols[word] for word in words], np.uint8)
