"""Annotated images as common tools write them: boxes, labels and masks are right, and check and training agree."""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layouts_of_boxes import (
    HEIGHT,
    LAYOUTS,
    NAMES,
    SPLITS,
    WHOLE,
    WIDTH,
    box,
    coco,
    coco_files,
    picture,
    pictures,
    standard,
    write,
)  # fmt: skip
from regard.core import DataError
from regard.lab.tasks.check_data import check_data
from regard.lab.tasks.clean_copy import write_clean_copy
from regard.lab.tasks.data_report import DataReport
from regard.lab.tasks.detection import Detection, Instances, data, masks
from regard.lab.tasks.segmentation.data import layout_of, own_digest

pytestmark = pytest.mark.usefixtures("own_cache")
BOXES_ALONE = ("VOC", "YOLO", "table")


def task_on(path: Path, kind: type = Detection, **fields: Any) -> Any:
    return kind(host="vit_desk(patch=16)", data=str(path), size=(256, 256), **fields)


def trained(path: Path, kind: type) -> tuple[dict[str, list[Any]], list[str], str]:
    """The scenes of a training, its warnings, and what stops it."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("regard.data")
    log.addHandler(handler)
    try:
        task = task_on(path, kind)
        split = task.part("train")
        for row in range(len(split)):
            split.item(row)
        return {name: list(scenes) for name, scenes in task.data_set().splits.items()}, said, ""
    except DataError as error:
        return {}, said, str(error)
    finally:
        log.removeHandler(handler)


def agreed(path: Path, kind: type = Detection) -> tuple[dict[str, list[Any]], list[str], str]:
    """`trained`, which `regard data check` foresees: a problem where it stops, else the same warnings and objects."""
    found = trained(path, kind)
    try:
        report = check_data(str(path), kind.name)
    except DataError as error:
        report = DataReport(kind.name, problems=[str(error)])
    assert bool(report.problems) == bool(found[2]), (report.problems, found[2])
    if not found[2]:
        assert set(found[1]) <= set(report.warnings)
        objects = sum(row["objects"] for row in report.rows)
        assert objects == sum(int((~scene.objects.crowd).sum()) for scenes in found[0].values() for scene in scenes)
    return found


def number_of(scene: Any) -> int:
    return int(Path(scene.name).stem.removeprefix("my photo ").removesuffix(".x"))


def check_scene(scene: Any, with_masks: bool) -> None:
    number = number_of(scene)
    left, top, width, height = box(number)
    assert scene.size == (HEIGHT, WIDTH)
    assert np.allclose(scene.objects.boxes, [[left, top, left + width, top + height]], atol=1e-3)
    assert [NAMES[label] for label in scene.objects.labels] == [NAMES[number % 2]]
    if with_masks:
        assert masks.area(scene.objects.masks[0]) == width * height


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read(tmp_path: Path, layout: str) -> None:
    """Also for instances, where it has polygons."""
    LAYOUTS[layout](tmp_path)
    assert check_data(str(tmp_path)).kind == "detection"
    assert data.load(str(tmp_path), False, "stop").classes == NAMES
    polygons = not layout.startswith(BOXES_ALONE) or layout == "YOLO of polygons"
    for kind in (Detection, Instances)[: 1 + polygons]:
        splits, said, error = agreed(tmp_path, kind)
        assert error == ""
        assert not said or layout == "COCO of Label Studio"  # images are found by their names
        for scene in (scene for scenes in splits.values() for scene in scenes):
            check_scene(scene, kind is Instances)
        found = {split: [number_of(scene) for scene in scenes] for split, scenes in splits.items()}
        held = 1 if layout in WHOLE else 2
        assert {split: len(numbers) for split, numbers in found.items()} == {"train": 6 - held, "val": held}
        assert {*found["train"], *found["val"]} == set(range(6))
        assert set(found["val"]) == {4, 5} or layout in WHOLE


def test_an_export_without_splits_is_divided_by_val(tmp_path: Path) -> None:
    WHOLE["COCO of CVAT"](tmp_path)
    assert len(data.load(str(tmp_path), False, "stop", whole=True).splits["train"]) == 6
    task = task_on(tmp_path, val=0.25)
    assert (len(task.part("train")), len(task.part("held"))) == (4, 1)


def test_a_photo_more_or_less_hardly_changes_what_is_held_out(tmp_path: Path) -> None:
    """Boxes and masks; a folder of another name has the same."""
    coco_files(tmp_path / "data", "images", "result.json", (("", range(60)),))
    shutil.copytree(tmp_path / "data", tmp_path / "fewer")
    boxes, drawn = [], []
    for folder in ("data", "fewer"):
        write(tmp_path / "fewer" / "result.json", coco(range(59)))
        (tmp_path / "fewer" / "images" / "59.jpg").unlink(missing_ok=True)
        splits = data.own_splits(tmp_path / folder, data.Choices()).splits
        assert {number_of(scene) for scenes in splits.values() for scene in scenes} == set(range(60 - len(boxes)))
        boxes.append({number_of(scene) for scene in splits["val"]})
        drawn.append({int(image.stem) for image, _ in layout_of(tmp_path / folder, 255, "")[1]["test"]})
    assert boxes == drawn
    assert [len(part) for part in boxes] == [12, 11]
    assert len(boxes[0] & boxes[1]) == 11


def test_data_that_are_divided_by_name_have_another_key(tmp_path: Path) -> None:
    """Older versions divided them by a permutation; what has splits keeps its key."""
    WHOLE["COCO of CVAT"](tmp_path / "whole")
    standard(tmp_path / "split")
    for name in ("whole", "split"):
        keys = data.identity(str(tmp_path / name), False, "stop").removeprefix("own:"), own_digest(tmp_path / name)
        assert [key.startswith("by_name-") for key in keys] == [name == "whole"] * 2


def test_the_check_goes_on_after_files_of_labelme_that_are_wrong(tmp_path: Path) -> None:
    """And a training that skips leaves out what a clean copy does."""
    LAYOUTS["labelme"](tmp_path / "data")
    write(tmp_path / "data" / "0.json", "")
    write(tmp_path / "data" / "also 1.json", (tmp_path / "data" / "1.json").read_text())
    report = check_data(str(tmp_path / "data"))
    for problem, words in zip(report.problems, ("0.json is empty", "also 1.json and 1.json are both"), strict=True):
        assert words in problem
    assert sum(row["objects"] for row in report.rows) == 5
    write_clean_copy(str(tmp_path / "data"), tmp_path / "out")
    for name in ("data", "out"):
        splits = data.own_splits(tmp_path / name, data.Choices(corrupt="skip")).splits
        assert {number_of(scene) for scenes in splits.values() for scene in scenes} == set(range(1, 6))


def test_lists_of_voc_may_have_suffixes_and_sizes_a_point(tmp_path: Path) -> None:
    LAYOUTS["VOC"](tmp_path)
    expected = [scene.name for scene in agreed(tmp_path)[0]["train"]]
    write(tmp_path / LISTED, "".join(f"{line}.jpg\n" for line in (tmp_path / LISTED).read_text().split()))
    for file in (tmp_path / "Annotations").glob("*.xml"):
        write(file, file.read_text().replace("</width>", ".0</width>"))
    assert [scene.name for scene in agreed(tmp_path)[0]["train"]] == expected


def edited(edit: Callable[[dict[str, Any]], object], file: str = "train.json") -> Callable[[Path], object]:
    """COCO's data, of which one file is edited."""

    def make(root: Path) -> None:
        standard(root)
        content = json.loads((root / file).read_text())
        edit(content)
        write(root / file, content)

    return make


