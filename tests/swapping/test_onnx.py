"""Swapped models go to ONNX and give the same numbers there; needs onnxscript and onnxruntime, else skipped."""

from pathlib import Path

import pytest
import torch

from in_onnx import agrees
from regard.core import ConfigError
from regard.lab.train.onnx_export import compare_onnx, export_onnx
from regard.swapping.swap import swap
from small_hosts import HOSTS, draw_large_weights, vit

PAIRS = (
    ("vit", "MiTA(m=4, k=3)"),
    ("vit", "Reformer(chunk=5)"),
    ("vit", "DAT(stride=2, kernel=3)"),  # a learned bias, with gradients on: memory in another order
    ("vit", "Factors(projection=FSNE(code=8), dwc=3, gate=True)"),
)


@pytest.mark.slow
@pytest.mark.untyped
@pytest.mark.parametrize(("host", "mixer"), PAIRS, ids=lambda text: text)
def test_a_swapped_model_is_the_same_in_onnx(host: str, mixer: str, tmp_path: Path) -> None:
    model, x = HOSTS[host]()
    agrees(swap(model, mixer).eval(), x, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.untyped
def test_tokens_are_sorted_by_expert_in_onnx(tmp_path: Path) -> None:
    """196 tokens, which MiTA groups; few are taken in one dense piece. Any batch."""
    model, _ = vit(img_size=(112, 112))
    one, several = torch.randn(2, 3, 112, 112), torch.randn(5, 3, 112, 112)
    agrees(swap(model, "MiTA(m=16, k=9)").eval(), one, tmp_path / "model.onnx", several, several[:1])


@pytest.mark.slow
@pytest.mark.untyped
@pytest.mark.parametrize(
    "mixer", ["MiTA(m=(3, 3), k=9)", "MiTA(m=(3, 3), k=9, experts=2)", "Agent(m=(3, 3))", "SKA", "TopK(k=9)"]
)
def test_height_and_width_are_free_in_onnx(mixer: str, tmp_path: Path) -> None:
    """Three sizes, two of another aspect, from one file; SKA resamples its keys."""
    model, _ = vit(img_size=(32, 48), dynamic_img_size=True)
    swap(model, mixer, example=torch.randn(1, 3, 32, 48)).eval()
    draw_large_weights(model)
    file = tmp_path / "model.onnx"
    difference, dynamic = export_onnx(model, (torch.randn(1, 3, 32, 48),), file, free_size=True)
    assert (difference < 1e-5, dynamic) == (True, True)
    for height, width in ((32, 48), (64, 32), (48, 80)):
        assert compare_onnx(model, (torch.randn(3, 3, height, width),), file) < 1e-5


@pytest.mark.untyped
def test_what_needs_the_size_of_images_is_refused_where_sides_are_free(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, _ = vit(img_size=(32, 48), dynamic_img_size=True)
    images, file = torch.randn(1, 3, 32, 48), tmp_path / "m.onnx"
    for mixer in ("Agent(m=4)", "MiTA(m=4, k=3)"):
        with pytest.raises(ConfigError, match=r"lays its landmarks by the shape of the image.*here m=\(2, 2\)"):
            export_onnx(swap(model, mixer).eval(), (images,), file, free_size=True)
    with pytest.raises(ConfigError, match=r"takes images of 32x48 only.*dynamic_img_size=True"):
        export_onnx(vit(img_size=(32, 48))[0], (images,), file, free_size=True)
