"""The segmentation task: batches, windows, the score by hand, predictions."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from regard.core import DataError
from regard.images.augment import scaled_pixels
from regard.lab.tasks.segmentation import Segmentation
from regard.lab.tasks.segmentation.data import own_digest
from regard.lab.tasks.segmentation.feed import fitted_size
from regard.lab.tasks.segmentation.pictures import mask_of, overlay, runs, sheet
from regard.lab.tasks.segmentation.score import confusion, score_of
from regard.lab.tasks.segmentation.windows import classes_of, positions, window_scores
from regard.lab.train.recipe import Recipe
from regard.measure.mean_iou import ious, margins, miou
from regard.mixers.spelling import parse_mixer
from regard.models.segmentation import VOID
from streams import equal_batches, joined

RECIPE = Recipe(epochs=1, batch=4, augment="scale", smoothing=0.0)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Left halves of one class and right halves of another, in images of two sizes; with void borders."""
    own_digest.cache_clear()
    for split, number in (("train", 6), ("test", 3)):
        for part in (split, f"{split}annot"):
            (tmp_path / part).mkdir()
        for index in range(number):
            height, width = ((32, 48), (40, 36))[index % 2]
            rng = np.random.default_rng(index)
            mask = np.zeros((height, width), np.uint8)
            mask[:, int(rng.integers(10, width - 10)) :] = 1
            pixels = (60 + 120 * mask[..., None] + rng.integers(0, 20, (height, width, 3))).astype(np.uint8)
            mask[0] = 255
            Image.fromarray(pixels).save(tmp_path / split / f"{index}.png")
            Image.fromarray(mask).save(tmp_path / f"{split}annot" / f"{index}.png")
    return tmp_path


def task_on(folder: Path, **fields: object) -> Segmentation:
    options = {"host": "vit_desk(patch=8, dim=16, depth=1, heads=2)", "size": (32, 32), "head": "pixels"}
    return Segmentation(data=str(folder), **{**options, **fields})  # type: ignore[arg-type]


def test_miou_by_hand() -> None:
    truth = np.array([[0, 0, 1, 1], [2, 2, 2, VOID]], np.uint8)
    predicted = np.array([[0, 1, 1, 1], [2, 2, 0, 3]], np.uint8)
    matrix = confusion(truth, predicted, 5)
    assert matrix[0].tolist() == [1, 1, 0, 0, 0]  # the prediction 3 is at the void pixel
    values = ious(margins(matrix))
    assert values[:3] == pytest.approx([100 / 3, 200 / 3, 200 / 3])
    assert np.isnan(values[3:]).all()
    assert miou(margins(matrix)) == pytest.approx((100 / 3 + 200 / 3 + 200 / 3) / 3)
    assert miou(margins(matrix), ignored=(0,)) == pytest.approx(200 / 3)


def test_miou_is_that_of_the_whole_set_and_not_a_mean_over_images() -> None:
    rng = np.random.default_rng(0)
    pairs = [rng.integers(0, 3, (2, 6, 8)).astype(np.uint8) for _ in range(5)]
    pairs[0][0, 0] = VOID
    score = score_of(np.stack([margins(confusion(*pair, 4)) for pair in pairs]), "abcd")
    truth, predicted = np.concatenate(pairs, 1)
    counted = truth != VOID
    expected = [
        100 * ((truth == k) & (predicted == k))[counted].sum() / ((truth == k) | (predicted == k))[counted].sum()
        for k in range(3)
    ]
    assert score.metrics["miou"] == pytest.approx(np.mean(expected))
    assert score.metrics["pixels"] == pytest.approx(100 * (truth == predicted)[counted].mean())
    assert score.details == pytest.approx(
        {"iou/a": expected[0], "iou/b": expected[1], "iou/c": expected[2], "classes_present": 3}
    )
    assert score.samples.shape == (5,)


