"""Images with masks as common tools write them: labels and classes are right, and check and training agree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from layouts_of_boxes import HEIGHT, TRAIN, WHOLE, WIDTH, WITH_SPLITS, box, picture, write
from regard.core import DataError
from regard.images import images
from regard.lab.tasks.check_data import check_data
from regard.lab.tasks.segmentation.data import load, own_digest, own_set
from regard.models.segmentation import VOID

SHAPE = (12, 16)
COLOURS = np.array([(0, 0, 0), (128, 0, 0), (0, 128, 0)], np.uint8)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own_digest.cache_clear()
    own_set.cache_clear()


def labels(number: int, classes: int = 3) -> np.ndarray:
    return np.random.default_rng(number).integers(0, classes, SHAPE).astype(np.uint8)


def mask(path: Path, values: np.ndarray, mode: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    if mode == "P":
        image = image.quantize(3, dither=Image.Dither.NONE) if values.ndim == 3 else image.convert("P")
    (image.convert(mode) if mode else image).save(path)


def pairs(root: Path, image: str, name: str, values: Callable[[int], np.ndarray] = labels, mode: str = "") -> None:
    """Four training and two further images; {0} stands for the split and {1} for the number."""
    for number in range(6):
        split = "train" if number in TRAIN else "val"
        picture(root / image.format(split, number), number, SHAPE[::-1])
        mask(root / name.format(split, number), values(number), mode)


def coloured(root: Path, file: str, content: str, mode: str = "RGB") -> None:
    pairs(root, "images/{0}/{1}.png", "masks/{0}/{1}.png", lambda n: COLOURS[labels(n)], mode)
    write(root / file, content)


LIST = "name,r,g,b\nsky,0,0,0\nroad,128,0,0\ntree,0,128,0\n"
RAW = np.array([7, 8, 26, 0, 4, 255], np.uint8)
"""Labels of Cityscapes: road, sidewalk, car, and three that do not count."""


def cityscapes(root: Path, raw: bool) -> None:
    for number in range(6):
        split = "train" if number in TRAIN else "val"
        stem = f"a/a_{number}_000019"
        picture(root / "leftImg8bit" / split / f"{stem}_leftImg8bit.png", number, SHAPE[::-1])
        ids = labels(number, 6)
        folder = root / "gtFine" / split
        mask(folder / f"{stem}_gtFine_labelIds.png", RAW[ids])
        mask(folder / f"{stem}_gtFine_color.png", COLOURS[ids % 3])
        if not raw:
            mask(folder / f"{stem}_gtFine_labelTrainIds.png", np.array([0, 1, 13, 255, 255, 255], np.uint8)[ids])


def voc(root: Path, lists: bool) -> None:
    pairs(root, "JPEGImages/{1}.jpg", "SegmentationClass/{1}.png")
    for split, numbers in (("train", range(4)), ("val", range(4, 6))) if lists else ():
        write(root / "ImageSets" / "Segmentation" / f"{split}.txt", "".join(f"{n}\n" for n in numbers))


def binary(number: int) -> np.ndarray:
    return labels(number, 2) * 255


def inside(number: int) -> np.ndarray:
    """The mask of the object of `layouts_of_boxes`."""
    left, top, width, height = box(number)
    values = np.zeros((HEIGHT, WIDTH), np.uint8)
    values[top : top + height, left : left + width] = 1 + number % 2
    return values


def same(number: int) -> np.ndarray:
    return np.repeat(binary(number)[..., None], 3, -1)


FOLDERS = ("images/{0}/{1}.png", "masks/{0}/{1}.png")
THREE = ("0", "1", "2")
OBJECTS = ("background", "cat", "dog")


def halves(number: int) -> np.ndarray:
    return binary(number) // 255


def cars(number: int) -> np.ndarray:
    return np.array([0, 1, 13, VOID, VOID, VOID], np.uint8)[labels(number, 6)]


CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], Callable[[int], np.ndarray]]] = {
    "0 and 255": (lambda root: pairs(root, *FOLDERS, binary), ("0", "255"), halves),
    "0 and 255, palette": (lambda root: pairs(root, *FOLDERS, binary, "P"), ("0", "255"), halves),
    "0 and 255, one bit": (lambda root: pairs(root, *FOLDERS, binary, "1"), ("0", "1"), halves),
    "0 and 255, equal channels": (lambda root: pairs(root, *FOLDERS, same), ("0", "255"), halves),
    "0 and 255, opaque": (lambda root: pairs(root, *FOLDERS, same, "RGBA"), ("0", "255"), halves),
    "0 and 255, grey and opaque": (lambda root: pairs(root, *FOLDERS, binary, "LA"), ("0", "255"), halves),
    "an ending": (lambda root: pairs(root, FOLDERS[0], "masks/{0}/{1}_mask.png"), THREE, labels),
    "two endings": (lambda root: pairs(root, "images/{0}/{1}_sat.jpg", "masks/{0}/{1}_mask.png"), THREE, labels),
    "beside the images": (lambda root: pairs(root, "{0}/{1}.jpg", "{0}/{1}_mask.png"), THREE, labels),
    "Cityscapes": (lambda root: cityscapes(root, True), ("road", "sidewalk", "car"), cars),
    "Cityscapes with train ids": (lambda root: cityscapes(root, False), ("road", "sidewalk", "car"), cars),
    "VOC": (lambda root: voc(root, True), THREE, labels),
    "colours": (lambda root: coloured(root, "classes.csv", LIST), ("sky", "road", "tree"), labels),
    "colours of CamVid": (lambda root: coloured(root, "class_dict.csv", LIST), ("sky", "road", "tree"), labels),
    "colours, palette": (lambda root: coloured(root, "classes.csv", LIST, "P"), ("sky", "road", "tree"), labels),
    "colours of CVAT": (
        lambda root: coloured(root, "labelmap.txt", "# label:color\nsky:0,0,0::\nroad:128,0,0::\ntree:0,128,0::\n"),
        ("sky", "road", "tree"),
        labels,
    ),
    "colours with void": (
        lambda root: coloured(root, "classes.csv", "sky,0,0,0\nvoid,128,0,0\ntree,0,128,0\n"),
        ("sky", "tree"),
        lambda n: np.array([0, VOID, 1], np.uint8)[labels(n)],
    ),
    "polygons of COCO": (WITH_SPLITS["COCO"], OBJECTS, inside),
    "polygons of YOLO": (WITH_SPLITS["YOLO of polygons"], OBJECTS, inside),
    "polygons of labelme": (WITH_SPLITS["labelme in splits"], OBJECTS, inside),
}


def agreed(path: Path, **options: Any) -> tuple[Any, str]:
    """What a training reads, or what stops it; `regard data check` foresees the latter."""
    try:
        found, error = load(str(path), options.get("void", 255), options.get("classes", 0)), ""
        for split in found.splits.values():
            [(sample.image, sample.mask) for sample in split]
    except DataError as problem:
        found, error = None, str(problem)
    try:
        problems = check_data(str(path), "segmentation", **options).problems
    except DataError as problem:
        problems = [str(problem)]
    assert bool(problems) == bool(error), (problems, error)
    return found, error


@pytest.mark.parametrize("case", CASES)
def test_masks_are_read(tmp_path: Path, case: str) -> None:
    make, names, expected = CASES[case]
    make(tmp_path)
    found, error = agreed(tmp_path)
    assert error == ""
    used = set()
    for name, part in (("train", range(4)), ("test", range(4, 6))):
        assert len(found.splits[name]) == len(part)
        for number, sample in zip(part, found.splits[name], strict=True):
            assert np.array_equal(sample.mask, expected(number))
            used |= set(np.unique(sample.mask).tolist()) - {VOID}
    if case.startswith("Cityscapes"):
        assert len(found.classes) == 19
        assert {found.classes[label] for label in used} == set(names)
    else:
        assert found.classes == names
    if not case.startswith("polygons"):
        assert check_data(str(tmp_path)).kind == "segmentation"


@pytest.mark.parametrize("make", [lambda root: voc(root, False), WHOLE["COCO of CVAT"]], ids=["VOC", "COCO"])
def test_masks_without_splits_are_divided(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path)
    found, error = agreed(tmp_path)
    assert error == ""
    assert {split: len(part) for split, part in found.splits.items()} == {"train": 4, "test": 2}


def several(root: Path) -> None:
    for end in ("_a", "_b"):
        pairs(root, FOLDERS[0], "masks/{0}/{1}" + end + ".png")


def no_mask_fits(root: Path) -> None:
    pairs(root, FOLDERS[0], "masks/{0}/m{1}.png")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "colours without a list": (lambda root: pairs(root, *FOLDERS, lambda n: COLOURS[labels(n)]), "classes.csv"),
    "a colour that is not listed": (lambda root: coloured(root, "classes.csv", LIST[:-13]), "has the colour 0,128,0"),
    "a list of colours with a word": (lambda root: coloured(root, "classes.csv", LIST + "x,y,0,0\n"), "line 5"),
    "several masks": (several, "_a, _b"),
    "no mask has the name of an image": (no_mask_fits, "no image of"),
    "labels from 1": (lambda root: pairs(root, *FOLDERS, lambda n: labels(n) + 1), "task.void=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_cannot_be_read_stop_check_and_training(tmp_path: Path, case: str) -> None:
    make, word = REFUSED[case]
    make(tmp_path)
    assert word in agreed(tmp_path)[1]


def test_labels_from_1_are_read_with_void_0(tmp_path: Path) -> None:
    pairs(tmp_path, *FOLDERS, lambda number: labels(number) + 1)
    found, error = agreed(tmp_path, void=0)
    assert (found.classes, error) == (("1", "2", "3"), "")


@pytest.mark.parametrize("as_stored", [True, False])
def test_masks_lie_on_the_picture_that_they_were_made_for(tmp_path: Path, as_stored: bool) -> None:
    """A camera was turned: the mask has the sides of the stored picture, or of the upright one."""
    pairs(tmp_path, *FOLDERS)
    picture(tmp_path / "images/train/0.png", 0, SHAPE[::-1], orientation=6)
    values = labels(0) if as_stored else labels(0).T.copy()
    mask(tmp_path / "masks/train/0.png", values)
    found, error = agreed(tmp_path)
    assert error == ""
    sample = found.splits["train"][0]
    assert np.array_equal(sample.mask, values)
    stored = np.random.default_rng(0).integers(0, 255, (*SHAPE, 3), dtype=np.uint8)
    assert np.array_equal(sample.image, stored if as_stored else np.rot90(stored, -1))
    assert [("EXIF" in text) for text in check_data(str(tmp_path)).warnings] == [True] * as_stored


def tiff(path: Path, channels: int) -> None:
    """A TIFF without compression whose pixels have so many channels of 8 bits."""
    width, height, more = 3, 2, channels - 3
    data = bytes(range(width * height * channels))
    shorts = (8).to_bytes(2, "little") * channels + bytes(2) * more  # bits of each channel, kinds of the further ones
    extra = 160 + 2 * channels if more > 2 else 0
    entries = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, channels, 160), (259, 3, 1, 1), (262, 3, 1, 2),
               (273, 4, 1, 200), (277, 3, 1, channels), (278, 3, 1, height), (279, 4, 1, len(data)),
               (338, 3, more, extra)]  # fmt: skip
    head = b"II*\0" + (8).to_bytes(4, "little") + len(entries).to_bytes(2, "little")
    for tag, kind, number, value in entries:
        head += tag.to_bytes(2, "little") + kind.to_bytes(2, "little")
        head += number.to_bytes(4, "little") + value.to_bytes(4, "little")
    path.write_bytes(((head + bytes(4)).ljust(160, b"\0") + shorts).ljust(200, b"\0") + data)


def test_channels_and_pages_that_are_not_read_are_told(tmp_path: Path) -> None:
    for number in range(6):
        picture(tmp_path / "ab"[number % 2] / f"{number}.png", number)
    pages = [Image.new("RGB", (8, 8), (n, 0, 0)) for n in range(3)]
    pages[0].save(tmp_path / "a" / "pages.tif", save_all=True, append_images=pages[1:])
    tiff(tmp_path / "b" / "five.tif", 5)
    report = check_data(str(tmp_path))
    assert report.problems == []
    assert [("all pages" in text, "channels 4 to 5" in text) for text in report.warnings] == [
        (True, False),
        (False, True),
    ]
    tiff(tmp_path / "b" / "five.tif", 8)
    assert ["8 channels" in text for text in check_data(str(tmp_path)).problems] == [True]


def test_a_picture_that_is_too_large_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = picture(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for read in (images.read_image, lambda file, *rest: images.size_of(file)):
        with pytest.raises(DataError, match="tiles"):
            read(file, None, 3)


def test_a_crowd_of_polygons_is_void(tmp_path: Path) -> None:
    WITH_SPLITS["COCO"](tmp_path)
    content = json.loads((tmp_path / "train.json").read_text())
    content["annotations"][0]["iscrowd"] = 1
    write(tmp_path / "train.json", content)
    first = load(str(tmp_path), 255, 0).splits["train"][0].mask
    assert np.array_equal(first == VOID, inside(0) == 1)
