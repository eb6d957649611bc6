"""The explorer's page: what it holds, and the command that writes it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from regard import MiTA, create_model
from regard.cli.app import run
from regard.core import ConfigError, DataError, UnsupportedError
from regard.explorer.explore import explore
from small_hosts import vit

HOST = "vit_desk(size=32, patch=4, dim=16, depth=2, heads=2)"


def data_of(html: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert match
    return json.loads(match[1])


def test_two_models_in_one_call() -> None:
    model = create_model(HOST)
    page = explore(model, "flower", MiTA(m=4, k=4))
    (picture,) = data_of(page.html)["pictures"]
    first, second = (one["label"] for one in picture["models"])
    assert "VisionTransformer" in first
    assert second == "MiTA(m=4, k=4)"
    assert picture["change"].startswith("Change of the output (scores)")
    assert all(len(one["layers"]) == 3 for one in picture["models"])
    assert "flower.jpg by dany13" in page.html
    assert "srcdoc" in page._repr_html_()
    assert not any("regard" in name for name, _ in model.named_modules())
    assert len(page.html) < 1_000_000


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 48, 3), np.uint8)
    for name in ("a.png", "b </script>.png"):
        Image.fromarray(pixels).save(tmp_path / name.replace("/", "_"))
    out = tmp_path / "page.html"
    pictures = [str(path) for path in sorted(tmp_path.glob("*.png"))]
    assert run(["explore", HOST, *pictures, "--mixer", "Agent(m=4)", "--out", str(out)]) == 0
    found = data_of(out.read_text())["pictures"]
    assert [one["name"] for one in found] == ["a.png", "b <_script>.png"]
    assert "untrained weights" in out.read_text()
    (tmp_path / "more").mkdir()
    Image.fromarray(255 - pixels).save(tmp_path / "more" / "a.png")
    both = [pictures[0], str(tmp_path / "more" / "a.png")]
    assert run(["explore", HOST, *both, "--out", str(out)]) == 0
    assert [one["name"] for one in data_of(out.read_text())["pictures"]] == both  # of one name in two folders
    assert "MB" in capsys.readouterr().out
    (tmp_path / "bad.png").write_bytes(b"no image")
    for words, message in (
        ([str(tmp_path / "bad.png")], "cannot be read as an image"),
        ([str(tmp_path / "none.png")], "there is no image"),
        (["flower", "--layers", "none*"], "no attention"),
        (["flower", "--mixer", "SKA()", "--plan", "plan.json"], "leave one out"),
        ([pictures[0], "--out", pictures[0]], "ends in .html"),
    ):
        options = [] if "--out" in words else ["--out", str(tmp_path / "other.html")]
        assert run(["explore", HOST, *words, *options]) in (1, 2)
        assert message in capsys.readouterr().err
        assert not (tmp_path / "other.html").exists()
    assert run(["explore", "resnet18(num_classes=2)", "flower", "--out", str(out)]) != 0


def test_the_model_keeps_its_size() -> None:
    model = create_model("vit_desk(patch=8, dim=16, depth=1, heads=2)").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explore(model, "china", size=(64, 64))
    with pytest.raises(ConfigError):
        explore(model, "china", size=(33, 33))
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 64}, "size is 64"),
        ({"size": (-32, 32)}, "at least 1"),
        ({"normal": (0.5, 0.5)}, "normal is"),
        ({"normal": ([0.5] * 3, [0.5])}, "3 and 1 channels"),
        ({"extra": 3}, "extra is 3"),
    ],
)
def test_other_arguments_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        explore(create_model("vit_desk(dim=16, depth=1, heads=2)").eval(), **given)


def test_a_folder_does_not_hide_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flower").mkdir()
    monkeypatch.chdir(tmp_path)
    explore(create_model("vit_desk(dim=16, depth=1, heads=2)").eval(), normal=((0.5,) * 3, (0.5,) * 3))


@pytest.mark.parametrize(
    "picture", [np.zeros((32, 32, 3)), np.zeros((32, 32), np.uint8), np.zeros((32, 32, 4), np.uint8), [1, 2], None]
)
def test_what_is_no_picture_is_named(picture: Any) -> None:
    with pytest.raises(DataError, match="a picture is a file"):
        explore(create_model("vit_desk").eval(), picture)


def test_weights_that_are_nan_are_named() -> None:
    model = create_model("vit_desk(patch=8, dim=16, depth=1, heads=2)").eval()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[0] = torch.nan
    with pytest.raises(UnsupportedError, match="output is not finite"):
        explore(model, "china")


def test_a_layer_that_is_called_twice_is_left_out() -> None:
    class Flipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = create_model("vit_desk(patch=8, dim=16, depth=1, heads=2)")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.inner(x.flip(-1))

    with pytest.raises(UnsupportedError, match="called more than once"):
        explore(Flipped().eval(), np.zeros((32, 32, 3), np.uint8), size=(32, 32), normal=([0.5] * 3, [0.5] * 3))


def test_a_model_of_your_own() -> None:
    model, x = vit()
    pixels = np.zeros((*x.shape[-2:], 3), np.uint8)
    page = explore(model, pixels, layers="blocks.1.*", size=tuple(x.shape[-2:]))
    (layer,) = data_of(page.html)["pictures"][0]["models"][0]["layers"]
    assert layer["name"] == "blocks.1.attn"


def test_a_page_of_a_clip() -> None:
    model = create_model("vit_desk_video(size=(14, 21), frames=4, tube=2, patch=7, dim=16, depth=2)")
    clip = np.arange(12, dtype=np.uint8) * np.ones((14, 21, 1), np.uint8)
    (picture,) = data_of(explore(model, clip, MiTA(m=(2, 2, 3), k=3)).html)["pictures"]
    assert (picture["height"], picture["width"]) == (14, 42)  # the two frames of tokens, side by side
    layer = picture["models"][1]["layers"][0]
    assert (layer["rows"], layer["columns"], layer["frames"], layer["prefix"]) == (2, 6, 2, 0)
    assert layer["views"]