def test_torchmetrics_agrees() -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    rng = np.random.default_rng(1)
    truth, predicted = rng.integers(0, 4, (2, 3, 9, 7)).astype(np.uint8)
    truth[:, 2] = VOID
    metric = classification.MulticlassJaccardIndex(4, ignore_index=VOID)
    metric.update(torch.from_numpy(predicted).long(), torch.from_numpy(truth).long())
    ours = score_of(np.stack([margins(confusion(*pair, 4)) for pair in zip(truth, predicted, strict=True)]), "abcd")
    assert ours.metrics["miou"] == pytest.approx(100 * float(metric.compute()), abs=1e-4)


def test_windows_cover_everything() -> None:
    assert positions(10, 4, 4) == [0, 4, 6]
    assert positions(4, 4, 4) == [0]
    for side, window, step in ((23, 7, 3), (8, 7, 7), (50, 7, 7)):
        covered = {start + offset for start in positions(side, window, step) for offset in range(window)}
        assert covered == set(range(side))


@pytest.mark.parametrize("stride", [1.0, 0.5])
def test_windows_of_a_pointwise_model_are_the_whole_image(stride: float) -> None:
    model, images = nn.Conv2d(3, 5, 1), torch.randn(2, 3, 19, 26)
    assert torch.allclose(window_scores(model, images, (8, 12), stride), model(images), atol=1e-6)