def change(entries: str, **fields: Any) -> Callable[[Path], object]:
    """COCO's data with other fields in its second training entry."""
    return edited(lambda content: content[entries][1].update(fields))


def altered(layout: str, file: str, old: str, new: str) -> Callable[[Path], object]:
    """A layout with another text in one file, in the place of all of it if `old` is empty."""

    def make(root: Path) -> None:
        LAYOUTS[layout](root)
        content = (root / file).read_text()
        assert old in content
        write(root / file, content.replace(old, new, 1) if old else new)

    return make


def also(layout: str, add: Callable[[Path], object]) -> Callable[[Path], object]:
    """A layout, and what is done in its folder then."""
    return lambda root: [make(root) for make in (LAYOUTS[layout], add)]


def a_pipe(layout: str, file: str) -> Callable[[Path], object]:
    """A layout with a pipe in the place of a file, or beside the others."""
    return also(layout, lambda root: [(root / file).unlink(missing_ok=True), os.mkfifo(root / file)])


def fractions(root: Path) -> None:
    pictures(root, range(2))
    write(root / "train.csv", "file,class,xmin,ymin,xmax,ymax\n0.jpg,cat,.1,.1,.5,.6\n1.jpg,cat,.2,.1,.5,.6\n")


def with_file(layout: str, name: str, content: Any) -> Callable[[Path], object]:
    return also(layout, lambda root: write(root / name, content))


