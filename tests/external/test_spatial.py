"""Convolutions and the four factors against independent code: torchvision, torch, transformers, and mmcv's formula."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.core import Grid, Mask, Site
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
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    x = torch.randn(3, 8, 7, 9, dtype=torch.float64)
    weight = torch.randn(4, 8 // weight_groups, 3, 3, dtype=torch.float64)
    bias = torch.randn(4, dtype=torch.float64)
    out = F.conv2d(x[:, :1], weight[:1, :1], **places).shape[2:]
    offsets = torch.randn(3, 2 * groups * 9, *out, dtype=torch.float64) * 3
    mask = torch.rand(3, groups * 9, *out, dtype=torch.float64) if masked else None
    leaves = [t.requires_grad_() for t in (x, weight, bias, offsets, mask) if t is not None]
    theirs = torchvision.ops.deform_conv2d(x, offsets, weight, bias, mask=mask, **places)
    ours = call(x, weight, offsets, mask=mask, bias=bias, **places)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-11)
    grads = (torch.autograd.grad(y.sin().sum(), leaves) for y in (ours, theirs))
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


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


def copied(theirs: nn.MultiheadAttention, ours: nn.Module) -> None:
    """Weights of torch's attention into a Factors layer; a query bias goes into u, a key bias nowhere."""
    width = theirs.embed_dim
    with torch.no_grad():
        ours.qkv.weight.copy_(theirs.in_proj_weight)
        if ours.operator.u is not None:
            ours.operator.u.copy_(theirs.in_proj_bias[:width].view_as(ours.operator.u))
        ours.proj.weight.copy_(theirs.out_proj.weight)
        ours.proj.bias.copy_(theirs.out_proj.bias + theirs.out_proj.weight @ theirs.in_proj_bias[2 * width :])


@pytest.mark.parametrize("terms", ["1000", "1010"])
def test_content_is_torchs_multihead_attention(terms):
    """1000 without input biases; 1010 with u = the query bias, whatever the key bias."""
    grid = Grid(3, 5, 1)
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True).double()
    nn.init.normal_(theirs.out_proj.bias)
    if terms == "1010":
        nn.init.normal_(theirs.in_proj_bias)
    ours = Factors(terms, scale=None).build(Site(16, 2, grid, qkv_bias=False)).double()
    copied(theirs, ours)
    x = torch.randn(3, 16, 16, dtype=torch.float64)
    assert torch.allclose(ours(x, grid), theirs(x, x, x, need_weights=False)[0], rtol=0, atol=1e-12)
    keep = torch.rand(3, 16) > 0.3
    expected = theirs(x, x, x, key_padding_mask=~keep, need_weights=False)[0]
    assert torch.allclose(ours(x, grid, Mask(keep=keep)), expected, rtol=0, atol=1e-12)


def test_content_is_torchs_fused_attention():
    from regard import ops

    q, k, v = torch.randn(3, 2, 3, 15, 8, dtype=torch.float64)
    got = ops.factors(q, k, v, terms="1000", grid=Grid(3, 5), scale=None)
    assert torch.allclose(got, F.scaled_dot_product_attention(q, k, v), rtol=0, atol=1e-12)


def test_transformer_xl_is_relative_attention_of_wav2vec2_conformer():
    transformers = pytest.importorskip("transformers", reason="pip install 'regard[hf]'")
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as conformer

    options = transformers.Wav2Vec2ConformerConfig(
        hidden_size=16, num_attention_heads=2, position_embeddings_type="relative", attention_dropout=0.0
    )
    torch.manual_seed(0)
    theirs = conformer.Wav2Vec2ConformerSelfAttention(options).double().eval()
    for weight in (theirs.pos_bias_u, theirs.pos_bias_v):
        torch.nn.init.normal_(weight)
    for linear in (theirs.linear_q, theirs.linear_k, theirs.linear_v, theirs.linear_out):
        torch.nn.init.zeros_(linear.bias)
    length = 11
    x = torch.randn(2, length, 16, dtype=torch.float64)
    positions = conformer.Wav2Vec2ConformerRelPositionalEmbedding(options)(x).double()
    expected = theirs(x, relative_position_embeddings=positions)[0]

    grid = Grid.sequence(length)
    config = Factors("1111", scale=None, preset="transformer_xl", axes=1)
    ours = config.build(Site(16, 2, grid, qkv_bias=False)).double()
    even = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat([theirs.linear_q.weight, theirs.linear_k.weight, theirs.linear_v.weight]))
        ours.proj.weight.copy_(theirs.linear_out.weight)
        ours.proj.bias.zero_()
        ours.operator.u.copy_(theirs.pos_bias_u)
        ours.operator.t.copy_(theirs.pos_bias_v)
        ours.operator.positions_x.copy_(theirs.linear_pos.weight[:, even])
    assert torch.allclose(ours(x, grid), expected, rtol=0, atol=1e-6)


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