def test_overlapping_windows_are_averaged() -> None:
    class Position(nn.Module):
        """The column of a pixel in its window."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.arange(x.shape[-1]).expand(len(x), 1, x.shape[-2], -1).float()

    scores = window_scores(Position(), torch.zeros(1, 1, 4, 6), (4, 4), 0.5)
    assert scores[0, 0, 0].tolist() == [0, 1, (2 + 0) / 2, (3 + 1) / 2, 2, 3]


def test_scores_are_enlarged_and_not_classes() -> None:
    """Two score maps that cross between pixels: with nearest classes the border would be at a multiple of 4."""

    class Slope(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            line = torch.tensor([2.0, 1.0, -3.0, -4.0]).expand(len(x), 1, x.shape[-2], 4)
            return torch.cat([line, -line], 1)

    classes = classes_of(
        Slope(), torch.zeros(1, 1, 4, 4, dtype=torch.uint8), ([0.5], [0.5]), (4, 4), 1.0, (16, 16), CPU
    )
    assert classes[0, 0].tolist() == [0] * 7 + [1] * 9


def test_batches_depend_on_seed_and_number_alone(folder: Path) -> None:
    task = task_on(folder)
    first = list(task.batches(RECIPE, 3, 0, 4))
    assert equal_batches(first[3:], task.batches(RECIPE, 3, 3, 4))
    assert equal_batches(first[2:3], joined([list(task.batches(RECIPE, 3, 2, 3, part=(i, 2))) for i in range(2)]))
    assert not torch.equal(next(task.batches(RECIPE, 4, 0, 1))[0], first[0][0])


@pytest.mark.parametrize("augment", ["none", "crop", "scale", "scale+colour"])
def test_masks_stay_on_their_images(folder: Path, augment: str) -> None:
    """Class 1 is brighter than class 0 in every image, before and after any augmentation."""
    recipe = dataclasses.replace(RECIPE, augment=augment)
    task = task_on(folder, shorter=24)  # smaller than the crop: there is a border of void
    seen = 0
    for images, masks in task.batches(recipe, 0, 0, 4):
        assert images.shape == (4, 3, 32, 32)
        assert masks.shape == (4, 32, 32)
        for image, mask in zip(images.float().mean(1), masks, strict=True):
            if (mask == 0).any() and (mask == 1).any():
                seen += 1
                assert image[mask == 1].mean() > image[mask == 0].mean() + 30
    assert seen > 4


def test_resizing_keeps_labels() -> None:
    mask = np.array([[0, 3], [7, VOID]], np.uint8)
    assert set(np.unique(scaled_pixels(mask, (9, 11), smooth=False)).tolist()) == {0, 3, 7, VOID}
    assert fitted_size((360, 480), 180) == (180, 240)
    assert fitted_size((480, 360), 180, 1.5) == (360, 270)


def test_a_run_trains_and_scores_at_the_original_size(folder: Path) -> None:
    task = task_on(folder)
    model = task.model(parse_mixer("Softmax()"), 0)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for batch in task.batches(RECIPE, 0, 0, 60):
        optimizer.zero_grad()
        task.loss(model, batch, RECIPE, CPU).backward()
        optimizer.step()
    score = task.score(model, CPU)
    assert score.metrics["miou"] > 80 > task.chance
    assert len(score.samples) == 3
    shapes = [mask.shape for mask in task.predict_masks(model, CPU, task.part("test"), task.statistics())]
    assert shapes == [(32, 48), (40, 36), (32, 48)]


def test_chance_is_the_most_frequent_class(folder: Path) -> None:
    task = task_on(folder)
    split = task.part("test")
    truth = np.concatenate([sample.mask.ravel() for sample in split])
    truth = truth[truth != VOID]
    assert task.chance == pytest.approx(max((truth == 0).mean(), (truth == 1).mean()) * 100 / 2)


def test_of_cued_the_background_is_not_counted() -> None:
    task = Segmentation(
        host="vit_desk(patch=7, dim=16, depth=1)", size=(84, 84), data="cued-digits", head="pixels", limit=8
    )
    assert task.chance == 0.0
    score = task.score(task.model(None, 0), CPU)
    assert score.metrics["miou"] == pytest.approx(score.details["iou/match"])


def test_a_model_is_built_from_its_record(folder: Path) -> None:
    task = task_on(folder)
    record = task.record()
    model = task.model(parse_mixer("SKA()"), 1)
    elsewhere = dataclasses.replace(task, data="/no/such/folder").model(parse_mixer("SKA()"), 1, record=record)
    for (name, own), (_, other) in zip(model.state_dict().items(), elsewhere.state_dict().items(), strict=True):
        assert torch.equal(own, other), name
    assert record["train"] == 6
    assert record["test"] == 3


def test_predictions_are_masks_of_the_files_size(folder: Path) -> None:
    task = task_on(folder)
    model, record = task.model(None, 0), task.record()
    file = folder / "test" / "1.png"
    (prediction,) = task.predict(model.eval(), [file], CPU, record)
    mask = mask_of(prediction["runs"], prediction["size"])
    assert mask.shape == (40, 36)
    assert (mask == next(iter(task.predict_masks(model, CPU, [one_file(file)], task.statistics(record))))).all()
    assert sum(prediction["shares"].values()) == pytest.approx(100, abs=0.01)
    assert task.draw(file, prediction).width > 500


def one_file(file: Path) -> SimpleNamespace:
    image = np.asarray(Image.open(file))
    return SimpleNamespace(image=image, mask=np.zeros(image.shape[:2], np.uint8))


def test_other_data_need_the_same_classes(folder: Path) -> None:
    task = task_on(folder)
    model, record = task.model(None, 0), task.record()
    assert task.score_on(str(folder), model, CPU, record).metrics == task.score(model, CPU).metrics
    with pytest.raises(DataError, match="other classes"):
        task.score_on("cued-digits", model, CPU, record)


def test_the_key_has_no_path(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    identity = task_on(folder).identity()
    assert identity.data.startswith("own:")
    moved = folder.rename(tmp_path_factory.mktemp("other") / "moved")
    assert task_on(moved).identity() == identity


def test_a_trial_needs_no_data() -> None:
    trial = task_on(Path("/no/such/folder")).trial(parse_mixer("Softmax()"), outputs=3)
    assert trial.forward(2).shape == (2, 3, 32, 32)
    trial.loss(2).backward()


def test_overlays_show_void_and_hidden_classes_as_they_are() -> None:
    pixels = np.full((4, 6, 1), 90, np.uint8)
    mask = np.array([[0, 1, 2, VOID, 0, 0]] * 4, np.uint8)
    drawn = np.asarray(overlay(pixels, mask, hidden=(0,)))
    assert (drawn[:, [0, 3, 4, 5]] == 90).all()
    assert (drawn[:, 1] != drawn[:, 2]).any()
    assert mask_of(runs(mask), mask.shape).tolist() == mask.tolist()
    assert sheet(pixels, [("truth", mask), ("prediction", mask)], ["a", "b", "c"]).width > 900
