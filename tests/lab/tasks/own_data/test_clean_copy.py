"""A clean copy is read as the original was, without a problem."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from layouts_of_boxes import LAYOUTS, coco, picture, pictures, standard, write
from regard.cli.app import run
from regard.core import ConfigError, DataError
from regard.images import own
from regard.images.images import read_image
from regard.lab.tasks.check_data import check_data
from regard.lab.tasks.clean_copy import write_clean_copy
from regard.lab.tasks.detection import masks
from regard.lab.tasks.detection.data import Choices, own_splits
from regard.lab.tasks.segmentation.data import own_set
from small_masks import FOLDERS, labels, pairs

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", LAYOUTS)
def test_boxes_of_every_layout(tmp_path: Path, name: str) -> None:
    LAYOUTS[name](tmp_path / "data")
    write_clean_copy(str(tmp_path / "data"), tmp_path / "out", "detection")
    before, after = (own_splits(tmp_path / folder, Choices()) for folder in ("data", "out"))
    assert after.categories == before.categories
    assert after.splits.keys() == before.splits.keys()
    for split, scenes in before.splits.items():
        for old, new in zip(scenes, after.splits[split], strict=True):
            assert (read_image(old.source, None, 3) == read_image(new.source, None, 3)).all()
            np.testing.assert_allclose(old.objects.boxes, new.objects.boxes, atol=1e-4)
            assert (old.objects.labels == new.objects.labels).all()
    assert check_data(str(tmp_path / "out")).problems == []


@pytest.mark.parametrize("make", [LAYOUTS["labelme"], LAYOUTS["YOLO of polygons"], lambda root: standard(root)])
def test_a_copy_of_boxes_keeps_the_polygons(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """As they were; those that leave their image are masks. The check says for which other tasks they are."""
    make(tmp_path / "data")
    write_clean_copy(str(tmp_path / "data"), tmp_path / "out")
    before, after = (own_splits(tmp_path / name, Choices(outlines=True)) for name in ("data", "out"))
    for split, scenes in before.splits.items():
        assert [new.objects.outlines for new in after.splits[split]] == [old.objects.outlines for old in scenes]
    for name in ("data", "out"):
        report = check_data(str(tmp_path / name))
        assert (report.problems, report.warnings) == ([], [])
        assert [hint.startswith("all 6 objects have polygons") for hint in report.hints] == [True]
    assert check_data(str(tmp_path / "out"), "instances").problems == []


def test_pictures_of_a_copy_of_boxes_can_be_found_again(tmp_path: Path) -> None:
    """By their names; where one occurs twice, by those in the JSON."""
    LAYOUTS["labelme in splits"](tmp_path / "data")
    write_clean_copy(str(tmp_path / "data"), tmp_path / "out")
    assert {file.name for file in (tmp_path / "out" / "images").iterdir()} == {f"{n}.jpg" for n in range(6)}
    shutil.copytree(tmp_path / "data", tmp_path / "double")
    for end in ("jpg", "json"):
        (tmp_path / "double" / "val" / f"4.{end}").rename(tmp_path / "double" / "val" / f"0.{end}")
    write_clean_copy(str(tmp_path / "double"), tmp_path / "again")
    entries = json.loads((tmp_path / "again" / "val.json").read_text())["images"]
    assert [entry["original"] for entry in entries] == ["val/0.jpg", "val/5.jpg"]


def test_polygons_that_leave_their_image_are_masks_in_a_copy_of_boxes(tmp_path: Path) -> None:
    standard(tmp_path / "data", bbox=[70, 50, 20, 30], segmentation=[[70, 50, 90, 50, 90, 80, 70, 80]])
    edited = json.loads((tmp_path / "data" / "train.json").read_text())
    edited["annotations"][0].pop("segmentation")
    write(tmp_path / "data" / "train.json", edited)
    write_clean_copy(str(tmp_path / "data"), tmp_path / "out")
    first, *others = own_splits(tmp_path / "out", Choices(outlines=True)).splits["train"]
    assert first.objects.outlines == (None,)
    assert [masks.area(masks.from_annotation(*scene.objects.outlines, scene.size)) for scene in others] == [140] * 3
    report = check_data(str(tmp_path / "out"))
    assert (report.problems, report.warnings, report.hints) == ([], [], [])


def test_objects_that_leave_their_image_and_turned_images(tmp_path: Path) -> None:
    """Boxes are clipped; masks and crowds stay; an image that EXIF data do not turn here is not turned elsewhere."""
    standard(tmp_path / "data", bbox=[70, 50, 20, 30], segmentation=[[70, 50, 90, 50, 90, 80, 70, 80]])
    picture(tmp_path / "data" / "images" / "0.jpg", 0, orientation=6)
    (tmp_path / "data" / "images" / "1.jpg").write_bytes(b"no image")
    lines = write_clean_copy(str(tmp_path / "data"), tmp_path / "out", "instances")
    assert lines[0].endswith("5 images written")
    assert "1.jpg cannot be read as an image" in lines[1]
    found = own_splits(tmp_path / "out", Choices(with_masks=True))
    for scenes in found.splits.values():
        for scene in scenes:
            assert scene.objects.boxes.tolist() == [[70, 50, 80, 64]]
            assert scene.objects.masks is not None
            assert read_image(scene.source, None, 3).shape == (64, 80, 3)
    assert check_data(str(tmp_path / "out"), "instances").problems == []


def test_classes(tmp_path: Path) -> None:
    """From a list; a turned image, one of four inks and one that cannot be read."""
    data = tmp_path / "data"
    pictures(data / "images", range(12), ".png")
    picture(data / "images" / "0.png", 0, orientation=6)
    Image.new("CMYK", (9, 9), (9, 99, 0, 0)).save(data / "images" / "ink.jpg")
    (data / "images" / "none.png").write_bytes(b"no image")
    names = [*(f"{number}.png" for number in range(12)), "ink.jpg", "none.png"]
    rows = "".join(f"images/{name},{'cat' if place % 2 else 'dog'}\n" for place, name in enumerate(names))
    write(data / "labels.csv", f"file,label\n{rows}")
    lines = write_clean_copy(str(data), tmp_path / "out")
    assert lines[0].endswith("13 images written")
    assert "none.png cannot be read" in lines[1]
    splits = [own.read_splits(path) for path in (data, tmp_path / "out")]
    (old_classes, old), (new_classes, new) = splits
    assert old_classes == new_classes == ("cat", "dog")
    for split in ("train", "test"):
        found = [
            sorted(
                (int(label), read_image(Path(str(source)), None, 3).tobytes())
                for source, label in zip(sources, labels, strict=True)
                if "none" not in str(source)
            )
            for sources, _, labels in (old[split], new[split])
        ]
        assert found[0] == found[1]
    others = rows.replace("images/1.png,cat\n", "")
    for name in ("../../elsewhere", "a\0", 300 * "ä"):
        write(data / "labels.csv", f"file,label\n{others}images/1.png,{name}\n")
        with pytest.raises(DataError, match=f"the class {re.escape(repr(name)[:60])}.* rename"):
            write_clean_copy(str(data), tmp_path / "other")
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "other").exists()


def test_masks(tmp_path: Path) -> None:
    """Masks of 0 and 255, from which the labels 0 and 1 become."""
    pairs(tmp_path / "data", FOLDERS[0], "masks/{0}/{1}_mask.png", lambda number: labels(number, 2) * 255)
    assert run(["data", "check", str(tmp_path / "data"), "--fix", str(tmp_path / "out")]) == 0
    before, after = (own_set(tmp_path / name, 255, 0, name) for name in ("data", "out"))
    assert after.classes == before.classes
    for split in ("train", "test"):
        for old, new in zip(before.splits[split], after.splits[split], strict=True):
            assert (old.image == new.image).all()
            assert (old.mask == new.mask).all()


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    standard(tmp_path / "data")
    for out, words in (("data", "lies in .*data"), ("data/images/new", "lies in .*data"), (".", "is in use")):
        with pytest.raises(ConfigError, match=words):
            write_clean_copy(str(tmp_path / "data"), tmp_path / out)
    write(tmp_path / "texts" / "train.csv", "text,label\na,0\nb,1\n")
    with pytest.raises(ConfigError, match="--fix writes images"):
        write_clean_copy(str(tmp_path / "texts"), tmp_path / "out")
    with pytest.raises(DataError, match="does not exist"):
        write_clean_copy(str(tmp_path / "nowhere"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write(tmp_path / "crowds" / "train.json", coco(range(4), iscrowd=1))
    pictures(tmp_path / "crowds" / "images", range(4))
    assert run(["data", "check", str(tmp_path / "crowds"), "--fix", str(tmp_path / "out")]) == 2
    assert "crowds" in capsys.readouterr().err
