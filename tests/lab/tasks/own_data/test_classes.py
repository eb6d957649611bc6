"""Images with classes as common tools write them: labels and splits are right, and check and training agree."""

import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from layouts_of_boxes import NAMES, VAL, coco, picture, standard, write
from regard.core import DataError
from regard.images import own
from regard.lab.tasks.check_data import check_data
from regard.lab.tasks.classification import Classification
from regard.lab.tasks.detection import Detection
from regard.lab.tasks.segmentation import Segmentation
from regard.lab.tasks.segmentation.data import own_digest
from small_masks import labels, pairs

pytestmark = pytest.mark.usefixtures("own_cache")
SPLITS = (("train", range(8)), ("test", range(8, 12)))
CPU = torch.device("cpu")


def shade(path: Path, number: int) -> Path:
    """A small image of one grey value, which tells its number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 9), (20 * number,) * 3).save(path)
    return path


def shades(root: Path) -> None:
    for number in range(12):
        shade(root / NAMES[number % 2] / f"{number}.png", number)


def folders(root: Path, *names: str) -> None:
    """Class folders of images that differ; names: of the splits."""
    for place, split in enumerate(names):
        for number in range(8):
            picture(root / split / NAMES[number % 2] / f"{number}.png", 100 * place + number, (9, 9))


def table(head: tuple[str, str], rows: range, folder: str = "", mark: str = ",") -> str:
    lines = [mark.join(head), *(mark.join((f"{folder}{n}.png", NAMES[n % 2])) for n in rows)]
    return "\n".join(lines) + "\n"


def lists(root: Path, files: dict[str, str], folder: str = "images/{1}.png") -> None:
    """Images, of which {0} is the split, and lists with their content."""
    for split, numbers in SPLITS:
        for number in numbers:
            shade(root / folder.format(split, number), number)
    for name, content in files.items():
        write(root / name, content)


def with_split_column(root: Path) -> None:
    rows = [f"images/{n}.png;{NAMES[n % 2]};{split}" for split, part in SPLITS for n in part]
    lists(root, {"all.csv": "\n".join(["path;class;split", *rows])})


def lines_of_json(numbers: range) -> str:
    return "".join(json.dumps({"file_name": f"{n}.png", "label": NAMES[n % 2]}) + "\n" for n in numbers)


def hub_table(
    path: Path, numbers: range, label: str = "label", image: str = "image", known: bool = True, names: Any = NAMES,
    more: dict[str, list[Any]] | None = None,
) -> None:  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    images = []
    for number in numbers:
        stream = io.BytesIO()
        Image.new("RGB", (9, 9), (20 * number,) * 3).save(stream, "PNG")
        images.append({"bytes": stream.getvalue(), "path": f"{number}.png"})
    made = pa.table({image: images, label: [n % 2 if known else -1 for n in numbers], **(more or {})})
    kinds = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": kinds}})}
    pq.write_table(made.replace_schema_metadata(metadata), path)


def hub(root: Path, **options: Any) -> None:
    hub_table(root / "data/train-00000-of-00002.parquet", range(4), **options)
    hub_table(root / "data/train-00001-of-00002.parquet", range(4, 8), **options)
    hub_table(root / "data/test-00000-of-00001.parquet", range(8, 12), **options)


def hub_converted(root: Path) -> None:
    hub_table(root / "default/train/0000.parquet", range(8))
    hub_table(root / "default/test/0000.parquet", range(8, 12))


def rows_of_folders(numbers: range, split: str = "") -> str:
    return "".join(f"{NAMES[n % 2]}/{n}.png,{NAMES[n % 2]}{split and ',' + split}\n" for n in numbers)


HEAD = "file,label\n"
FILE, LABEL = "file_name", "label"
WITH_TEST: dict[str, Callable[[Path], object]] = {
    "two lists": lambda root: lists(root, {f"{s}.csv": table(("file", "label"), n, "images/") for s, n in SPLITS}),
    "two lists, names alone": lambda root: lists(
        root, {f"{s}.tsv": table(("image", "class"), n, mark="\t") for s, n in SPLITS}
    ),
    "a column of splits": with_split_column,
    "metadata.csv in each split": lambda root: lists(
        root, {f"{s}/metadata.csv": table((FILE, LABEL), n) for s, n in SPLITS}, "{0}/{1}.png"
    ),
    "metadata.jsonl in each split": lambda root: lists(
        root, {f"{s}/metadata.jsonl": lines_of_json(n) for s, n in SPLITS}, "{0}/{1}.png"
    ),
    "tables of the Hub": hub,
    "tables of the Hub, other columns": lambda root: hub(root, image="photo", label="species"),
    "converted tables of the Hub": hub_converted,
}
WHOLE: dict[str, Callable[[Path], object]] = {
    "labels.csv": lambda root: lists(root, {"labels.csv": table(("file", "label"), range(12))}),
    "labels.csv beside the images": lambda root: lists(
        root, {"labels.csv": table(("Filename", "Label"), range(12))}, "{1}.png"
    ),
    "metadata.jsonl": lambda root: lists(root, {"metadata.jsonl": lines_of_json(range(12))}),
    "folders of another meaning": lambda root: lists(
        root, {"labels.csv": table(("file", "label"), range(12))}, "images/{0}/{1}.png"
    ),
}  # fmt: skip


def task(data: Path, **fields: Any) -> Classification:
    return Classification(
        host="vit_desk(patch=4, dim=8, depth=1, heads=2)", data=str(data), size=(8, 8), init="host", **fields
    )


def numbers_of(images: Any) -> list[int]:
    return [round(float(images.pixels[row].mean()) / 20) for row in range(len(images))]


@pytest.mark.parametrize("case", [*WITH_TEST, *WHOLE])
def test_classes_are_read(tmp_path: Path, case: str) -> None:
    {**WITH_TEST, **WHOLE}[case](tmp_path)
    report = check_data(str(tmp_path))
    assert (report.kind, report.problems, report.warnings) == ("classification", [], [])
    found = task(tmp_path).data_set()
    assert found.classes == NAMES
    for images in (found.train, found.test):
        assert [number % 2 for number in numbers_of(images)] == images.labels.tolist()
    assert sorted(numbers_of(found.train) + numbers_of(found.test)) == list(range(12))
    assert found.divided == (case in WHOLE)
    if case in WITH_TEST:
        assert sorted(numbers_of(found.test)) == [8, 9, 10, 11]


def test_a_list_is_a_path_too(tmp_path: Path) -> None:
    WHOLE["labels.csv"](tmp_path)
    assert check_data(str(tmp_path / "labels.csv")).problems == []
    one, before = task(tmp_path / "labels.csv"), task(tmp_path).identity()
    assert len(one.data_set().train) + len(one.data_set().test) == 12
    assert one.identity() == before
    write(tmp_path / "labels.csv", table(("file", "label"), range(11)))
    own.digest.cache_clear()
    assert task(tmp_path).identity() != before


def test_class_folders_need_no_list(tmp_path: Path) -> None:
    """What older versions read has its key, with and without a list of the same classes."""
    folders(tmp_path / "a", ".")
    before = task(tmp_path / "a").identity()
    write(tmp_path / "a/labels.csv", HEAD + rows_of_folders(range(8)))
    own.digest.cache_clear()
    assert check_data(str(tmp_path / "a")).kind == "classification"
    assert task(tmp_path / "a").identity() == before


BY_SPLIT = rows_of_folders(range(6), "train") + rows_of_folders(range(6, 12), "test")
DECIDING: dict[str, tuple[dict[str, str], int]] = {
    "a column of splits": ({"labels.csv": "file,label,split\n" + BY_SPLIT}, 12),
    "two lists": (
        {f"{s}.csv": HEAD + rows_of_folders(n) for s, n in (("train", range(6)), ("test", range(6, 12)))},
        12,
    ),
    "some of the images": ({"labels.csv": HEAD + rows_of_folders(range(6))}, 6),
}


@pytest.mark.parametrize("case", DECIDING)
def test_a_list_decides_beside_class_folders_of_its_names(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, count = DECIDING[case]
    shades(tmp_path)
    before = task(tmp_path).identity()
    for name, content in files.items():
        write(tmp_path / name, content)
    own.digest.cache_clear()
    found = task(tmp_path).data_set()
    numbers = numbers_of(found.train), numbers_of(found.test)
    assert sorted(numbers[0] + numbers[1]) == list(range(count))
    assert count == 6 or sorted(numbers[0]) == list(range(6))
    assert task(tmp_path).identity() != before
    report = check_data(str(tmp_path))
    assert report.problems == []
    assert report.warnings == [record.getMessage() for record in caplog.records]
    assert [("names, which are not used: 6" in text) for text in report.warnings] == [True] * (count == 6)


def test_a_list_without_splits_does_not_mix_folders_of_splits(tmp_path: Path) -> None:
    folders(tmp_path, "train", "test")
    for numbers in (range(8), range(7)):
        rows = [f"{split}/{NAMES[n % 2]}/{n}.png,{NAMES[n % 2]}\n" for split in ("train", "test") for n in numbers]
        write(tmp_path / "labels.csv", HEAD + "".join(rows))
        own.digest.cache_clear()
        if len(numbers) == 8:
            assert len(task(tmp_path).data_set().test) == 8
    with pytest.raises(DataError, match="folders test and train, but no split"):
        check_data(str(tmp_path))


def test_a_list_that_contradicts_class_folders_decides_with_a_warning(tmp_path: Path) -> None:
    shades(tmp_path)
    write(tmp_path / "labels.csv", HEAD + rows_of_folders(range(12)).replace("cat/0.png,cat", "cat/0.png,dog"))
    (said,) = check_data(str(tmp_path)).warnings
    assert "of another class" in said
    assert "1, the first" in said
    assert "0.png, which is dog" in said
    assert sorted(own.read_splits(tmp_path)[1]["test"][2].tolist()) == [0, 1]


def test_images_and_pipes_that_no_list_names(tmp_path: Path) -> None:
    lists(tmp_path, {"labels.csv": table(("file", "label"), range(10))})
    (said,) = check_data(str(tmp_path)).warnings
    assert "no list or annotation names, which are not used: 2" in said
    assert "10.png" in said
    os.mkfifo(tmp_path / "images" / "x.png")
    with pytest.raises(DataError, match=r"x\.png is a pipe"):
        check_data(str(tmp_path))


@pytest.mark.parametrize("labels", [(0, 5.0, 10, 5), ("0.0", "5.", "10.0", "5.0")])
def test_whole_numbers_that_are_written_as_decimals(tmp_path: Path, labels: tuple[object, ...]) -> None:
    """As a tool writes them that has no missing values in whole numbers."""
    rows = [{"file": f"{n}.png", "label": labels[n % 4]} for n in range(12)]
    lists(tmp_path, {"labels.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    classes, splits = own.read_splits(tmp_path)
    assert classes == ("0", "5", "10")
    found = {
        Path(name).stem: label for _, names, part in splits.values() for name, label in zip(names, part, strict=True)
    }
    assert found == {str(n): (0, 1, 2, 1)[n % 4] for n in range(12)}


GOOD = table(("file", "label"), range(12))
REFUSED: list[tuple[dict[str, str], str]] = [
    ({"labels.csv": HEAD + "0.png,dog, small\n1.png,cat\n"}, "line 2 has more fields .* quotes"),
    ({"labels.csv": HEAD + "0.png,cat\n\n1.png,dog, big\n"}, "line 4 has more fields"),
    ({"labels.csv": HEAD + '0.png,"cat\n1.png,dog\n2.png,cat" b\n3.png,dog\n'}, 'line 2 begins a label .* line 4; .*"'),
    ({"labels.csv": HEAD + '1.png,dog\n"0.png,cat\n3.png,dog\n'}, 'line 3 begins a file .* line 4; .*"'),
    ({"labels.csv": "file,label,Label\n0.png,cat,dog\n1.png,dog,cat\n"}, "'label' twice"),
    ({"labels.csv": HEAD + "0.png,cat\n1.png,dog\n0.png,dog\n"}, r"0\.png is 'dog' .*'cat' .*line 2"),
    ({"labels.csv": HEAD + "0.png,  \n1.png,dog\n"}, "line 2: expected a file and one label"),
    ({"labels.csv": "file,label,split\n0.png,cat,test\n1.png,dog,train\n0.png,cat,train\n"}, "of train, .* of test"),
    ({"train.csv": "file,label,split\n0.png,cat,train\n1.png,dog,test\n"}, "line 3: its column split does not say tr"),
    ({"labels.csv": HEAD + "x,cat\n0.png,dog\n1.png,cat\n"}, "line 2: .*x"),
    ({"labels.jsonl": '{"file": "0.png", "label": 1, "label": 2}\n'}, "line 1: 'label' occurs twice"),
    ({"labels.csv": GOOD + "gone.png,cat\n"}, "line 14: .*gone.png"),
    ({"labels.csv": GOOD + "/data/0.png,cat\n"}, "line 14: .*absolute"),
    ({"labels.csv": GOOD + "images/0.png,\n"}, "line 14: .*one label"),
    ({"labels.csv": GOOD + "0.doc,cat\n"}, "line 14: .*no image"),
    ({"all.csv": "file,label,split\n0.png,cat,\n1.png,dog,train\n"}, "line 2: its split"),
    ({"labels.csv": HEAD + "0.png,nan\n1.png,dog\n"}, "line 2: expected a file and one label"),
    ({"all.csv": "file,label,split\n0.png,cat,holdout\n1.png,dog,train\n"}, "line 2: its split"),
    ({"a.csv": GOOD, "b.csv": HEAD + "0.png,dog\n1.png,dog\n"}, r"0\.png is 'dog' .*'cat' .*a\.csv"),
    ({"labels.csv": HEAD + "0.png,None\n1.png,dog\n"}, "line 2: .*none and nan count as empty"),
    (
        {"train.csv": "image_id,label\n0.png,cat\n1.png,dog\n"},
        "names images, but has the columns image_id, label",
    ),
    ({"labels.csv": "id,breed\n0,cat\n1,dog\n"}, "names images, but has the columns id, breed: call"),
    ({"labels.csv": HEAD + "0,cat\n1,dog\n"}, "names images, .* with their suffixes"),
]


@pytest.mark.parametrize(("files", "words"), REFUSED)
def test_what_a_list_leaves_open_is_refused(tmp_path: Path, files: dict[str, str], words: str) -> None:
    lists(tmp_path, files)
    for read in (check_data, lambda data: task(Path(data)).data_set()):
        with pytest.raises(DataError, match=words):
            read(str(tmp_path))


def test_a_list_of_unknown_columns_makes_no_folders_of_images_into_classes(tmp_path: Path) -> None:
    lists(tmp_path, {"train.csv": table(("id", "breed"), range(8))}, "{0}_images/{1}.png")
    for read in (check_data, lambda data: task(Path(data)).data_set()):
        with pytest.raises(DataError, match=r"train\.csv names images, but has the columns id, breed"):
            read(str(tmp_path))


def test_a_list_with_a_line_before_its_header_is_named(tmp_path: Path) -> None:
    lists(tmp_path, {"labels.csv": "# made by me\n" + table(("file", "label"), range(8))}, "{1}.png")
    with pytest.raises(DataError, match=r"labels\.csv names images, but has the columns # made by me: call"):
        check_data(str(tmp_path))


def test_columns_beside_those_that_are_taken_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = "".join(f"{number}.png,{NAMES[number % 2]},{number % 3}\n" for number in range(12))
    lists(tmp_path / "list", {"labels.csv": "file,label,class\n" + rows})
    (said,) = check_data(str(tmp_path / "list")).warnings
    assert said.startswith("columns of files or labels beside those taken: 1, the first: class of ")
    assert said.endswith("labels.csv, not label")
    lists(tmp_path / "fastai", {"labels.csv": "file|label|is_valid\n" + rows.replace(",", "|")})
    (said,) = check_data(str(tmp_path / "fastai")).warnings
    assert said.startswith("columns that may say splits, which only a column split does: 1, the first: is_valid of ")
    hub_table(tmp_path / "table.parquet", range(8))
    made = pq.read_table(tmp_path / "table.parquet")
    pq.write_table(made.append_column("img", made["image"]), tmp_path / "table.parquet")
    own.read_splits(tmp_path / "table.parquet")
    assert "table.parquet has the columns img and image; img is taken" in caplog.text


def test_a_list_in_another_encoding_is_named_before_class_folders_are_read(tmp_path: Path) -> None:
    WHOLE["folders of another meaning"](tmp_path)
    (tmp_path / "labels.csv").write_bytes((HEAD + "0.png,café\n").encode("latin-1"))
    with pytest.raises(DataError, match=r"^[^:]*labels\.csv cannot be read: '[^:]*: .* UTF-8$"):
        check_data(str(tmp_path))


LONG = "0.png," + 140_000 * "x" + "\n"
DAMAGED: dict[str, tuple[dict[str, bytes], str]] = {
    "a cut line": (
        {"train.jsonl": lines_of_json(range(8)).encode(), "test.jsonl": lines_of_json(range(8, 12))[:-9].encode()},
        r"test\.jsonl cannot be read: line 4: ",
    ),
    "a cut line alone": (
        {"train.jsonl": lines_of_json(range(8)).encode(), "test.jsonl": b'{"file_name": "8.p'},
        r"test\.jsonl cannot be read: line 1: ",
    ),
    "UTF-16": ({"classes.csv": GOOD.encode("utf-16")}, r"classes\.csv cannot be read: .*UTF-8"),
    "UTF-16 without a mark": ({"labels.csv": GOOD.encode("utf-16-le")}, r"labels\.csv has no rows that can be read"),
    "no rows": ({"train.csv": GOOD.encode(), "test.csv": b""}, r"test\.csv has no rows"),
    "a long field": ({"classes.csv": (GOOD + LONG).encode()}, r"classes\.csv cannot be read: line 14: field larger"),
    "a long field first": ({"classes.csv": (HEAD + LONG + "1.png,dog\n").encode()}, "line 2: field larger"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_list_is_named_beside_class_folders(tmp_path: Path, case: str) -> None:
    files, words = DAMAGED[case]
    shades(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for read in (check_data, lambda data: task(Path(data)).data_set()):
        with pytest.raises(DataError, match=words):
            read(str(tmp_path))


def test_files_that_are_no_lists_are_passed_over(tmp_path: Path) -> None:
    shades(tmp_path)
    for name in ("log", "labels"):
        (tmp_path / f"{name}.csv").write_bytes("epoch;größe\n1;2\n".encode("latin-1"))
        (tmp_path / f"{name}.tsv").write_bytes("epoch\tloss\n1\t2\n".encode("utf-16"))
        (tmp_path / f"{name}.jsonl").write_text('{"epoch": 1}\n{"epoch')
    (tmp_path / "log2.csv").write_bytes(b"\0\1\2")
    (tmp_path / "log2.jsonl").write_text("no JSON")
    assert (report := check_data(str(tmp_path))).problems == report.warnings == []
    assert task(tmp_path).data_set().classes == NAMES


def test_a_test_without_labels_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the Hub the labels of a hidden test are -1."""
    hub_table(tmp_path / "data/train-00000-of-00001.parquet", range(8))
    hub_table(tmp_path / "data/test-00000-of-00001.parquet", range(8, 12), known=False)
    assert any("has no labels" in text for text in check_data(str(tmp_path)).warnings)
    found = task(tmp_path).data_set()
    assert sorted(numbers_of(found.train) + numbers_of(found.test)) == list(range(8))
    assert "has no labels" in caplog.text


