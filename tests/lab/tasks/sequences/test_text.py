"""The user's own tables of texts: splits, labels, and every bad input named by file and row."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from regard.core import DataError
from regard.lab.tasks.sequences import data, text

GOOD = [
    ("good film", "pos"),
    ("bad, and long", "neg"),
    ('she said "no"', "neg"),
    ("très\nbien", "pos"),
    ("so so", "neg"),
]


def write(path, rows, header=("text", "label")):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.table(dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))), path)
        return path
    import csv

    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


def texts(split):
    starts = split.tokens.starts
    return [split.tokens.symbols[a:b].tobytes().decode() for a, b in zip(starts[:-1], starts[1:], strict=True)]


@pytest.mark.parametrize("suffix", text.SUFFIXES)
def test_a_folder_of_tables_is_read(tmp_path, suffix):
    write(tmp_path / f"Train{suffix}", GOOD)
    write(tmp_path / f"test{suffix}", GOOD[::-1])
    write(tmp_path / f"val{suffix}", GOOD[:2])
    found = text.own(tmp_path)
    assert found.classes == ("neg", "pos")
    assert texts(found.train) == [line for line, _ in GOOD]
    assert texts(found.test) == [line for line, _ in GOOD[::-1]]
    assert found.train.labels.tolist() == [1, 0, 0, 1, 0]
    assert len(found.held) == 2
    ids = found.train.ids(np.array([0, 3]), 6)
    assert ids[0].tolist() == [byte + 1 for byte in b"good f"]
    assert ids[1].tolist() == [byte + 1 for byte in "très\nbien".encode()[:6]]
    assert found.train.count_truncated(9) == 3


def test_without_a_test_every_fifth_row_is_reserved(tmp_path):
    rows = [(f"text {i}", i % 3) for i in range(50)]
    found = text.own(write(tmp_path / "mine.parquet", rows))
    assert (len(found.train), len(found.test)) == (40, 10)
    assert set(texts(found.train)) | set(texts(found.test)) == {line for line, _ in rows}
    assert found.classes == ("0", "1", "2")
    alone = text.own(write(tmp_path / "f" / "train.csv", rows))
    assert texts(alone.test) == texts(found.test)
    write(tmp_path / "f" / "val.csv", rows[:4])
    assert texts(text.own(tmp_path / "f").test) == [line for line, _ in rows[:4]]


def test_a_column_split_is_not_passed_over(tmp_path):
    rows = [(f"text {i}", i % 2, "train" if i < 8 else "test") for i in range(10)]
    header = ("text", "label", "split")
    with pytest.raises(DataError, match="row 9: the column split of such tables is not read, and says 'test'"):
        text.own(write(tmp_path / "mine.csv", rows, header))
    write(tmp_path / "two" / "train.csv", rows[:8], header)
    write(tmp_path / "two" / "test.parquet", rows[8:], header)
    assert len(text.own(tmp_path / "two").test) == 2


def test_whole_numbers_are_one_class_however_they_are_written(tmp_path):
    rows = [(f"text {i}", ("0", "1", "1.0")[i % 3]) for i in range(30)]
    assert text.own(write(tmp_path / "mine.csv", rows)).classes == ("0", "1")
    assert text.own(write(tmp_path / "other.csv", [*rows, ("a", "x")])).classes == ("0", "1", "1.0", "x")


def test_numbers_are_sorted_as_numbers(tmp_path):
    rows = [(f"text {i}", label) for i, label in enumerate([10, 9, 2, -1, 10, 9, 2, -1, 9, 9])]
    assert text.own(write(tmp_path / "mine.csv", rows)).classes == ("-1", "2", "9", "10")
    assert text.own(write(tmp_path / "mine.parquet", rows)).classes == ("-1", "2", "9", "10")


def test_pairs_have_two_texts(tmp_path):
    rows = [("a b", "b a", 1), ("c", "d", 0), ("e", "ffff", 1)]
    write(tmp_path / "train.tsv", rows, ("text1", "text2", "label"))
    write(tmp_path / "test.tsv", rows[:1], ("text1", "text2", "label"))
    found = text.own(tmp_path)
    assert found.pairs
    assert texts(found.train) == ["a b", "b a", "c", "d", "e", "ffff"]
    ids = found.train.ids(np.array([2, 0]), 4)
    assert ids.shape == (2, 2, 4)
    assert ids[0].tolist() == [[102, 0, 0, 0], [103] * 4]
    assert texts(found.train.take(np.array([1]))) == ["c", "d"]
    write(tmp_path / "test.tsv", GOOD)
    with pytest.raises(DataError, match="test.tsv and train.tsv differ: one has pairs"):
        text.own(tmp_path)


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        (GOOD, ("review", "label"), r"train\.csv has no column text1 and no column text2 \(it has review, label\)"),
        (GOOD, ("text", "stars"), r"train\.csv has no column label \(it has text, stars\)"),
        ([*GOOD, ("  ", "pos")], ("text", "label"), r"train\.csv, row 6, column text is empty; remove the row"),
        ([*GOOD, ("a", "")], ("text", "label"), r"train\.csv, row 6: the label is ''"),
        ([*GOOD, ("a", "nan")], ("text", "label"), r"train\.csv, row 6: the label is 'nan'"),
        ([*GOOD, ("a", "pos", "b")], ("text", "label"), r"train\.csv, row 6 has 3 fields, the header has 2"),
        ([(line, "pos") for line, _ in GOOD], ("text", "label"), r"train\.csv has one label only, 'pos'"),
        ([], ("text", "label"), r"train\.csv has no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, header, message):
    write(tmp_path / "train.csv", rows, header)
    write(tmp_path / "test.csv", GOOD)
    with pytest.raises(DataError, match=message):
        text.own(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text,label\ngood,pos\nbad \xff,neg\n", r"test\.csv has bytes that are no UTF-8 after row \d"),
        (b'text,label\n"good"x,pos\n', r"test\.csv, row 1 cannot be read"),
        (b"", r"test\.csv is empty"),
        (b"text,label\nnew,neutral\n", r"test\.csv, row 1: label 'neutral' does not occur in the training split"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    write(tmp_path / "train.csv", GOOD)
    (tmp_path / "test.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        text.own(tmp_path)
    write(tmp_path / "test.tsv", GOOD)
    with pytest.raises(DataError, match="name the same split"):
        text.own(tmp_path)


def test_wrong_types_in_parquet_are_named(tmp_path):
    rows = [("a", 0), (None, 1)]
    with pytest.raises(DataError, match=r"row 2, column text is NoneType"):
        text.own(write(tmp_path / "a.parquet", rows))
    with pytest.raises(DataError, match=r"row 1: the label is 0.5"):
        text.own(write(tmp_path / "b.parquet", [("a", 0.5), ("b", 1.0)]))
    with pytest.raises(DataError, match=r"row 1, column text is int"):
        text.own(write(tmp_path / "c.parquet", [(3, 0)]))
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        text.own(tmp_path / "d.parquet")


def test_a_text_that_is_too_long_for_a_csv_is_named(tmp_path):
    write(tmp_path / "train.csv", [("short", 0), ("a" * 200_000, 1)])
    with pytest.raises(DataError, match=r"row 2 has a text of more than 131,072 characters.*save the table as parquet"):
        text.own(tmp_path / "train.csv")


def test_missing_data_are_explained(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="unknown data set 'listop'"):
        data.identity("listop")
    with pytest.raises(DataError, match="does not exist; expected a table"):
        data.identity(str(tmp_path / "none"))
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(DataError, match="expected a table"):
        data.identity(str(tmp_path / "note.txt"))
    with pytest.raises(DataError, match="no table of the training split"):
        data.identity(str(tmp_path))
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"imdb needs .*train\.parquet, which does not exist"):
        text.imdb()


def test_the_identity_is_that_of_the_content(tmp_path):
    first = write(tmp_path / "a" / "train.csv", GOOD)
    second = write(tmp_path / "b" / "train.csv", GOOD)
    third = write(tmp_path / "c" / "train.csv", GOOD[:4])
    names = [data.identity(str(file.parent)) for file in (first, second, third)]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("own:")


def test_the_pairs_of_the_arena_are_tables_in_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with pytest.raises(DataError, match="aan needs the folder .*new_aan_pairs"):
        text.aan()
    rows = [("a b", "b a", 1), ("c", "d", 0)]
    for split in ("train", "val", "test"):
        write(tmp_path / "aan" / f"{split}.tsv", rows, ("text1", "text2", "label"))
    found = text.aan()
    assert (found.name, found.pairs, len(found.train), len(found.held)) == ("aan", True, 2, 2)


def test_the_last_reviews_of_imdb_are_reserved(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    monkeypatch.setattr(text, "IMDB_HELD", 2)
    for split in ("train", "test"):
        write(tmp_path / "imdb" / f"{split}.parquet", [(line, label == "pos") for line, label in GOOD])
    found = text.imdb()
    assert (texts(found.train), texts(found.held)) == ([line for line, _ in GOOD[:3]], [line for line, _ in GOOD[3:]])
    assert (found.classes, found.test.labels.tolist()) == (("negative", "positive"), [1, 0, 0, 1, 0])


@pytest.mark.slow
def test_imdb_has_the_published_splits(data_root):
    if not (data_root / "imdb" / "train.parquet").exists():
        pytest.skip("needs imdb in the data folder")
    found = text.imdb()
    assert (len(found.train), len(found.held), len(found.test)) == (22_500, 2_500, 25_000)
    assert np.bincount(found.test.labels).tolist() == [12_500, 12_500]
    assert 0.025 < found.test.count_truncated(4096) / 25_000 < 0.030  # 2.7 % are longer


def test_a_test_that_is_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"word {n},{n % 2}\n" for n in range(10)))
    (tmp_path / "test.csv").symlink_to(tmp_path / "gone.csv")
    with pytest.raises(DataError, match=r"test\.csv is a link to nothing"):
        text.tables(tmp_path)


def test_a_changed_table_is_read_again(tmp_path):
    path = str(write(tmp_path / "mine.csv", GOOD * 2))
    name, found = data.identity(path), data.load(path, 16)
    write(tmp_path / "mine.csv", GOOD * 3)
    assert data.identity(path) != name == found.name
    assert len(data.load(path, 16).train) > len(found.train)
