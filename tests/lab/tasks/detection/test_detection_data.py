"""Data for detection: both formats, and one clear error for every bad input."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.core import DataError
from regard.images import digest
from regard.lab.tasks.detection import Detection, Instances, data, masks
from small_scenes import SIZE, coco_folder

pytestmark = pytest.mark.usefixtures("own_cache")


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    file = folder / "train.json"
    made = json.loads(file.read_text())
    change(made)
    file.write_text(json.dumps(made))
    return folder


def test_coco_is_read_with_its_gap_in_the_categories(tmp_path: Path) -> None:
    scene_set = data.load(str(coco_folder(tmp_path / "own")), False, "stop")
    made = json.loads((tmp_path / "own" / "train.json").read_text())
    assert scene_set.classes == ("bright", "dark")
    assert scene_set.category_ids == (3, 7)
    assert {split: len(scenes) for split, scenes in scene_set.splits.items()} == {"train": 6, "val": 4}
    for scene in scene_set.splits["train"]:
        own = [entry for entry in made["annotations"] if entry["image_id"] == scene.number]
        left, top, width, height = np.array([entry["bbox"] for entry in own], np.float32).reshape(-1, 4).T
        assert np.array_equal(scene.objects.boxes, np.stack([left, top, left + width, top + height], 1))
        assert scene.objects.labels.tolist() == [0 if entry["category_id"] == 3 else 1 for entry in own]


def test_identity_is_a_digest_that_does_not_depend_on_the_path(tmp_path: Path) -> None:
    one, two = (data.identity(str(coco_folder(tmp_path / name)), False, "stop") for name in ("one", "two"))
    assert one == two
    assert one.startswith("own:")
    changed(coco_folder(tmp_path / "three"), lambda made: made["annotations"][0]["bbox"].__setitem__(2, 5))
    assert data.identity(str(tmp_path / "three"), False, "stop") != one


def _set(part: str, field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda made: made[part][1].__setitem__(field, value)


def test_wrong_annotations_are_refused_before_images_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all bytes of large data takes minutes."""
    monkeypatch.setattr(digest, "LIMIT", 0)  # reaching the digest would ask for its kind
    folder = changed(coco_folder(tmp_path / "wrong", masks=True), _set("annotations", "category_id", 9))
    for task in (Detection, Instances):
        with pytest.raises(DataError, match="annotation 2 has category 9"):
            task(host="vit_desk", data=str(folder), size=(48, 64)).identity()
    with pytest.raises(DataError, match="--digest index"):
        Detection(host="vit_desk", data=str(coco_folder(tmp_path / "right")), size=(48, 64)).identity()


def test_skip_leaves_out_what_is_wrong_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(coco_folder(tmp_path / "own"), _set("annotations", "bbox", [70, 10, 20, 10]))
    (folder / "images" / "5.png").unlink()
    train = data.load(str(folder), False, "skip").splits["train"]
    assert [scene.number for scene in train] == [1, 2, 3, 4, 6]
    assert [len(scene.objects) for scene in train] == [0, 1, 1, 3, 5]
    assert "annotation 2 in 3.png" in caplog.text
    assert "5.png" in caplog.text


