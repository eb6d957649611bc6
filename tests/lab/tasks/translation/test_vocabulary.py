"""The vocabulary: text comes back, nothing is unknown, and its merges are all that must be kept."""

import pytest

from regard.core import ConfigError, DataError
from regard.lab.tasks.translation.networks.translator import END, SPECIAL
from regard.lab.tasks.translation.vocabulary import SMALLEST, Vocabulary, train_vocabulary

TEXTS = (("the old house is the old house", "a new house"), ("das alte Haus ist das alte Haus", "ein neues Haus"))


def test_text_comes_back_with_any_characters() -> None:
    words = train_vocabulary(TEXTS, 300)
    lines = ["the old Haus", "日本語 🙂 naïve\tx  y", "ß\u2028\x00", "<pad> <end>", "trailing  "]
    assert words.decode(words.encode(lines)) == lines


def test_frequent_words_are_one_token() -> None:
    words = train_vocabulary(TEXTS, 300)
    assert [len(tokens) for tokens in words.encode(["house", "Haus", "xyz"])] == [2, 2, 5]
    assert words.pieces(words.encode(["old house"])[0]) == ["▁old", "▁house", "end"]


def test_no_text_gives_a_special_token_but_the_end() -> None:
    words = train_vocabulary(TEXTS, 300)
    for tokens in words.encode(["<pad> the <start>", "a"]):
        assert tokens[-1] == END
        assert min(tokens[:-1]) >= SPECIAL


def test_the_merges_determine_the_vocabulary() -> None:
    words = train_vocabulary(TEXTS, 300)
    again = Vocabulary.from_text(words.text)
    assert again.digest == words.digest
    assert len(again) == len(words) <= 300
    lines = ["the new house", "neu é"]
    assert again.encode(lines) == words.encode(lines)


def test_training_is_repeatable_and_depends_on_the_texts() -> None:
    first = train_vocabulary(TEXTS, 290).digest
    train_vocabulary.cache_clear()
    assert train_vocabulary(TEXTS, 290).digest == first
    assert train_vocabulary((TEXTS[0], TEXTS[0]), 290).digest != first


def test_the_smallest_vocabulary_is_of_bytes() -> None:
    words = train_vocabulary(TEXTS, SMALLEST)
    assert len(words) == SMALLEST
    assert len(words.encode(["é"])[0]) == 4  # a space, two bytes, the end
    with pytest.raises(ConfigError, match=f"vocabulary is at least {SMALLEST}"):
        train_vocabulary(TEXTS, SMALLEST - 1)


@pytest.mark.parametrize("text", ["a b c", "a zz"])
def test_damaged_merges_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="train again"):
        Vocabulary.from_text(text)
