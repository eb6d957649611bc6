"""Classification: data sets by name and of the user's own, first weights, and wrong data."""

import dataclasses
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from regard import Grid, Port, Site, Softmax
from regard.core import ConfigError, DataError
from regard.images import cores as cores_module
from regard.images import feed, own
from regard.images.augment import augment_batch, place_on_canvas
from regard.images.cores import decoders
from regard.images.images import Chosen, _warn_of_darkness, decode, decode_all, fit
from regard.images.streams import generator, seed_all
from regard.lab.data.catalog import (
    PARQUET,
    classes_and_channels,
    digits,
    load,
    parquet_set,
    size_before_centre,
    torchvision_set,
)
from regard.lab.engine.jobs import Job, execute_job
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.tasks.check_data import check_data
from regard.lab.tasks.classification.task import _mixed_loss
from regard.lab.tasks.weights import draw, outputs
from regard.lab.train.execute import execute
from regard.lab.train.load import load_trained
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.lab.train.watch import Watch
from regard.mixers.convolutions.conv import Conv
from regard.mixers.convolutions.deformable import DeformableConv
from regard.mixers.convolutions.dynamic import DynamicConv
from regard.mixers.factors.factors import Factors
from regard.mixers.pvt import PVT
from regard.mixers.vit3 import ViT3
from regard.swapping.removed import RemovedMixer
from streams import equal_batches

pytestmark = pytest.mark.usefixtures("own_cache")
PLAIN = Recipe(batch=32, augment="none")


def canvas(host: str = "vit_desk(size=12, patch=2, dim=16, depth=1)", **fields) -> Classification:
    return Classification(host=host, data="digits-canvas", size=(12, 12), **fields)


def folder(root: Path, *images: int, shade: int = 0) -> Path:
    """Class folders with so many images each, 10 and 10 by default; each image has a grey value of its own."""
    images = images or (10, 10)
    for label, count in enumerate(images):
        (root / f"class{label}").mkdir(parents=True)
        for number in range(count):
            grey = shade + sum(images[:label]) + number
            Image.fromarray(np.full((20, 24, 3), grey, np.uint8)).save(root / f"class{label}" / f"{number}.png")
    return root


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def test_digits_canvas_has_the_sizes_of_the_protocol() -> None:
    found = digits(canvas=(12, 12))
    assert (len(found.train), len(found.test)) == (898, 1798)
    assert canvas().batches_per_epoch(PLAIN) == 28
    both = found.test.pixels.reshape(2, 899, -1)
    assert (both.sum(-1)[0] == both.sum(-1)[1]).all()
    assert not (both[0] == both[1]).all(-1).all()


def test_plain_digits_come_at_any_size_and_keep_their_checksum() -> None:
    small, large = digits(), load("digits", (12, 16))
    assert large.train.pixels.shape == (898, 12, 16, 1)
    assert large.checksum == small.checksum
    assert not large.canvas
    assert abs(float(large.test.pixels.mean()) - float(small.test.pixels.mean())) < 8


def test_a_digit_is_placed_whole_and_anew() -> None:
    pixels = digits().train.pixels[:50]
    first, second = (place_on_canvas(pixels, (12, 14), generator("test", i)) for i in (0, 1))
    assert first.shape == (50, 12, 14, 1)
    assert (first.sum((1, 2, 3), dtype=int) == pixels.sum((1, 2, 3), dtype=int)).all()
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("augment", ["none", "flip", "crop", "pad", "shift", "resized"])
def test_augmentation_keeps_shape_and_depends_on_the_stream_alone(augment: str) -> None:
    pixels = generator("pixels").integers(0, 256, (6, 9, 7, 3), dtype=np.uint8)
    made = [augment_batch(pixels, (9, 7), augment, False, generator("a", i)) for i in (0, 0, 1)]
    assert made[0].shape == pixels.shape
    assert made[0].dtype == np.uint8
    assert np.array_equal(made[0], made[1])
    assert np.array_equal(made[0], made[2]) == (augment == "none")


def test_batches_by_number_are_the_same_with_workers_and_from_the_middle() -> None:
    task = canvas()
    whole = list(task.batches(PLAIN, 0, 0, 31))
    assert equal_batches(whole[26:], task.batches(PLAIN, 0, 26, 31, workers=2))
    labels = torch.cat([y for _, y in whole[:28]])
    have = np.bincount(task.train_images().labels)
    assert (have - np.bincount(labels.numpy()) >= 0).all()  # an epoch shows no image twice
    assert len(labels) == 896


def test_rows_of_a_seed_share_their_first_weights() -> None:
    task = canvas(init="fan_in")
    own, swapped = task.model(None, 3).state_dict(), task.model(Softmax(dwc=3), 3).state_dict()
    shared = own.keys() & swapped.keys()
    assert {"blocks.0.mlp.fc1.weight", "patch_embed.proj.weight", "head.weight"} <= shared
    assert all(torch.equal(own[name], swapped[name]) for name in shared)
    assert not torch.equal(own["head.weight"], task.model(None, 4).state_dict()["head.weight"])


