"""Agent attention: its two steps, position biases on another grid, padding. The layer: published_layers.py."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from operators import check_error, check_hidden, draw_qkv
from regard.core import ConfigError, Grid, GridError, Mask, ShapeError, Site, UnsupportedError
from regard.mixers.agent import Agent, AgentBias, agent, agent_reference, bilinear
from regard.mixers.shared.landmarks import pool_landmarks
from regard.mixers.softmax import softmax_reference

F64 = torch.float64


def tensors(n=13, m=9, landmarks=4, d=8, e=5):
    return *draw_qkv(n, m, d, e), torch.randn(3, 2, landmarks, d, dtype=F64)


def test_it_is_two_softmax_attentions():
    q, k, v, landmarks = tensors()
    two = softmax_reference(q, landmarks, softmax_reference(landmarks, k, v))
    assert torch.allclose(agent(q, k, v, landmarks), two, atol=1e-12)


def test_class_and_register_tokens_are_not_pooled():
    grid = Grid(4, 6, 1, 2)
    q, k, v, _ = tensors(27, 27)
    operator = Agent(m=(2, 3)).operator(Site(16, 2, grid))
    out = operator(q, k, v, grid=grid)
    changed = q.clone()
    changed[:, :, [0, 25, 26]] = 7.0
    assert torch.allclose(operator(changed, k, v, grid=grid)[:, :, 1:25], out[:, :, 1:25], atol=1e-12)


def test_bias_on_another_grid():
    bias = AgentBias(3, Site(16, 2, Grid(4, 6, 1)))
    resized = bias(Grid(7, 5, 1))
    table = F.interpolate(bias.table, (7, 5), mode="bilinear", align_corners=False)
    rows = F.interpolate(bias.rows, (7, 1), mode="bilinear", align_corners=False)
    columns = F.interpolate(bias.columns, (1, 5), mode="bilinear", align_corners=False)
    assert torch.allclose(resized[:, :, 1:], (table + rows + columns).flatten(2), atol=1e-6)
    check_error(GridError, "prefix and suffix tokens must be the same", bias, Grid(4, 6, 2))


@pytest.mark.parametrize(("old", "new"), [(7, 14), (7, 3), (7, 7), (1, 4), (5, 1)])
def test_bilinear_is_torch_interpolation(old, new):
    x = torch.randn(1, 1, old, dtype=F64)
    expected = F.interpolate(x, new, mode="linear", align_corners=False)
    assert torch.allclose(x @ bilinear(old, new, x).mT, expected, atol=1e-12)


def test_hidden_tokens_may_hold_any_value():
    grid = Grid(4, 6, 1)
    operator = Agent(m=(2, 3)).operator(Site(16, 2, grid))
    q, k, v, _ = tensors(25, 25)
    keep = torch.ones(3, 25, dtype=torch.bool)
    keep[:, 13:] = False  # the lower windows have no token
    landmarks = pool_landmarks(q, grid, (2, 3))[:, :, :3]
    cropped = agent_reference(q[:, :, :13], k[:, :, :13], v[:, :, :13], landmarks)
    for run in (operator, operator.reference):
        out = check_hidden(partial(run, grid=grid, mask=Mask(keep=keep)), (k, v), keep, queries=q)
        assert torch.allclose(out[:, :, :13], cropped, atol=1e-12)
    empty = operator(q, k, v, grid=grid, mask=Mask(keep=torch.zeros_like(keep)))
    assert torch.equal(empty, torch.zeros_like(empty))


def test_counts_of_the_paper():
    """Section 4.7: H m (2 49 + 2 (h + w) + 2) = H 49 156 a layer; 5,992,600, 22,601,032 and with dwc 22,647,112."""
    for dim, heads, host, expected in ((192, 3, 5_717_416, 5_992_600), (384, 6, 22_050_664, 22_601_032)):
        site = Site(dim, heads, Grid(14, 14, prefix=1))
        params = Agent(bias=True).operator_cost(site).params
        assert params == heads * 49 * 156
        assert host + 12 * params == expected
        assert Agent().operator_cost(site).params == 0
        assert Agent(bias=True).operator_cost(site, "paper").macs == 4 * 197 * 49 * dim
    layer = Agent(bias=True, dwc=3).cost(site).params - Agent().cost(site).params
    assert 22_050_664 + 12 * layer == 22_647_112


def test_refusals():
    site = Site(16, 2, Grid(4, 6))
    check_error(UnsupportedError, "bias=False", Agent(m=4, bias=True).build_cross, site)
    check_error(GridError, "nearest possible", Agent(m=17).operator, site)
    check_error(ConfigError, "m is at least 1", Agent, m=(0, 2))
    check_error(ConfigError, 'bias=True needs preset="paper"', Agent, bias=True, preset="official")


@pytest.mark.untyped
def test_errors_of_wrong_calls():
    q, k, v, landmarks = tensors()
    check_error(ConfigError, "no preset='code': preset is paper or official", Agent, preset="code")
    check_error(ShapeError, "landmarks has width 7, q has 8", agent, q, k, v, landmarks[..., 1:])
    with pytest.raises(ShapeError, match=r"read_bias has tokens 4, q has 13"):
        agent(q, k, v, landmarks, read_bias=torch.zeros(2, 4, 13, dtype=F64))
