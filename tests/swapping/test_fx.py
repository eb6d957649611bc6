"""Symbolic tracing takes a swapped layer as one step, as timm does with its own attention."""

from typing import Any

import pytest
import timm
import torch
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from regard.core import RegardError
from regard.mixers.topk.topk import TopK
from regard.swapping.swap import swap

SMALL = {"img_size": 32, "depth": 2}
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "vit_tiny_patch16_224", "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224",
            "deit3_small_patch16_224",
            "beit_base_patch16_224", "beitv2_base_patch16_224", "vit_small_patch16_rope_224", "xcit_nano_12_p16_224",
            "vit_base_patch16_rpn_224", "flexivit_small",
        ),
        SMALL,
    ),
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "vit_small_patch14_dinov2": {"img_size": 28, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (1, 1)},
    "swinv2_tiny_window8_256": {"img_size": 64, "depths": (1, 1)},
    "twins_svt_small": {},
    "pvt_v2_b0": {},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_model_is_traced(name: str) -> None:
    """The same output as without tracing, also where the traced model is the first to run."""
    torch.manual_seed(0)
    model = timm.create_model(name, **MODELS[name]).eval()
    side = MODELS[name].get("img_size", 64)
    x = torch.randn(2, 3, side, side)
    swap(model, TopK(k=3), example=x[:1], reinitialise=True)
    last = get_graph_node_names(model)[1][-1]
    with torch.no_grad():
        traced = create_feature_extractor(model, [last])(x)[last]
        assert torch.equal(traced, model(x))


def test_another_size_of_a_traced_model_is_refused() -> None:
    """Its layers know one grid: the module that gave them others is no step of the trace."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, dynamic_img_size=False).eval()
    swap(model, TopK(k=2))
    traced = torch.fx.symbolic_trace(model.blocks)
    assert any(node.op == "call_module" and node.target == "0.attn" for node in traced.graph.nodes)
    with pytest.raises(RegardError):
        traced(torch.randn(1, 10, 192))
