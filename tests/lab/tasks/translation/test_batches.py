"""Batches: every pair once in an epoch, a limit of tokens, pure functions of their number, equal parts."""

import numpy as np
import pytest
import torch

from regard.core import DataError
from regard.lab.tasks.translation import batches
from regard.lab.tasks.translation.batches import Batches, Encoded, cuts, encode, evaluation_batches
from regard.lab.tasks.translation.networks.translator import END, PAD, START
from regard.lab.tasks.translation.texts import Sentences
from regard.lab.tasks.translation.vocabulary import train_vocabulary


def pairs(number: int = 203) -> Encoded:
    """Sentences of 2 to 20 tokens; the first token of both is the number of the pair."""
    rng = np.random.default_rng(0)
    return Encoded(*(
        [[10 + row, *rng.integers(5000, 6000, rng.integers(0, 19)).tolist(), END] for row in range(number)]
        for _ in range(2)
    ))  # fmt: skip


def rows(batch: tuple) -> list[int]:
    return batch[0][:, 0].tolist()


def test_every_pair_is_in_an_epoch_once() -> None:
    feed = Batches(pairs(), 16, seed=1)
    for epoch in range(2):
        batches = list(feed.between(epoch * feed.per_epoch, (epoch + 1) * feed.per_epoch))
        assert sorted(row for batch in batches for row in rows(batch)) == list(range(10, 213))


def test_batches_have_about_the_same_number_of_tokens() -> None:
    feed = Batches(pairs(2000), 64, seed=1)
    budget = 64 * feed.lengths.mean()
    sizes = [max(batch[0].numel(), batch[1].numel()) for batch in feed.between(0, feed.per_epoch)]
    assert max(sizes) <= budget
    assert np.mean(sizes) > 0.7 * budget
    assert feed.per_epoch == pytest.approx(2000 / 64, rel=0.3)


def test_targets_are_shifted_by_one_token() -> None:
    source, target, labels, tokens = next(Batches(pairs(), 16, seed=1).between(0, 1))
    assert (target[:, 0] == START).all()
    assert torch.equal(target[:, 1:][labels[:, 1:] != PAD], labels[:, :-1][labels[:, 1:] != PAD])
    ends = (labels != PAD).sum(1)
    assert (labels[torch.arange(len(labels)), ends - 1] == END).all()
    assert tokens == int(ends.sum())
    assert source.shape[0] == target.shape[0]


def test_a_batch_depends_on_seed_and_number_only() -> None:
    feed, again = Batches(pairs(), 16, seed=1), Batches(pairs(), 16, seed=1)
    stop = 2 * feed.per_epoch + 3
    all_rows = [rows(batch) for batch in feed.between(0, stop)]
    start = feed.per_epoch + 2
    assert [rows(batch) for batch in again.between(start, stop)] == all_rows[start:]
    assert [rows(batch) for batch in Batches(pairs(), 16, seed=2).between(0, stop)] != all_rows
    assert all_rows[: feed.per_epoch] != all_rows[feed.per_epoch : 2 * feed.per_epoch]


@pytest.mark.parametrize("count", [2, 3])
def test_parts_make_up_the_batch(count: int) -> None:
    whole = Batches(pairs(), 16, seed=1)
    parts = [list(Batches(pairs(), 16, 1, (index, count)).between(0, whole.per_epoch)) for index in range(count)]
    for number, batch in enumerate(whole.between(0, whole.per_epoch)):
        own = [part[number] for part in parts]
        real = [row for part in own for row, labels in zip(rows(part), part[2], strict=True) if (labels != PAD).any()]
        assert sorted(real) == sorted(rows(batch))
        assert all(part[3] == batch[3] / count for part in own)


def test_a_part_without_sentences_has_no_labels() -> None:
    batches = list(Batches(pairs(5), 2, 0, (2, 3)).between(0, 3))
    assert any((batch[2] == PAD).all() for batch in batches)


@pytest.mark.parametrize("tokens", [3.0, 57.5, 400.0, 20_000.0])
def test_cuts_are_those_of_the_whole_remainder(tokens: float) -> None:
    """Each batch has as many of the next sentences as fit, looked for among all of them."""
    lengths = np.sort(np.random.default_rng(1).integers(3, 40, 700))
    places = [0]
    while places[-1] < len(lengths):
        rest = lengths[places[-1] :]
        rows = max(int((np.arange(1, len(rest) + 1) * rest <= tokens).sum()), 1)
        rows -= rows % 8 if rows >= 8 and rows < len(rest) else 0
        places.append(places[-1] + rows)
    assert cuts(lengths, tokens) == places


def test_long_sentences_are_named() -> None:
    sentences = Sentences(("a b", "c d e f g"), ("A", "B"), ("x.en", "x.de"))
    words = train_vocabulary((("a b",), ("c",)), 259)
    with pytest.raises(DataError, match=r"x.en, line 2: the sentence has 11 tokens, more than longest=8; .*longest=11"):
        encode(sentences, words, 8)
    for part in (sentences.take([1]), sentences.take([0, 1]).take([1]).first(1)):  # as without a validation part
        with pytest.raises(DataError, match=r"x.en, line 2: "):
            encode(part, words, 8)


def test_sentences_are_encoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tuple(f"sentence {number} of some" for number in range(25))
    sentences, words = Sentences(lines, lines[::-1], ("one", "two")), train_vocabulary((lines,), 270)
    expected = words.encode(lines)
    monkeypatch.setattr(batches, "TOGETHER", 10)
    monkeypatch.setattr(words, "encode", lambda part, whole=words.encode: whole(part) if len(part) <= 10 else None)
    found = encode(sentences, words, 60)
    assert [list(tokens) for tokens in found.source] == expected
    assert [list(tokens) for tokens in found.target] == expected[::-1]


def test_evaluation_keeps_every_sentence() -> None:
    seen = np.concatenate([found for found, *_ in evaluation_batches(pairs(), 32)])
    assert sorted(seen) == list(range(203))
