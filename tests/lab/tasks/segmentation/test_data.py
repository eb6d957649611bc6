"""Images with masks in training: each is decoded when it is needed, and no more often."""

from pathlib import Path

import pytest
import torch

from layouts_of_boxes import picture
from regard.core import DataError
from regard.images import digest
from regard.images.normalise import normalise
from regard.lab.tasks.segmentation import Segmentation, data, windows
from regard.lab.tasks.segmentation.data import MaskSet, load
from regard.lab.train.recipe import Recipe
from regard.mixers.softmax import Softmax
from small_masks import BESIDE, SHAPE, labels, mask, pairs
from streams import equal_batches

CPU = torch.device("cpu")
RECIPE = Recipe(augment="crop", smoothing=0.0, batch=4)


def read(path: Path) -> MaskSet:
    """The set, anew."""
    data.own_set.cache_clear()
    return load(str(path), 255, 0)


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No split is small enough to be decoded at once."""
    monkeypatch.setattr(data, "IN_MEMORY", 1)


def task_on(folder: Path | str, **fields: float) -> Segmentation:
    host = "vit_desk(patch=8, dim=8, depth=1)"
    return Segmentation(host=host, data=str(folder), size=(8, 16), **fields)  # type: ignore[arg-type]


def test_a_wrong_name_suggests_a_right_one() -> None:
    with pytest.raises(DataError, match="unknown data set 'camvit'.*camvid"):
        load("camvit", 255, 0)


def test_large_sets_are_decoded_when_they_are_used(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    here = read(pairs(tmp_path, *BESIDE)).splits["train"]
    request.getfixturevalue("lazy")
    later = read(tmp_path).splits["train"]
    assert later.decoded is None  # type: ignore[attr-defined]
    for one, other in zip(here, later, strict=True):
        assert (one.image == other.image).all()
        assert (one.mask == other.mask).all()


@pytest.mark.usefixtures("lazy")
def test_files_are_decoded_once_for_each_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_on(pairs(tmp_path, *BESIDE))
    model = task.model(Softmax(), 0)
    task.statistics()
    opened: list[str] = []
    for name in ("read_image", "read_mask"):
        function = getattr(data, name)
        monkeypatch.setattr(data, name, lambda *given, n=name, f=function: opened.append(n) or f(*given))
    counts = []
    for use in (lambda: list(task.batches(RECIPE, 0, 0, 1)), lambda: task.score(model, CPU), lambda: task.chance):
        opened.clear()
        use()
        counts.append((opened.count("read_image"), opened.count("read_mask")))
    assert counts == [(4, 4), (2, 2), (0, 2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_files_that_are_decoded_when_used_are_loaded_by_processes(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """With the same batches, also of a part of the images."""
    monkeypatch.setattr("regard.images.cores.decoders", lambda: 2)
    task = task_on(pairs(tmp_path, *BESIDE), val=0.3)
    if workers:
        request.getfixturevalue("lazy")
    assert task.usual_workers(RECIPE) == workers
    assert equal_batches(task.batches(RECIPE, 0, 0, 2, workers=workers), task.batches(RECIPE, 0, 0, 2))


def test_a_named_set_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again in every training step, which asks for the statistics of its images."""
    (pairs(tmp_path / "cityscapes", *BESIDE) / "classes.txt").write_text("a\nb\nc\n")
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    task = task_on("cityscapes")
    model, read = task.model(Softmax(), 0), []
    (batch,) = task.batches(RECIPE, 0, 0, 1)
    monkeypatch.setattr(digest, "fingerprint", lambda file: read.append(file) or (0, ""))
    task.loss(model, batch, RECIPE, CPU)
    assert not read


@pytest.mark.usefixtures("lazy")
def test_a_mask_of_another_size_is_named_when_it_is_used(tmp_path: Path) -> None:
    """Also where the camera was turned: the header of the image has the sides exchanged."""
    train = read(pairs(tmp_path, *BESIDE)).splits["train"]
    picture(tmp_path / "train/0.png", 0, SHAPE, orientation=6)
    assert train[0].mask.shape == train[0].image.shape[:2] == SHAPE
    mask(tmp_path / "trainannot/1.png", labels(1, size=SHAPE[::-1]))
    with pytest.raises(DataError, match=r"1.png has 16x12 pixels .* its image .*1.png has 12x16"):
        _ = train[1].mask


def test_large_images_are_enlarged_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    enlarged = windows.enlarge
    monkeypatch.setattr(windows, "enlarge", lambda scores, size: sizes.append(len(scores)) or enlarged(scores, size))
    model = torch.nn.Conv2d(3, 5, 1)
    images = torch.randint(0, 256, (3, 3, 8, 12), dtype=torch.uint8)
    statistics = ([0.5] * 3, [0.2] * 3)
    found = windows.classes_of(model, images, statistics, (8, 12), 1.0, (16, 24), CPU)
    assert sizes == [1, 1, 1]
    with torch.inference_mode():
        expected = enlarged(model(normalise(images, statistics, CPU)), (16, 24)).argmax(1)
    assert torch.equal(found.long(), expected)
