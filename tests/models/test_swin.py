"""Windows of swin_t_32: where they lie, who sees whom, and torchvision's attention in shifted windows beside it."""

import copy

import pytest
import torch
from torch import nn

from regard.core import GridError
from regard.mixers.softmax import Softmax
from regard.models.create import create_model
from regard.swapping.swap import swap


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model_a = create_model("swin_t_32", None).eval()
    for stage in model_a.stages[:3]:
        for value in stage[1:3].parameters():
            nn.init.normal_(value, std=0.08)
    return model_a


@pytest.mark.parametrize("swapped", [False, True], ids=["host", "Softmax()"])
def test_blocks_are_those_of_torchvision(model, swapped):
    """External: attention in (shifted) windows with one relative bias for all heads, in stages of 16, 8 and 4 cells."""
    attention = pytest.importorskip("torchvision.models.swin_transformer").shifted_window_attention
    model = copy.deepcopy(model).double()
    found = swap(copy.deepcopy(model), Softmax(), example=torch.randn(1, 3, 32, 32).double()) if swapped else model
    for stage, side in ((0, 16), (1, 8), (2, 4)):
        for index in (0, 1):
            block = model.stages[stage][1 + index]
            own = block.attn
            bias = own.relative_position_bias_table[own.relative_position_index.flatten()].view(1, 1, 16, 16)
            x = torch.randn(2, side, side, own.qkv.in_features, dtype=torch.float64)
            windows = {"window_size": [4, 4], "num_heads": own.num_heads, "shift_size": [2 * index, 2 * index]}
            weights = (own.qkv.weight, own.proj.weight, bias.expand(1, own.num_heads, -1, -1))
            y = x + attention(block.norm1(x), *weights, **windows, proj_bias=own.proj.bias)
            expected = y + block.mlp(block.norm2(y))
            assert torch.allclose(found.stages[stage][1 + index](x), expected, rtol=0, atol=1e-10)


def test_images_of_another_size_are_refused(model):
    """Masks of shifts, clipped windows and keys of windows are those of the size that the model was made for."""
    for height, width in ((64, 64), (32, 64), (40, 40)):
        with pytest.raises(GridError, match=rf"not {height}x{width}.*build it with img_size=\({height}, {width}\)"):
            model(torch.randn(1, 3, height, width))
    larger = create_model("swin_t_32", None, img_size=(32, 64)).eval()
    larger.load_state_dict(model.state_dict())
    assert torch.isfinite(larger(torch.randn(1, 3, 32, 64))).all()
