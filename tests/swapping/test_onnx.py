"""Swapped models go to ONNX and give the same numbers there; needs onnxscript and onnxruntime, else skipped."""

from pathlib import Path

import pytest
import torch

from in_onnx import agrees
from regard.swapping.swap import swap
from small_hosts import HOSTS, vit

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
