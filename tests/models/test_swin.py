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


def seen_by(block, row, column):
    """The rows and columns of the cells that change when one cell does."""
    x = torch.randn(1, 16, 16, 96)
    other = x.clone()
    other[:, row, column] = 3.0 * torch.randn(96)
    with torch.no_grad():
        changed = (block(x) != block(other)).any(-1)[0]
    rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
    assert changed.sum() == len(rows) * len(columns)
    return (int(rows[0]), int(rows[-1]) + 1), (int(columns[0]), int(columns[-1]) + 1)


@pytest.mark.parametrize("swapped", [False, True], ids=["host", "Softmax()"])
def test_every_second_layer_shifts_its_windows_by_half_and_hides_what_wraps_around(model, swapped):
    model = swap(copy.deepcopy(model), Softmax(), "stages.0.*") if swapped else model
    plain, shifted = model.stages[0][1:3]
    assert seen_by(plain, 5, 9) == ((4, 8), (8, 12))
    assert seen_by(shifted, 5, 9) == ((2, 6), (6, 10))
    assert seen_by(shifted, 0, 15) == ((0, 2), (14, 16))  # rolled into one window with rows 14-15 and columns 0-1


def test_blocks_are_those_of_torchvision(model):
    """External: attention in (shifted) windows with one relative bias for all heads, in stages of 16, 8 and 4 cells."""
    attention = pytest.importorskip("torchvision.models.swin_transformer").shifted_window_attention
    for stage, side in ((0, 16), (1, 8), (2, 4)):
        for index in (0, 1):
            block = copy.deepcopy(model.stages[stage][1 + index]).double()
            own = block.attn
            bias = own.relative_position_bias_table[own.relative_position_index.flatten()].view(1, 1, 16, 16)
            x = torch.randn(2, side, side, own.qkv.in_features, dtype=torch.float64)
            y = x + attention(
                block.norm1(x),
                own.qkv.weight,
                own.proj.weight,
                bias.expand(1, own.num_heads, -1, -1),
                window_size=[4, 4],
                num_heads=own.num_heads,
                shift_size=[2 * index, 2 * index],
                proj_bias=own.proj.bias,
            )
            assert torch.allclose(block(x), y + block.mlp(block.norm2(y)), rtol=0, atol=1e-10)


def test_images_of_another_size_are_refused(model):
    """Masks of shifts, clipped windows and keys of windows are those of the size that the model was made for."""
    for height, width in ((64, 64), (32, 64), (40, 40)):
        with pytest.raises(GridError, match=rf"not {height}x{width}.*build it with img_size=\({height}, {width}\)"):
            model(torch.randn(1, 3, height, width))
    larger = create_model("swin_t_32", None, img_size=(32, 64)).eval()
    larger.load_state_dict(model.state_dict())
    assert torch.isfinite(larger(torch.randn(1, 3, 32, 64))).all()