YOLO, YOLO_LISTS, FIRST = "YOLO, images/train", "YOLO with lists", "labels/train/0.txt"
LISTED = "ImageSets/Main/train.txt"
ALTERED: dict[str, tuple[str, str, str, str, str]] = {
    "YOLO in pixels": (YOLO, FIRST, "", "0 40 32 20 30\n", "fractions"),
    "YOLO, not a number": (YOLO, FIRST, "", "0 nan .5 .2 .2\n", "no finite numbers"),
    "YOLO with confidence": (YOLO, FIRST, "", "0 .5 .5 .2 .2 .9\n", "5 numbers"),
    "YOLO, no class": (YOLO, FIRST, "", "cat .5 .5 .2 .2\n", "no"),
    "YOLO, a class without a name": (YOLO, FIRST, "", "7 .5 .5 .2 .2\n", "category 7"),
    "YOLO, a number without a name": (
        "YOLO, train/images",
        "coco8.yaml",
        "1: dog",
        "2: dog",
        "1; the categories are 0, 2",
    ),
    "YOLO, a key twice": (YOLO, "data.yaml", "nc: 2", "names: [dog, cat]", "data.yaml cannot be read: 'names' occurs"),
    "YOLO, a merge key": (YOLO, "data.yaml", "names: [cat, dog]", "x: &x {names: [cat, dog]}\n<<: *x", "<<: write out"),
    "YOLO, an image in two lists": (
        YOLO_LISTS,
        "val.txt",
        "4.jpg",
        "0.jpg",
        r"0\.jpg has a name of the lists of train",
    ),
    "YOLO, another number of classes": (YOLO, "data.yaml", "nc: 2", "nc: 3", "says nc 3"),
    "YOLO, a name alone": (YOLO, "data.yaml", "[cat, dog]", "cat", "no texts"),
    "YOLO, an empty name": (YOLO, "data.yaml", "cat", '""', "no texts"),
    "YOLO, names to numbers": ("YOLO, train/images", "coco8.yaml", "0: cat", "cat: 0", "name of 'cat'"),
    "COCO, a category without a name": ("COCO", "train.json", '"cat"', "null", "name 'None'"),
    "COCO, a key twice": ("COCO", "train.json", '"images"', '"images": [], "images"', "'images' occurs twice"),
    "COCO, nothing": ("COCO", "train.json", "", "\n", "train.json is empty"),
    "COCO, wrong JSON": ("COCO", "train.json", "", '{"images": [\n 1,, 2]}', "line 2, column 4"),
    "COCO, a list": ("COCO", "train.json", "", "[1]", "no object"),
    "labelme, no shape": ("labelme", "0.json", '"shapes": [', '"shapes": [null, ', "shape 1 .*it is NoneType"),
    "labelme, no label": ("labelme", "0.json", '"cat"', "null", "name 'None'"),
    "labelme, a key twice": ("labelme", "0.json", '"shapes"', '"shapes": [], "shapes"', "'shapes' occurs twice"),
    "VOC, two names": ("VOC", "Annotations/0.xml", "<name>", "<name>a</name><name>", "object 1: it has 2 of name"),
    "VOC, two boxes": ("VOC", "Annotations/0.xml", "<xmin>", "<xmin>1</xmin><xmin>", "2 of bndbox/xmin"),
    "VOC, no corner": ("VOC", "Annotations/0.xml", "<xmin>11</xmin>", "", "0.xml: object 1: it has no bndbox/xmin"),
    "VOC, wrong XML": ("VOC", "Annotations/0.xml", "<xmin>", "<xmim>", r"0.xml is no valid XML: line \d+, column \d+"),
    "VOC without lists, nothing": (
        "VOC without lists",
        "Annotations/0.xml",
        "",
        "",
        r"0.xml is no valid XML: line 1, column",
    ),
    "labelme, nothing": ("labelme", "0.json", "", "", "0.json is empty; a file of annotations has JSON; correct or"),
    "labelme, two files of an image": (
        *("labelme", "1.json", "1.jpg", "0.jpg"),
        r"1.json and 0.json are both of 0.jpg: move the shapes",
    ),
    "labelme, no number": ("labelme", "1.json", "[[11", "[[NaN", "1.json: shape 1 .*a point without a finite number"),
    "labelme, wrong JSON": ("labelme", "0.json", '"shapes"', ",", r"0\.json is no valid JSON: line 1"),
    "VOC, a box outside": (
        "VOC",
        "Annotations/0.xml",
        "<xmin>",
        "<xmin>9",
        r"0.xml: object 1 \(cat\): its box .* no area",
    ),
    "VOC, no image": ("VOC", LISTED, "1\n", "9\n", "no image .*JPEGImages/9"),
    "VOC, an image twice": ("VOC", LISTED, "1\n", "0\n", "names 0 twice"),
    "VOC, an empty list": ("VOC", LISTED, "", "", "names no images"),
    "table, an empty class": ("tables", "train.csv", "cat", "", "line 2: .*the name ''"),
    "table, a missing class": ("tables", "train.csv", "cat", "nan", "line 2: .*the class nan"),
    "table, a comma in a class": ("tables", "train.csv", "cat", "cat, small", "line 2 has more fields"),
    "table, another width": ("tables", "train.csv", f".jpg,{WIDTH},", ".jpg,400,", f"has {WIDTH}x{HEIGHT} pixels"),
    "table, a class without a box": (
        "tables",
        "train.csv",
        "",
        "file,class,xmin,ymin,xmax,ymax\n0.jpg,cat,,,,\n",
        "no box",
    ),
    "table, a column twice": ("tables", "train.csv", "width", "class", "'class' twice"),
    "table, a column split": (
        "tables",
        "train.csv",
        "width",
        "split",
        "line 2: the column split of such tables is not",
    ),
    "table of the Hub, more boxes": (
        *("table of the Hub", "train/metadata.jsonl", '"bbox": [', '"bbox": [[1, 2, 3, 4], '),
        "2 boxes and 1 classes",
    ),
    "table of the Hub, a key twice": (
        *("table of the Hub", "train/metadata.jsonl", '"objects"', '"objects": {}, "objects"'),
        "line 1: 'objects' occurs twice",
    ),
}
"""Layout, file, what stands there, what is put in its place, and words of the error."""
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    **{case: (altered(*place), words) for case, (*place, words) in ALTERED.items()},
    "YOLO, all in pixels": (
        also(YOLO, lambda root: [write(file, "0 40 32 20 30\n") for file in sorted(root.glob("labels/*/*.txt"))]),
        "fractions",
    ),
    "all are crowds": (lambda root: standard(root, iscrowd=1), "iscrowd"),
    "a class has crowds alone": (
        edited(lambda content: [entry.update(iscrowd=entry["category_id"] - 1) for entry in content["annotations"]]),
        "all 2 objects of dog in the train split of .* are crowds, which are not learned",
    ),
    "corners for sides": (lambda root: standard(root, bbox=[30, 30, 70, 60]), "right, bottom"),
    "a box outside": (change("annotations", bbox=[90, 10, 5, 5]), r"1 in 1.jpg: its box \[90, 10, 5, 5\].* outside"),
    "a box without area": (change("annotations", bbox=[5, 10, 0, 10]), "annotation 1 in 1.jpg: .*has no area"),
    "a box without a number": (change("annotations", bbox=[5, 10, float("nan"), 10]), "1 in 1.jpg: its bbox is"),
    "three numbers": (change("annotations", bbox=[5, 10, 10]), "annotation 1 in 1.jpg: its bbox is"),
    "another category": (change("annotations", category_id=4), "annotation 1 has category 4; the categories are 1, 2"),
    "another image": (change("annotations", image_id=99), "annotation 1 is of image 99"),
    "an annotation's id twice": (change("annotations", id=0), "annotation id 0 occurs twice"),
    "a file under two ids": (change("images", file_name="0.jpg"), "images 0 and 1 have one file"),
    "an image's id twice": (change("images", id=0), "image id 0 occurs twice"),
    "a category's id twice": (change("categories", id=1), "category id 1 occurs twice"),
    "a missing image": (change("images", file_name="gone.jpg"), "image 1, gone.jpg, is not in .*images"),
    "an image without width": (change("images", width=0), "image 1 has no valid file_name, width and height"),
    "no categories": (edited(lambda content: content.pop("categories")), "no list 'categories'"),
    "no images": (edited(lambda content: content["images"].clear()), "has no images"),
    "no objects": (edited(lambda content: content["annotations"].clear()), "the train split of .* has no objects"),
    "other categories": (edited(lambda content: content["categories"].pop()), "other categories|has category 2"),
    "an absolute path": (change("images", file_name="/data/0.jpg"), "absolute"),
    "an absolute path of Windows": (change("images", file_name="C:\\data\\0.jpg"), "absolute"),
    "another case": (change("images", file_name="1.JPG"), "1.jpg"),
    "neither box nor polygon": (change("annotations", bbox=None, segmentation=None), "1 in 1.jpg: it has no bbox"),
    "several files": (
        lambda root: coco_files(root, "images", "annotations/{}.json", (("a", range(6)), ("b", range(6)))),
        "several annotation files",
    ),
    "YOLO, other parts in data.yaml": (
        also(
            "YOLO without splits",
            lambda root: [
                write(root / "data.yaml", "train: ../images/one\nval: ../images/two\nnames: [cat, dog]\n"),
                *(picture(root / "images" / folder / "9.jpg") for folder in ("one", "two")),
            ],
        ),
        "data.yaml says val: ../images/two, but parts are read from folders",
    ),
    "YOLO, parts exchanged in data.yaml": (
        altered(YOLO, "data.yaml", "train: images/train\nval: images/val", "train: images/val\nval: images/train"),
        "data.yaml says train: images/val",
    ),
    "tables, a copy": (
        also("tables", lambda root: write(root / "train_old.csv", (root / "train.csv").read_text())),
        r"train.csv and train_old.csv both have 0.jpg of train",
    ),
    "YOLO, other names in a list of labelImg": (
        also(
            YOLO,
            lambda root: [
                (root / "data.yaml").unlink(),
                write(root / "labels/train/classes.txt", "cat\ndog\n"),
                write(root / "labels/val/classes.txt", "dog\ncat\n"),
            ],
        ),
        "val/classes.txt has other names of classes than labels/train/classes.txt",
    ),
    "YOLO, other names in a list": (with_file(YOLO, "classes.txt", "dog\ncat\n"), "other names of classes"),
    "YOLO, other names in a second file": (with_file(YOLO, "old.yaml", "names: [dog, cat]\n"), "other names"),
    "YOLO, two images of one name in a list": (
        also(YOLO_LISTS, lambda root: picture(root / "images/more/0.jpg")),
        "2 images are named 0.jpg",
    ),
    "YOLO, a list against a folder": (
        with_file(YOLO, "val.txt", "images/train/0.jpg\n"),
        "is of train by its folder, and of val by a list",
    ),
    "COCO, fractions": (
        lambda root: standard(root, bbox=[0.1, 0.1, 0.5, 0.5], segmentation=None),
        r"train.json: all boxes, such as \[0.1, 0.1, 0.5, 0.5\], are in fractions of the image",
    ),
    "VOC, fractions": (
        with_file(
            "VOC",
            "Annotations/0.xml",
            "<annotation><object><name>cat</name><bndbox><xmin>0.1</xmin>"
            "<ymin>0.1</ymin><xmax>0.6</xmax><ymax>0.6</ymax></bndbox></object></annotation>",
        ),
        r"0.xml: object 1: its box is in fractions of the image",
    ),
    "VOC, a width in words": (
        altered("VOC", "Annotations/0.xml", "<width>", "<width>wide"),
        "its width 'wide80' is no",
    ),
    "table, fractions": (fractions, "line 2: .*fractions of the image"),
    "a pipe as annotations": (a_pipe("VOC", "Annotations/0.xml"), "is no file"),
    "a pipe as an image": (a_pipe("COCO", "images/0.jpg"), "0.jpg"),
    "a pipe beside the images": (a_pipe("COCO", "images/9.jpg"), "is a pipe"),
    "a pipe as a label file": (a_pipe(YOLO, FIRST), "is a pipe"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_stops_check_and_training(tmp_path: Path, case: str) -> None:
    make, words = REFUSED[case]
    make(tmp_path)
    assert re.search(words, agreed(tmp_path)[2])


def shrink(content: dict[str, Any]) -> None:
    content["images"][1] |= {"width": 700, "height": 700}
    content["annotations"][1] |= {"bbox": [5, 5, 1, 1], "segmentation": None}


def tiny(root: Path) -> None:
    edited(shrink)(root)
    picture(root / "images/1.jpg", 1, (700, 700))


def unnamed(layout: str, place: str = "train/9.jpg") -> Callable[[Path], object]:
    """A layout with an image that nothing names."""
    return also(layout, lambda root: picture(root / place, 9))


UNNAMED = "images that no list or annotation names, which are not used: 1"
POINT = '"shapes": [{"label": "cat", "points": [[1, 1]], "shape_type": "point"}, '
WARNED: dict[str, tuple[Callable[[Path], object], str, list[float] | None]] = {
    "a crowd": (change("annotations", iscrowd=1), "crowds", [11, 20, 31, 50]),
    "a box beyond the image": (
        change("annotations", bbox=[-7, 20, 20, 60], segmentation=None),
        "clipped",
        [0, 20, 13, 64],
    ),
    "a polygon beside its box": (change("annotations", bbox=[40, 20, 20, 30]), "polygons", [40, 20, 60, 50]),
    "an image elsewhere": (change("images", file_name="x/1.jpg"), "by their names", [11, 20, 31, 50]),
    "an object below a pixel": (tiny, "less than a pixel", [5, 5, 6, 6]),
    "a point of labelme": (altered("labelme", "0.json", '"shapes": [', POINT), "points and lines", None),
    "YOLO, a line three times": (
        also(YOLO, lambda root: write(root / FIRST, 3 * (root / FIRST).read_text())),
        "second time, which count as further ones: 2, the first",
        None,
    ),
    "COCO, an object twice": (
        edited(lambda content: content["annotations"].append({**content["annotations"][1], "id": 77})),
        "second time, which count as further ones: 1, the first",
        None,
    ),
    "table, a row twice": (
        also(
            "tables",
            lambda root: write(
                root / "train.csv", (text := (root / "train.csv").read_text()) + text.splitlines()[1] + "\n"
            ),
        ),
        "second time, which count as further ones: 1, the first",
        None,
    ),
    "YOLO without a label file": (also(YOLO, lambda root: (root / FIRST).unlink()), "without a label file", None),
    "YOLO, a label file alone": (
        with_file(YOLO, "labels/train/9.txt", "0 .5 .5 .2 .2\n"),
        "label files without an image, which are not used: 1",
        None,
    ),
    "YOLO, an image beside the lists": (unnamed(YOLO_LISTS, "images/9.jpg"), UNNAMED, None),
    "VOC, an image in two lists": (
        altered("VOC", "ImageSets/Main/val.txt", "4", "0\n4"),
        "in train and in val: 1",
        None,
    ),
    "COCO, an image without annotations": (unnamed("COCO", "images/9.jpg"), UNNAMED, None),
    "table, an image elsewhere": (altered("tables", "train.csv", "1.jpg", "x/1.jpg"), "by their names: 1", None),
    "table, an image without a row": (unnamed("table of Roboflow"), UNNAMED, None),
    "VOC, an image without annotations": (unnamed("VOC of Roboflow"), UNNAMED, None),
    "VOC, an image beside the lists": (unnamed("VOC", "JPEGImages/9.jpg"), UNNAMED, None),
    "YOLO, two classes that are one": (
        altered(YOLO, "data.yaml", "[cat, dog]", "[cat, 'Cat ']"),
        "names differ in case or blanks alone: 1, the first: 'cat' and 'Cat '",
        None,
    ),
    "VOC, filename names another image": (
        altered("VOC", "Annotations/1.xml", "<size>", "<filename>0.jpg</filename><size>"),
        "in whose place the image with the XML's name is read: 1, the first: 0.jpg in ",
        None,
    ),
    "labelme, imagePath names no file": (
        altered("labelme", "1.json", "1.jpg", "99.jpg"),
        "image with the JSON's name is read: 1, the first: 99.jpg of ",
        None,
    ),
    "labelme, one object of a class": (
        altered("labelme", "1.json", '"dog"', '"bird "'),
        "classes with a single object: 1, the first: 'bird '",
        None,
    ),
    "labelme, an image without annotations": (unnamed("labelme", "9.jpg"), UNNAMED, None),
}


def test_whole_numbers_of_a_table_are_one_class_however_they_are_written(tmp_path: Path) -> None:
    altered("tables", "train.csv", "cat", "1")(tmp_path)
    for split, numbers in SPLITS:
        file = tmp_path / f"{split}.csv"
        written = (f"{number % 2 + 1}{'.0' * (number > 2)}" for number in numbers)
        head, *rows = file.read_text().splitlines()
        parts = [row.split(",") for row in rows]
        file.write_text(
            "\n".join([head, *(",".join([*p[:3], name, *p[4:]]) for p, name in zip(parts, written, strict=True))])
        )
    splits, _, error = agreed(tmp_path)
    assert error == ""
    assert {int(label) for scenes in splits.values() for scene in scenes for label in scene.objects.labels} == {0, 1}


@pytest.mark.parametrize("case", WARNED)
def test_what_is_unusual_is_one_warning(tmp_path: Path, case: str) -> None:
    make, word, corners = WARNED[case]
    make(tmp_path)
    splits, said, error = agreed(tmp_path)
    assert error == ""
    assert [word in text for text in said] == [True]
    if corners:
        (scene,) = (scene for scene in splits["train"] if Path(scene.name).stem == "1")
        assert scene.objects.boxes.tolist() == [corners]


def test_a_training_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its defaults, its key and its scenes are of one reading."""
    make, word, _ = WARNED["VOC, an image beside the lists"]
    make(tmp_path)
    monkeypatch.setattr("regard.images.digest.UNSETTLED", 0)  # as for files that are older than the test
    task = Detection(data=str(tmp_path), **Detection.defaults(str(tmp_path))["task"])
    assert task.identity()
    assert task.record()
    assert [word in record.getMessage() for record in caplog.records] == [True]


def test_skipped_data_that_are_read_now_have_another_key(tmp_path: Path) -> None:
    """Older versions left the box out with corrupt="skip"."""
    change("annotations", bbox=[-7, 20, 20, 60], segmentation=None)(tmp_path)
    assert data.identity(str(tmp_path), False, "skip") == f"{data.identity(str(tmp_path), False, 'stop')}@2"
    standard(tmp_path / "right")
    assert len({data.identity(str(tmp_path / "right"), False, corrupt) for corrupt in ("skip", "stop")}) == 1


def test_yolo_may_begin_with_many_images_of_background(tmp_path: Path) -> None:
    LAYOUTS[YOLO](tmp_path)
    for number in range(101):
        picture(tmp_path / f"images/train/--{number}.jpg", 0, (8, 8))
        write(tmp_path / f"labels/train/--{number}.txt", "")
    assert tuple(data.load(str(tmp_path), False, "stop").classes) == tuple(NAMES)


def test_names_of_labelimg_beside_its_labels_are_read(tmp_path: Path) -> None:
    LAYOUTS[YOLO](tmp_path)
    (tmp_path / "data.yaml").unlink()
    write(tmp_path / "labels/train/classes.txt", "cat\ndog\n")
    assert data.load(str(tmp_path), False, "stop").classes == NAMES


def test_names_of_yolo_are_the_texts_that_are_written(tmp_path: Path) -> None:
    """Older versions read False and 8; what they read as now keeps its key."""
    keys = []
    for names, classes in (("[no, 010]", ("no", "010")), ("['no', '010']", ("no", "010")), ("[no, b]", ("no", "b"))):
        altered(YOLO, "data.yaml", "[cat, dog]", names)(tmp_path / str(len(keys)))
        assert data.load(str(tmp_path / str(len(keys))), False, "stop").classes == classes
        keys.append(data.identity(str(tmp_path / str(len(keys))), False, "stop"))
    assert [key.endswith("@3") for key in keys] == [True, False, True]
    altered("YOLO of polygons", "data.yaml", "[cat, dog]", "[no, b]")(tmp_path / "masks")
    assert own_digest(tmp_path / "masks").endswith("@3")


def turned(root: Path, orientations: dict[int, int], stored: bool | None, square: bool = False) -> None:
    """COCO's data, some of whose images are turned, annotated as stored or upright; None = both."""
    standard(root)
    for split, part in SPLITS:
        content = coco(part, segmentation=None)
        for entry in content["images"]:
            number = entry["id"]
            if number not in orientations:
                continue
            size = (60, 60) if square else (WIDTH, HEIGHT)
            picture(root / "images" / f"{number}.jpg", number, size, orientations[number])
            as_stored = number % 2 == 0 if stored is None else stored
            sides = size if as_stored or orientations[number] < 5 else size[::-1]
            entry |= {"width": sides[0], "height": sides[1]}
        write(root / f"{split}.json", content)


@pytest.mark.parametrize(
    ("orientations", "stored", "square", "kept"),
    [
        ({0: 6}, True, False, True),
        ({0: 6, 1: 3}, True, False, True),
        ({0: 8}, False, False, False),
        ({0: 3}, True, False, False),  # nothing tells
        ({0: 6}, True, True, False),
    ],
)
def test_pictures_are_turned_as_they_were_annotated(
    tmp_path: Path, orientations: dict[int, int], stored: bool, square: bool, kept: bool
) -> None:
    turned(tmp_path, orientations, stored, square)
    splits, said, error = agreed(tmp_path)
    assert error == ""
    sizes = {int(Path(scene.name).stem): scene.size for scene in splits["train"]}
    assert sizes[0] == ((60, 60) if square else (HEIGHT, WIDTH) if stored else (WIDTH, HEIGHT))
    unknown = not kept and (square or 3 in orientations.values())
    assert [("EXIF" in text) for text in said] == [True] * (kept or unknown)
    first = next(row for row, scene in enumerate(splits["train"]) if Path(scene.name).stem == "0")
    plain = task_on(tmp_path, exif="keep" if kept else "turn")
    assert np.array_equal(task_on(tmp_path).part("train").pixels(first), plain.part("train").pixels(first))


def test_a_size_that_is_not_annotated_does_not_tell_how_pictures_are_turned(tmp_path: Path) -> None:
    """Of two turned pictures of Pascal VOC one has its size as it is stored, the other none."""
    LAYOUTS["VOC"](tmp_path)
    for number in (0, 1):
        picture(tmp_path / "JPEGImages" / f"{number}.jpg", number, (WIDTH, HEIGHT), 6)
    annotation = tmp_path / "Annotations" / "1.xml"
    annotation.write_text(re.sub("<size>.*</size>", "", annotation.read_text(), flags=re.DOTALL))
    splits, _, error = agreed(tmp_path)
    assert error == ""
    assert {scene.size for scene in splits["train"]} == {(HEIGHT, WIDTH)}


def test_evidence_for_both_is_refused_and_a_choice_decides(tmp_path: Path) -> None:
    turned(tmp_path, {0: 6, 1: 6}, None)
    error = agreed(tmp_path)[2]
    assert "0.jpg" in error
    assert "1.jpg" in error
    assert "--exif" in error
    turned(tmp_path, {0: 3}, True)
    one, two = (task_on(tmp_path, exif=choice).part("train").pixels(0) for choice in ("keep", "turn"))
    assert np.array_equal(one[::-1, ::-1].mean((0, 1)).round(), two.mean((0, 1)).round())
    assert not np.array_equal(one, two)


def test_annotations_that_are_a_link_to_nothing_are_named(tmp_path: Path) -> None:
    standard(tmp_path)
    (tmp_path / "val.json").unlink()
    (tmp_path / "val.json").symlink_to(tmp_path / "gone.json")
    with pytest.raises(DataError, match=r"val\.json is a link to nothing"):
        check_data(str(tmp_path))


@pytest.mark.parametrize("points", [4, 5])
def test_lines_of_key_points_without_their_shape_are_no_polygons(tmp_path: Path, points: int) -> None:
    pictures(tmp_path / "images/train", range(3))
    line = f"0 .5 .5 .2 .4 {'.45 .6 2 ' * points}\n"
    for number in range(3):
        write(tmp_path / f"labels/train/{number}.txt", line)
    with pytest.raises(DataError, match=r"kpt_shape"):
        data.load(str(tmp_path), False, "stop")
    write(tmp_path / "data.yaml", f"names: [cat]\nkpt_shape: [{points}, 3]\n")
    scenes = data.load(str(tmp_path), False, "stop").splits["train"]
    np.testing.assert_allclose(scenes[0].objects.boxes[0] / (WIDTH, HEIGHT, WIDTH, HEIGHT), [0.4, 0.3, 0.6, 0.7], 1e-6)


def test_lines_of_one_length_are_said_to_be_polygons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They may be key points without visibility."""
    pictures(tmp_path / "images/train", range(3))
    for number in range(3):
        write(tmp_path / f"labels/train/{number}.txt", "0 .5 .5 .2 .4 .45 .6 .4 .4 .5 .5\n")
    data.load(str(tmp_path), False, "stop")
    assert "lines of 10 numbers, which are read as polygons of 5 points: key points need kpt_shape" in caplog.text


def test_images_in_training_and_test_are_said_by_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in ("apart", "alike"):
        LAYOUTS[YOLO](tmp_path / folder)
    data.load(str(tmp_path / "apart"), False, "stop")
    assert "in train, too" not in caplog.text
    images = tmp_path / "alike/images"
    shutil.copy(images / "train/0.jpg", next(images.glob("val/*.jpg")))
    data.load(str(tmp_path / "alike"), False, "stop")
    assert "images of val that are in train, too, so that their scores are no test: 1, the first: " in caplog.text