def test_matrices_have_std_fan_in() -> None:
    model = canvas("vit_desk(size=12, patch=2, dim=64, depth=1)", init="fan_in").model(Softmax(), 0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and name != "pos_embed":
            assert float(parameter.detach().std()) * parameter[0].numel() ** 0.5 == pytest.approx(1.0, abs=0.15), name


@pytest.mark.parametrize(
    "mixer",
    [None, Softmax(), Conv(), DeformableConv(), DynamicConv(kernel=3), ViT3()],
    ids=["host", "softmax", "conv", "deformable", "dynamic", "vit3"],
)
def test_zero_outputs_make_every_block_the_identity(mixer) -> None:
    model = canvas().model(mixer, 0)
    assert len(outputs(model)) == 2
    x = torch.randn(2, 36, 16)
    assert torch.equal(model.blocks(x), x)
    assert canvas(init="fan_in").model(mixer, 0).blocks(x).sub(x).abs().max() > 0.1


def test_layers_with_a_start_of_their_own_keep_it() -> None:
    """Offsets at zero, the mean of patches, Xavier-uniform maps; from the seed and the name alone."""
    task = canvas(init="fan_in")
    deformable = task.model(DeformableConv(groups=2), 0).blocks[0].attn.regard.conv
    assert not any(parameter.any() for parameter in deformable.offset.parameters())
    assert deformable.weight.std() > 0
    reduce = task.model(PVT(), 0).blocks[0].attn.regard.operator.reduce
    assert torch.equal(reduce.weight[:, :, 0, 0], torch.eye(16) / 4)
    maps = [task.model(DynamicConv(kernel=3), seed).blocks[0].attn.regard.kernels.weight for seed in (0, 0, 1)]
    assert maps[0].abs().max() <= (6 / sum(maps[0].shape)) ** 0.5
    assert torch.equal(maps[0], maps[1])
    assert not torch.equal(maps[0], maps[2])


@pytest.mark.parametrize("mixer", [Factors("0110"), DynamicConv(kernel=3)], ids=["factors", "dynamic"])
def test_a_slot_behind_a_gamma_of_zero_can_learn(mixer) -> None:
    """Were the output of the mechanism zero too, neither it nor gamma would ever have a gradient."""
    host = "attended_resnet18(stem=1, channels=(16, 16, 16, 32), stages=(3,))"
    model = Classification(host=host, data="digits", size=(8, 8)).model(mixer, 0)
    model(torch.randn(4, 1, 8, 8)).square().sum().backward()
    for block in model.layer3:
        assert block.attn.gamma.item() == 0
        assert block.attn.gamma.grad.abs() > 0


def test_no_mixer_has_no_attention_parameters() -> None:
    model = canvas().model(None, 0, removed=True)
    assert not [name for name, _ in model.named_parameters() if "attn" in name]


class Mixing(torch.nn.Linear):
    """Stands for an attention of the user."""


class MixingPort(Port):
    replaces = (Mixing,)
    watch = "patches"

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return Site(dim=8, heads=2, grid=grid, name=name, layer=layer)


class own_network(torch.nn.Module):
    def __init__(self, num_classes: int = 10, in_chans: int = 3, img_size: tuple[int, int] = (8, 8)) -> None:
        super().__init__()
        self.patches, self.img_size = torch.nn.Conv2d(in_chans, 8, 2, 2), img_size
        self.attention, self.head = Mixing(8, 8), torch.nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).mT
        return self.head((x + self.attention(x)).mean(1))


def test_attention_that_a_port_of_the_user_knows_is_removed_too() -> None:
    """Else the control without attention would have it."""
    task = Classification(host="own_network", data="digits", size=(8, 8), init="host", extra=(own_network, MixingPort))
    model = task.model(None, 0, removed=True)
    assert isinstance(model.attention, MixingPort)
    assert isinstance(model.attention.mixer, RemovedMixer)


