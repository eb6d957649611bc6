"""Networks by a user's words: timm's names, folders of transformers, functions, and files of weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from library_hosts import SQUARE, hugging
from regard.advice.user_model import load_user_model
from regard.core import ConfigError, StoreError
from regard.mixers.softmax import Softmax
from regard.models import saving
from regard.models.create import create_model
from regard.models.named import named_network
from regard.swapping.swap import swap

HOST = "vit_tiny_patch16_224(img_size=32, depth=1)"
MODULE = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(64, 2))

def make_nothing():
    return None

def make_error():
    raise RuntimeError("no such file")
"""


def state(classes: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return create_model(HOST, None, num_classes=classes).state_dict()


def test_of_two_state_dicts_the_first_is_read_and_named(tmp_path: Path) -> None:
    averaged = {name: value + 1 for name, value in state().items()}
    torch.save({"state_dict": state(), "state_dict_ema": averaged}, tmp_path / "two.pt")
    with pytest.warns(UserWarning, match=r"two.pt has state_dict and state_dict_ema: state_dict is read"):
        found = named_network(f"timm:{HOST}", weights=str(tmp_path / "two.pt"))
    assert torch.equal(found.network.state_dict()["norm.bias"], state()["norm.bias"])


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "model.module."])
@pytest.mark.parametrize("entry", ["", "state_dict", "model"])
def test_checkpoints_of_training_loops_are_read(prefix: str, entry: str, tmp_path: Path) -> None:
    """With their own number of classes."""
    content = {prefix + name: value for name, value in state().items()}
    torch.save({entry: content, "epoch": 3} if entry else content, tmp_path / "w.pt")
    found = named_network(f"timm:{HOST}", weights=str(tmp_path / "w.pt"))
    assert found.trained
    assert all(torch.equal(value, state()[name]) for name, value in found.network.state_dict().items())


def test_weights_that_are_others_are_refused(tmp_path: Path) -> None:
    save_file(
        {f"x{row}.{name}": value for row, (name, value) in enumerate(state().items())}, tmp_path / "w.safetensors"
    )
    file = str(tmp_path / "w.safetensors")
    with pytest.raises(StoreError, match=r"missing, first cls_token; .* not in the model"):
        named_network(HOST, weights=file)
    for wrong, message in (
        ({name: value.long() for name, value in state().items()}, "is of torch.int64, expected torch.float32"),
        ({name: value / 0 for name, value in state().items()}, "has values that are not finite"),
    ):
        save_file(wrong, file)
        with pytest.raises(StoreError, match=message):
            named_network(HOST, weights=file)
    save_file({**state(), "cls_token": torch.zeros(1, 1, 3)}, tmp_path / "w.safetensors")
    with pytest.raises(StoreError, match="1 of another shape, first cls_token$"):
        named_network(HOST, weights=file)
    save_file(state(), file)
    with pytest.raises(StoreError, match="first pos_embed; its positions are of images of 32x32: give --size 32x32"):
        named_network(HOST.replace("32", "224"), weights=file)
    torch.save({"model": torch.nn.Linear(1, 1)}, tmp_path / "w.pt")
    with pytest.raises(StoreError, match="pickle with other things than tensors"):
        named_network(HOST, weights=str(tmp_path / "w.pt"))
    (tmp_path / "w.bin").write_text("abc")
    with pytest.raises(StoreError, match="is damaged, or no checkpoint"):
        named_network(HOST, weights=str(tmp_path / "w.bin"))
    with pytest.raises(ConfigError, match="leave one out"):
        named_network(HOST, weights=file, pretrained=True)


def test_regards_own_hosts_take_the_classes_of_a_file(tmp_path: Path) -> None:
    host = "vit_desk(size=16, patch=4, dim=32, depth=1, heads=2)"
    save_file(create_model(host, None, num_classes=3).state_dict(), tmp_path / "w.safetensors")
    network = named_network(host, weights=str(tmp_path / "w.safetensors")).network
    assert network(torch.zeros(1, 3, 16, 16)).shape == (1, 3)


