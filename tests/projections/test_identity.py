"""Queries that are the input: what is left out, and nothing else."""

from dataclasses import replace

import pytest
import torch

from regard.core import ConfigError, Grid, Site, heads
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import parse, spell
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.projections.identity import IdentityQuery
from regard.projections.linear import LinearQKV, project_roles
from regard.swapping.swap import swap

SITE = Site(dim=12, heads=3, grid=Grid(2, 3))


def test_it_is_a_linear_projection_with_the_identity_for_queries():
    torch.manual_seed(0)
    plain, direct = LinearQKV().build(SITE, "qkv").double(), IdentityQuery().build(SITE, "qkv").double()
    with torch.no_grad():
        for value in plain.parameters():
            value.normal_()
        plain.weight[:12] = torch.eye(12)
        plain.bias[:12] = 0
        direct.linear.weight.copy_(plain.weight[12:])
        direct.linear.bias.copy_(plain.bias[12:])
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    for roles in ("qkv", "q", "kv", "vq", ""):
        for one, other in zip(direct(x, roles), project_roles(plain, x, "qkv", roles, 3), strict=True):
            assert torch.allclose(one, other, atol=1e-13)


def test_an_operator_of_queries_alone_has_no_matrix():
    made = IdentityQuery().build(SITE, "q")
    x = torch.randn(2, 6, 12)
    assert not list(made.parameters())
    assert IdentityQuery().cost(SITE, "q").params == 0
    assert torch.equal(made(x, "q")[0], heads(x, 3))
    assert made.adopt_linear(torch.randn(12, 12), None) is False


@pytest.mark.parametrize("bias", [True, False])
def test_cost_counts_keys_and_values(bias):
    site = Site(dim=12, heads=3, grid=Grid(2, 3, 1), qkv_bias=bias)
    for roles, number in (("qkv", 2), ("qv", 1)):
        cost = IdentityQuery().cost(site, roles)
        built = IdentityQuery().build(site, roles)
        assert cost.params == sum(p.numel() for p in built.parameters()) == number * (144 + 12 * bias)
        assert cost.macs == 7 * number * 144


def test_a_swap_keeps_the_hosts_keys_and_values():
    torch.manual_seed(0)
    model = create_model("vit_desk(size=8, patch=2, dim=16, depth=1, heads=2)", None)
    rows = model.blocks[0].attn.qkv.weight.detach().clone().unflatten(0, (3, -1))
    swap(model, Softmax(projection=IdentityQuery()))
    assert torch.equal(model.blocks[0].attn.mixer.qkv.linear.weight, rows[1:].flatten(0, 1))
    swap(model, SKA(projection=IdentityQuery()))
    assert torch.equal(model.blocks[0].attn.mixer.qkv.linear.weight, rows[2])


def test_it_can_be_spelled_and_needs_the_width_of_the_input():
    config = SKA(projection=IdentityQuery())
    assert parse(spell(config)) == config
    with pytest.raises(ConfigError, match="with 12 channels; 3 heads of width 8 need 24"):
        config.build(Site(dim=12, heads=3, width=8, grid=Grid(2, 3)))
    before = IdentityQuery().build(SITE, "qv")
    weight = before.linear.weight.detach().clone()
    before.reset_parameters()
    assert not torch.equal(before.linear.weight, weight)


def test_hosts_with_separate_matrices_keep_their_convolutions():
    """CvT: 1,556,672 numbers of the query matrices and their biases are gone, the convolution before them stays."""
    with torch.device("meta"):
        model = create_model("cvt_13", SKA(projection=IdentityQuery()))
    queries = sum(depth * (dim * dim + dim) for depth, dim in ((1, 64), (2, 192), (10, 384)))
    assert sum(value.numel() for value in model.parameters()) == 18_022_730 - queries
    mixer = model.stages[1].blocks[0].attn.mixer
    assert {name for name, _ in mixer.named_children() if name.startswith("conv_")} == {"conv_q", "conv_v"}


def test_under_autocast_queries_have_the_dtype_of_keys_and_values():
    """A LayerNorm before the layer gives float32 there, and a linear map bfloat16."""
    grid, other = Grid(4, 6, 1), Grid(2, 3)
    x, memory = torch.randn(2, 25, 16), torch.randn(2, 6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        for text in ("Softmax", "SKA", "MHLA(m=4)", "PVT"):
            layer = replace(parse(text), projection=IdentityQuery()).build(Site(16, 2, grid))
            assert layer(x, grid).dtype == torch.bfloat16
        cross = Softmax(projection=IdentityQuery()).build_cross(Site(16, 2, grid, memory=other))
        assert cross(x, grid, memory=memory, memory_grid=other).dtype == torch.bfloat16
        double = Softmax(projection=IdentityQuery()).build(Site(16, 2, grid)).double()
        assert {y.dtype for y in double.project(x.double(), "qkv")} == {torch.float64}
    assert layer(x, grid).dtype == torch.float32
