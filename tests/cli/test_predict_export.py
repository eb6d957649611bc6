"""`regard predict` and `regard export` on a finished classification run."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from command_line import answer, refused
from regard.cli.app import run as command
from regard.cli.predict import _coco, _ids_in, _nothing_drawn, _surest
from regard.cli.trained import read_trained
from regard.cli.user_model import ModelOptions
from regard.core import ConfigError, DataError, UnsupportedError
from regard.files.records import read_record, write_record
from regard.images import own
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.train import onnx_export
from regard.lab.train.execute import execute
from regard.lab.train.load import load_run
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.mixers.linear import Linear
from regard.models.create import create_model
from regard.models.saving import load, read_description, save
from regard.swapping.layer_plan import write_layer_plan

RUN = Run(
    task=Classification(
        host="vit_desk(size=8, patch=2, dim=16, depth=1, heads=2)", data="digits", size=(8, 8), limit=64
    ),
    recipe=Recipe(epochs=1, batch=32, augment="none"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The results folder and the key of a finished run."""
    root = tmp_path_factory.mktemp("results")
    execute(RUN, Results(root), device="cpu")
    return str(root), RUN.key


def digit_file(folder: Path, index: int) -> Path:
    from sklearn.datasets import load_digits

    path = folder / f"digit{index}.png"
    Image.fromarray((load_digits().images[index] * 15.9).astype(np.uint8)).save(path)
    return path