class NamedPort(Port):
    watch = "patches"
    parameter_names = {"to_qkv": "qkv", "out": "proj"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixer(x, self.grid())


class Named(torch.nn.Module):
    """An attention of the user, with names of its own."""

    port = NamedPort

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.to_qkv, self.out = 2, torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class named_network(own_network):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.attention = Named()


def test_rows_of_a_seed_start_alike_in_a_host_with_names_of_its_own() -> None:
    task = Classification(host="named_network", data="digits", size=(8, 8), init="fan_in", extra=(named_network,))
    own, swapped, gated = (task.model(mixer, 3).state_dict() for mixer in (None, Softmax(), Softmax(gate=True)))
    assert own.keys() == swapped.keys() < gated.keys()
    assert all(torch.equal(own[name], state[name]) for state in (swapped, gated) for name in own)


def test_regards_own_ports_keep_the_weights_of_their_first_runs() -> None:
    """CvT has other names than its mixers, whose streams are those of finished runs."""
    model = Classification(host="cvt_13_32", data="digits", size=(32, 32), init="fan_in").model(Softmax(), 3)
    name, layer = next((name, layer) for name, layer in model.named_modules() if isinstance(layer, Port))
    matrix = layer.mixer.qkv.q
    weight = next(each for each in matrix.named_parameters() if each[1].ndim > 1)
    expected = torch.empty_like(weight[1])
    draw(expected, 3, f"{name}.qkv.q.{weight[0]}")
    assert torch.equal(weight[1], expected)


def test_init_zero_of_an_unknown_host_says_so() -> None:
    with pytest.raises(ConfigError, match="finds no output layers"):
        Classification(host="resnet10t", data="digits", size=(8, 8)).model(None, 0)


def test_every_class_gives_a_fifth_to_the_test(tmp_path: Path) -> None:
    """And at least one image of two, while the only image of a class is for training."""
    sizes = (50, 10, 6, 5, 3, 2, 1)
    found = load(str(folder(tmp_path, *sizes)), (14, 14))
    assert np.bincount(found.test.labels, minlength=7).tolist() == [10, 2, 1, 1, 1, 1, 0]
    assert np.bincount(found.train.labels).tolist() == [40, 8, 5, 4, 2, 1, 1]
    assert found.classes == tuple(f"class{label}" for label in range(7))
    assert found.train.pixels.shape[1:] == (16, 16, 3)
    greys = [part.pixels[:, 0, 0, 0] for part in (found.train, found.test)]
    assert np.array_equal(np.searchsorted(np.cumsum(sizes), greys[0], "right"), found.train.labels)
    assert sorted(np.concatenate(greys)) == list(range(77))


def test_parquet_is_read(tmp_path: Path) -> None:
    files = sorted(folder(tmp_path / "data").rglob("*.png"))
    table = {"image": [file.read_bytes() for file in files], "label": [int(file.parent.name[-1]) for file in files]}
    path = tmp_path / "own.parquet"
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    assert len(load(str(path), (7, 7)).train) == 16
    pyarrow.parquet.write_table(pyarrow.table({**table, "label": [0, -1] * 10}), path.with_name("bad.parquet"))
    with pytest.raises(DataError, match=r"label -1 of row .* is outside 0..0"):
        load(str(path.with_name("bad.parquet")), (7, 7))
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), path.with_name("none.parquet"))
    with pytest.raises(DataError, match="expected one of img"):
        load(str(path.with_name("none.parquet")), (7, 7))


@pytest.mark.parametrize(
    "names",
    [("Train", "Test"), ("training", "validation"), ("TRAIN", "Valid"), ("train", "val"), ("train", "Test", "val")],
)
def test_splits_have_the_names_that_people_give_them(names: tuple[str, ...], tmp_path: Path) -> None:
    """A test comes before a validation."""
    for name, images in zip(names, (6, 3, 4), strict=False):
        folder(tmp_path / name, images, images)
    found = load(str(tmp_path), (8, 8))
    assert found.classes == ("class0", "class1")
    assert (len(found.train), len(found.test)) == (12, 6)


def test_a_part_beside_the_test_is_validated_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the place of the share `val`, with a key of its own: older versions validated on training images."""
    root = tmp_path / "set"
    for shade, (name, images) in enumerate((("train", 6), ("val", 2), ("test", 3))):
        folder(root / name, images, images, shade=shade)
    assert len(load(str(root), (8, 8)).test) == 6
    assert caplog.text.count("is its validation part") == 1
    task = canvas(init="host", val=0.5).on(str(root))
    validation = task.validation()
    assert (len(task.train_images()), len(validation.test_images()), len(task.test_images())) == (12, 4, 6)
    assert task.identity().data == f"{dataclasses.replace(task, val=0.0).identity().data}@2"
    assert len(dataclasses.replace(task, val=0.0, split="held").test_images()) == 4


@pytest.mark.parametrize(
    ("data", "size", "cut", "before"),
    [("cifar10", (32, 32), False, (32, 32)), ("cifar10", (24, 24), True, (32, 32)), ("MNIST", (24, 24), True, (32, 32)),
     ("fashion_mnist", (24, 24), True, (28, 28)), ("Flowers102", (224, 224), False, (224, 224)),
     ("Flowers102", (224, 224), True, (256, 256)), ("imagenet", (224, 224), False, (256, 256)),
     ("photos", (224, 224), False, (256, 256))],
)  # fmt: skip
def test_a_file_is_prepared_like_the_images_of_the_test(
    data: str, size: tuple[int, int], cut: bool, before: tuple[int, int]
) -> None:
    assert size_before_centre(data, size, cut) == before


def put(root: Path, *names: str) -> None:
    """Small images, and tables that are empty."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            (root / name).touch()
        else:
            Image.new("RGB", (8, 8)).save(root / name, "PNG")


