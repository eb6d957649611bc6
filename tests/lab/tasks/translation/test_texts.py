"""Parallel texts: what is read, and what every bad input says."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from regard.core import ConfigError, DataError
from regard.lab.tasks.text_inputs import read_lines
from regard.lab.tasks.translation.numbers_text import english, german, number_sentences
from regard.lab.tasks.translation.texts import COUNTS, identity, load


def write(folder: Path, **texts: str | bytes | None) -> Path:
    """Files named by arguments such as train_en; None = none."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        if text is not None:
            (folder / name.replace("_", ".")).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def small(folder: Path, **changes: str | bytes | None) -> Path:
    texts = {"train_en": "a b\nc d\n", "train_de": "A B\nC D\n", "val_en": "e\n", "val_de": "E\n"}
    return write(folder, **(texts | changes))


def read(folder: Path) -> None:
    load(str(folder), "en", "de")


def test_a_folder_is_read_line_by_line(tmp_path: Path) -> None:
    corpus = load(str(small(tmp_path)), "en", "de")
    assert corpus.split("train").source == ("a b", "c d")
    assert corpus.split("test").target == ("E",)
    assert load(str(tmp_path), "de", "en").split("train").source == ("A B", "C D")


def test_test_texts_are_the_test_and_val_is_kept(tmp_path: Path) -> None:
    corpus = load(str(small(tmp_path, test_en="t\n", test_de="T\n")), "en", "de")
    assert corpus.split("test").source == ("t",)
    assert corpus.split("val").source == ("e",)


def test_changed_texts_are_read_again(tmp_path: Path) -> None:
    name = identity(str(small(tmp_path)), "en", "de")
    small(tmp_path, train_en="a b\nc d\ne f\n", train_de="A B\nC D\nE F\n")
    assert identity(str(tmp_path), "en", "de") != name
    assert len(load(str(tmp_path), "en", "de").split("train")) == 3


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    """`str.splitlines` would break at these; a carriage return before a newline and a first mark are dropped."""
    (tmp_path / "text").write_bytes("\ufeffone\u2028two\u0085three\x0b\r\nfour".encode())
    assert read_lines(tmp_path / "text") == ("one\u2028two\u0085three\x0b", "four")


def test_packed_files_are_read(tmp_path: Path) -> None:
    small(tmp_path, train_en=None, train_en_gz=gzip.compress(b"x\ny\n"))
    assert load(str(tmp_path), "en", "de").split("train").source == ("x", "y")


def test_the_key_has_a_digest_of_the_texts_and_no_path(tmp_path: Path) -> None:
    one, two = small(tmp_path / "one"), small(tmp_path / "two")
    other = small(tmp_path / "other", train_en="a b\nc e\n")
    names = [identity(str(folder), "en", "de") for folder in (one, two, other)]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("own:")
    assert identity("numbers", "en", "de") == "numbers"


BAD = {
    "lengths": ({"train_de": "A\nB\nC\n"}, r"train.en has 2 lines, .*train.de has 3"),
    "empty": ({"train_en": "a\n \n", "train_de": "A\nB\n"}, r"train.en, line 2: the text is empty"),
    "no sentences": ({"val_en": ""}, r"val.en has no lines"),
    "not UTF-8": ({"train_de": b"gut\nsch\xf6n\n"}, r"train.de, line 2: byte 0xf6 at position 4 is not UTF-8"),
    "damaged": ({"train_en": None, "train_en_gz": gzip.compress(b"x\ny\n" * 99)[:-20]}, "train.en.gz cannot be read"),
    "twice": ({"val_en_gz": gzip.compress(b"e\n")}, "are the same text; remove one"),
    "no train": ({"train_en": None, "train_de": None}, "has no train texts; expected train.en and train.de"),
    "no val": ({"val_en": None, "val_de": None}, "has no val or test texts; expected val.en and val.de"),
    "one language": ({"test_en": "x\n"}, r"test in one language only: test.de \(or .gz\) is missing"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_texts_name_the_file_and_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(small(tmp_path, **changes))


def test_missing_texts_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; expected a folder of parallel texts"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match="train.en is a file; expected a folder"):
        read(small(tmp_path) / "train.en")
    with pytest.raises(DataError, match="did you mean numbers"):
        load("number", "en", "de")


def test_languages_are_checked() -> None:
    with pytest.raises(ConfigError, match="two languages, not both"):
        load("numbers", "en", "en")
    with pytest.raises(ConfigError, match="suffix of a language's files"):
        load("numbers", "../en", "de")
    with pytest.raises(DataError, match="numbers has the languages en and de, not en and fr"):
        load("numbers", "en", "fr")


def test_a_split_that_does_not_exist() -> None:
    with pytest.raises(DataError, match="numbers has no val split; it has train, test"):
        load("numbers", "en", "de").split("val")


def test_numbers_in_words() -> None:
    words = {
        0: ("zero", "null"),
        1: ("one", "eins"),
        16: ("sixteen", "sechzehn"),
        21: ("twenty-one", "einundzwanzig"),
        30: ("thirty", "dreißig"),
        101: ("one hundred one", "einhunderteins"),
        412: ("four hundred twelve", "vierhundertzwölf"),
        2021: ("two thousand twenty-one", "zweitausendeinundzwanzig"),
        9999: ("nine thousand nine hundred ninety-nine", "neuntausendneunhundertneunundneunzig"),
    }
    assert {number: (english(number), german(number)) for number in words} == words
    assert len({german(number) for number in range(10_000)}) == 10_000
    assert len({english(number) for number in range(10_000)}) == 10_000


def test_numbers_are_the_same_everywhere_and_no_test_sentence_is_in_training() -> None:
    corpus = load("numbers", "en", "de")
    train, test = corpus.split("train"), corpus.split("test")
    assert (len(train), len(test)) == COUNTS["numbers"]
    assert not set(train.source) & set(test.source)
    assert number_sentences(3) == number_sentences(9)[:3]
    assert corpus.checksum.startswith(CHECKSUM)


CHECKSUM = "6bc63867e29b"


def test_multi30k_is_complete(data_root: Path) -> None:
    if not (data_root / "multi30k").is_dir():
        pytest.skip(f"needs multi30k in {data_root}")
    corpus = load("multi30k", "en", "de")
    assert {name: len(sentences) for name, sentences in corpus.splits.items()} == {
        "train": 29_000, "val": 1014, "test": 1000,
    }  # fmt: skip
