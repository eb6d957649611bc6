"""The tasks end to end on a small folder: a step, a score, predictions, pictures, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric

from layouts_of_boxes import standard
from regard.core import ConfigError, DataError
from regard.images import digest
from regard.lab.tasks.detection import Detection, Instances
from regard.lab.tasks.detection import data as data_sets
from regard.lab.tasks.detection.masks import decode
from regard.lab.tasks.detection.pictures import draw_prediction
from regard.lab.tasks.detection.predictions import predictions_of
from regard.lab.tasks.detection.presets import defaults
from regard.lab.tasks.detection.score import Found, evaluate, results
from regard.lab.tasks.detection.task import Boxes
from regard.lab.tasks.image_task import is_copy
from regard.lab.train.inference_speed import inference_speed
from regard.lab.train.recipe import Recipe
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA
from small_scenes import SIZE, coco_folder

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "host": "vit_desk(patch=8, dim=32, depth=1)", "size": (64, 64), "strides": (8, 16), "width": 16, "head": 32,
    "proposals": (60, 30), "rois": 16, "mask_head": (16, 1),
}  # fmt: skip
RECIPE = Recipe(augment="flips", smoothing=0.0, batch=3, epochs=1)


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path) -> Path:
    return coco_folder(tmp_path / "own", masks=True)


def instances(folder: Path, **fields: Any) -> Instances:
    return Instances(data=str(folder), **{**SMALL, **fields})


@pytest.mark.parametrize(("kind", "resize"), [(Detection, "stretch"), (Instances, "fit"), (Instances, "sides")])
def test_training_and_evaluation_end_to_end(folder: Path, kind: type[Boxes], resize: str) -> None:
    task = kind(data=str(folder), **SMALL, resize=resize)  # type: ignore[call-arg]
    task.check(RECIPE)
    model = task.model(Softmax(), 0).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for batch in task.batches(RECIPE, 0, 0, 24):
        loss = task.loss(model, batch, RECIPE, CPU)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-6:]) < 0.8 * np.mean(losses[:6])
    score = task.score(model, CPU)
    assert set(score.metrics) == {"map", *kind.further}
    if kind is Instances:
        most = max(map(len, (scene.objects for scene in task.test_scenes())))
        found = predictions_of(task.frame(), model, task.part(task.split), CPU)
        boxes = evaluate(task.test_scenes(), found, task.data_set().classes, "bbox", max(100, most))
        assert score.metrics["box_map"] == boxes.metrics()["map"]
    assert inference_speed(model, task.example(), "32") > 0
    assert all(0 <= value <= 100 for value in score.metrics.values())
    assert score.samples.shape == (4,)
    assert {"ap/bright", "ap/dark"} <= set(score.details)


def test_scores_are_in_pixels_of_the_original_images(folder: Path) -> None:
    """A model that returns the truth at the size of its inputs has a precision of 100 in images of another size."""
    for resize in ("stretch", "fit", "sides"):
        task = Detection(data=str(folder), **SMALL, resize=resize)
        split = task.part("val")
        answers = iter([split.item(row)[1] for row in range(len(split))])

        class Truth(torch.nn.Module):
            def forward(self, images: torch.Tensor, targets: None, sizes: Any) -> list[dict[str, torch.Tensor]]:
                found = [next(answers) for _ in images]  # noqa: B023
                return [one | {"scores": torch.ones(len(one["boxes"]))} for one in found]

        assert SIZE[0] / 64 != SIZE[1] / 64
        assert task.score(Truth(), CPU).metrics["map"] == pytest.approx(100)


def test_the_trivial_answer_needs_no_object_in_the_first_image(folder: Path) -> None:
    assert Detection(data=str(folder), **SMALL, limit=1).chance == 0.0
    assert Detection(data=str(folder), **SMALL).chance >= 0.0


def test_images_that_are_decoded_when_used_are_loaded_by_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.images.cores.decoders", lambda: 2)
    assert instances(folder).usual_workers(RECIPE) == 0
    assert Detection(data="cued-digits", **SMALL).usual_workers(RECIPE) == 0
    task = instances(folder, resize="sides")
    assert task.usual_workers(RECIPE) == 2
    for one, two in zip(task.batches(RECIPE, 0, 0, 2, workers=2), task.batches(RECIPE, 0, 0, 2), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_detections_are_100_unless_an_image_has_more_objects(tmp_path: Path, own_cache: Path) -> None:
    for objects, expected in ((100, 100), (101, 200)):
        path = coco_folder(tmp_path / str(objects))
        made = json.loads((path / "train.json").read_text())
        first = made["annotations"][0]
        made["annotations"] += [{**first, "id": 1000 + number} for number in range(objects - 1)]
        (path / "train.json").write_text(json.dumps(made))
        assert Detection(data=str(path), **SMALL).record()["detections"] == expected


@pytest.mark.parametrize("data", ["bccd", "coco"])
def test_a_named_set_is_read_once(data: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again in every training step, which asks for the statistics of its images."""
    folder.rename(folder.parent / data)
    monkeypatch.setenv("REGARD_DATA", str(folder.parent))
    task = Detection(data=data, **SMALL)
    model, read = task.model(Softmax(), 0).train(), []
    batches = list(task.batches(RECIPE, 0, 0, 2))
    monkeypatch.setattr(digest, "fingerprint", lambda file: read.append(file) or (0, ""))
    for batch in batches:
        task.loss(model, batch, RECIPE, CPU)
    assert not read


