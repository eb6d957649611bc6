"""The user's own images and masks: layouts, labels, and one clear error for every bad input."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.core import DataError
from regard.images import digest
from regard.images.normalise import normalised
from regard.lab.tasks.check_data import check_data
from regard.lab.tasks.segmentation import Segmentation, data, windows
from regard.lab.tasks.segmentation.data import load, own_digest, own_set
from regard.lab.train.recipe import Recipe
from regard.mixers.softmax import Softmax
from regard.models.segmentation import VOID

CPU = torch.device("cpu")
SIZE = (20, 30)


def save(folder: Path, name: str, labels: np.ndarray, mode: str = "L") -> None:
    """An image folder/NAME.png beside a mask folder + "annot"/NAME.png."""
    masks = folder.with_name(folder.name + "annot")
    for path in (folder, masks):
        path.mkdir(parents=True, exist_ok=True)
    pixels = np.repeat(labels[..., None] * 40 + 20, 3, -1).astype(np.uint8)
    Image.fromarray(pixels).save(folder / f"{name}.png")
    mask = Image.fromarray(labels.astype(np.uint8))
    if mode == "P":
        mask.putpalette([value for colour in range(256) for value in (colour, 255 - colour, 7)])
    mask.save(masks / f"{name}.png")


def labels(seed: int, classes: int = 3, size: tuple[int, int] = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, size)


def own(path: Path, mode: str = "L") -> Path:
    for split, number in (("train", 4), ("test", 2)):
        for index in range(number):
            save(path / split, f"{split}{index}", labels(index), mode)
    return path


def read(path: Path, void: int = 255, classes: int = 0):
    own_digest.cache_clear()
    return load(str(path), void, classes)


def test_folders_that_are_refused_are_not_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all bytes of large data takes minutes."""
    monkeypatch.setattr(digest, "LIMIT", 0)  # reaching the digest would ask for its kind
    root = own(tmp_path)
    with pytest.raises(DataError, match="--digest index"):
        read(root)
    (root / "classes.txt").write_text("sky\nsky\n")
    with pytest.raises(DataError, match="names the class 'sky' twice"):
        read(root)
    (root / "trainannot" / "train0.png").unlink()
    with pytest.raises(DataError, match=r"train0\.png has no mask"):
        read(root)


@pytest.mark.parametrize("mode", ["L", "P"])
def test_grey_and_palette_masks_hold_the_same_labels(tmp_path: Path, mode: str) -> None:
    mask_set = read(own(tmp_path, mode))
    assert mask_set.classes == ("0", "1", "2")
    assert {name: len(split) for name, split in mask_set.splits.items()} == {"train": 4, "test": 2}
    for row in range(4):
        assert (mask_set.splits["train"][row].mask == labels(row)).all()
        assert mask_set.splits["train"][row].image.shape == (*SIZE, 3)


def test_images_and_masks_may_be_in_separate_folders(tmp_path: Path) -> None:
    first, other = own(tmp_path / "a"), tmp_path / "b"
    for split, new in (("train", "training"), ("test", "validation")):
        for source, kind in ((split, "images"), (f"{split}annot", "annotations")):
            (other / kind).mkdir(parents=True, exist_ok=True)
            (first / source).rename(other / kind / new)
    mask_set = read(other)
    assert {name: len(split) for name, split in mask_set.splits.items()} == {"train": 4, "val": 2, "test": 2}


def test_without_splits_a_fifth_is_for_the_test(tmp_path: Path) -> None:
    for index in range(10):
        save(tmp_path / "images", f"{index}", labels(index))
    (tmp_path / "imagesannot").rename(tmp_path / "masks")
    splits = read(tmp_path).splits
    names = {split: {photo.image_file.name for photo in items} for split, items in splits.items()}
    assert {split: len(items) for split, items in names.items()} == {"train": 8, "test": 2}
    assert not names["train"] & names["test"]


def test_void_zero_moves_the_classes_down(tmp_path: Path) -> None:
    split = read(own(tmp_path), void=0).splits["train"]
    raw = labels(0)
    assert (split[0].mask == np.where(raw == 0, VOID, raw - 1)).all()


def test_names_come_from_a_file(tmp_path: Path) -> None:
    (own(tmp_path) / "classes.txt").write_text("sky\nroad\n\ncar\n")
    assert read(tmp_path).classes == ("sky", "road", "car")


def unknown_label(path: Path) -> None:
    (path / "classes.txt").write_text("sky\nroad\ncar\n")
    raw = labels(1)
    raw[3, 7] = 9
    save(path / "test", "test1", raw)


