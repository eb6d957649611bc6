"""A mechanism with another number of heads than its host: no row of the host is its row, and a swap is undone whole."""

import copy

import pytest
import torch

from regard.core import UnsupportedError
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.cska import CSKA
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.models.saving import load, save
from regard.projections.sne import SNE
from regard.swapping.swap import plan_swap, remove, restore, swap
from small_hosts import draw_large_weights, swin

DESK = "vit_desk(size=12, patch=3, dim=16, depth=2, heads=2)"
# with 3 heads, q and v have as many rows as the host's q, k and v
NUMBERS = [SKA(heads=1), SKA(heads=3), SKA(heads=4), SKA(heads=4, projection=SNE(init="svd")), CSKA(heads=3)]


def model_and_image():
    torch.manual_seed(0)
    model = create_model(DESK, None).double().eval()
    draw_large_weights(model)
    return model, torch.randn(2, 3, 12, 12, dtype=torch.float64)


@pytest.mark.parametrize("mixer", NUMBERS, ids=spell)
def test_other_numbers_of_heads_are_undone(mixer):
    model, x = model_and_image()
    before, state = model(x), copy.deepcopy(model.state_dict())
    changed = swap(model, mixer)(x)
    assert (changed - before).abs().max() > 1e-3 * before.abs().max()
    assert (swap(model, Softmax())(x) - before).abs().max() <= 1e-12 * before.abs().max()
    swap(model, mixer)
    assert (remove(model)(x) - before).abs().max() > 1e-3 * before.abs().max()
    swap(restore(model), mixer)
    assert torch.equal(restore(model)(x), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_a_plan_with_other_heads_keeps_no_row(heads):
    model, _ = model_and_image()
    site = plan_swap(model, SKA(heads=heads)).sites[0]
    assert site.kept == ["proj.bias"]
    assert site.dropped == ["qkv.weight", "proj.weight"]
    assert site.new == ["regard.operator.keys", "regard.proj.weight", "regard.qkv.weight"]
    kept = plan_swap(model, SKA(heads=2)).sites[0].kept
    assert kept == ["qkv.weight[qv]", "proj.weight", "proj.bias"]


def test_a_state_with_other_heads_has_its_own_names(tmp_path):
    model, x = model_and_image()
    plain = copy.deepcopy(model.state_dict())
    swap(model, SKA(heads=3))
    assert "blocks.0.attn.qkv.weight" not in model.state_dict()
    assert model.state_dict()["blocks.0.attn.regard.qkv.weight"].shape == (48, 16)
    message = model.load_state_dict(plain, strict=False)
    assert "blocks.0.attn.regard.qkv.weight" in message.missing_keys
    assert not message.unexpected_keys
    save(model, tmp_path)
    assert torch.equal(load(tmp_path)(x), model(x))


def test_a_bias_of_the_hosts_heads_refuses_others():
    model, x = swin()
    before = model.eval()(x)
    with pytest.raises(UnsupportedError, match="biases of 2 heads, which do not fit the 4 heads of SKA"):
        swap(model, SKA(heads=4))
    assert torch.equal(model(x), before)
    swap(model, SKA(heads=2), "layers.0.*")
