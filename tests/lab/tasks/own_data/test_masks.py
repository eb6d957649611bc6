"""Images with masks as common tools write them: labels and classes are right, and check and training agree."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from layouts_of_boxes import HEIGHT, SPLITS, WHOLE, WIDTH, WITH_SPLITS, box, picture, write
from regard.core import DataError
from regard.images import digest, images, own
from regard.lab.tasks.check_data import check_data
from regard.lab.tasks.segmentation.data import load, own_digest
from regard.lab.tasks.segmentation.task import Segmentation
from regard.models.segmentation import VOID
from small_masks import BESIDE, FOLDERS, SHAPE, labels, mask, pairs

pytestmark = pytest.mark.usefixtures("own_cache")
COLOURS = np.array([(0, 0, 0), (128, 0, 0), (0, 128, 0)], np.uint8)


def coloured(root: Path, file: str, content: str, mode: str = "RGB") -> None:
    pairs(root, *FOLDERS, lambda n: COLOURS[labels(n)], mode)
    write(root / file, content)


def turned(number: int) -> np.ndarray:
    return np.array([1, 2, 0], np.uint8)[labels(number)]


def greys(root: Path, mode: str) -> None:
    pairs(root, *FOLDERS, lambda n: np.array([(0,) * 3, (128,) * 3, (255,) * 3], np.uint8)[labels(n)], mode)
    write(root / "classes.csv", "road,255,255,255\nsky,0,0,0\ntree,128,128,128\n")


LIST = "name,r,g,b\nsky,0,0,0\nroad,128,0,0\ntree,0,128,0\n"
RAW = np.array([7, 8, 26, 0, 4, 255], np.uint8)
"""Labels of Cityscapes: road, sidewalk, car, and three that do not count."""


def cityscapes(root: Path, raw: bool) -> None:
    for split, number in ((split, number) for split, numbers in SPLITS for number in numbers):
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
    for split, numbers in SPLITS if lists else ():
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
    "palette": (lambda root: pairs(root, *FOLDERS, mode="P"), THREE, labels),
    "folders beside": (lambda root: pairs(root, *BESIDE), THREE, labels),
    "other names": (lambda root: pairs(root, "images/{2}/{1}.png", "annotations/{2}/{1}.png"), THREE, labels),
    "names in a file": (
        lambda root: write(pairs(root, *BESIDE) / "classes.txt", "sky\nroad\n\ncar\n"),
        ("sky", "road", "car"),
        labels,
    ),
    "an ending": (lambda root: pairs(root, FOLDERS[0], "masks/{0}/{1}_mask.png"), THREE, labels),
    "two endings": (lambda root: pairs(root, "images/{0}/{1}_sat.jpg", "masks/{0}/{1}_mask.png"), THREE, labels),
    "beside the images": (lambda root: pairs(root, "{0}/{1}.jpg", "{0}/{1}_mask.png"), THREE, labels),
    "Cityscapes": (lambda root: cityscapes(root, True), ("road", "sidewalk", "car"), cars),
    "Cityscapes with train ids": (lambda root: cityscapes(root, False), ("road", "sidewalk", "car"), cars),
    "VOC": (lambda root: voc(root, True), THREE, labels),
    "colours": (lambda root: coloured(root, "classes.csv", LIST), ("sky", "road", "tree"), labels),
    "colours of CamVid": (lambda root: coloured(root, "class_dict.csv", LIST), ("sky", "road", "tree"), labels),
    "colours, palette": (lambda root: coloured(root, "classes.csv", LIST, "P"), ("sky", "road", "tree"), labels),
    "greys": (lambda root: greys(root, "L"), ("road", "sky", "tree"), turned),
    "greys in colour": (lambda root: greys(root, "RGB"), ("road", "sky", "tree"), turned),
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


def test_greys_of_a_list_have_a_key_of_their_own(tmp_path: Path) -> None:
    """Older versions read them as labels."""
    greys(tmp_path / "grey", "L")
    coloured(tmp_path / "colour", "classes.csv", LIST)
    assert [own_digest(tmp_path / name).endswith("@4") for name in ("grey", "colour")] == [True, False]


@pytest.mark.parametrize(
    "make",
    [
        lambda root: voc(root, False),
        WHOLE["COCO of CVAT"],
        lambda root: pairs(root, "images/{1}.png", "masks/{1}.png"),
        lambda root: pairs(root, splits=(("train", range(6)),)),
    ],
    ids=["VOC", "COCO", "folders", "training alone"],
)
def test_masks_without_splits_are_divided(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path)
    found, error = agreed(tmp_path)
    assert error == ""
    assert {split: len(part) for split, part in found.splits.items()} == {"train": 5, "test": 1}
    assert len({sample.image.tobytes() for part in found.splits.values() for sample in part}) == 6


def beside(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    """Masks in folders beside those of the images, and what changes there."""
    return lambda root: [change(root) for change in (lambda root: pairs(root, *BESIDE), *changes)]


def with_label(number: int, label: int, dtype: str = "u1") -> np.ndarray:
    values = labels(number).astype(dtype)
    values[3, 7] = label
    return values


def classes(text: str) -> Callable[[Path], object]:
    return lambda root: write(root / "classes.txt", text)


def several(root: Path) -> None:
    for end in ("_a", "_b"):
        pairs(root, FOLDERS[0], "masks/{0}/{1}" + end + ".png")


def in_jpeg(root: Path) -> None:
    file = root / "trainannot/0.png"
    Image.open(file).save(file.with_suffix(".jpg"))
    file.unlink()


def in_tiff(root: Path, values: np.ndarray, mode: str) -> None:
    """The mask of picture 2 in another format of numbers."""
    (root / "trainannot/2.png").unlink()
    Image.frombytes(mode, values.shape[::-1], values.tobytes()).save(root / "trainannot/2.tif")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "colours without a list": (
        lambda root: pairs(root, *FOLDERS, lambda n: COLOURS[labels(n)]),
        r"masks/train/0.png is a picture in colour \(RGB\), not a mask; .*classes.csv",
    ),
    "a colour that is not listed": (lambda root: coloured(root, "classes.csv", LIST[:-13]), "has the colour 0,128,0"),
    "a list of colours with a word": (lambda root: coloured(root, "classes.csv", LIST + "x,y,0,0\n"), "line 5"),
    "several masks": (several, "_a, _b"),
    "other names": (lambda root: pairs(root, FOLDERS[0], "masks/{0}/m{1}.png"), "no image of"),
    "labels from 1": (lambda root: pairs(root, *FOLDERS, lambda n: labels(n) + 1), "task.void=0"),
    "an unknown label": (
        beside(classes("sky\nroad\ncar\n"), lambda root: mask(root / "valannot/5.png", with_label(5, 9))),
        "valannot/5.png has the unknown label 9 at row 3, column 7; known are 0, 1, 2 and 255",
    ),
    "a label alone": (
        beside(lambda root: mask(root / "trainannot/1.png", with_label(1, 254))),
        "trainannot have label 254, but none has label 3; correct them, list all classes",
    ),
    "another size": (
        beside(lambda root: mask(root / "trainannot/1.png", labels(1, size=(12, 17)))),
        "trainannot/1.png has 12x17 pixels .*train/1.png has 12x16",
    ),
    "no mask": (
        beside(lambda root: (root / "trainannot/3.png").unlink()),
        "train/3.png has no mask: .*trainannot/3",
    ),
    "no image": (beside(lambda root: (root / "train/3.png").unlink()), "the mask .*trainannot/3.png has no image"),
    "a damaged image": (
        beside(lambda root: (root / "train/2.png").write_bytes(b"")),
        "train/2.png cannot be read as an image",
    ),
    "a damaged mask": (
        beside(lambda root: (root / "trainannot/2.png").write_bytes(b"")),
        "trainannot/2.png cannot be read as an image",
    ),
    "a mask of floating-point numbers": (
        beside(lambda root: in_tiff(root, labels(2).astype(np.float32), "F")),
        "trainannot/2.tif has labels in floating-point numbers; save whole ones",
    ),
    "a mask of 16 bits": (
        beside(lambda root: in_tiff(root, with_label(2, 300, ">u2"), "I;16B")),
        "above 255, such as 300",
    ),
    "a negative label": (
        beside(lambda root: in_tiff(root, with_label(2, -1, "i4"), "I")),
        "has labels below 0, such as -1",
    ),
    "a mask in JPEG": (beside(in_jpeg), r"the mask .*0\.jpg is a JPEG, whose compression changes labels"),
    "an empty folder": (
        beside(lambda root: [file.unlink() for file in (root / "train").iterdir()]),
        "train has no images",
    ),
    "no folder of masks": (
        beside(lambda root: (root / "valannot").rename(root / "elsewhere")),
        "val has no masks: there is no folder .*valannot",
    ),
    "other names than the list of colours": (
        lambda root: [coloured(root, "classes.csv", LIST), classes("car\nroad\nsky\n")(root)],
        "classes.txt has other names, or another order, than the list of colours, sky, road, tree: remove",
    ),
    "a class twice": (beside(classes("sky\nsky\n")), "classes.txt names the class 'sky' twice"),
    "no class": (beside(classes("\n")), "classes.txt names no class"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_cannot_be_read_stop_check_and_training(tmp_path: Path, case: str) -> None:
    make, words = REFUSED[case]
    make(tmp_path)
    assert re.search(words, agreed(tmp_path)[1])


def test_masks_in_class_folders_are_no_classes(tmp_path: Path) -> None:
    for folder, end in ((folder, end) for folder in ("benign", "normal") for end in ("", "_mask")):
        for number in range(4):
            mask(tmp_path / folder / f"{folder} ({number}){end}.png", labels(number))
    assert check_data(str(tmp_path)).kind == "segmentation"
    with pytest.raises(DataError, match=r"benign \(0\)_mask.png is a mask .* beside it: add --task segmentation"):
        own.read_splits(tmp_path)


def test_masks_in_unknown_colours_are_the_only_problem(tmp_path: Path) -> None:
    coloured(tmp_path, "notes.txt", "")
    assert all("is a picture in colour" in problem for problem in check_data(str(tmp_path)).problems)


UNUSUAL: dict[str, Callable[[Path], object]] = {
    "nothing": beside(),
    "void alone": beside(lambda root: pairs(root, *BESIDE, lambda n: labels(n) | 255, splits=(("val", range(9, 10)),))),
    "a gap": beside(lambda root: pairs(root, *BESIDE, lambda n: labels(n) * 2, splits=(("train", range(5)),))),
    "an unknown label": beside(classes("ground\nsky\n")),
    "a class of the test": beside(
        lambda root: pairs(root, *BESIDE, lambda n: labels(n, 5), splits=(("val", range(9, 10)),))
    ),
}


@pytest.mark.parametrize("options", [{}, {"void": 0}, {"void": 2}, {"classes": 2}, {"classes": 5}], ids=str)
@pytest.mark.parametrize("case", UNUSUAL)
def test_check_and_training_refuse_the_same_masks(tmp_path: Path, case: str, options: dict[str, int]) -> None:
    UNUSUAL[case](tmp_path)
    agreed(tmp_path, **options)


@pytest.mark.parametrize("lowest", [0, 1])
def test_with_void_0_classes_begin_at_label_1(tmp_path: Path, lowest: int) -> None:
    pairs(tmp_path, *FOLDERS, lambda number: labels(number) + lowest)
    found, error = agreed(tmp_path, void=0)
    assert (found.classes, error) == (("1", "2", "3")[: 2 + lowest], "")
    values = labels(0) + lowest
    assert np.array_equal(found.splits["train"][0].mask, np.where(values == 0, VOID, values - 1))


def test_folders_that_are_refused_are_not_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all bytes of large data takes minutes."""
    monkeypatch.setattr(digest, "LIMIT", 0)  # reaching the digest would ask for its kind
    for change, words in (
        (lambda root: pairs(root, *BESIDE), "--digest index"),
        (classes("sky\nsky\n"), "names the class 'sky' twice"),
        (lambda root: (root / "trainannot/0.png").unlink(), r"0\.png has no mask"),
    ):
        change(tmp_path)
        own_digest.cache_clear()
        with pytest.raises(DataError, match=words):
            load(str(tmp_path), 255, 0)


def test_a_set_that_changes_has_another_key_in_the_same_process(tmp_path: Path) -> None:
    pairs(tmp_path, *BESIDE)
    task = Segmentation(host="vit_desk", data=str(tmp_path), size=(32, 32))
    before = task.identity()
    for file in tmp_path.rglob("*.png"):
        image = np.asarray(Image.open(file))
        Image.fromarray(image[::-1].copy()).save(file)
    assert task.identity() != before
    assert task.identity() == dataclasses.replace(task).identity()


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


def test_a_number_of_several_colours_is_noted(tmp_path: Path) -> None:
    pairs(tmp_path, *FOLDERS, mode="P")
    assert not check_data(str(tmp_path), "segmentation").warnings
    other = next(file for file in sorted((tmp_path / "masks").rglob("*.png")))
    with Image.open(other) as image:
        image.load()
        palette = image.getpalette()
        image.putpalette([*palette[3:6], *palette[:3], *palette[6:]])
        image.save(other)
    check = check_data(str(tmp_path), "segmentation")
    assert ["masks in whose palettes a number has different colours" in text for text in check.warnings] == [True]
