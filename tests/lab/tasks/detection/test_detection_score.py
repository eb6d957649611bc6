"""Average precision: by hand, against pycocotools and torchmetrics, and what each image contributes."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch

from regard.core import DataError
from regard.lab.tasks.detection.masks import decode, encode
from regard.lab.tasks.detection.scenes import Scene, objects_of
from regard.lab.tasks.detection.score import Found, evaluate, ground_truth, results
from regard.lab.tasks.detection.trivial import components, otsu

CLASSES = ("a", "b", "never")
SIDE = 160


def random_case(seed: int, images: int = 30, masks: bool = False) -> tuple[list[Scene], list[Found]]:
    """Scenes with crowds and without objects, and predictions near their objects."""
    rng = np.random.default_rng(seed)
    scenes, found = [], []
    for image in range(images):
        count = int(rng.integers(0, 9))
        first = rng.integers(0, 90, (count, 2))
        boxes = np.concatenate([first, first + rng.integers(5, 70, (count, 2))], 1).astype(np.float32)
        labels, crowd = rng.integers(0, 2, count), rng.random(count) < 0.1
        near = rng.integers(0, max(count, 1), int(rng.integers(0, 20)) if count else 0)
        guesses = boxes[near] + rng.normal(0, 4, (len(near), 4))
        guesses = np.concatenate([guesses[:, :2].clip(0), guesses[:, 2:].clip(0, SIDE)], 1).round().astype(np.float32)
        guesses[:, 2:] = np.maximum(guesses[:, 2:], guesses[:, :2] + 2)
        rles = _rles(boxes) if masks else None
        objects = objects_of(boxes.tolist(), labels.tolist(), crowd.tolist(), (), rles)
        scenes.append(Scene(str(image), b"", (SIDE, SIDE), objects, image + 1))
        scores = rng.random(len(near)).astype(np.float32)
        found.append(Found(guesses, labels[near], scores, _rles(guesses) if masks else None))
    return scenes, found


def _rles(boxes: np.ndarray) -> list[Any]:
    arrays = np.zeros((len(boxes), SIDE, SIDE), bool)
    for array, (left, top, right, bottom) in zip(arrays, boxes.astype(int), strict=True):
        array[top:bottom, left:right] = True
        array[top, left] = False
    return encode(arrays)


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("seed", [0, 1])
def test_pycocotools_agrees(kind: str, seed: int) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    scenes, found = random_case(seed, masks=kind == "segm")
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco.COCO()
        truth.dataset = ground_truth(scenes, CLASSES)
        truth.createIndex()
        entries = [{name: value for name, value in entry.items() if kind == "bbox" or name != "bbox"}
                   for entry in results(found)]  # fmt: skip
        oracle = cocoeval.COCOeval(truth, truth.loadRes(entries), kind)
        oracle.evaluate()
        oracle.accumulate()
        oracle.summarize()
    score = evaluate(scenes, found, CLASSES, kind, 100).score()
    sizes = [score.details.get(f"ap/{size}", -100) for size in ("small", "medium", "large")]
    ours = np.array([*score.metrics.values(), *sizes]) / 100
    np.testing.assert_allclose(ours, oracle.stats[:6], rtol=0, atol=1e-12)
    assert 0.05 < ours[0] < 0.9


def test_the_size_of_a_mask_is_not_that_of_its_box() -> None:
    """A false positive along the diagonal has few pixels in a large box: it counts among small objects."""
    whole, line = np.zeros((1, SIDE, SIDE), bool), np.eye(SIDE, dtype=bool)[None]
    whole[0, :20, :20] = True
    scene = Scene("one", b"", (SIDE, SIDE), objects_of([[0.0, 0.0, 20.0, 20.0]], [0], [False], (), encode(whole)), 1)
    boxes = np.array([[0, 0, SIDE, SIDE], [0, 0, 20, 20]], np.float32)
    found = Found(boxes, np.zeros(2, np.int64), np.array([0.9, 0.8], np.float32), encode(np.concatenate([line, whole])))
    details = evaluate([scene], [found], ("a",), "segm", 100).score().details
    assert details["ap/small"] == pytest.approx(50, abs=1)


def test_torchmetrics_agrees() -> None:
    metrics = pytest.importorskip("torchmetrics.detection")

    scenes, found = random_case(2)
    exact = [np.linspace(0.5, 0.95, 10).tolist(), np.linspace(0, 1, 101).tolist()]  # its own are in float32
    metric = metrics.MeanAveragePrecision("xyxy", "bbox", *exact, class_metrics=True, backend="faster_coco_eval")
    for scene, one in zip(scenes, found, strict=True):
        objects = scene.objects
        predicted = {"boxes": torch.tensor(one.boxes), "scores": torch.tensor(one.scores)}
        truth = {"boxes": torch.tensor(objects.boxes), "labels": torch.tensor(objects.labels)}
        truth |= {"iscrowd": torch.tensor(objects.crowd).int(), "area": torch.tensor(objects.areas)}
        metric.update([predicted | {"labels": torch.tensor(one.labels)}], [truth])
    theirs = metric.compute()
    score = evaluate(scenes, found, CLASSES, "bbox", 100).score()
    for name, other in (("map", "map"), ("ap50", "map_50"), ("ap75", "map_75")):
        assert score.metrics[name] == pytest.approx(100 * float(theirs[other]), abs=1e-4)
    each = [score.details["ap/a"], score.details["ap/b"]]
    assert each == pytest.approx((100 * theirs["map_per_class"][:2]).tolist(), abs=1e-4)
    assert "ap/never" not in score.details


def test_average_precision_by_hand() -> None:
    """Two objects. The first prediction is right, the second wrong, the third right: precision 1 up to recall 0.5, then
    2/3; of 101 recalls 51 are up to 0.5."""
    boxes = [[0.0, 0.0, 40.0, 40.0], [50.0, 50.0, 90.0, 90.0]]
    scene = Scene("one", b"", (100, 100), objects_of(boxes, [0, 0]), 1)
    guesses = np.array([boxes[0], [0.0, 50.0, 40.0, 90.0], boxes[1]], np.float32)
    found = Found(guesses, np.zeros(3, np.int64), np.array([0.9, 0.8, 0.7], np.float32))
    score = evaluate([scene], [found], ("a",), "bbox", 100).score()
    assert score.metrics == pytest.approx(dict.fromkeys(("map", "ap50", "ap75"), 100 * (51 + 50 * 2 / 3) / 101))


def test_what_an_image_contributes_is_the_jackknife_value() -> None:
    scenes, found = random_case(3)
    evaluation = evaluate(scenes, found, CLASSES, "bbox", 100)
    samples = evaluation.score().samples
    for left_out in (0, 7):
        rest = [row for row in range(len(scenes)) if row != left_out]
        without = evaluate([scenes[row] for row in rest], [found[row] for row in rest], CLASSES, "bbox", 100).mean()
        whole = evaluation.mean()
        expected = len(scenes) * whole - (len(scenes) - 1) * without
        assert samples[left_out] == pytest.approx(expected, rel=1e-5)


def test_no_prediction_has_precision_zero_and_no_object_none() -> None:
    scenes, _ = random_case(4)
    nothing = Found(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32))
    score = evaluate(scenes, [nothing] * len(scenes), CLASSES, "bbox", 100).score()
    assert set(score.metrics.values()) == {0.0}
    corner = [Scene("corner", b"", (9, 9), objects_of([[0.0, 0.0, 1.0, 1.0]], [0]), 1)]
    assert set(evaluate(corner, [nothing], CLASSES, "bbox", 100).score().metrics.values()) == {0.0}
    empty = [Scene("empty", b"", (9, 9), objects_of([], []), 1)]
    with pytest.raises(DataError, match="no objects to evaluate"):
        evaluate(empty, [nothing], CLASSES, "bbox", 100).score()


def test_more_detections_than_100_count() -> None:
    first = np.stack(np.meshgrid(np.arange(12), np.arange(12)), -1).reshape(-1, 2) * 12
    boxes = np.concatenate([first, first + 10], 1).astype(np.float32)
    scene = Scene("many", b"", (SIDE, SIDE), objects_of(boxes.tolist(), [0] * 144), 1)
    found = Found(boxes, np.zeros(144, np.int64), np.linspace(1, 0.5, 144, dtype=np.float32))
    assert evaluate([scene], [found], ("a",), "bbox", 150).mean() == pytest.approx(100)
    assert (evaluate([scene], [found], ("a",), "bbox", 100).mean() or 0) < 75


def test_otsu_separates_two_levels() -> None:
    grey = np.array([[10] * 30 + [200] * 10], np.uint8)
    assert 10 <= otsu(grey) < 200


@pytest.mark.parametrize("inverted", [False, True])
def test_components_are_the_boxes_of_separate_things(inverted: bool) -> None:
    pixels = np.full((40, 60, 3), 20, np.uint8)
    pixels[5:15, 10:30] = 220
    pixels[20:35, 40:50] = 220
    pixels[0, 0] = 220  # too small
    found = components(255 - pixels if inverted else pixels, 2, 100, True)
    assert found.boxes.tolist() == [[10, 5, 30, 15], [40, 20, 50, 35]]
    assert found.labels.tolist() == [2, 2]
    assert decode(found.masks, (40, 60)).sum((1, 2)).tolist() == [200, 150]