def test_a_model_is_a_function_of_its_seed_and_needs_no_data_with_a_record(folder: Path) -> None:
    task = instances(folder)
    record = json.loads(json.dumps(task.record()))
    one, other = task.model(Softmax(), 1), instances(folder.parent / "gone").model(Softmax(), 1, record=record)
    assert record["class_names"] == ["bright", "dark"]
    assert record["category_ids"] == [3, 7]
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    second = task.model(Softmax(), 2)
    assert any(not torch.equal(value, second.state_dict()[name]) for name, value in one.state_dict().items())


def test_a_prediction_is_data_for_json_and_can_be_drawn(folder: Path) -> None:
    task = instances(folder)
    model = task.model(Softmax(), 0).eval()
    with torch.no_grad():
        model.roi_heads.box_predictor.cls_score.weight.mul_(10)
    file = folder / "images" / "3.png"
    (prediction,) = task.predict(model, [file], CPU, task.record())
    assert json.loads(json.dumps(prediction)) == prediction
    assert prediction["file"] == str(file)
    objects = prediction["objects"]
    boxes = np.array([item["box"] for item in objects])
    assert len(objects) > 0
    assert boxes.min() >= 0
    assert (boxes <= [64, 48, 64, 48]).all()
    assert {(item["label"], item["category"]) for item in objects} <= {("bright", 3), ("dark", 7)}
    assert [item["score"] for item in objects] == sorted((item["score"] for item in objects), reverse=True)
    rles = [{**item["mask"], "counts": item["mask"]["counts"].encode()} for item in objects]
    assert decode(rles, SIZE).shape == (len(boxes), *SIZE)
    for item in objects:
        item["score"] = 0.9
    picture = task.draw(file, {**prediction, "objects": objects[:5]})
    assert picture.width / picture.height == pytest.approx(64 / 48)
    empty = {**prediction, "objects": []}
    assert task.draw(file, empty).size == picture.size
    assert np.any(np.asarray(task.draw(file, empty)) != np.asarray(picture))
    many = task.draw(file, {**prediction, "objects": objects[:1] * 41})
    assert (many.width, many.height > picture.height) == (picture.width, True)  # the names of classes are below


def test_captions_lie_beside_small_objects_and_within_the_picture() -> None:
    pixels = np.full((80, 80, 3), 100, np.uint8)
    boxes = [[70.0, 40.0, 78.0, 46.0], [2.0, 1.0, 9.0, 6.0]]
    objects = [{"box": box, "label": "a long name", "category": 1, "score": 0.9} for box in boxes]
    drawn = np.asarray(draw_prediction(pixels, {"objects": objects})).astype(int)
    factor = drawn.shape[0] // 80
    for left, top, right, bottom in boxes:
        rows, columns = (slice(round(a + 1) * factor, round(b - 1) * factor) for a, b in ((top, bottom), (left, right)))
        assert (drawn[rows, columns] == 100).all()
    assert (drawn[:, -1] == 100).all()  # no text is cut off