BOTH = tuple(f"{split}/class{label}/{number}.png" for split in ("train", "test") for label in "01" for number in "01")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "has no images"),
        (("a/0.png",), "only one class folder"),
        ((*BOTH[:4], "holdout/class0/0.png"), r"holdout lies beside train and has images, .*: call it test"),
        ((*BOTH[:4], "train/loose.png"), r"loose\.png lies beside the class folders"),
        ((*BOTH, "loose.png"), r"loose\.png lies beside train; put it into"),
        ((*BOTH, "extra/one.png"), "extra lies beside train and has im"),
        ((*BOTH, "Training/class0/0.png"), "Training and train name the same split"),
        (("a/train/0.png", "a/test/1.png", "b/train/0.png"), r"a has the splits of its class inside; .*/train/a and"),
        (("Learn/a/0.png", "Test/a/0.png"), r"Test has the name of a split .* expected .*/train/CLASS"),
        (("train.parquet", "cat/0.png"), r"a table \(train\.parquet\) and also .*0\.png"),
        (("train.parquet", "more-00000-of-00001.parquet"), r"more-00000-of-00001\.parquet lies beside train\.parquet"),
    ],
    ids=str,
)
def test_nothing_that_looks_like_data_is_left_out_silently(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    put(tmp_path, *names)
    with pytest.raises(DataError, match=words):
        load(str(tmp_path), (8, 8))


def test_usual_companions_are_no_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, *BOTH, "README.md", "LICENSE", ".DS_Store", "SHA256SUMS", "train/class0/notes.txt",
        "train/class0/README", "test/class1/.DS_Store", "train/class1/Thumbs.db")  # fmt: skip
    assert len(load(str(tmp_path), (8, 8)).train) == 4
    assert ["in train, too" in record.getMessage() for record in caplog.records] == [True]  # all images are alike


def test_other_files_in_class_folders_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, *BOTH, *(f"train/class0/{number}.heic" for number in range(3)))
    load(str(tmp_path), (8, 8))
    assert "3 files in class folders are not read as images, such as" in caplog.text
    assert "0.heic" in caplog.text


@pytest.mark.parametrize("suffix", [".jfif", ".jpe", ".avif", ".jp2", ".tga", ".pnm"])
def test_other_suffixes_of_images_are_read(tmp_path: Path, suffix: str) -> None:
    root = folder(tmp_path / "data")
    Image.init()
    if suffix not in Image.registered_extensions():
        pytest.skip(f"this Pillow does not write {suffix}")
    for label in range(2):
        Image.new("RGB", (20, 24), (9, 9, 9)).save(root / f"class{label}" / f"more{suffix}")
    found = load(str(root), (8, 8))
    assert len(found.train) + len(found.test) == 22


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    put(tmp_path, *(f"{name}/{number}.png" for name in ("bus", "train") for number in range(2)))
    assert load(str(tmp_path), (8, 8)).classes == ("bus", "train")


def test_a_limit_keeps_all_classes_of_sorted_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = canvas(limit=6).on(str(folder(tmp_path / "set", 10, 10, 10)))
    assert np.bincount(task.train_images().labels, minlength=3).tolist() == [2, 2, 2]
    assert set(task.test_images().labels) == {0, 1, 2}
    assert len(dataclasses.replace(task, limit=1000).train_images()) == 24
    assert [canvas(limit=limit).at_most(9).limit for limit in (0, 6, 20)] == [9, 6, 9]
    monkeypatch.setattr(own, "IN_MEMORY", 100)
    lazy, rows = own.load(tmp_path / "set", (12, 12), "stop").train, np.array([1, 22])
    assert np.array_equal(lazy.take(rows).pixels[:], lazy.pixels[:][rows])
    first = canvas(limit=50).train_images()  # a named set, which is not sorted
    assert np.array_equal(first.pixels, canvas().train_images().pixels[:50])


def test_wrong_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="did you mean cifar10"):
        load("cifar", (32, 32))
    monkeypatch.delenv("REGARD_DATA", raising=False)
    with pytest.raises(DataError, match="--data-root"):
        load("cifar10", (32, 32))
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"cifar10 needs .*train.parquet"):
        load("cifar10", (32, 32))
    with pytest.raises(DataError, match="does not exist"):
        load(str(tmp_path / "nowhere"), (8, 8))
    with pytest.raises(DataError, match="the task needs 16x16"):
        load("digits", (16, 16), cut=True)