def test_pictures_are_drawn_beside_the_predictions(store: tuple[str, str], tmp_path: Path) -> None:
    file, out = digit_file(tmp_path, 3), tmp_path / "out"
    assert command(["predict", store[1], str(file), "--results", store[0], "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["0000-digit3.png", "predictions.json"]
    assert Image.open(out / "0000-digit3.png").width >= 512


def test_wrong_use_is_one_sentence(store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict = ["predict", store[1], "--results", store[0]]
    refused(capsys, [*predict, "missing.png"], "there is no file missing.png")
    refused(capsys, [*predict, "--coco", str(digit_file(tmp_path, 0).parent)], "--coco is for boxes and masks")
    refused(capsys, ["export", store[1], "--onnx", "model.pt", "--results", store[0]], "ends in .onnx")
    file = digit_file(tmp_path, 0)
    refused(capsys, [*predict, str(file), "--confidence", "0.2"], "add --out FOLDER")
    drawn = ["--confidence", "0.2", "--out", str(tmp_path / "drawn")]
    refused(capsys, [*predict, str(file), *drawn], "--confidence is for boxes and masks")
    for out, read in ((file.parent, file), (file.parent, file.parent), (file.parent / "out", file.parent)):
        refused(capsys, [*predict, str(read), "--out", str(out)], "lies in, a folder of what is read: name another")


@pytest.mark.parametrize(
    ("normal", "said"),
    [
        (None, "outcome.json: of its data, 'normal' is missing, which is needed here; the file is damaged"),
        ([[0.5] * 3, [0.2] * 3], "have 1: its outcome is damaged"),
        ([[], []], "outcome.json: of its data, normal is [mean, deviation], a number of each channel"),
    ],
)
def test_a_record_of_other_images_is_named(
    store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], normal: Any, said: str
) -> None:
    folder = shutil.copytree(Path(store[0]) / store[1], tmp_path / store[1])
    outcome = read_record(folder / "outcome.json")
    names = {"class_names": outcome["data"]["class_names"]}
    write_record(folder / "outcome.json", {**outcome, "data": names if normal is None else {**names, "normal": normal}})
    refused(capsys, ["predict", str(folder), str(digit_file(tmp_path, 3))], said, code=1)


def test_the_files_of_a_folder_are_predicted_and_those_that_cannot_be_read_do_not_stop_the_others(
    store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.png", "digit2.png", "z.png", "b.heic", "notes.txt"):
        (tmp_path / name).write_bytes(b"no image")
    for digit in (1, 3):
        digit_file(tmp_path, digit)
    assert command(["predict", store[1], str(tmp_path), "--results", store[0], "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert [Path(item["file"]).name for item in found] == ["digit1.png", "digit3.png"]
    for item in found:
        assert item["top"][0]["label"] == item["label"]
        assert 0 < sum(part["probability"] for part in item["top"]) <= 1.0001
    assert [line for line in shown.err.splitlines() if line.startswith("left out: ")] == [
        f"left out: {tmp_path / name} cannot be read as an image: its bytes are of no image format that Pillow reads"
        for name in ("a.png", "digit2.png", "z.png")
    ]
    assert f"1 files of {tmp_path} are not read as images, such as {tmp_path / 'b.heic'}" in shown.err


def test_a_saved_model_predicts_as_the_run_does(
    store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its classes and normalisation where the folder has them, else with numbers and a note."""
    file, network = str(digit_file(tmp_path, 3)), load_run(Path(store[0]) / store[1])
    record = Results(store[0]).data(store[1]) | {"class_names": [f"digit {label}" for label in range(10)]}
    known, bare = save(network, tmp_path / "known (copy)", data=record), save(network, tmp_path / "bare", data={})
    again = save(load(save(network, tmp_path / "as loaded")), tmp_path / "again")
    found = {}
    for model in (store[1], str(known), str(bare), str(again)):
        assert command(["predict", model, file, "--results", store[0], "--device", "cpu"]) == 0
        shown = capsys.readouterr()
        (found[model],) = json.loads(shown.out)
        assert ("assumed, as the model does not say it" in shown.err) == (model == str(bare))
    assert found[str(again)] == found[store[1]]
    assert found[str(known)]["label"] == f"digit {found[store[1]]['label']}"
    assert found[str(known)]["probability"] == found[store[1]]["probability"]
    assert found[str(bare)]["label"] in map(str, range(10))
    refused(capsys, ["predict", str(known), file, "--best"], "is no run, and has no other weights")


def test_any_classifier_is_evaluated_on_labelled_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of its classes, else with those of the data in their order."""
    from sklearn.datasets import load_digits

    digits, photos = load_digits(), str(tmp_path / "photos")
    for index in range(60):
        folder = tmp_path / "photos" / f"digit {digits.target[index]}"
        folder.mkdir(parents=True, exist_ok=True)
        digit_file(folder, index)
    record = {"normal": ([0.5] * 3, [0.25] * 3), "class_names": [f"digit {label}" for label in range(10)]}
    torch.manual_seed(0)
    network = create_model("vit_desk(size=8, patch=2, dim=16, depth=1, heads=2)", num_classes=10).eval()
    nn.init.normal_(network.head.weight)
    known = save(network, tmp_path / "known", data=record)
    unnamed = save(network, tmp_path / "unnamed", data={"normal": record["normal"]})
    found = {}
    for model in (known, unnamed):
        for change in ([], ["--mixer", "Linear()"]):
            assert command(["eval", str(model), "--data", photos, "--json", *change]) == 0
            shown = capsys.readouterr()
            found[model.name, *change] = json.loads(shown.out)
            assert ("taken for the classes of" in shown.err) == (model == unnamed)
    assert found["known",]["images"] == 60
    assert found["known",]["metrics"] == found["unnamed",]["metrics"]
    assert found["known",]["metrics"] != found["known", "--mixer", "Linear()"]["metrics"]
    assert command(["predict", str(known), photos]) == 0
    predicted = json.loads(capsys.readouterr().out)
    right = [one["label"] == Path(one["file"]).parent.name for one in predicted]
    assert found["known",]["metrics"]["top1"] == pytest.approx(100 * np.mean(right))
    plan = write_layer_plan({"blocks.0.attn": Linear()}, tmp_path / "plan.json")
    assert (
        answer(capsys, "eval", str(known), "--data", photos, "--plan", str(plan))["metrics"]
        == found["known", "--mixer", "Linear()"]["metrics"]
    )
    both = ["--mixer", "SKA()", "--plan", "blocks.0.attn=None"]
    refused(capsys, ["eval", str(known), "--data", photos, *both], "--mixer and --plan both")
    taught = ["--plan", "Linear()", "--data", photos, "--steps", "0", "--output-steps", "0"]
    assert command(["distill", str(unnamed), *taught, "--out", str(tmp_path / "taught")]) == 0
    assert "named by the classes of" in capsys.readouterr().err
    assert read_description(tmp_path / "taught")["data"]["class_names"] == record["class_names"]
    refused(capsys, ["eval", str(known)], "give labelled images with --data")
    (tmp_path / "photos" / "digit 9").rename(tmp_path / "nine")
    own.digest.cache_clear()  # which a process computes once
    assert command(["eval", str(unnamed), "--data", photos]) == 2
    assert "10 outputs without names" in capsys.readouterr().err
    assert answer(capsys, "eval", str(known), "--data", photos)["images"] < 60


def unnamed_head() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def test_a_head_without_a_name_gives_class_scores_and_features_do_not(tmp_path: Path) -> None:
    model = create_model("unnamed_head", None, extra=[unnamed_head])
    folder, options = save(model, tmp_path / "own", data={"normal": [[0.5] * 3] * 2}), ModelOptions(results=tmp_path)
    trained = read_trained(str(folder), options, (unnamed_head,))
    assert trained.record["class_names"] == ["0", "1", "2"]
    features = create_model("vit_desk(size=8, patch=2, dim=16, depth=1, heads=2, num_classes=0)", None)
    with pytest.raises(UnsupportedError, match="gives embedding, no class scores"):
        read_trained(str(save(features, tmp_path / "features")), options, ())
    kept = read_trained(str(tmp_path / "features"), options, (), any_output=True)
    assert (kept.task, "class_names" in kept.record) == (None, False)


def export(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> tuple[dict, str]:
    """What an exported file says of itself, and what the command says."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    capsys.readouterr()
    assert command(["export", *words, "--onnx", str(path)]) == 0
    said = capsys.readouterr().out
    assert "input batchx1x8x8" in said
    return {entry.key: json.loads(entry.value) for entry in onnx.load(path).metadata_props}, said


def test_a_saved_model_is_exported(store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(load_run(Path(store[0]) / store[1]), tmp_path / "saved", data={"class_names": list("abcdefghij")})
    about, _ = export(capsys, tmp_path / "m.onnx", str(folder))
    assert about["class_names"] == list("abcdefghij")


def test_an_exported_run_gives_the_same_scores_for_any_batch_and_says_what_it_takes(
    store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    about, said = export(capsys, tmp_path / "model.onnx", store[1], "--results", store[0])
    images = torch.randn(5, 1, 8, 8)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.inference_mode():
        expected = load_run(Path(store[0]) / store[1])(images)
    assert np.abs(scores - expected.numpy()).max() < 1e-4
    mean, deviation = RUN.task.record()["normal"]
    assert (about["mean"], about["deviation"]) == (pytest.approx(mean), pytest.approx(deviation))
    assert about["class_names"] == [str(label) for label in range(10)]
    assert f"input = (pixels / 255 - mean) / deviation, grey: mean {about['mean']}" in said


@pytest.mark.parametrize("difference", [1.0, float("nan"), 0.0])
def test_a_file_that_is_not_the_model_replaces_no_other(
    difference: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = SimpleNamespace(
        model=SimpleNamespace(metadata_props={}), save=lambda path: Path(path).write_text("new", encoding="utf-8")
    )
    monkeypatch.setattr(onnx_export, "require", lambda *_: None)
    monkeypatch.setattr(onnx_export, "_trace", lambda *_: program)
    monkeypatch.setattr(onnx_export, "compare_onnx", lambda *_: difference)
    path = tmp_path / "model.onnx"
    path.write_text("old", encoding="utf-8")
    with nullcontext() if difference == 0 else pytest.raises(ConfigError, match="is not written"):
        onnx_export.export_onnx(nn.Identity(), (torch.ones(1),), path)
    assert path.read_text(encoding="utf-8") == ("new" if difference == 0 else "old")
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_drawn_is_said_where_it_is_nothing() -> None:
    objects = [{"score": score} for score in (0.127, 0.05)]
    assert len(_surest({"objects": objects}, 0.1)["objects"]) == 1
    assert "--confidence 0.12 draws the best" in _nothing_drawn([{"objects": objects}, {"objects": []}], 0.5)
    assert not _nothing_drawn([{"objects": objects}], 0.12)
    assert not _nothing_drawn([{"label": "cat"}], 0.5)


def test_coco_results_have_the_ids_of_an_annotation_file(tmp_path: Path) -> None:
    file = tmp_path / "val.json"
    content = {"images": [{"id": 7, "file_name": "b.png"}, {"id": 9, "file_name": "a/b.png"}]}
    file.write_text(json.dumps(content))
    found = {"box": [1.0, 2.0, 4.0, 8.0], "category": 3, "label": "cat", "score": 0.5}
    predictions = [{"file": name, "objects": [found]} for name in ("data/a/b.png", "data/b.png")]
    results = _coco(predictions, _ids_in(file))
    assert [item["image_id"] for item in results] == [9, 7]
    assert results[0]["bbox"] == [1.0, 2.0, 3.0, 6.0]
    assert results[0]["category_id"] == 3
    with pytest.raises(ConfigError, match=r"names no image data/c\.png"):
        _coco([{"file": "data/c.png", "objects": []}], _ids_in(file))
    with pytest.raises(ConfigError, match=r"data/b\.png and other/b\.png are one image"):
        _coco([{"file": name, "objects": []} for name in ("data/b.png", "other/b.png")], _ids_in(file))
    file.write_text(json.dumps(content | {"categories": [{"id": 12, "name": "cat"}, {"id": 3, "name": "dog"}]}))
    assert [item["category_id"] for item in _coco(predictions, _ids_in(file))] == [12, 12]
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    for (height, width), fits in (((6, 4), True), ((4, 6), False)):
        entry = {"id": 1, "file_name": "turned.jpg", "height": height, "width": width}
        file.write_text(json.dumps({"images": [entry]}))
        with nullcontext() if fits else pytest.raises(ConfigError, match="has 4x6 pixels as its EXIF"):
            _coco([{"file": str(tmp_path / "turned.jpg"), "objects": []}], _ids_in(file))
    file.write_text(json.dumps(content | {"categories": [{"id": 3, "name": "dog"}]}))
    found["label"] = "bird"
    with pytest.raises(ConfigError, match="no category 'bird'"):
        _coco(predictions, _ids_in(file))
    file.write_text("[]")
    with pytest.raises(DataError, match="is no COCO annotation file"):
        _ids_in(file)
