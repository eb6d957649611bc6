"""ImageNet's folder layout: found, checked, decoded when asked for, and never on the fly where it is absent."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.core import DataError
from regard.images.imagenet import NORMAL, OriginalSizes
from regard.images.order import batch_rows
from regard.lab.data import catalog
from regard.lab.tasks import Classification
from regard.lab.train.recipe import Recipe

CLASSES = ("n01440764", "n01443537", "n02102040")
HOST = "vit_desk(size=(14, 28), patch=7, dim=16, depth=1, heads=2)"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """4 training and 2 validation images a class, of several sizes; red tells the class."""
    for split, number in (("train", 4), ("val", 2)):
        for label, name in enumerate(CLASSES):
            folder = tmp_path / "imagenet" / split / name
            folder.mkdir(parents=True)
            for i in range(number):
                pixels = np.full((20 + i, 40 + 2 * i, 3), 60 * label, np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}_{i}.JPEG")
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    return tmp_path


def task(**fields: object) -> Classification:
    return Classification(host=HOST, data="imagenet", size=(14, 28), **fields)  # type: ignore[arg-type]


def test_the_folders_are_the_set(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "regard.data"):
        found = catalog.load("imagenet", (14, 28))
    assert found.classes == CLASSES
    assert found.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert found.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.test.pixels[:].shape == (6, 16, 32, 3)
    assert [round(float(image.mean()) / 60) for image in found.test.pixels[:]] == found.test.labels.tolist()
    assert "3 classes, 12 training and 6 validation images" in caplog.text


def test_a_part_decodes_nothing(root: Path) -> None:
    one = task(limit=5)
    (root / "imagenet" / "train" / CLASSES[0] / f"{CLASSES[0]}_0.JPEG").write_bytes(b"no image")
    assert isinstance(one.train_images().pixels, OriginalSizes)
    assert one.record() == {**one.record(), "train": 5, "test": 5}
    with pytest.raises(DataError, match=f"{CLASSES[0]}_0.JPEG cannot be read"):
        one.train_images().pixels[:]


def test_training_and_the_test_read_it(root: Path) -> None:
    model = task().model(None, 0)
    images, labels = next(task().batches(Recipe(batch=6, augment="crop"), 0, 0, 1))
    assert images.shape == (6, 3, 14, 28)
    assert [round(float(image.float().mean()) / 60) for image in images] == labels.tolist()
    assert task().loss(model, (images, labels), Recipe(), torch.device("cpu")).isfinite()
    assert task().score(model, torch.device("cpu")).samples is not None


def test_transforms_begin_with_the_whole_image(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = task().feed(Recipe(batch=4, augment="timm"), 0)
    sizes: list[tuple[int, int]] = []
    inner = feed.transform
    feed.transform = lambda image: (sizes.append(image.size), inner(image))[1]
    images, _ = feed[0]
    assert images.shape == (4, 3, 14, 28)
    rows = batch_rows(len(feed.images), feed.batch, feed.seed, 0)
    assert sizes == [(40 + 2 * (row % 4), 20 + row % 4) for row in rows.tolist()]


def test_it_is_normalised_as_everyone_does(root: Path) -> None:
    grey = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    found = task().prepare(grey, torch.device("cpu"))[0, :, 0, 0]
    assert torch.allclose(found, (1 - torch.tensor(NORMAL[0])) / torch.tensor(NORMAL[1]))


def test_the_checksum_is_of_names_and_not_of_the_place(root: Path) -> None:
    first = catalog.load("imagenet", (14, 28)).checksum
    assert task().identity().data == "imagenet"
    (root / "imagenet" / "val" / CLASSES[0] / f"{CLASSES[0]}_0.JPEG").unlink()
    catalog._load.cache_clear()
    assert catalog.load("imagenet", (14, 28)).checksum != first


def loose(folder: Path) -> None:
    shutil.rmtree(folder / "val")
    (folder / "val").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "val" / "ILSVRC2012_val_00000001.JPEG")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "does not exist.*train/CLASS/.*JPEG"),
        (lambda folder: shutil.rmtree(folder / "val"), "val, which does not exist.*train/CLASS/.*JPEG"),
        (loose, "not in class folders.*train/CLASS/.*JPEG"),
        (lambda folder: shutil.rmtree(folder / "val" / CLASSES[1]), f"different classes: {CLASSES[1]}.*train/CLASS/.*"),
        (lambda folder: [file.unlink() for file in (folder / "train" / CLASSES[1]).iterdir()], "has no images"),
    ],
    ids=["absent", "no val", "loose", "classes", "empty"],
)
def test_errors_say_the_layout(damage: Callable[[Path], object], words: str, root: Path) -> None:
    damage(root / "imagenet")
    with pytest.raises(DataError, match=words):
        catalog.load("imagenet", (14, 28))