def test_results_are_written_with_the_ids_of_the_annotations(folder: Path, tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    task = instances(folder)
    scenes = task.test_scenes()
    found = [
        Found(s.objects.boxes, s.objects.labels, np.ones(len(s.objects), np.float32), s.objects.masks) for s in scenes
    ]
    entries = results(found, [scene.number for scene in scenes], task.data_set().category_ids)
    (tmp_path / "results.json").write_text(json.dumps(entries))
    truth = coco.COCO(str(folder / "val.json"))
    loaded = truth.loadRes(str(tmp_path / "results.json"))
    for one in truth.loadAnns(truth.getAnnIds()):
        twins = [entry for entry in loaded.imgToAnns[one["image_id"]] if entry["bbox"] == one["bbox"]]
        assert twins
        assert twins[0]["category_id"] == one["category_id"]
        assert np.array_equal(loaded.annToMask(twins[0]), truth.annToMask(one))


def test_boxes_keep_their_precision_under_autocast(folder: Path) -> None:
    """16 bits cannot tell the pixels of large images apart: losses in bf16-mixed are those of 32 bits, nearly."""
    task = Detection(data=str(folder), **SMALL)
    with pytest.raises(ConfigError, match="bf16-true boxes are rounded"):
        task.check(dataclasses.replace(RECIPE, precision="bf16-true"))
    batch = next(iter(task.batches(RECIPE, 0, 0, 1)))
    losses = []
    for precision in ("32-true", "bf16-mixed"):
        fabric: Any = Fabric(accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]
        model = task.model(Softmax(), 0).train()
        seen: list[torch.Tensor] = []
        take = model.roi_heads.forward
        model.roi_heads.forward = lambda *given, take=take, seen=seen: seen.extend([given[1][0]]) or take(*given)
        torch.manual_seed(0)
        losses.append(task.loss(fabric.setup_module(model), batch, RECIPE, CPU).item())
        assert seen[0].dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_fit_needs_a_mechanism_that_takes_a_padding_mask(folder: Path) -> None:
    for mixer in (None, XCA()):
        with pytest.raises(ConfigError, match='resize="fit" leaves padding, and .*use resize="stretch"'):
            instances(folder, resize="fit").model(mixer, 0)


def test_scales_that_the_host_cannot_take_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not take images of 32x32"):
        instances(folder, scales=(0.5,)).model(Softmax(), 0)
    moving = instances(folder, scales=(0.5, 1.0), host="skaformer_desk", strides=(4, 8, 16))
    assert moving.model(None, 0)


def test_other_data_need_the_same_classes(folder: Path, tmp_path: Path) -> None:
    task = instances(folder)
    model, record = task.model(Softmax(), 0), task.record()
    other = coco_folder(tmp_path / "other", masks=True)
    assert task.score_on(str(other), model, CPU, record).metrics["map"] >= 0
    with pytest.raises(DataError, match="dark; the model has"):
        task.score_on(str(other), model, CPU, record | {"class_names": ["bright", "black"]})


def test_a_split_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="no split 'test' .*train, val"):
        instances(folder, split="test").record()


def test_a_damaged_image_stops_or_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = folder / "images" / "4.png"
    file.write_bytes(file.read_bytes()[:70])
    with pytest.raises(DataError, match="4.png cannot be read as an image"):
        instances(folder).part("train").pixels(0)
    task = instances(folder, corrupt="skip")
    assert task.record()["train"] == 5
    assert "4.png" in caplog.text


def test_cued_digits_need_no_files() -> None:
    task = Instances(**{**Instances.defaults("cued-digits")["task"], "data": "cued-digits", "limit": 8})
    assert task.record()["train"] == 8
    assert task.record()["class_names"] == ["match"]
    _, target, _ = task.part("train").item(0)
    assert len(target["boxes"]) >= 3
    assert 0 < task.chance < 50
    trial = task.trial(Softmax())
    assert torch.isfinite(trial.loss(2))
    assert len(trial.forward(2)) == 2


def test_few_pictures_of_ones_own_get_more_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The annotations tell their number: no picture is read for it."""
    monkeypatch.setattr(data_sets.digests, "identity_of", lambda *_: pytest.fail("the pictures were read"))
    standard(tmp_path)
    assert Detection.defaults(str(tmp_path))["recipe"]["epochs"] == 70
    assert Detection.defaults(str(tmp_path / "missing"))["recipe"]["epochs"] == 9
    assert [defaults("", images)["recipe"]["epochs"] for images in (48, 1000)] == [70, 9]
    assert Detection.defaults("nuclei")["recipe"]["epochs"] == 8


def test_a_copy_of_divided_data_is_scored_where_the_run_was(tmp_path: Path) -> None:
    """Not on its training images."""
    for name in ("one", "copy"):
        (coco_folder(tmp_path / name, masks=True) / "val.json").unlink()
    task = instances(tmp_path / "one")
    record = task.record()
    whole = task.on(str(tmp_path / "copy"))._load(whole=True)
    assert is_copy(whole, record)
    assert not is_copy(whole, record | {"name": whole.name})  # of an older version, which divided otherwise
