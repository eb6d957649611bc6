"""Convolutions and the four factors against independent code: torchvision, torch, transformers, mmcv."""

import itertools

import pytest
import torch

from operators import check_error
from regard.core import Grid, Site
from regard.mixers.convolutions.deformable import DeformableConv2d, deformable_conv, deformable_conv_reference
from regard.mixers.factors.factors import Factors
from regard.testing.external import largest
from regard.testing.external.packages import content_pairs, deformable_pairs, perturb, transformer_xl_pairs

TERMS = ["".join(flags) for flags in itertools.product("01", repeat=4)]
WRONG = ("0100", "0110", "1100", "1110")


@pytest.mark.parametrize("call", [deformable_conv, deformable_conv_reference], ids=lambda f: f.__name__)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("groups", "weight_groups", "frame"),
    [
        (1, 1, {"padding": 1}),
        (2, 1, {"padding": 1, "stride": 2}),
        (4, 2, {"padding": 2, "dilation": 2}),
        (2, 4, {"padding": (2, 0), "stride": (1, 2), "dilation": (1, 2)}),
    ],
)
def test_deformable_convolution_is_torchvisions(call, masked, groups, weight_groups, frame):
    """Values and gradients in float64: order of offsets, masks and groups, borders, strides."""
    pytest.importorskip("torchvision")
    pairs = deformable_pairs(groups, weight_groups, masked, frame, call)
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


def test_transformer_xl_is_relative_attention_of_wav2vec2_conformer():
    pytest.importorskip("transformers", reason="pip install 'regard[hf]'")
    assert largest(transformer_xl_pairs()) < 1e-6


def mmcv_pairs(terms, sides, built=""):
    """Factors with preset="mmcv" beside mmcv's GeneralizedAttention, without its residual.

    built: the attention_type of theirs if it is another; weights that ours does not have are 0 there.
    """
    bricks = pytest.importorskip("mmcv.cnn.bricks.generalized_attention", reason="pip install mmcv-lite")
    torch.manual_seed(0)
    grid = Grid(*sides)
    layer = perturb(Factors(terms, preset="mmcv").build(Site(16, 2, grid, qkv_bias=False)))
    theirs = bricks.GeneralizedAttention(16, num_heads=2, kv_stride=2, attention_type=built or terms).double()
    roles = dict(zip(layer.config.roles, layer.qkv.weight.chunk(len(layer.config.roles)), strict=True))
    operator = layer.operator
    weights = {"query_conv.weight": roles.get("q"), "key_conv.weight": roles.get("k"), "value_conv.weight": roles["v"]}
    weights |= {"appr_geom_fc_x.weight": operator.positions_x, "appr_geom_fc_y.weight": operator.positions_y}
    weights |= {"appr_bias": operator.u, "geom_bias": operator.t, "gamma": torch.ones(1)}
    weights |= {f"proj_conv.{key}": value for key, value in layer.proj.state_dict().items()}
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            made = weights[name]
            value.copy_(torch.zeros_like(value) if made is None else made.reshape(value.shape))
        x = torch.randn(2, 16, *sides, dtype=torch.float64)
        return [(layer(x.flatten(2).mT, grid), (theirs(x) - x).flatten(2).mT)]


@pytest.mark.slow  # the import
def test_preset_mmcv_is_its_module():
    """The twelve attention_type strings for which the published module is right, on a square and on a rectangle."""
    for terms in TERMS:
        if terms not in WRONG:
            for sides in ((6, 6), (5, 8)):
                assert largest(mmcv_pairs(terms, sides)) < 1e-12, (terms, sides)


@pytest.mark.slow  # the import
@pytest.mark.parametrize("terms", WRONG)
def test_spatial_fact_4_mmcv_is_wrong_for_e2_without_e4(terms):
    """Its map of queries is transposed before the vertical product: errors on squares, exceptions elsewhere.

    What it should be is its own module with E4 on and the vector of E4 at 0, which takes another path.
    """
    assert largest(mmcv_pairs(terms, (6, 6), built=terms[:3] + "1")) < 1e-12
    assert largest(mmcv_pairs(terms, (5, 8), built=terms[:3] + "1")) < 1e-12
    assert largest(mmcv_pairs(terms, (6, 6))) > 0.01
    check_error(RuntimeError, "size", mmcv_pairs, terms, (5, 8))