@pytest.mark.parametrize("memory", [own.IN_MEMORY, 100])
def test_a_damaged_image_stops_or_is_skipped(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own, "IN_MEMORY", memory)
    damage(folder(tmp_path) / "class1/3.png")
    with pytest.raises(DataError, match=r"class1/3.png cannot be read"):
        own.load(tmp_path, (8, 8), "stop").train.pixels[:]
    for _ in range(2):  # it is told each time
        caplog.clear()
        found = own.load(tmp_path, (8, 8), "skip")
        assert len(found.train) + len(found.test) == 19
        assert "1 of " in caplog.text
        assert "cannot be read and are left out" in caplog.text


@pytest.mark.slow
def test_cifar10_is_whole(data_root: Path) -> None:
    if not (data_root / "cifar10").is_dir():
        pytest.skip("needs cifar10 below REGARD_DATA")
    found = load("cifar10", (24, 24), cut=True)
    assert (len(found.train), len(found.held or ()), len(found.test)) == (45_000, 5_000, 10_000)
    assert found.statistics[0] == pytest.approx((0.4914, 0.4822, 0.4465), abs=0.004)
    task = Classification(host="vit_desk(size=24)", data="cifar10", size=(24, 24), cut=True, limit=128)
    images, _ = next(task.batches(Recipe(augment="crop"), 0, 0, 1))
    assert images.shape == (64, 3, 24, 24)


class Seen(torch.nn.Module):
    """Keeps the images that it gets, and the number of those of the largest batch."""

    most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.images, self.most = x, max(self.most, len(x))
        return x.mean((1, 2, 3))[:, None].expand(-1, 10)


def test_erasing_makes_a_rectangle_noise() -> None:
    """In the asked share of images; it has mean 0 and deviation 1, as normalised images have."""
    task, seen, device = canvas(), Seen(), torch.device("cpu")
    batch = next(task.batches(dataclasses.replace(PLAIN, batch=400), 0, 0, 1))
    task.loss(seen, batch, PLAIN, device)
    plain = seen.images
    seed_all("erasing")
    task.loss(seen, batch, dataclasses.replace(PLAIN, erasing=0.25), device)
    changed = (seen.images != plain)[:, 0]
    hit = changed.flatten(1).any(1)
    assert hit.float().mean().item() == pytest.approx(0.25, abs=0.07)
    for mask in changed[hit]:
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns[None])
    noise = seen.images[:, 0][changed]
    assert noise.mean().item() == pytest.approx(0.0, abs=0.1)
    assert noise.std().item() == pytest.approx(1.0, abs=0.1)


def check_lazy(lazy: Any, whole: Any) -> None:
    """That images are decoded when they are used, to the same ones as at once."""
    assert isinstance(lazy.pixels, own.Lazy)
    assert lazy.pixels.shape == whole.pixels.shape
    assert np.array_equal(lazy.pixels[:], whole.pixels)
    assert lazy.labels.tolist() == whole.labels.tolist()


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    return tmp_path


def idx(path: Path, values: np.ndarray) -> None:
    """An array as MNIST's files hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = b"".join(side.to_bytes(4, "big") for side in values.shape)
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + shape + values.tobytes())


def fashion(root: Path, train: int, test: int) -> None:
    """FashionMNIST with so many random images, whose labels are 0 to 9 in turn."""
    raw = root / "torchvision" / "FashionMNIST" / "raw"
    for split, number in (("train", train), ("t10k", test)):
        idx(raw / f"{split}-images-idx3-ubyte", generator(split).integers(0, 256, (number, 28, 28), dtype=np.uint8))
        idx(raw / f"{split}-labels-idx1-ubyte", np.arange(number, dtype=np.uint8) % 10)


def test_what_is_known_of_a_torchvision_set_is_what_it_gives(data_folder: Path) -> None:
    """Grey images become RGB: a host that is built without the data has as many channels as one that is trained."""
    fashion(data_folder, 20, 10)
    task = Classification(host="vit_desk(dim=16, depth=1)", data="FashionMNIST", size=(32, 32))
    found = task.data_set()
    assert (len(found.classes), found.channels) == classes_and_channels("FashionMNIST") == (10, 3)
    assert classes_and_channels("fashion_mnist") == (10, 1)
    assert task.model(None, 0).patch_embed.proj.in_channels == 3


def test_arrays_that_are_too_large_are_resized_when_they_are_used(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits keeps its checksum; what does not has that of the images in their own size."""
    fashion(data_folder, 20, 20)
    labels = np.arange(20) % 10
    whole = torchvision_set("FashionMNIST", (40, 36), False, "stop", False)
    parts = (whole.train.pixels, labels.astype(np.int64), whole.test.pixels, labels.astype(np.int64))
    assert whole.checksum == hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    monkeypatch.setattr(own, "IN_MEMORY", 100)
    lazy, other = (torchvision_set("FashionMNIST", size, False, "stop", False) for size in ((40, 36), (32, 32)))
    check_lazy(lazy.train, whole.train)
    check_lazy(lazy.test, whole.test)
    assert lazy.checksum == other.checksum != whole.checksum
    assert lazy.statistics == whole.statistics


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_tables_that_are_too_large_are_decoded_when_they_are_used(
    data_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARQUET, name, dataclasses.replace(PARQUET[name], rows=(20, 10), used=15))
    (data_folder / name).mkdir()
    for split, number in (("train", 20), ("test", 10)):
        images = []
        for pixels in generator(split).integers(0, 256, (number, 28, 28), dtype=np.uint8):
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            images.append(pixels.tobytes() if name == "fashion_mnist" else file.getvalue())
        table = pyarrow.table({"img": images, "label": np.arange(number) % 10})
        pyarrow.parquet.write_table(table, data_folder / name / f"{split}.parquet")
    whole = parquet_set(name, (40, 36), "stop")
    monkeypatch.setattr(own, "IN_MEMORY", 100)
    lazy = parquet_set(name, (40, 36), "stop")
    for part in ("train", "held", "test"):
        check_lazy(getattr(lazy, part), getattr(whole, part))
    assert (lazy.checksum, lazy.channels, lazy.statistics) == (whole.checksum, whole.channels, whole.statistics)


