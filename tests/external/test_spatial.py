"""Convolutions and the four factors against independent code: torchvision, torch, transformers, and mmcv's formula."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.core import Grid, Site
from regard.measure.external import largest
from regard.measure.external_pairs import content_pairs, deformable_pairs, transformer_xl_pairs
from regard.mixers.deform import DeformableConv2d, deformable_conv, deformable_conv_reference
from regard.mixers.factors import Factors

TERMS = ["".join(flags) for flags in itertools.product("01", repeat=4)]
WRONG = ("0100", "0110", "1100", "1110")


@pytest.mark.parametrize("call", [deformable_conv, deformable_conv_reference], ids=lambda f: f.__name__)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("groups", "weight_groups", "places"),
    [
        (1, 1, {"padding": 1}),
        (2, 1, {"padding": 1, "stride": 2}),
        (4, 2, {"padding": 2, "dilation": 2}),
        (2, 4, {"padding": (2, 0), "stride": (1, 2), "dilation": (1, 2)}),
    ],
)
def test_deformable_convolution_is_torchvisions(call, masked, groups, weight_groups, places):
    """Values and gradients in float64: order of offsets, masks and groups, borders, strides."""
    pytest.importorskip("torchvision")
    pairs = deformable_pairs(groups, weight_groups, masked, places, call)
    assert len(pairs) == 5 + masked
    assert largest(pairs[:1]) < 1e-11
    assert largest(pairs) < 1e-10


def test_a_replaced_convolution_in_a_resnet():
    """Its second convolution of a stage: stride 2, no bias, the same keys in the state."""
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(weights=None).double().eval()
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    before, state = model(x), model.state_dict()
    block = model.layer3[0]
    block.conv1 = DeformableConv2d.from_conv(block.conv1)
    assert torch.allclose(model(x), before, rtol=0, atol=1e-12)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["layer3.0.conv1.offset.weight", "layer3.0.conv1.offset.bias"]
    assert not unexpected


@pytest.mark.parametrize("terms", ["1000", "1010"])
def test_content_is_torchs_multihead_attention(terms):
    """1000 without input biases; 1010 with u = the query bias, whatever the key bias; also with padding."""
    assert largest(content_pairs(terms)) < 1e-12


def test_content_is_torchs_fused_attention():
    from regard import ops

    q, k, v = torch.randn(3, 2, 3, 15, 8, dtype=torch.float64)
    got = ops.factors(q, k, v, terms="1000", grid=Grid(3, 5), scale=None)
    assert torch.allclose(got, F.scaled_dot_product_attention(q, k, v), rtol=0, atol=1e-12)


def test_transformer_xl_is_relative_attention_of_wav2vec2_conformer():
    pytest.importorskip("transformers", reason="pip install 'regard[hf]'")
    assert largest(transformer_xl_pairs()) < 1e-6


def mmcv_module(layer: nn.Module, x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """What mmcv's GeneralizedAttention computes on a map (B, C, h, w), without its residual; from its documentation.

    query - key displacements, base 1000, keys at every second cell, each projected encoding over sqrt 2. transposed:
    its product of queries and vertical encodings takes the map of queries by columns where E2 is on without E4.
    """
    config, operator, heads = layer.config, layer.operator, layer.site.heads
    e1, e2, e3, e4 = (flag == "1" for flag in config.terms)
    weights = dict(zip(config.roles, layer.qkv.weight.chunk(len(config.roles)), strict=True))

    def project(role: str, cells: torch.Tensor) -> torch.Tensor:
        return torch.einsum("oc,bchw->bohw", weights[role], cells).unflatten(1, (heads, -1))  # (B, H, d, h, w)

    few = x[:, :, ::2, ::2]
    energy = x.new_zeros(len(x), heads, *x.shape[2:], *few.shape[2:])
    if e1:
        energy = energy + torch.einsum("bndhw,bndij->bnhwij", project("q", x), project("k", few))
    if e3:
        energy = energy + torch.einsum("nd,bndij->bnij", operator.u, project("k", few))[:, :, None, None]
    if e2 or e4:
        rate = 1000.0 ** (-4.0 / x.shape[1] * torch.arange(x.shape[1] // 4, dtype=x.dtype))
        encoded = []
        for axis, weight in ((2, operator.positions_y), (3, operator.positions_x)):
            places, kept = torch.arange(x.shape[axis], dtype=x.dtype), torch.arange(few.shape[axis]) * 2
            angles = (places[:, None] - kept)[..., None] * rate
            wave = torch.cat([angles.sin(), angles.cos()], -1)
            encoded.append((wave @ weight.mT / math.sqrt(2)).unflatten(-1, (heads, -1)))  # (q, k, H, d)
        vertical, horizontal = encoded
        if e2:
            q = project("q", x)
            for_y = q.transpose(3, 4) if transposed and not e4 else q
            energy = energy + torch.einsum("bndhw,wjnd->bnhwj", q, horizontal)[..., None, :]
            energy = energy + torch.einsum("bndhw,hind->bnhwi", for_y, vertical)[..., None]
        if e4:
            energy = energy + torch.einsum("nd,wjnd->nwj", operator.t, horizontal)[None, :, None, :, None, :]
            energy = energy + torch.einsum("nd,hind->nhi", operator.t, vertical)[None, :, :, None, :, None]
    a = energy.flatten(4).softmax(-1)
    out = torch.einsum("bnhwk,bndk->bndhw", a, project("v", few).flatten(3)).flatten(1, 2)
    return torch.einsum("oc,bchw->bohw", layer.proj.weight, out) + layer.proj.bias[:, None, None]


def mmcv_layer(terms: str, grid: Grid) -> nn.Module:
    torch.manual_seed(0)
    return Factors(terms, preset="mmcv").build(Site(16, 2, grid, qkv_bias=False)).double()


@pytest.mark.parametrize("terms", [terms for terms in TERMS if terms not in WRONG])
@pytest.mark.parametrize("grid", [Grid(6, 6), Grid(5, 8)], ids=str)
def test_preset_mmcv_is_its_module(terms, grid):
    """The twelve strings for which the published module is right."""
    layer = mmcv_layer(terms, grid)
    x = torch.randn(2, 16, grid.height, grid.width, dtype=torch.float64) * 2
    expected = mmcv_module(layer, x, transposed=True)
    assert torch.allclose(layer(x.flatten(2).mT, grid).mT.unflatten(-1, x.shape[2:]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("terms", WRONG)
def test_spatial_fact_4_mmcv_is_wrong_for_e2_without_e4(terms):
    """Its map of queries is transposed before the vertical product: errors on squares, exceptions elsewhere."""
    grid = Grid(6, 6)
    layer = mmcv_layer(terms, grid)
    with torch.no_grad():
        layer.qkv.weight.mul_(2)
    x = torch.randn(2, 16, 6, 6, dtype=torch.float64) * 2
    ours = layer(x.flatten(2).mT, grid).mT.unflatten(-1, (6, 6))
    assert torch.allclose(ours, mmcv_module(layer, x, transposed=False), rtol=0, atol=1e-12)
    assert (ours - mmcv_module(layer, x, transposed=True)).abs().max() > 0.05
    with pytest.raises(RuntimeError, match="size"):
        mmcv_module(mmcv_layer(terms, Grid(5, 8)), torch.randn(2, 16, 5, 8, dtype=torch.float64), transposed=True)
