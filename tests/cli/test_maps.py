"""`regard maps --show`: chosen where it is not asked for, refused with a sentence where a model has no such thing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.cli.app import run
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.train.execute import execute
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.models.create import create_model
from regard.models.saving import save

VIT = "vit_desk(size=(12, 20), patch=4, dim=16, depth=2, heads=2)"
GREY = (
    "attended_resnet18(channels=(8, 8, 16, 16), stem=1, img_size=12, stages=(2, 3), heads=2, in_chans=1, "
    "deformable=True)"
)


@pytest.mark.parametrize(
    ("arguments", "message", "note"),
    [
        ([VIT, "china", "--mixer", "Factors('1010')"], "maps of 1 layer", "this model has terms too"),
        ([VIT, "china", "--mixer", "Factors('1010')", "--show", "terms", "--layer", "*"], "terms of 2 layers", ""),
        ([VIT, "--mixer", "DeformableConv(version=2)", "--query", "0,4"], "offsets of 1 layer", ""),
        ([VIT, "--mixer", "DynamicConv(kernel=3, groups=4)", "--head", "all"], "kernels of 1 layer", ""),
        ([GREY, "digit", "--layer", "*"], "offsets of 4 layers", ""),
        ([GREY, "digit", "--mixer", "Factors('0010')"], "maps of 1 layer", "this model has terms, offsets too"),
    ],
    ids=["maps", "terms", "offsets", "kernels", "grey resnet", "both"],
)
def test_a_view_is_drawn(
    arguments: list[str], message: str, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drawn.png"
    assert run(["maps", *arguments, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == f"{out}: {message}"
    assert "untrained weights" in shown.err
    assert ("too; --show" in shown.err) == bool(note)
    assert note in shown.err
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_file_of_16_bits_is_seen_as_one_of_8(tmp_path: Path) -> None:
    """Pillow alone would cut off all values above 255 and show white."""
    ramp = np.add.outer(np.arange(24), 8 * np.arange(30)).astype(np.uint8)
    drawn = []
    for pixels in (ramp, ramp.astype(np.uint16) << 8):
        Image.fromarray(pixels).save(tmp_path / "ramp.png")
        torch.manual_seed(0)
        assert run(["maps", VIT, str(tmp_path / "ramp.png"), "--out", str(tmp_path / "drawn.png")]) == 0
        drawn.append(np.asarray(Image.open(tmp_path / "drawn.png")))
    assert np.array_equal(*drawn)


def test_a_file_that_is_no_picture_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.png").write_bytes(b"no picture")
    for name, message in (("some.png", "cannot be read as an image"), ("none.png", "give a file, or one of")):
        assert run(["maps", VIT, str(tmp_path / name), "--out", str(tmp_path / "drawn.png")]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("out", ["photo.jpg", "photo.png"])
def test_a_picture_is_not_drawn_over_its_image(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (24, 24)).save(tmp_path / out)
    before = (tmp_path / out).read_bytes()
    assert run(["maps", VIT, str(tmp_path / out), "--out", str(tmp_path / out)]) == 2
    assert "a new file that ends in .png" in capsys.readouterr().err
    assert (tmp_path / out).read_bytes() == before


def test_maps_of_a_run_need_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Run(
        task=Classification(
            host="vit_desk(size=8, patch=2, dim=16, depth=1, heads=2)", data="digits", size=(8, 8), limit=64
        ),
        recipe=Recipe(epochs=1, augment="none"),
    )
    execute(one, Results(tmp_path), device="cpu")
    monkeypatch.setattr(Classification, "data_set", lambda self: pytest.fail("the data were read"))
    assert run(["maps", str(tmp_path / one.key), "digit", "--out", str(tmp_path / "drawn.png")]) == 0


def test_a_saved_model_gets_the_image_as_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from regard.cli.maps import _input
    from regard.cli.user_model import ModelOptions, read_model

    normal = [[0.1, 0.2, 0.3], [0.5, 0.4, 0.3]]
    folder = save(create_model(VIT, None), tmp_path / "saved", data={"normal": normal})
    Image.new("RGB", (20, 12)).save(tmp_path / "dark.png")
    given = ModelOptions(mean="0.4,0.5,0.6", std="1,2,4")
    for options, (mean, std) in ((ModelOptions(), normal), (given, [[0.4, 0.5, 0.6], [1, 2, 4]])):
        user = read_model(str(folder), replace(options, results=tmp_path), ())
        tensor = _input(user, str(tmp_path / "dark.png"))[0]
        assert torch.allclose(tensor[:, 0, 0], -torch.tensor(mean) / torch.tensor(std))
    assert run(["maps", str(folder), "--pretrained"]) == 2
    assert "leave --pretrained and --weights out" in capsys.readouterr().err