@pytest.mark.parametrize("fields", [{"val": 0.25}, {"limit": 7}, {"val": 0.25, "limit": 12}])
def test_a_part_of_mapped_images_is_no_copy(tmp_path: Path, fields: dict[str, Any]) -> None:
    task = canvas(init="host", **fields).on(str(folder(tmp_path / "data")))
    whole, part = task.data_set().train.pixels, task.train_images()
    assert isinstance(whole, np.memmap)
    assert isinstance(part.pixels, Chosen)
    assert np.shares_memory(part.pixels.pixels, whole)
    assert part.pixels.shape == (len(part), *whole.shape[1:])
    assert np.array_equal(part.pixels[:], whole[part.pixels.rows])
    images, labels = next(task.batches(PLAIN, 0, 0, 1))
    assert len(images) == len(labels) == len(part)
    assert task.score(task.model(None, 0), torch.device("cpu")).samples is not None


@pytest.mark.parametrize("threads", [1, 3])
def test_images_are_decoded_in_order_by_any_number_of_threads(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = own.load(folder(tmp_path / "data"), (8, 8), "stop").train
    monkeypatch.setattr(own, "IN_MEMORY", 0)
    monkeypatch.setattr(own, "decoders", lambda: threads)
    lazy = own.load(tmp_path / "data", (8, 8), "stop").train
    assert np.array_equal(lazy.pixels[3:11], whole.pixels[3:11])
    damage(tmp_path / "data/class1/3.png")
    with pytest.raises(DataError, match=r"class1/3\.png cannot be read as an image"):
        lazy.pixels[:]


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 2)])
def test_jobs_decode_with_all_cores_and_the_same_result(
    tmp_path: Path, cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of a study, whose number of loader processes no one chooses."""
    monkeypatch.setattr(own, "IN_MEMORY", 0)
    recipe = Recipe(batch=6, epochs=2, augment="shift")
    run = Run(task=canvas(init="host").on(str(folder(tmp_path / "data"))), recipe=recipe)
    execute(run, Results(tmp_path / "alone"), device="cpu", watch=Watch(workers=0))
    used: list[int] = []
    between = feed.Batches.between

    def counted(self: feed.Batches, start: int, stop: int, number: int = 0) -> Iterator[tuple[torch.Tensor, ...]]:
        used.append(number)
        return between(self, start, stop, number)

    monkeypatch.setattr(feed.Batches, "between", counted)
    for module in (cores_module, own):
        monkeypatch.setattr(module, "decoders", lambda: cores)
    state, _, text = execute_job(Job(run, "s", "smoke", "row", 0), str(tmp_path / "study"))
    assert (state, text) == ("done", "")
    assert used == [workers]
    first, second = (Results(tmp_path / name) for name in ("alone", "study"))
    outcomes = [store.outcome(run.key) or {} for store in (first, second)]
    assert outcomes[0]["metrics"] == outcomes[1]["metrics"]
    weights = [load_trained(run, store).state_dict() for store in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_data_in_memory_need_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "decoders", lambda: 8)
    assert canvas().usual_workers(PLAIN) == 0


@pytest.mark.parametrize(("free", "workers"), [(10**9, 8), (4 * 3 * 1000, 3), (4 * 1000, 0)])
def test_batches_of_the_usual_processes_fit_the_shared_memory(
    free: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores_module, "decoders", lambda: 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert cores_module.loaders(1000) == workers


def test_processes_of_torchrun_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = len(os.sched_getaffinity(0))
    assert decoders() == 1  # torch has one thread in these tests
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert decoders() == max(1, min(usable // 2, 8))


def textures(root: Path, damaged: bool = False) -> None:
    """DTD with 4 images of different sizes for training and 4 for the test, in two of its 47 classes."""
    for part, word in (("train", "a"), ("test", "b")):
        rows = [f"{label}/{label}_{word}{i}.png" for label in ("banded", "blotchy") for i in (0, 1)]
        (root / "dtd/dtd/labels").mkdir(parents=True, exist_ok=True)
        (root / f"dtd/dtd/labels/{part}1.txt").write_text("\n".join(rows))
        for i, row in enumerate(rows):
            file = root / "dtd/dtd/images" / row
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator(row).integers(0, 256, (40 + i, 50 - i, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
            if damaged and i == 1 and part == "train":
                file.write_bytes(file.read_bytes()[:60])


def test_files_of_torchvision_are_decoded_one_by_one_to_the_size(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    textures(data_folder / "torchvision")
    found = torchvision_set("DTD", (28, 14), False, "stop", False)
    assert found.train.pixels.shape == (4, 28, 14, 3)
    with Image.open(data_folder / "torchvision/dtd/dtd/images/banded/banded_a1.png") as image:
        assert np.array_equal(found.train.pixels[1], np.asarray(fit(image, (28, 14))))
    assert torchvision_set("DTD", (28, 14), True, "stop", False).test.pixels.shape == (4, 32, 16, 3)  # 8/7, to be cut
    monkeypatch.setattr(own, "IN_MEMORY", 100)
    lazy = torchvision_set("DTD", (28, 14), False, "stop", False)
    check_lazy(lazy.train, found.train)
    assert lazy.checksum == found.checksum


def test_damaged_files_of_torchvision_are_named_or_skipped(data_folder: Path) -> None:
    textures(data_folder / "torchvision", damaged=True)
    with pytest.raises(DataError, match=r"banded_a1\.png cannot be read"):
        torchvision_set("DTD", (28, 14), False, "stop", False)
    skipped = torchvision_set("DTD", (28, 14), False, "skip", False)
    assert (len(skipped.train), skipped.train.labels.tolist()) == (3, [0, 1, 1])


@pytest.mark.parametrize("augment", ["timm:rand-m9-mstd0.5-inc1", "randaugment+crop"])
def test_transforms_of_images_are_functions_of_the_sample(tmp_path: Path, augment: str) -> None:
    task = canvas(init="host").on(str(folder(tmp_path / "data")))
    recipe = Recipe(batch=4, augment=augment)
    (x, _), (y, _) = (next(task.batches(recipe, 0, 5, 6, workers=workers)) for workers in (0, 1))
    assert x.shape == (4, 3, 12, 12)
    assert torch.equal(x, y)


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_become_the_upper_eight(channels: int) -> None:
    wide = np.arange(0, 2**16, 2**10, dtype=np.uint16).reshape(8, 8)
    file = io.BytesIO()
    Image.fromarray(wide).save(file, "PNG")
    assert np.array_equal(decode(file.getvalue(), None, channels)[..., 0], wide // 256)


@pytest.mark.parametrize("name", ["wide.png", "wide.tif"])
def test_images_of_fewer_bits_than_their_files_are_told(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A PNG of 16 bits, and a TIFF of 32, with values up to 255 or 4095."""
    _warn_of_darkness.cache_clear()
    root, kind = folder(tmp_path / "data"), np.uint16 if name.endswith("png") else np.int32
    for number, label in enumerate((0, 1, 1)):
        values = np.arange(256, dtype=kind).reshape(16, 16) * (16 if number == 2 else 1)
        Image.fromarray(values).save(root / f"class{label}" / f"{number}{name}")
    report = check_data(str(root))
    assert any("of 16 bits of train is above" in text for text in report.warnings)
    assert not report.problems
    _warn_of_darkness.cache_clear()
    caplog.clear()
    load(str(root), (8, 8))
    assert caplog.text.count("read as almost black") == 1


def test_a_validation_part_leaves_images_of_each_class(tmp_path: Path) -> None:
    root = folder(tmp_path, 20, 20, 2)
    (root / "class2").rename(root / "rare")
    seeds = [canvas(val=0.5, val_seed=seed).on(str(root)) for seed in range(20)]
    for task in seeds:
        rows = task.divide(len(task.data_set().train))[0]
        if set(task.data_set().train.labels[rows]) == {0, 1, 2}:
            assert len(task.train_images()) == len(rows)
        else:
            break
    with pytest.raises(ConfigError, match=r"val=0\.5 leaves no training image of class rare"):
        task.train_images()


def test_a_canvas_takes_no_transform_of_single_images() -> None:
    """It would stretch digits that the test places on a canvas."""
    with pytest.raises(ConfigError, match=r"digits-canvas places in whole batches: use one of none, flip"):
        next(canvas().batches(Recipe(batch=8, augment="timm"), 0, 0, 1))


def test_large_images_are_evaluated_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Seen(), Seen()
    task = Classification(host="vit_desk", data="digits", size=(8, 8))
    usual = task.score(small, torch.device("cpu"))
    monkeypatch.setattr(feed, "EVALUATED", 10 * 64 + 63)
    other = task.score(large, torch.device("cpu"))
    assert (small.most, large.most) == (256, 10)
    assert other.metrics["top1"] == usual.metrics["top1"]


def test_all_images_of_other_data_without_a_test_are_scored(tmp_path: Path) -> None:
    task = canvas(init="host").on(str(folder(tmp_path / "data")))
    other = folder(tmp_path / "other", 15, 15, shade=3)
    model, device, record = task.model(None, 0), torch.device("cpu"), task.record()

    def number(data: Path) -> int:
        return len(task.score_on(str(data), model, device, record).samples)

    assert number(other) == 30
    assert number(tmp_path / "data") == 4
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    assert number(tmp_path / "copy") == 4  # its other images were trained on
    put(tmp_path / "divided", *BOTH)
    assert number(tmp_path / "divided") == 4
    (tmp_path / "data" / "class0" / "3.png").unlink()
    with pytest.raises(DataError, match="has changed since the training, so the fifth that was kept for its test"):
        number(tmp_path / "data")


def test_pixels_without_a_known_range_are_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).random((8, 8), np.float32)).save(file, "TIFF")
    with pytest.raises(DataError, match="digit 0 cannot be read as an image .* 32 bits, whose range is not known"):
        decode_all(([file.getvalue()], ["digit 0"], np.zeros(1, np.int64)), (8, 8), 3)


