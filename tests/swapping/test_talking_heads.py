"""Mechanisms between the talking heads of CaiT: their logits, what these cost, and tools that look at operators."""

import copy

import pytest
import torch
from torch import nn

from regard.core import Grid, Site, UnsupportedError
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.cska import CSKA
from regard.mixers.static_keys.keys import calibrate, freeze_keys
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.swapping.swap import swap
from regard.swapping.talking_heads import logits_operator
from small_hosts import draw_large_weights

GRID = Grid(3, 5)
STATIC = [SKA(), CSKA(), CSKA(bias=False, scale=2.0), CSKA(factorised=True), CSKA(reading="key")]


def at_site(config):
    """The operator and its logits with the same parameters, and queries, float64."""
    torch.manual_seed(0)
    site = Site(dim=16, heads=2, grid=GRID)
    operator, logits = config.operator(site).double(), logits_operator(config, site).double()
    for value in operator.parameters():
        nn.init.normal_(value, std=0.7)
    logits.load_state_dict(operator.state_dict())
    return operator, logits, torch.randn(3, 2, 15, 8, dtype=torch.float64)


@pytest.mark.parametrize("config", STATIC, ids=spell)
def test_the_softmax_of_the_logits_is_the_mechanism(config):
    operator, logits, q = at_site(config)
    values = logits(q, None, q, grid=GRID)
    assert torch.allclose(values.softmax(-1), operator.weights(q, None, q, grid=GRID), rtol=0, atol=1e-12)


def test_small_weights_do_not_underflow():
    """Two heads in float32 whose weights are below the smallest number still have their difference."""
    _, logits, q = at_site(CSKA(scale=300.0, bias=False))
    _, one, _ = at_site(CSKA(scale=1.0, bias=False))
    values, plain = (each.float()(q.float(), None, q.float(), grid=GRID) for each in (logits, one))
    assert (values.softmax(-1) == 0).any()
    assert torch.allclose(values, 300.0 * plain, rtol=1e-5)


def test_what_has_no_softmax_over_all_keys_is_refused():
    model = create_model("cait_s_32(heads=2, width=24)", None)
    for config, message in (
        (SKA(activation="relu"), "SKA.activation='relu'"),
        (CSKA(activation="gelu"), "CSKA.activation='gelu'"),
        (SKA(resize="window"), "SKA.resize='window'"),
        (CSKA(stride=2), "CSKA.stride=2"),
    ):
        with pytest.raises(UnsupportedError, match=f"{message}. does not have; leave that option out"):
            swap(model, config)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    host = create_model("cait_s_32(heads=2, width=24)", None)
    for value in host.parameters():
        nn.init.normal_(value, std=0.08)
    return host.double().eval(), torch.randn(2, 3, 32, 32, dtype=torch.float64)


@pytest.mark.parametrize("kind", [SKA, CSKA])
def test_keys_of_one_image_give_its_output(trained, kind):
    """K[h, j] = K_h(x)_j of the host with talking heads: the same output for this image, not for another."""
    host, x = trained
    teacher = swap(copy.deepcopy(host), Softmax())
    student = swap(copy.deepcopy(host), kind(init="calibrate"))
    names = calibrate(student, teacher, [x[:1]])
    assert names == [f"blocks.{index}.attn.regard.operator.logits" for index in range(6)]
    expected = host(x)
    with torch.no_grad():
        close = (student(x) - expected).abs().amax(1) <= 1e-9 * expected.abs().max()
    assert close.tolist() == [True, False]


def test_keys_of_positions(trained):
    host, _ = trained
    teacher = swap(copy.deepcopy(host), Softmax())
    student = swap(copy.deepcopy(host), SKA(init="positions"))
    calibrate(student, teacher)
    block = host.blocks[3]
    k = block.attn.qkv(block.norm1(host.pos_embed)).chunk(3, -1)[1]
    assert torch.allclose(
        student.blocks[3].attn.mixer.operator.logits.keys, k.unflatten(-1, (2, 24))[0].transpose(0, 1), atol=1e-12
    )


@pytest.mark.parametrize("kind", [SKA, CSKA])
def test_keys_are_frozen(trained, kind):
    host, x = trained
    model = swap(copy.deepcopy(host), kind())
    before = model(x)
    names = freeze_keys(model, x)
    assert names == [f"blocks.{index}.attn.regard.operator.logits" for index in range(6)]
    operators = [model.get_submodule(name) for name in names]
    assert all(operator.frozen is not None for operator in operators)
    assert torch.equal(model(x), before)
    draw_large_weights(nn.ModuleList(operators))
    assert torch.equal(model(x), before)
