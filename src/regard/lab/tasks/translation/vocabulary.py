"""Vocabulary: byte-pair encoding shared by two languages, trained by `tokenizers` and stored as its list of merges."""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from regard.core import ConfigError, DataError, require

from .networks.translator import END, PAD, SPECIAL, START

_SPECIAL = {PAD: "<pad>", START: "<start>", END: "<end>"}
SMALLEST = SPECIAL + 256
"""The size of a vocabulary of single bytes."""


class Vocabulary:
    """Text to tokens and back. Pieces are of bytes, so that no character is unknown.

    merges: pairs of pieces that are joined, in this order; they determine everything else.
    Raises: DataError if the merges do not fit together.
    """

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        self.merges = tuple(merges)
        self._tokenizer = _tokenizer(self.merges)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the merges."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def text(self) -> str:
        """The merges as text, one a line, which `from_text` reads; for the record of a run."""
        return "\n".join(" ".join(pair) for pair in self.merges)

    @classmethod
    def from_text(cls, text: str) -> "Vocabulary":
        """Raises: DataError if it is not what `text` gives."""
        pairs = [tuple(line.split(" ")) for line in text.split("\n") if line]
        if any(len(pair) != 2 for pair in pairs):
            raise DataError("the record of the run has damaged merges of its vocabulary; train again")
        return cls(pairs)  # type: ignore[arg-type]

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """The tokens of each sentence, with `END` at the end."""
        return [[*item.ids, END] for item in self._tokenizer.encode_batch(list(sentences), add_special_tokens=False)]

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of tokens, up to `END`."""
        cut = [list(item[: item.index(END)] if END in item else item) for item in map(list, tokens)]
        return [text.removeprefix(" ") for text in self._tokenizer.decode_batch(cut, skip_special_tokens=True)]

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """The text of each single token; "▁" marks the beginning of a word."""
        names = {END: "end", START: "start", PAD: ""}
        texts = [names.get(token) or self._tokenizer.decode([token]) for token in tokens]
        return [f"▁{text[1:]}" if text.startswith(" ") else text for text in texts]


@lru_cache(maxsize=4)
def train_vocabulary(sentences: tuple[tuple[str, ...], ...], size: int) -> Vocabulary:
    """The vocabulary of at most `size` tokens that joins the most frequent pairs of pieces in some texts.

    Deterministic: ties are resolved by the order of the pieces. Raises: ConfigError for a size below `SMALLEST`.
    """
    import json

    if size < SMALLEST:
        raise ConfigError(f"vocabulary is at least {SMALLEST} (256 bytes and {SPECIAL} special tokens), not {size}")
    tokenizers = _library()
    tokenizer = _tokenizer(())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(_SPECIAL.values()), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((line for text in sentences for line in text), trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return Vocabulary([tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in merges])


def _tokenizer(merges: tuple[tuple[str, str], ...]) -> Any:
    """The tokenizer of some merges: special tokens, bytes, then joined pieces in their order."""
    tokenizers = _library()
    names = [_SPECIAL[index] for index in range(SPECIAL)] + sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    numbers = {name: index for index, name in enumerate(names)}
    for left, right in merges:
        if left not in numbers or right not in numbers:
            raise DataError(f"the merges of the vocabulary do not fit together at {left} {right}; train again")
        numbers.setdefault(left + right, len(numbers))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, list(merges)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _library() -> Any:
    require("tokenizers")

    import tokenizers  # takes long

    return tokenizers