@pytest.mark.untyped
@pytest.mark.parametrize("size", [32, (32,), (32, 0), (32.5, 32)])
def test_a_size_is_height_and_width(size) -> None:
    with pytest.raises(ConfigError, match=r"size=.*expected|size is \(height, width\)"):
        Classification(host="vit_desk", data="digits", size=size)


def test_a_pretrained_host_is_known_by_its_options() -> None:
    with pytest.raises(ConfigError, match="a pretrained host keeps its weights"):
        Classification(host="vit_tiny_patch16_224(pretrained=1)", data="digits", size=(224, 224))
    Classification(host="vit_tiny_patch16_224(pretrained=False)", data="digits", size=(224, 224))


@pytest.mark.untyped
def test_class_weights_may_be_whole_numbers() -> None:
    task = Classification(host="vit_desk(size=8, patch=2, dim=16, depth=1, heads=2)", data="digits", size=(8, 8))
    model, batch = task.model(None, 0), (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.arange(4))
    whole, same = (dataclasses.replace(task, class_weights=weights) for weights in ((3, *[1] * 9), (3.0, *[1.0] * 9)))
    assert whole.loss(model, batch, Recipe(), torch.device("cpu")) == same.loss(
        model, batch, Recipe(), torch.device("cpu")
    )


def test_class_weights_scale_the_loss_of_their_class() -> None:
    host = "vit_desk(size=8, patch=2, dim=16, depth=1, heads=2)"
    task = Classification(host=host, data="digits", size=(8, 8), class_weights=(3.0, *[1.0] * 9))
    plain = dataclasses.replace(task, class_weights=())
    model = plain.model(None, 0)
    images = torch.randint(0, 255, (4, 1, 8, 8), dtype=torch.uint8)
    labels, recipe, device = torch.tensor([0, 1, 2, 3]), Recipe(smoothing=0.0), torch.device("cpu")
    alone = [float(plain.loss(model, (images[i : i + 1], labels[i : i + 1]), recipe, device)) for i in range(4)]
    weighted = float(task.loss(model, (images, labels), recipe, device))
    assert weighted == pytest.approx((3 * alone[0] + sum(alone[1:])) / 6, rel=1e-5)
    for smoothing in (0.0, 0.1):  # torch's loss of whole labels is that of labels mixed with nothing
        scores, weights = torch.randn(4, 10), torch.rand(10) + 0.1
        smooth = F.one_hot(labels, 10) * (1 - smoothing) + smoothing / 10
        expected = F.cross_entropy(scores, labels, weights, label_smoothing=smoothing)
        assert torch.allclose(_mixed_loss(scores, smooth, weights, smoothing), expected)
    without = dataclasses.replace(task, class_weights=(*[0.0] * 9, 1.0))
    assert without.loss(model, (images, torch.zeros_like(labels)), recipe, device) == 0
    with pytest.raises(ConfigError, match="one of them more"):
        dataclasses.replace(task, class_weights=(0.0,) * 10)
    with pytest.raises(ConfigError, match="class_weights has 2 numbers, the task has 10 classes"):
        dataclasses.replace(task, class_weights=(1.0, 2.0)).loss(model, (images, labels), recipe, device)