def test_coco_itself_is_read_without_its_objects_of_no_height(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Annotations 918 and 2206849 of instances_train2017.json have boxes of no height."""
    path = coco_folder(tmp_path / "coco")
    flat = {"bbox": [1.0, 2.0, 30.0, 0.0], "area": 0.0}
    for number in (918, 2206849):
        changed(path, lambda made, n=number: made["annotations"].append({**made["annotations"][0], "id": n, **flat}))
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with caplog.at_level("WARNING", "regard.data"):
        found = data.load("coco", False, "stop")
    assert sum(len(scene.objects) for scene in found.splits["train"]) == 15
    (record,) = caplog.records
    assert "2 wrong annotations are left out, the first: " in record.message
    assert "annotation 918 in 2.png: its box [1.0, 2.0, 30.0, 0.0] has no area" in record.message
    (path / "images" / "3.png").unlink()
    shutil.copytree(path, tmp_path / "root" / "coco")  # what is read once is kept by its path
    monkeypatch.setenv("REGARD_DATA", str(tmp_path / "root"))
    with pytest.raises(DataError, match="image 3, 3.png, is not in"):
        data.load("coco", False, "stop")
    assert [scene.number for scene in data.load("coco", False, "skip").splits["train"]] == [1, 2, 4, 5, 6]


@pytest.mark.parametrize(
    ("segmentation", "words"),
    [
        ({"size": [30, 30], "counts": [900]}, "mask has 30x30 pixels .*the image has 48x64"),
        ({"size": list(SIZE), "counts": [10, 20]}, "sum 3072"),
        ({"size": list(SIZE), "counts": "1234"}, "sum 3072"),
        ({"size": list(SIZE), "counts": "\x7f!"}, "no encoding has"),
        ({"size": list(SIZE), "counts": [3072]}, "its mask is empty"),
        ([[1, 2, 3, 4]], "three points"),
        ([], "has no segmentation"),
        (5, "neither a list of polygons nor"),
    ],
)
def test_bad_masks_are_named(tmp_path: Path, segmentation: Any, words: str) -> None:
    folder = changed(coco_folder(tmp_path / "own", masks=True), _set("annotations", "segmentation", segmentation))
    with pytest.raises(DataError, match=f"train.json: annotation 2 in 3.png.*{words}"):
        data.load(str(folder), True, "stop")
    if words != "three points":  # as in labelme
        assert data.load(str(folder), False, "stop")  # boxes alone
        return
    with pytest.raises(DataError, match="annotation 2 in 3.png: a polygon has fewer than three points"):
        data.load(str(folder), False, "stop")
    assert data.identity(str(folder), False, "skip").endswith("@2")


def test_a_box_that_is_not_that_of_its_mask_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = {"size": list(SIZE), "counts": [0, SIZE[0] * SIZE[1]]}
    folder = changed(coco_folder(tmp_path / "own", masks=True), _set("annotations", "segmentation", whole))
    assert data.load(str(folder), True, "stop")
    assert ["boxes that are not those of their polygons or masks" in one.message for one in caplog.records] == [True]


def test_a_folder_of_no_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no train.json"):
        data.load(str(tmp_path), False, "stop")
    with pytest.raises(DataError, match="unknown data set 'bcd'.*bccd"):
        data.load("bcd", False, "stop")
    with pytest.raises(DataError, match="does not exist"):
        data.load(str(tmp_path / "gone"), False, "stop")


def test_all_encodings_of_a_mask_are_the_same() -> None:
    mask = np.zeros((1, *SIZE), bool)
    mask[0, 5:20, 10:30] = True
    (packed,) = masks.encode(mask)
    runs = np.flatnonzero(np.diff(np.concatenate([[False], mask[0].ravel(order="F"), [False]]).astype(int)))
    counts = np.diff([0, *runs, mask[0].size]).tolist()
    polygon = [[10, 5, 30, 5, 30, 20, 10, 20]]
    text = masks.as_text(packed)
    assert masks.run_lengths(packed["counts"]) == [count for count in counts if count] or counts
    for segmentation in (polygon, text, {"size": list(SIZE), "counts": counts}):
        rle = masks.from_annotation(segmentation, SIZE)
        assert np.array_equal(masks.decode([rle], SIZE), mask.astype(np.uint8))
        assert masks.area(rle) == 15 * 20


@pytest.mark.parametrize("seed", range(5))
def test_run_lengths_are_those_of_the_mask(seed: int) -> None:
    mask = np.random.default_rng(seed).random((37, 53)) < (0.5 if seed % 2 else 0.02)
    (packed,) = masks.encode(mask[None])
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat.astype(int))) + 1
    lengths = np.diff([0, *changes, flat.size]).tolist()
    assert masks.run_lengths(packed["counts"]) == ([0, *lengths] if flat[0] else lengths)


@pytest.mark.slow
def test_bccd_and_nuclei_are_complete(data_root: Path) -> None:
    for name, with_masks, counts in (("bccd", False, (2804, 1137, 945)), ("nuclei", True, (8746, 1806, 1756))):
        if not (data_root / name).is_dir():
            pytest.skip(f"needs {data_root / name}")
        splits = data.load(name, with_masks, "stop").splits
        assert tuple(sum(len(scene.objects) for scene in splits[split]) for split in splits) == counts
