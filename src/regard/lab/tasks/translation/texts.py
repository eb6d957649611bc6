"""Parallel texts: the sentences of two languages, line by line, from the user's files or a named set."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from regard.core import ConfigError, DataError
from regard.files.paths import user_path
from regard.images.digest import forget_if_changed
from regard.images.folders import SPLITS
from regard.lab.data.catalog import folder_in_use, folder_of, own_path
from regard.lab.data.generated import with_revision

from ..text_inputs import read_lines
from .numbers_text import number_sentences

NAMED = {"numbers": "generated", "multi30k": "REGARD_DATA/multi30k", "wmt14": "REGARD_DATA/wmt14"}
"""The sets that `--data` accepts by name, and where they come from; anything else is a folder of the user."""
COUNTS = {"numbers": (8000, 500), "multi30k": (29_000, 1000), "wmt14": (4_500_000, 3003)}
"""Numbers of (training, test) sentences of the named sets."""
LANGUAGES = ("en", "de")
"""Of the named sets, in either direction."""
_FLICKR = "test_2016_flickr"
"""The test of Multi30k."""


@dataclass(frozen=True)
class Sentences:
    """Sentences of both languages, in their order. files: where they come from, for messages; lines: their numbers
    there, from 1, () = all in order."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    files: tuple[str, str]
    lines: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.source)

    def first(self, number: int) -> "Sentences":
        """The first sentences; 0 = all."""
        end = number or None
        return Sentences(self.source[:end], self.target[:end], self.files, self.lines[:end])

    def take(self, rows: Iterable[int]) -> "Sentences":
        """The sentences of these rows."""
        rows = list(rows)
        source, target = (tuple(side[row] for row in rows) for side in (self.source, self.target))
        return Sentences(source, target, self.files, tuple(self.lines[row] if self.lines else row + 1 for row in rows))


@dataclass(frozen=True)
class Corpus:
    """A set of parallel texts. splits: "train" and "test", and "val" where the set has both. checksum: of all texts."""

    name: str
    splits: dict[str, Sentences]
    checksum: str

    def split(self, name: str) -> Sentences:
        """Raises: DataError if the set has no such split."""
        if name not in self.splits:
            raise DataError(f"{self.name} has no {name} split; it has {', '.join(self.splits)}")
        return self.splits[name]


def load(data: str, source: str, target: str) -> Corpus:
    """A named set, or the user's folder with train.SOURCE, train.TARGET, and val or test likewise. Raises: DataError.

    source, target: the languages, which are the suffixes of the files; each may also be .gz.
    """
    if data not in NAMED:
        forget_if_changed(user_path(data, DataError), _load)
    return _load(data, source, target, folder_in_use() if data in NAMED else "")


@lru_cache(maxsize=4)
def _load(data: str, source: str, target: str, folder: str) -> Corpus:
    check_languages(source, target)
    if data in NAMED and {source, target} != set(LANGUAGES):
        raise DataError(f"{data} has the languages {' and '.join(LANGUAGES)}, not {source} and {target}")
    if data == "numbers":
        return _numbers(source, target)
    if data in NAMED:
        return _from_folder(folder_of(data, "parallel texts"), source, target, data)
    expected = "a folder of parallel texts: train.en, train.de, val.en and val.de or the like"
    return _from_folder(own_path(data, NAMED, expected), source, target, "")


def identity(data: str, source: str, target: str) -> str:
    """The data in a run's key: the name of a named set, or a digest of the user's texts. Raises: DataError."""
    return with_revision(data) if data in NAMED else load(data, source, target).name


def check_languages(source: str, target: str) -> None:
    """Raises: ConfigError unless the two are different suffixes."""
    for name, value in (("source", source), ("target", target)):
        if not isinstance(value, str) or not value or not value.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"{name} is the suffix of a language's files, such as en, not {value!r}")
    if source == target:
        raise ConfigError(f"source and target are two languages, not both {source!r}")


def _from_folder(folder: Path, source: str, target: str, name: str) -> Corpus:
    splits = {}
    for split, names in SPLITS.items():
        sentences = _split(folder, (*names, _FLICKR) if split == "test" else names, source, target)
        if sentences is not None:
            splits[split] = sentences
    if "test" not in splits and "val" in splits:
        splits["test"] = splits.pop("val")
    for split, name_of_split, expected in (("train", "train", "train"), ("test", "val or test", "val")):
        if split not in splits:
            raise DataError(
                f"{folder} has no {name_of_split} texts; expected {expected}.{source} and {expected}.{target} "
                "(.gz is allowed). Other languages: --set task.source=... --set task.target=..."
            )
    digest = hashlib.sha256()
    for split, sentences in splits.items():
        for lines in (sentences.source, sentences.target):
            digest.update((split + "\0" + "\n".join(lines) + "\0").encode())
    checksum = digest.hexdigest()
    return Corpus(name or f"own:{checksum[:12]}", splits, checksum)


def _split(folder: Path, names: tuple[str, ...], source: str, target: str) -> Sentences | None:
    for name in names:
        files = [_file(folder, f"{name}.{language}") for language in (source, target)]
        if files == [None, None]:
            continue
        for file, language in zip(files, (source, target), strict=True):
            if file is None:
                raise DataError(f"{folder} has {name} in one language only: {name}.{language} (or .gz) is missing")
        paths = [file for file in files if file is not None]
        texts = [read_lines(path) for path in paths]
        if len(texts[0]) != len(texts[1]):
            raise DataError(
                f"{paths[0]} has {len(texts[0])} lines, {paths[1]} has {len(texts[1])}: line i of one is the "
                "translation of line i of the other, so the numbers must be equal"
            )
        return Sentences(texts[0], texts[1], (str(paths[0]), str(paths[1])))
    return None


def _file(folder: Path, name: str) -> Path | None:
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.is_file() and packed.is_file():
        raise DataError(f"{plain} and {packed.name} are the same text; remove one of them")
    return plain if plain.is_file() else packed if packed.is_file() else None


def _numbers(source: str, target: str) -> Corpus:
    train, test = COUNTS["numbers"]
    pairs = number_sentences(train + test)
    languages = dict(zip(LANGUAGES, zip(*pairs, strict=True), strict=True))
    texts = languages[source], languages[target]
    files = (f"numbers ({source})", f"numbers ({target})")
    splits = {
        "train": Sentences(texts[0][:train], texts[1][:train], files),
        "test": Sentences(texts[0][train:], texts[1][train:], files),
    }
    return Corpus("numbers", splits, hashlib.sha256("\n".join(texts[0] + texts[1]).encode()).hexdigest())


def training_sentences(data: str) -> int:
    """The number of lines of the first training text of a folder, for defaults; 0 if it cannot be read."""
    if data in COUNTS:
        return COUNTS[data][0]
    files = sorted(user_path(data, DataError).glob("train.*"))
    with suppress(DataError):
        return len(read_lines(files[0])) if files else 0
    return 0
