"""`regard predict` and `regard export` on a finished classification run."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard.cli.app import run as command
from regard.store.results import Results
from regard.tasks import Classification
from regard.train.recipe import Recipe
from regard.train.run import Run

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
    RUN.execute(Results(root), device="cpu")
    return str(root), RUN.key


def digit_file(folder: Path, index: int) -> Path:
    from sklearn.datasets import load_digits

    path = folder / f"digit{index}.png"
    Image.fromarray((load_digits().images[index] * 15.9).astype(np.uint8)).save(path)
    return path


def test_predictions_of_files_and_folders(
    store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in (0, 1):
        digit_file(tmp_path, index)
    assert command(["predict", store[1], str(tmp_path), "--results", store[0], "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(item["file"]).name for item in found] == ["digit0.png", "digit1.png"]
    for item in found:
        assert item["top"][0]["label"] == item["label"]
        assert 0 < sum(part["probability"] for part in item["top"]) <= 1.0001


def test_pictures_are_drawn_beside_the_predictions(store: tuple[str, str], tmp_path: Path) -> None:
    file, out = digit_file(tmp_path, 3), tmp_path / "out"
    assert command(["predict", store[1], str(file), "--results", store[0], "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["0000-digit3.png", "predictions.json"]
    assert Image.open(out / "0000-digit3.png").width >= 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.png"], "there is no file missing.png"),
        (["--coco", "HERE"], "--coco is for boxes and masks"),
    ],
)
def test_wrong_use_is_one_sentence(
    store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    digit_file(tmp_path, 0)
    arguments = [str(tmp_path) if item == "HERE" else item for item in arguments]
    assert command(["predict", store[1], *arguments, "--results", store[0]]) == 2
    assert message in capsys.readouterr().err


def test_an_unreadable_image_is_named(
    store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    assert command(["predict", store[1], str(broken), "--results", store[0]]) == 2
    assert f"{broken} cannot be read as an image: its bytes are of no image format" in capsys.readouterr().err


@pytest.mark.slow
def test_onnx_gives_the_same_scores_for_any_batch(
    store: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    import torch

    from regard.train.load import load

    path = tmp_path / "model.onnx"
    assert command(["export", store[1], "--onnx", str(path), "--results", store[0]]) == 0
    assert "input batchx1x8x8" in capsys.readouterr().out
    images = torch.randn(5, 1, 8, 8)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    model = load(Path(store[0]) / store[1])
    with torch.inference_mode():
        expected = model(images)
    assert np.abs(scores - expected.numpy()).max() < 1e-4


def test_export_names_the_file_it_wants(store: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["export", store[1], "--onnx", "model.pt", "--results", store[0]]) == 2
    assert "ends in .onnx" in capsys.readouterr().err