def other_size(path: Path) -> None:
    Image.fromarray(labels(1, size=(20, 31)).astype(np.uint8)).save(path / "trainannot" / "train1.png")


def colours(path: Path) -> None:
    Image.fromarray(np.full((*SIZE, 3), (1, 1, 2), np.uint8)).save(path / "trainannot" / "train1.png")


def no_mask(path: Path) -> None:
    (path / "trainannot" / "train3.png").unlink()


def no_image(path: Path) -> None:
    (path / "train" / "train3.png").unlink()


def no_folder(path: Path) -> None:
    (path / "testannot").rename(path / "elsewhere")


def cut_short(path: Path) -> None:
    file = path / "train" / "train2.png"
    file.write_bytes(file.read_bytes()[:60])


def cut_mask(path: Path) -> None:
    file = path / "trainannot" / "train2.png"
    file.write_bytes(file.read_bytes()[:60])


def a_label_alone(path: Path) -> None:
    save(path / "train", "train1", np.where(labels(1) == 2, 254, labels(1)))


def empty(path: Path) -> None:
    for file in (path / "train").iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unknown_label, r"testannot/test1.png has the unknown label 9 at row 3, column 7; known are 0, 1, 2 and 255"),
        (other_size, r"trainannot/train1.png has 20x31 pixels .*train/train1.png has 20x30"),
        (no_mask, r"train/train3.png has no mask: .*trainannot/train3"),
        (no_image, r"the mask .*trainannot/train3.png has no image"),
        (colours, r"trainannot/train1.png is a picture in colour \(RGB\), not a mask"),
        (cut_short, r"train/train2.png cannot be read as an image"),
        (cut_mask, r"trainannot/train2.png cannot be read as an image"),
        (empty, r"train has no images"),
        (no_folder, r"test has no masks: there is no folder .*testannot"),
        (a_label_alone, r"trainannot have label 254, but none has label 3; correct them, list all classes"),
        (lambda path: (path / "classes.txt").write_text("sky\nsky\n"), r"classes.txt names the class 'sky' twice"),
        (lambda path: (path / "classes.txt").write_text("\n"), r"classes.txt names no class"),
    ],
    ids=["label", "size", "no mask", "no image", "colour", "image", "mask", "empty", "no folder", "gap", "classes",
         "no class"],
)  # fmt: skip
def test_bad_input_names_its_file(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    change(own(tmp_path))
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_a_wrong_name_suggests_a_right_one() -> None:
    with pytest.raises(DataError, match="unknown data set 'camvit'.*camvid"):
        load("camvit", 255, 0)


def test_large_sets_are_decoded_when_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own(tmp_path)
    here = read(path)
    monkeypatch.setattr("regard.lab.tasks.segmentation.data.IN_MEMORY", 1)
    own_set.cache_clear()
    later = read(path)
    train = later.splits["train"]
    assert train.decoded is None  # type: ignore[attr-defined]
    for row in range(4):
        assert (train[row].image == here.splits["train"][row].image).all()
        assert (train[row].mask == here.splits["train"][row].mask).all()
    own_set.cache_clear()


def test_files_are_decoded_once_for_each_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.lab.tasks.segmentation.data.IN_MEMORY", 1)
    own_set.cache_clear()
    task = Segmentation(host="vit_desk(patch=8, dim=8, depth=1)", data=str(own(tmp_path)), size=(16, 24))
    recipe = Recipe(augment="crop", smoothing=0.0, batch=4)
    model = task.model(Softmax(), 0)
    task.statistics()
    opened: list[str] = []
    for name in ("read_image", "read_mask"):
        function = getattr(data, name)
        monkeypatch.setattr(data, name, lambda *given, n=name, f=function: opened.append(n) or f(*given))
    counts = []
    for use in (lambda: list(task.batches(recipe, 0, 0, 1)), lambda: task.score(model, CPU), lambda: task.chance):
        opened.clear()
        use()
        counts.append((opened.count("read_image"), opened.count("read_mask")))
    assert counts == [(4, 4), (2, 2), (0, 2)]
    own_set.cache_clear()


def test_files_that_are_decoded_when_used_are_loaded_by_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same batches, also of a part of the images."""
    monkeypatch.setattr("regard.images.cores.decoders", lambda: 2)
    task = Segmentation(host="vit_desk(patch=8, dim=8, depth=1)", data=str(own(tmp_path)), size=(16, 24), val=0.3)
    recipe = Recipe(augment="crop", smoothing=0.0, batch=3)
    assert task.usual_workers(recipe) == 0
    monkeypatch.setattr("regard.lab.tasks.segmentation.data.IN_MEMORY", 1)
    own_set.cache_clear()
    assert task.usual_workers(recipe) == 2
    for one, two in zip(task.batches(recipe, 0, 0, 2, workers=2), task.batches(recipe, 0, 0, 2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    own_set.cache_clear()


def test_a_named_set_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again in every training step, which asks for the statistics of its images."""
    path = own(tmp_path / "cityscapes")
    (path / "classes.txt").write_text("a\nb\nc\n")
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    task = Segmentation(host="vit_desk(patch=8, dim=8, depth=1)", data="cityscapes", size=(16, 24))
    recipe = Recipe(augment="crop", smoothing=0.0, batch=4)
    model, read = task.model(Softmax(), 0), []
    (batch,) = task.batches(recipe, 0, 0, 1)
    monkeypatch.setattr(digest, "fingerprint", lambda file: read.append(file) or (0, ""))
    task.loss(model, batch, recipe, CPU)
    assert not read


def test_a_mask_of_another_size_is_named_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the camera was turned: the header of the image has the sides exchanged."""
    path = own(tmp_path)
    monkeypatch.setattr("regard.lab.tasks.segmentation.data.IN_MEMORY", 1)
    own_set.cache_clear()
    train = read(path).splits["train"]
    turned = Image.open(path / "train" / "train0.png").transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[274] = 6
    turned.save(path / "train" / "train0.png", exif=exif)
    assert train[0].mask.shape == train[0].image.shape[:2] == SIZE
    Image.fromarray(labels(1, size=(30, 20)).astype(np.uint8)).save(path / "trainannot" / "train1.png")
    with pytest.raises(DataError, match=r"train1.png has 30x20 pixels .* its image .*train1.png has 20x30"):
        _ = train[1].mask
    own_set.cache_clear()


def test_large_images_are_enlarged_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    enlarged = windows.enlarged
    monkeypatch.setattr(windows, "enlarged", lambda scores, size: sizes.append(len(scores)) or enlarged(scores, size))
    model = torch.nn.Conv2d(3, 5, 1)
    images = torch.randint(0, 256, (3, 3, 8, 12), dtype=torch.uint8)
    statistics = ([0.5] * 3, [0.2] * 3)
    found = windows.classes_of(model, images, statistics, (8, 12), 1.0, (16, 24), CPU)
    assert sizes == [1, 1, 1]
    with torch.inference_mode():
        expected = enlarged(model(normalised(images, statistics, CPU)), (16, 24)).argmax(1)
    assert torch.equal(found.long(), expected)


def test_a_mask_in_jpeg_has_lost_its_labels(tmp_path: Path) -> None:
    own(tmp_path)
    mask = tmp_path / "trainannot" / "train0.png"
    Image.open(mask).save(mask.with_suffix(".jpg"))
    mask.unlink()
    for check in (read, lambda path: check_data(str(path))):
        with pytest.raises(DataError, match=r"the mask .*train0\.jpg is a JPEG, whose compression changes labels"):
            check(tmp_path)


def void_in_the_test(path: Path) -> None:
    save(path / "test", "void", np.full(SIZE, 255))


def a_gap(path: Path) -> None:
    save(path / "train", "gap", labels(9) * 2)
    for index in range(4):
        save(path / "train", f"train{index}", labels(index) * 2)


def an_unknown_label(path: Path) -> None:
    (path / "classes.txt").write_text("ground\nsky\n")


def a_class_of_the_test(path: Path) -> None:
    save(path / "test", "new", labels(0, 5))


def as_it_is(path: Path) -> None:
    pass


@pytest.mark.parametrize("options", [{}, {"void": 0}, {"void": 2}, {"classes": 2}, {"classes": 5}], ids=str)
@pytest.mark.parametrize("change", [as_it_is, void_in_the_test, a_gap, an_unknown_label, a_class_of_the_test])
def test_data_check_and_training_refuse_the_same_masks(
    tmp_path: Path, change: Callable[[Path], None], options: dict[str, int]
) -> None:
    change(own(tmp_path))
    problems = check_data(str(tmp_path), "segmentation", **options).problems
    with pytest.raises(DataError) if problems else contextlib.nullcontext():
        loaded = read(tmp_path, **options)
        for split in loaded.splits.values():
            [sample.mask for sample in split]