def test_an_image_of_another_folder_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A name alone says no folder."""
    lists(tmp_path, {}, "c/b/{1}.png")
    names = {0: "a/0.png", 1: "../../x/1.png", 2: "http://x/2.png", 3: r"c\b\3.png", 4: "../b/4.png", 5: "../5.png"}
    rows = "".join(f"{names.get(n, f'{n}.png')},{NAMES[n % 2]}\n" for n in range(12))
    write(tmp_path / "labels.csv", HEAD + rows)
    (said,) = check_data(str(tmp_path)).warnings
    assert "not where the list or annotation says, found by their names: 4, the first: " in said
    assert said.endswith("c/b/0.png for a/0.png")
    task(tmp_path).data_set()
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_path_up_and_down_again_is_followed(tmp_path: Path) -> None:
    """Of two images of one name the one that the list names."""
    for place, value in (("a", 1), ("b", 200)):
        (tmp_path / place).mkdir()
        for number in range(8):
            Image.new("RGB", (8, 8), (value + number,) * 3).save(tmp_path / place / f"{number}.png")
    names = [f"b/../a/{n}.png" for n in range(8)]
    write(tmp_path / "labels.csv", HEAD + "".join(f"{name},{NAMES[n % 2]}\n" for n, name in enumerate(names)))
    splits = own.read_splits(tmp_path)[1]
    assert {Path(str(file)).parent.name for sources, *_ in splits.values() for file in sources} == {"a"}


@pytest.mark.parametrize("other", ["CAT", "ca\N{ZERO WIDTH SPACE}t", "\N{FULLWIDTH LATIN SMALL LETTER C}at"])
def test_classes_that_look_alike_are_named(tmp_path: Path, other: str) -> None:
    for number, name in enumerate(("cat", other, "dog")):
        (tmp_path / name).mkdir()
        for part in range(6):
            Image.new("RGB", (8, 8), (40 * number + part,) * 3).save(tmp_path / name / f"{part}.png")
    (said,) = [text for text in check_data(str(tmp_path)).warnings if "join them" in text]
    assert ascii(other) in said
    assert "'cat'" in said


def test_a_repeated_row_is_named(tmp_path: Path) -> None:
    again = "images/3.png,dog\n"
    lists(tmp_path, {"labels.csv": table(("file", "label"), range(12), "images/") + again})
    for read in (lambda: check_data(str(tmp_path)), task(tmp_path).data_set):
        with pytest.raises(DataError, match=r"3\.png is listed 2 times, and without a split copies would lie in"):
            read()
    (tmp_path / "labels.csv").unlink()
    lists(tmp_path, {"train.csv": table(("file", "label"), range(8), "images/") + again,
                     "test.csv": table(("file", "label"), range(8, 12), "images/")})  # fmt: skip
    (said,) = (text for text in check_data(str(tmp_path)).warnings if "more than once" in text)
    assert said.endswith("3.png")


ALONE: dict[str, Callable[[Path], object]] = {
    "parquet": lambda root: hub_table(root / "data/test-00000-of-00001.parquet", range(8, 12)),
    "a list": lambda root: lists(root, {"test.csv": table(("file", "label"), range(8, 12))}),
    "a column": lambda root: lists(
        root, {"all.csv": "file,label,split\n" + "".join(f"{n}.png,{NAMES[n % 2]},val\n" for n in range(8, 12))}
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_data_for_the_test_alone_are_scored(tmp_path: Path, case: str) -> None:
    ALONE[case](tmp_path)
    classes, (sources, _, labels) = own.read_scored(tmp_path)
    assert (classes, len(sources), labels.tolist()) == (NAMES, 4, [0, 1, 0, 1])
    for read in (check_data, lambda data: task(Path(data)).data_set()):
        with pytest.raises(DataError, match="a training needs a part train"):
            read(str(tmp_path))


@pytest.mark.parametrize("names", [5, None, "ab", ["a", "a"], ["a", ""], [None, None], [["x"], ["y"]]])
def test_names_of_the_hub_are_distinct_texts(tmp_path: Path, names: Any) -> None:
    hub(tmp_path, names=names)
    words = r"train-.*parquet: names of 'label' .* (has a name twice|is not a JSON list of texts)"
    for data in (str(tmp_path), f"stream:{tmp_path / 'data'}"):
        with pytest.raises(DataError, match=words):
            check_data(data)


def test_a_validation_beside_a_test_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders(tmp_path, "train", "val", "test")
    (tmp_path / "train/cat/photo.HEIC").write_bytes(b"")
    report = check_data(str(tmp_path))
    task(tmp_path).data_set()
    assert (report.problems, report.warnings) == ([], [record.getMessage() for record in caplog.records])
    assert ["HEIC" in text for text in report.warnings] == [True, False]


@pytest.mark.parametrize("name", ["mask", "labels", "annotation"])
def test_a_class_may_have_a_name_of_masks(tmp_path: Path, name: str) -> None:
    for split, label in ((split, label) for split in ("train", "test") for label in (name, "none")):
        for number in range(4):
            picture(tmp_path / split / label / f"{number}.png", len(split) + 10 * number + len(label), (9, 9))
    assert check_data(str(tmp_path)).kind == "classification"
    assert own.read_splits(tmp_path)[0] == tuple(sorted((name, "none")))


@pytest.mark.parametrize("name", ["annotations", "gt", "masks"])
def test_folders_of_other_tasks_beside_the_splits_are_a_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folders(tmp_path, "train", "test", name)
    report = check_data(str(tmp_path))
    task(tmp_path).data_set()
    (said,) = report.warnings
    assert report.kind == "classification"
    assert f"{name} lies beside the splits" in said
    assert "not used: 8, the first: " in said
    assert said in [record.getMessage() for record in caplog.records]


def test_folders_of_macos_are_no_class(tmp_path: Path) -> None:
    folders(tmp_path / "a", ".")
    shade(tmp_path / "a" / "__MACOSX" / "0.png", 0)
    assert task(tmp_path / "a").data_set().classes == NAMES


def test_other_data_are_scored_whole_and_may_have_fewer_classes(tmp_path: Path) -> None:
    for number in range(12):
        shade(tmp_path / "run" / "abc"[number % 3] / f"{number}.png", number)
        if number % 3:
            shade(tmp_path / "fewer" / "abc"[number % 3] / f"{number}.png", number)
            shade(tmp_path / "test" / "test" / "abc"[number % 3] / f"{number}.png", number)
    shade(tmp_path / "more" / "a" / "0.png", 0)
    shade(tmp_path / "more" / "d" / "1.png", 1)
    trained = task(tmp_path / "run")
    model, record = trained.model(None, 0), trained.record()
    trained = replace(trained, limit=3)  # of the training, not of these
    for name in ("fewer", "test"):
        score = trained.score_on(str(tmp_path / name), model, CPU, record)
        images = [own.decode(file, (8, 8), 3) for file in sorted((tmp_path / name).rglob("*.png"))]
        assert len(score.samples) == len(images) == 8
        expected = trained.score_on(str(tmp_path / name), model, CPU, record | {"name": "own:another"})
        assert score.metrics == expected.metrics
    with pytest.raises(DataError, match="d; the model has"):
        trained.score_on(str(tmp_path / "more"), model, CPU, record)


def boxes_task(data: Path) -> Detection:
    fields = {"size": (64, 64), "width": 16, "strides": (8, 16), "proposals": (20, 10), "rois": 8, "head": 16}
    return Detection(host="vit_desk(patch=16, dim=16, depth=1, heads=2)", data=str(data), **fields)


@pytest.mark.parametrize(
    ("make", "images"),
    [
        (lambda root: write(root / "all.json", coco(range(6), "../run/images/{}.jpg".format)), 6),
        (lambda root: write(root / "test.json", coco(VAL)), 2),
        (lambda root: write(root / "val.json", coco(range(1, 6, 2))), 3),  # of one class
    ],
)
def test_other_boxes_are_scored_whole(tmp_path: Path, make: Callable[[Path], object], images: int) -> None:
    standard(tmp_path / "run")
    for number in range(6):
        picture(tmp_path / "other/images" / f"{number}.jpg", number)
    make(tmp_path / "other")
    trained = boxes_task(tmp_path / "run")
    model, record = trained.model(None, 0), trained.record()
    score = replace(trained, limit=1).score_on(str(tmp_path / "other"), model, CPU, record)
    assert len(score.samples) == images


def test_other_masks_are_scored_whole_and_may_have_fewer_classes(tmp_path: Path) -> None:
    for name, count in (("run", 3), ("other", 2)):
        pairs(tmp_path / name, "images/{1}.png", "masks/{1}.png", lambda number, count=count: labels(number, count))
    write(tmp_path / "run/classes.txt", "sky\nroad\ntree\n")
    write(tmp_path / "other/classes.txt", "tree\nsky\n")
    trained = Segmentation(host="vit_desk(patch=4, dim=8, depth=1, heads=2)", data=str(tmp_path / "run"), size=(8, 8))
    model, record = trained.model(None, 0), trained.record()
    score = replace(trained, limit=2).score_on(str(tmp_path / "other"), model, CPU, record)
    assert len(score.samples) == 6
    write(tmp_path / "other/classes.txt", "tree\ncar\n")
    own_digest.cache_clear()
    with pytest.raises(DataError, match="car"):
        trained.score_on(str(tmp_path / "other"), model, CPU, record)


def test_the_docs_name_the_tools_whose_files_are_read() -> None:
    text = (Path(__file__).parents[4] / "docs" / "tasks.md").read_text()
    assert all(
        word in text for word in ("YOLO", "labelme", "Cityscapes", "metadata.csv", "Label Studio", "Roboflow", "CVAT")
    )


def test_a_class_that_was_renamed_is_scored_by_its_new_name(tmp_path: Path) -> None:
    for number in range(8):
        shade(tmp_path / "run" / "ab"[number % 2] / f"{number}.png", number)
        shade(tmp_path / "other" / "ab"[number % 2] / f"{number}.png", number)
    trained = task(tmp_path / "run")
    model, record = trained.model(None, 0), trained.record()
    first = trained.score_on(str(tmp_path / "other"), model, CPU, record)
    for old, new in (("a", "c"), ("b", "a"), ("c", "b")):
        (tmp_path / "other" / old).rename(tmp_path / "other" / new)
    second = trained.score_on(str(tmp_path / "other"), model, CPU, record)
    assert second.metrics["top1"] == pytest.approx(100 - first.metrics["top1"])


@pytest.mark.parametrize("place", ["train/c", "test", "val"])
def test_a_link_to_nothing_is_no_missing_folder(tmp_path: Path, place: str) -> None:
    for number in range(8):
        shade(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", number)
    (tmp_path / place).symlink_to(tmp_path / "gone")
    for read in (lambda: check_data(str(tmp_path)), task(tmp_path).data_set):
        with pytest.raises(DataError, match=rf"{place} is a link to nothing"):
            read()


def test_classes_without_an_image_are_counted(tmp_path: Path) -> None:
    hub_table(tmp_path / "train.parquet", range(8), names=None)
    made = pq.read_table(tmp_path / "train.parquet")
    labels = pa.array([0, 1, 0, 1, 0, 1, 0, 5000])
    pq.write_table(made.set_column(1, "label", labels).replace_schema_metadata({}), tmp_path / "train.parquet")
    report = check_data(str(tmp_path / "train.parquet"))
    assert len(report.rows) <= 6
    assert "4998 of 5001 classes have no image" in "".join(report.warnings)
    texts = pa.array(list("abababab"))
    pq.write_table(made.set_column(1, "label", texts).replace_schema_metadata({}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"column 'label' holds texts, .*lists in \.csv take names"):
        check_data(str(tmp_path / "train.parquet"))


def test_names_with_accents_are_found_however_they_are_composed(tmp_path: Path) -> None:
    lists(tmp_path, {}, "photos/e\u0301{1}.png")
    rows = [f"\u00e9{n}.png,{NAMES[n % 2]}" for _, numbers in SPLITS for n in numbers]
    (tmp_path / "all.csv").write_text("\n".join(["file,label", *rows]), encoding="utf-8")
    assert len(own.load(tmp_path / "all.csv", (8, 8), "stop").train)


def test_a_column_split_of_a_table_is_not_passed_over(tmp_path: Path) -> None:
    hub_table(tmp_path / "train.parquet", range(8), more={"split": ["train"] * 8})
    assert len(own.load(tmp_path / "train.parquet", (8, 8), "stop").train) == 6
    hub_table(tmp_path / "b.parquet", range(8), more={"split": ["train"] * 6 + ["test"] * 2})
    with pytest.raises(DataError, match="the column split of such tables is not read, and says 'test'"):
        own.load(tmp_path / "b.parquet", (8, 8), "stop")
