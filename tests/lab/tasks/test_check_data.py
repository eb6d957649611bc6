"""`regard data check`: every kind of data, with counts, modes, copies in two splits, and unreadable files."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from regard.cli.app import run
from regard.core import DataError
from regard.lab.tasks.check_data import DataReport, check_data

BOX = (
    "<annotation><size><width>8</width><height>6</height><depth>3</depth></size><object><name>cat</name>"
    "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>4</ymax></bndbox></object></annotation>"
)


def picture(path: Path, number: int, mode: str = "RGB") -> None:
    """An image of 6 x 8 pixels, another one for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def class_folders(root: Path) -> tuple[Path, Path, Path]:
    for number in range(8):
        split, name = ("train", "test")[number // 4], ("a", "b")[number % 2]
        picture(root / split / name / f"{number}.png", number, "L" if number == 0 else "RGB")
    return root / "train/a/0.png", root / "test/b/copy.png", root / "train/a/2.png"


def coco(root: Path) -> tuple[Path, Path, Path]:
    images = [{"id": i, "file_name": f"{i}.png", "width": 8, "height": 6} for i in (1, 2)]
    objects = [{"id": i, "image_id": i, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16} for i in (1, 2)]
    content = {"images": images, "categories": [{"id": 1, "name": "cat"}], "annotations": objects}
    for start, split in ((0, "train"), (2, "val")):
        text(root / "annotations" / f"instances_{split}.json", json.dumps(content))
        for i in (1, 2):
            picture(root / split / f"{i}.png", start + i)
    return root / "train/1.png", root / "val/1.png", root / "train/2.png"


def voc(root: Path) -> tuple[Path, Path, Path]:
    for number in range(4):
        picture(root / "JPEGImages" / f"{number}.jpg", number)
        text(root / "Annotations" / f"{number}.xml", BOX)
    for split, names in (("train", "0\n1\n"), ("val", "2\n3\n")):
        text(root / "ImageSets/Main" / f"{split}.txt", names)
    return root / "JPEGImages/0.jpg", root / "JPEGImages/2.jpg", root / "JPEGImages/1.jpg"


def masks(root: Path) -> tuple[Path, Path, Path]:
    for number in range(4):
        name = f"{('train', 'test')[number // 2]}/{number}.png"
        picture(root / "images" / name, number)
        (root / "masks" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.eye(6, 8, dtype=np.uint8)).save(root / "masks" / name)
    return root / "images/train/0.png", root / "images/test/2.png", root / "masks/train/1.png"


LAYOUTS = {"classification": class_folders, "coco": coco, "voc": voc, "segmentation": masks}
KINDS = {"coco": "detection", "voc": "detection"}
pictures = pytest.mark.parametrize("layout", LAYOUTS)


@pictures
def test_images_are_counted_with_sizes_and_modes(tmp_path: Path, layout: str) -> None:
    LAYOUTS[layout](tmp_path)
    report = check_data(str(tmp_path))
    assert (report.kind, report.problems, report.warnings) == (KINDS.get(layout, layout), [], [])
    assert len({row["split"] for row in report.rows}) == 2
    assert all(row["images"] == 2 and row["smallest"] == row["largest"] == "6x8" for row in report.rows)
    first = next(row for row in report.rows if row["split"] == "train")
    assert first["modes"] == ("L 1, RGB 1" if layout == "classification" else "RGB 2")


@pictures
def test_a_copy_in_the_test_and_a_damaged_file_are_named(tmp_path: Path, layout: str, capsys) -> None:
    original, copy, broken = LAYOUTS[layout](tmp_path)
    shutil.copy(original, copy)
    report = check_data(str(tmp_path))
    assert len(report.warnings) == 1
    assert original.name in report.warnings[0]
    assert copy.name in report.warnings[0]
    broken.write_bytes(b"no image")
    assert [broken.name in problem for problem in check_data(str(tmp_path)).problems] == [True]
    assert run(["data", "check", str(tmp_path), "--json"]) == 1
    assert re.match("regard: 1 problem would stop a training, the first: .*" + broken.name, capsys.readouterr().err)


def sentences(root: Path) -> DataReport:
    for split, lines in (("train", "a b c\nd\ne\n"), ("val", "d e\n"), ("test", "d\n")):
        for language in ("en", "de"):
            text(root / f"{split}.{language}", lines)
    return check_data(str(root))


def sequences(root: Path) -> DataReport:
    text(root / "train.csv", "text,label\nabc,0\nde,1\nf,0\n")
    text(root / "test.csv", "text,label\nabc,0\nxyz,1\n")
    return check_data(str(root))


@pytest.mark.parametrize(
    ("make", "kind", "unit", "counts"),
    [(sentences, "translation", "sentences", [3, 3, 1, 1, 1, 1]), (sequences, "sequences", "texts", [2, 1, 1, 1])],
)
def test_texts_are_counted_and_copies_named(
    tmp_path: Path, make: Callable[[Path], DataReport], kind: str, unit: str, counts: list[int]
) -> None:
    report = make(tmp_path)
    assert (report.kind, report.problems) == (kind, [])
    assert [row[unit] for row in report.rows] == counts
    assert len(report.warnings) == 1
    assert "train" in report.warnings[0]
    assert "test" in report.warnings[0]


def test_a_split_with_a_single_class_is_a_problem(tmp_path: Path) -> None:
    class_folders(tmp_path)
    shutil.rmtree(tmp_path / "test" / "b")
    assert ["only one class" in problem for problem in check_data(str(tmp_path)).problems] == [True]


@pytest.mark.parametrize("data", ["", "no/such/folder", "/dev/null"])
def test_what_is_no_data_is_refused(data: str) -> None:
    with pytest.raises(DataError):
        check_data(data)


def test_a_folder_with_the_name_of_a_built_in_set_is_not_checked_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_folders(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"digits is the name of a built-in set, .* for the folder write \./digits"):
        check_data("digits")
    assert check_data("./digits").kind == "classification"


def test_masks_are_checked_for_instances(tmp_path: Path) -> None:
    coco(tmp_path)
    for file in tmp_path.glob("annotations/*.json"):
        content = json.loads(file.read_text())
        content["annotations"][0]["segmentation"] = [[1, 1, 5, 1, 5, 5, 1, 5]]  # the second object has no mask
        file.write_text(json.dumps(content))
    assert check_data(str(tmp_path), "detection").problems == []
    problems = check_data(str(tmp_path), "instances").problems
    assert len(problems) == 2
    assert all("annotation 2" in problem for problem in problems)


@pytest.mark.parametrize("layout", ["classification", "segmentation", "sequences", "translation"])
def test_all_files_that_do_not_fit_together_are_listed(tmp_path: Path, layout: str, capsys) -> None:
    """A training stops at them too, with the first one and the number of the others."""
    if layout == "classification":
        class_folders(tmp_path)
        for number in range(30):
            picture(tmp_path / "train" / f"{number}.png", number)
    elif layout == "segmentation":
        masks(tmp_path)
        for number in range(30):
            picture(tmp_path / "images" / "train" / f"more{number}.png", number)
    elif layout == "sequences":
        text(tmp_path / "train.csv", "text,label\nabc,0\nde,1\n")
        text(tmp_path / "test.csv", "text,label\n" + "abc,2\n" * 30)
    else:
        for name in ("train.en", "val.en", "val.de"):
            text(tmp_path / name, "a\n" * 30)
        text(tmp_path / "train.de", "\n" * 30)
    with pytest.raises(DataError, match="29 more like this: `regard data check` lists them"):
        check_data(str(tmp_path))
    assert run(["data", "check", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("problem: ") == 20
    assert "10 further problems; --json has all" in shown


def test_an_option_of_another_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path)
    for option in ("void", "classes", "source", "target"):
        assert run(["data", "check", str(tmp_path), f"--{option}", "3"]) == 2
        assert f"--{option} is for --task" in capsys.readouterr().err
    assert run(["data", "check", str(tmp_path), "--task", "instance"]) == 2
    assert "did you mean instances" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        (
            lambda entries: [entry | {"bbox": [4, 3, 7, 5]} for entry in entries],
            "leave their image, and all fit as",
        ),  # corners
        (lambda entries: [], "the train split of .* has no objects in any image"),
    ],
    ids=["corners", "none"],
)
def test_boxes_that_training_refuses_are_problems(
    tmp_path: Path, annotations: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], said: str
) -> None:
    coco(tmp_path)
    for file in tmp_path.glob("annotations/*.json"):
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"annotations": annotations(content["annotations"])}))
    problems = check_data(str(tmp_path), "detection").problems
    assert re.search(said, problems[0])
    assert run(["data", "check", str(tmp_path), "--task", "detection"]) == 1
