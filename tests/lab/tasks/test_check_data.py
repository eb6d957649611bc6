"""`regard data check`: every kind of data, with counts, modes, copies in two splits, and unreadable files."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from layouts_of_boxes import LAYOUTS, picture, pictures, standard, write
from regard.cli.app import run
from regard.core import DataError
from regard.lab.tasks.check_data import check_data
from regard.lab.tasks.data_report import DataReport
from small_masks import labels, pairs


def class_folders(root: Path) -> tuple[Path, Path, Path]:
    for number in range(8):
        split, name = ("train", "test")[number // 4], ("a", "b")[number % 2]
        picture(root / split / name / f"{number}.png", number, (8, 6))
    with Image.open(root / "train/a/0.png") as opened:
        opened.convert("L").save(root / "train/a/0.png")
    return root / "train/a/0.png", root / "test/b/copy.png", root / "train/a/2.png"


def official(root: Path) -> tuple[Path, Path, Path]:
    LAYOUTS["COCO as it is published"](root)
    return root / "train2017/0.jpg", root / "val2017/4.jpg", root / "train2017/1.jpg"


def voc(root: Path) -> tuple[Path, Path, Path]:
    LAYOUTS["VOC"](root)
    return root / "JPEGImages/0.jpg", root / "JPEGImages/4.jpg", root / "JPEGImages/1.jpg"


def masks(root: Path) -> tuple[Path, Path, Path]:
    pairs(root, values=lambda number: labels(0))
    return root / "images/train/0.png", root / "images/val/4.png", root / "masks/train/1.png"


def test_an_image_with_two_classes_is_named(tmp_path: Path) -> None:
    file, _, _ = class_folders(tmp_path)
    other = next(folder for folder in sorted(file.parents[1].iterdir()) if folder != file.parent)
    shutil.copy(file, other / "again.png")
    (warning,) = check_data(str(tmp_path)).warnings
    assert re.match(f"the same image in train, a: .* and train, {other.name}: ", warning)


CASES = {
    "classification": (class_folders, (2, 2), "6x8", "L 1, RGB 1"),
    "detection": (official, (2, 1), "64x80", "RGB 4"),
    "detection, VOC": (voc, (2, 1), "64x80", "RGB 4"),
    "segmentation": (masks, (4, 2), "12x16", "RGB 4"),
}


@pytest.mark.parametrize("case", CASES)
def test_images_are_counted_with_sizes_and_modes(tmp_path: Path, case: str) -> None:
    make, images, size, modes = CASES[case]
    make(tmp_path)
    report = check_data(str(tmp_path))
    assert (report.kind, report.problems, report.warnings) == (case.split(",")[0], [], [])
    assert len({row["split"] for row in report.rows}) == 2
    for row in report.rows:
        assert row["images"] == images[row["split"] != "train"]
        assert row["smallest"] == row["largest"] == size
    assert report.rows[0]["modes"] == modes


@pytest.mark.parametrize("case", CASES)
def test_a_copy_in_the_test_and_a_damaged_file_are_named(tmp_path: Path, case: str, capsys) -> None:
    original, copy, broken = CASES[case][0](tmp_path)
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
            write(root / f"{split}.{language}", lines)
    return check_data(str(root))


def sequences(root: Path) -> DataReport:
    write(root / "train.csv", "text,label\nabc,0\nde,1\nf,0\n")
    write(root / "test.csv", "text,label\nabc,0\nxyz,1\n")
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


def test_a_file_of_annotations_is_not_checked_without_its_folder(tmp_path: Path) -> None:
    standard(tmp_path)
    with pytest.raises(DataError, match="train.json is a file of annotations; give the folder"):
        check_data(str(tmp_path / "train.json"))


def test_masks_are_checked_for_instances(tmp_path: Path) -> None:
    standard(tmp_path)
    content = json.loads((tmp_path / "train.json").read_text())
    content["annotations"][1].pop("segmentation")
    write(tmp_path / "train.json", content)
    assert check_data(str(tmp_path), "detection").problems == []
    (problem,) = check_data(str(tmp_path), "instances").problems
    assert "annotation 1" in problem


def loose(root: Path) -> None:
    class_folders(root)
    pictures(root / "train", range(30), ".png")


def unmasked(root: Path) -> None:
    masks(root)
    pictures(root / "images" / "train", range(10, 40), ".png")


def unlearned(root: Path) -> None:
    write(root / "train.csv", "text,label\nabc,0\nde,1\n")
    write(root / "test.csv", "text,label\n" + "abc,2\n" * 30)


def untranslated(root: Path) -> None:
    for name in ("train.en", "val.en", "val.de"):
        write(root / name, "a\n" * 30)
    write(root / "train.de", "\n" * 30)


@pytest.mark.parametrize("make", [loose, unmasked, unlearned, untranslated])
def test_all_files_that_do_not_fit_together_are_listed(
    tmp_path: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A training stops at them too, with the first one and the number of the others."""
    make(tmp_path)
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
