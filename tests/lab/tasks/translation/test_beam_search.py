"""Beam search against an exhaustive search over all sequences of a tiny vocabulary."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.core import ConfigError
from regard.lab.tasks.translation.networks.beam_search import beam_search, length_penalty

END, START, WORDS = 0, 4, 4


class Toy:
    """Scores that depend on all tokens before, through a random table; one row for each sequence."""

    def __init__(self, sentences: int, beam: int, seed: int, end: float = 0.0) -> None:
        self.prefixes: list[tuple[int, tuple[int, ...]]] = [(s, ()) for s in range(sentences) for _ in range(beam)]
        self.seed, self.end, self.steps = seed, end, 0

    def scores(self, sentence: int, prefix: tuple[int, ...]) -> Tensor:
        number = hash((self.seed, sentence, prefix)) % 2**31
        scores = 2 * torch.randn(WORDS, generator=torch.Generator().manual_seed(number))
        scores[END] += self.end
        return scores

    def step(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        if int(tokens[0]) != START:
            self.prefixes = [
                (s, (*prefix, token)) for (s, prefix), token in zip(self.prefixes, tokens.tolist(), strict=True)
            ]
        return torch.stack([self.scores(*item) for item in self.prefixes])

    def select(self, rows: Tensor, same_memory: bool) -> None:
        chosen = [self.prefixes[row] for row in rows.tolist()]
        if same_memory:
            assert [s for s, _ in chosen] == [s for s, _ in self.prefixes]
        self.prefixes = chosen


def log_p(toy: Toy, sentence: int, text: tuple[int, ...]) -> float:
    """The log-probability of a text and its end."""
    steps = enumerate((*text, END))
    return sum(float(toy.scores(sentence, text[:place]).log_softmax(-1)[token]) for place, token in steps)


def exhaustive(toy: Toy, sentence: int, longest: int, penalty: float) -> tuple[tuple[int, ...], float]:
    texts = [text for length in range(longest) for text in itertools.product(range(1, WORDS), repeat=length)]
    values = [
        log_p(toy, sentence, text) / float(length_penalty(torch.tensor(len(text) + 1), penalty)) for text in texts
    ]
    best = max(range(len(texts)), key=values.__getitem__)
    return texts[best], values[best]


def search(toy: Toy, longest: list[int], beam: int, penalty: float) -> tuple[list[tuple[int, ...]], list[float]]:
    tokens, scores = beam_search(toy, torch.tensor(longest), start=START, end=END, beam=beam, penalty=penalty)
    texts = [tuple(itertools.takewhile(lambda token: token != END, row)) for row in tokens.tolist()]
    return texts, scores.tolist()


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_of_all_sequences(seed: int, penalty: float) -> None:
    """Also where sentences have other longest lengths, and leave the batch at other times."""
    longest, beam = [5, 3, 4], 3**4
    texts, scores = search(Toy(3, beam, seed), longest, beam, penalty)
    for sentence, length in enumerate(longest):
        text, value = exhaustive(Toy(3, 1, seed), sentence, length, penalty)
        assert texts[sentence] == text
        assert scores[sentence] == pytest.approx(value, abs=1e-5)


def test_the_search_stops_when_nothing_can_become_better() -> None:
    """Ends are likely: the first step decides, long before the longest length."""
    toy = Toy(1, 81, 0, end=20.0)
    texts, _ = search(toy, [50], 81, 0.6)
    assert texts == [()]
    assert toy.steps == 1


def test_a_later_longer_sequence_may_win_through_the_penalty() -> None:
    """A search that stopped at the first end would return another text."""
    found = 0
    for seed in range(20):
        toy = Toy(1, 81, seed, end=1.0)
        first = search(Toy(1, 81, seed, end=1.0), [5], 81, 0.0)[0][0]
        best = search(toy, [5], 81, 3.0)[0][0]
        assert best == exhaustive(Toy(1, 1, seed, end=1.0), 0, 5, 3.0)[0]
        found += len(best) > len(first)
    assert found > 3


def test_scores_are_those_of_the_returned_sequence_for_any_beam() -> None:
    for beam in (1, 2, 4):
        texts, scores = search(Toy(5, beam, 7), [6] * 5, beam, 0.6)
        for sentence, (text, score) in enumerate(zip(texts, scores, strict=True)):
            value = log_p(Toy(5, 1, 7), sentence, text)
            assert score == pytest.approx(value / float(length_penalty(torch.tensor(len(text) + 1), 0.6)), abs=1e-5)


def test_forbidden_tokens_are_never_chosen() -> None:
    tokens, _ = beam_search(Toy(6, 2, 3), torch.full((6,), 7), start=START, end=END, forbidden=(2,), beam=2)
    assert 2 not in tokens
    assert 1 in tokens
    assert 3 in tokens


@pytest.mark.parametrize("options", [{"beam": 0}, {"penalty": -1.0}], ids=str)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="beam is at least 1 and penalty at least 0"):
        beam_search(Toy(1, 1, 0), torch.tensor([3]), start=START, end=END, **options)