def test_a_function_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is searched last: its random.py does not take the place of Python's."""
    (tmp_path / "my_networks.py").write_text(MODULE)
    (tmp_path / "random.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    found = named_network("my_networks:make_model")
    assert found.label == f"my_networks:make_model ({tmp_path / 'my_networks.py'})"
    torch.save(found.network.state_dict(), tmp_path / "w.pt")
    again = named_network("my_networks:make_model", weights="w.pt")
    assert torch.equal(again.network[0].weight, found.network[0].weight)  # type: ignore[index]
    for text, message in (
        ("my_networks:make_mode", "did you mean make_model"),
        ("my_networks:make_nothing", "returned None, no torch.nn.Module"),
        ("my_networks:make_error", "RuntimeError: no such file"),
        ("no_such_module:make", "ModuleNotFoundError"),
        ("random:make_model", "random has no function 'make_model'"),
        ("regard:swap", "give a module of your own"),
    ):
        with pytest.raises(ConfigError, match=message):
            named_network(text)


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    model = hugging("ViTForImageClassification", 2, **SQUARE, num_labels=7).model
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 2]}')
    found = named_network(f"hf:{tmp_path}")
    assert found.data == {"normal": [[0.1, 0.2, 0.3], [1, 1, 2]]}
    x = torch.randn(1, 3, 64, 64)
    assert torch.allclose(found.network(x).logits, model.eval()(x).logits, atol=1e-6)
    # as transformers prepares images: pixels times a factor, less the mean, by the deviation
    for more, normal in (
        ('"do_normalize": false', [[0.0] * 3, [1.0] * 3]), ('"do_rescale": false', [[0.1 / 255, 0.2 / 255, 0.3 / 255],
        [1 / 255, 1 / 255, 2 / 255]]), ('"rescale_factor": 0.00784313725490196', [[0.05, 0.1, 0.15], [0.5, 0.5, 1.0]]),
        ('"rescale_factor": 0.00784313725490196, "offset": true', [[0.55, 0.6, 0.65], [0.5, 0.5, 1.0]]),
    ):  # fmt: skip
        settings.write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 2], ' + more + "}")
        assert np.allclose(named_network(f"hf:{tmp_path}").data["normal"], normal)
    for of_others in ("[]", '[{"image_mean": 1}]'):
        settings.write_text(of_others)
        assert named_network(f"hf:{tmp_path}").data == {}

    def refused(message: str, file: str, content: str | bytes) -> None:
        whole = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(StoreError, match=message):
            named_network(f"hf:{tmp_path}")
        (tmp_path / file).write_bytes(whole)

    refused("rescale_factor is a number", settings.name,
            '{"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "rescale_factor": "x"}')  # fmt: skip
    refused("give --mean and --std", settings.name, '{"image_mean": ["a", 0, 0], "image_std": [1, 1, 0]}')
    tensors = model.state_dict()
    for lost in (
        {k: v for k, v in tensors.items() if "cls_token" not in k},
        {**tensors, "classifier.bias": torch.ones(3)},
    ):
        refused(
            "has no weights, or other ones, for 1 tensors of ViT.*, first (vit.|classifier.bias)",
            "model.safetensors",
            save(lost, metadata={"format": "pt"}),
        )
    refused("cannot be loaded", "model.safetensors", (tmp_path / "model.safetensors").read_bytes()[:100])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.warns(UserWarning, match=r"16 tensors that ViT.* has not, first vit\.layers\.1\."):
        named_network(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = tmp_path / "model.safetensors.index.json"
    for file in ("../evil.pt", "evil.bin", 3):
        index.write_text(json.dumps({"weight_map": {"classifier.bias": file}}))
        with pytest.raises(StoreError, match=r"index\.json names other files than \.safetensors in its folder"):
            named_network(f"hf:{tmp_path}")
    index.unlink()
    more = {**tensors, "vit.\x1b[31mred": torch.ones(3)}
    (tmp_path / "model.safetensors").write_bytes(save(more, metadata={"format": "pt"}))
    with pytest.warns(UserWarning, match=r"first vit\.\\x1b\[31mred"):
        named_network(f"hf:{tmp_path}")
    for key in ("attn_implementation", "_attn_implementation"):
        for hub in ({key: "someone/kernels"}, {"vision_config": {key: "someone/kernels"}}):
            refused("attention 'someone/kernels' from the hub", "config.json", json.dumps({**config, **hub}))
    for wrong in ([], 3, *({"architectures": kinds} for kinds in (["os.system"], "ViTModel", 5))):
        refused("names no class of transformers", "config.json", json.dumps(wrong))
    (tmp_path / "config.json").unlink()
    with pytest.raises(StoreError, match=r"has no config\.json"):
        named_network(f"hf:{tmp_path}")


def test_a_classifier_of_transformers_names_its_classes(tmp_path: Path) -> None:
    model = hugging("ViTForImageClassification", 2, **SQUARE, num_labels=3).model
    for labels, names in (
        (["dark", "bright", "grey"], {"class_names": ["dark", "bright", "grey"]}),
        (["LABEL_0", "LABEL_1", "LABEL_2"], {}), (["crane", "crane", "ox"], {}),
    ):  # fmt: skip
        model.config.id2label = dict(enumerate(labels))  # type: ignore[union-attr]
        model.save_pretrained(tmp_path)  # type: ignore[operator]
        assert named_network(f"hf:{tmp_path}").data == names


def test_what_a_saved_model_of_transformers_knows_of_its_data_is_kept(tmp_path: Path) -> None:
    model = swap(hugging("ViTForImageClassification", 2, **SQUARE, num_labels=3).model, Softmax())
    normal = [[0.9] * 3, [0.1] * 3]
    for _ in range(2):  # over what it wrote itself
        saving.save(model, tmp_path / "a", data={"normal": normal})
    saving.save(saving.load(tmp_path / "a"), tmp_path / "b")
    for text in (f"hf:{tmp_path / 'b'}", str(tmp_path / "b")):
        found = load_user_model(text)
        assert [list(part) for part in found.statistics] == normal
        assert found.says_normal
    with pytest.raises(ConfigError, match="class_names has 2 names, but the model has 3 outputs"):
        saving.save(model, tmp_path / "c", data={"class_names": ["a", "b"]})
