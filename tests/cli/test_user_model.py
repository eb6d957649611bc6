"""A saved folder, or what a user names, stands for a model wherever a command takes one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard import create_model, save
from regard.cli.app import run
from regard.files.records import read_record, write_record
from regard.lab.results.results import Results
from regard.lab.train.load import load_run

OWN = """
import torch
from torch import nn
from regard import create_model

def make_model():
    torch.manual_seed(1)
    return create_model("vit_desk(size=16, patch=4, dim=32, depth=1, heads=2)", None, num_classes=3)

class Heat(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.img_size = make_model(), 16

    def forward(self, x):
        return self.body.forward_features(x).mean(-1).unflatten(1, (1, 4, 4))

def heat():
    return Heat()
"""
SMALL = "vit_tiny_patch16_224(img_size=32, depth=1)"
NAMED = [
    ["advise", "MODEL", "--mixers", "SKA()", "--seconds", "0.01"],
    ["bench", "SKA()", "--model", "MODEL", "--seconds", "0.01"],
    ["cost", "host", "SKA()", "--host", "MODEL"],
    ["swap-check", "MODEL", "SKA()"],
    ["maps", "MODEL", "flower", "--out", "maps.png"],
]


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"nets_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    return name


@pytest.mark.parametrize("verb", NAMED, ids=lambda verb: verb[0])
@pytest.mark.parametrize("model", ["make_model", "heat", f"timm:{SMALL}"])
def test_a_command_takes_what_the_user_names(verb: list[str], model: str, own_module: str) -> None:
    text = f"{own_module}:{model}" if model in ("make_model", "heat") else model
    assert run([text if word == "MODEL" else word for word in verb]) == 0


@pytest.mark.parametrize("verb", NAMED, ids=lambda verb: verb[0])
def test_a_command_takes_a_saved_folder(verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save(create_model("vit_desk(size=16, patch=4, dim=32, depth=1, heads=2)", None), tmp_path / "saved")
    command = ["saved" if word == "MODEL" else word for word in verb]
    assert run(command) == 0
    path = folder / "model.json"
    write_record(path, {**read_record(path), "host": "hf-hub:nobody/nothing"})
    assert run(command) == 1


def test_a_files_weights_predict_and_are_exported(own_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(3)
    model = create_model(SMALL, None, num_classes=5)
    torch.save(model.state_dict(), "mine.pt")
    Image.fromarray(np.full((32, 32, 3), 51, np.uint8)).save("grey.png")
    given = ["--weights", "mine.pt", "--mean", "0.1,0.2,0.3", "--std", "0.5,1,2"]
    assert run(["predict", SMALL, "grey.png", *given]) == 0
    shown = capsys.readouterr()
    pixels = ((0.2 - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor([0.5, 1, 2])).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    expected = model.eval()(pixels)[0].detach().softmax(-1)
    (found,) = json.loads(shown.out)
    assert found["label"] == str(int(expected.argmax()))
    assert found["probability"] == pytest.approx(float(expected.max()), abs=1e-4)
    assert "random" not in shown.err
    assert run(["predict", SMALL, "grey.png"]) == 0
    assert "are random: give --pretrained or --weights" in capsys.readouterr().err
    for name, arguments in ((SMALL, given), (f"{own_module}:heat", [])):
        assert run(["export", name, "--onnx", "m.onnx", *arguments]) == 0
    assert "input batchx3x16x16" in capsys.readouterr().out
    assert run(["predict", f"{own_module}:heat", "grey.png"]) == 2
    assert "gives map, no class scores" in capsys.readouterr().err


def test_finetuning_starts_from_a_files_weights(own_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = create_model(SMALL, None, num_classes=10)
    torch.save({"state_dict": model.state_dict()}, "mine.pt")
    command = ["finetune", f"timm:{SMALL}", "--weights", "mine.pt", "--data", "digits-canvas", "--size", "32x32"]
    still = ["--set", "recipe.lr=1e-12", "--set", "recipe.epochs=1", "--set", "recipe.weight_decay=0.0"]
    command += [*still, "--set", "task.limit=32"]
    assert run([*command, "--mean", "0.25,0.25,0.25", "--std", "1,1,1"]) == 2
    assert "are of 3 channels, the images of digits-canvas have 1" in capsys.readouterr().err
    assert run([*command, "--mean", "0.25", "--std", "0"]) == 2
    assert "--std is above 0 for each channel, not '0'" in capsys.readouterr().err
    assert run([*command, "--mean", "0.25", "--std", "1"]) == 0
    (folder,) = (path.parent for path in Path("results").glob("*/outcome.json"))
    trained = load_run(folder).state_dict()
    for name, tensor in model.state_dict().items():
        if trained[name].shape == tensor.shape:
            assert torch.allclose(trained[name], tensor, atol=1e-6), name
    assert Results(folder.parent).data(folder.name)["normal"] == [[0.25], [1.0]]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["finetune", "MODULE:make_model", "--data", "digits"], "a run cannot build"),
        (["finetune", "hf:folder", "--data", "digits"], "a run cannot build"),
        (["advise", "mine.pt"], "is a file of weights: give the model that they are of, and --weights mine.pt"),
        (["predict", "0123456789ab", "grey.png"], "0123456789ab"),
        (["maps", "MODULE:make_model", "--size", "15x16"], "nearest: 12x16 or 16x16"),
    ],
)  # fmt: skip
def test_wrong_words_are_one_sentence(
    command: list[str], message: str, own_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.pt").touch()
    assert run([word.replace("MODULE", own_module) for word in command]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("regard: ")]
    assert message in line


def test_a_classifier_of_transformers_predicts_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its output is a class of its own, of which the scores are taken."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
        num_labels=3, initializer_range=1.0,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained("folder")
    Image.fromarray(np.full((16, 16, 3), 51, np.uint8)).save("grey.png")
    given = ["--mean", "0,0,0", "--std", "1,1,1"]
    assert run(["predict", "hf:folder", "grey.png", *given]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    with torch.no_grad():
        scores = model(torch.full((1, 3, 16, 16), 0.2)).logits[0].softmax(-1)
    assert found["label"] == str(int(scores.argmax()))
    assert found["probability"] == pytest.approx(float(scores.max()), abs=1e-4)
    assert run(["export", "hf:folder", "--onnx", "m.onnx", *given]) == 0
    assert run(["cost", "host", "SKA()", "--host", "hf:folder"]) == 0
