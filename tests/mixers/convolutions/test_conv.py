"""Regular convolution on tokens, and what the three convolutions share: borders, masks, extra tokens, errors."""

import pytest
import torch
import torch.nn.functional as F

from operators import check_error
from regard.core import ConfigError, Grid, GridError, Mask, Site, UnsupportedError
from regard.mixers.convolutions.conv import Conv
from regard.mixers.convolutions.deformable import DeformableConv
from regard.mixers.convolutions.dynamic import DynamicConv
from regard.mixers.factors.factors import Factors
from regard.mixers.spelling import spell
from regard.testing import check
from regard.testing.subject import perturb

LINES = (Grid(1, 12), Grid(1, 7, 2), Grid(1, 9, 1, 2))
ON_LINES = [
    Conv(axes=1),
    Conv(axes=1, causal=True, kernel=4, dilation=2, groups=2),
    DeformableConv(axes=1, groups=2),
    DeformableConv(axes=1, version=2, causal=True, kernel=4, offset_kernel=2),
    DynamicConv(axes=1, kernel=5, groups=4),
    DynamicConv(axes=1, kernel=4, groups=2, causal=True, renorm_padding=True),
]


def built(config, grid, dim=8):
    torch.manual_seed(0)
    return perturb(config.build(Site(dim, 2, grid)))


@pytest.mark.untyped
@pytest.mark.parametrize("config", ON_LINES, ids=spell)
def test_contract_on_sequences(config):
    assert {"reference", "compile"} <= set(check(config, grids=LINES).passed)


@pytest.mark.parametrize("grid", [Grid(5, 7), Grid(7, 4, 2), Grid(4, 6, 1, 1)], ids=str)
@pytest.mark.parametrize(("kernel", "dilation", "groups"), [(3, 1, 1), (5, 1, 2), (3, 2, 8)])
def test_spatial_3_1_taps_as_heads_are_conv2d(grid, kernel, dilation, groups):
    layer = built(Conv(kernel=kernel, dilation=dilation, groups=groups), grid)
    x = torch.randn(3, grid.tokens, 8, dtype=torch.float64)
    _, cells = grid.to_map(x)
    reach, conv = dilation * (kernel // 2), layer.conv
    expected = F.conv2d(cells, conv.weight, conv.bias, padding=reach, dilation=dilation, groups=groups)
    for call in (layer, layer.reference):
        _, got = grid.to_map(call(x, grid))
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [Conv(), DeformableConv(version=2), DynamicConv(kernel=3, groups=4)], ids=spell)
def test_extra_tokens_get_the_mean_or_nothing(config):
    import dataclasses

    grid = Grid(3, 5, 2, 1)
    layer = built(config, grid)
    x = torch.randn(3, grid.tokens, 8, dtype=torch.float64)
    out = layer(x, grid)
    extra, cells = grid.to_map(out)
    assert torch.allclose(extra, cells.mean((2, 3))[:, None].expand(-1, 3, -1), rtol=0, atol=1e-12)
    other = x.clone()
    other[:, :2] += 1
    assert torch.equal(layer(other, grid), out)  # never read
    zero = built(dataclasses.replace(config, extra="zero"), grid)
    extra, same = grid.to_map(zero(x, grid))
    assert (extra == 0).all()
    assert torch.equal(same, cells)
    keep = torch.ones(3, grid.tokens, dtype=torch.bool)
    keep[:, 5:9] = False
    extra, cells = grid.to_map(layer(x, grid, Mask(keep=keep)))
    kept = cells.flatten(2)[:, :, keep[0, 2:17]]
    assert torch.allclose(extra[:, 0], kept.mean(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [Conv(), DeformableConv(), DynamicConv(kernel=3, groups=4)], ids=spell)
def test_padded_tokens_are_zeros(config):
    """Zero padded positions before sampling: a padded last column is a map that ends before it."""
    grid, narrow = Grid(4, 6), Grid(4, 5)
    layer = built(config, grid)
    x = torch.randn(2, 24, 8, dtype=torch.float64)
    keep = torch.ones(2, 4, 6, dtype=torch.bool)
    keep[..., 5] = False
    _, got = grid.to_map(layer(x, grid, Mask(keep=keep.flatten(1))))
    _, cells = grid.to_map(x)
    expected = layer(cells[..., :5].flatten(2).mT, narrow)
    assert torch.allclose(got[..., :5], narrow.to_map(expected)[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [c for c in ON_LINES if c.causal], ids=spell)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spatial_3_2_causal_taps_touch_no_later_cell(config, dtype):
    """Perturbing what comes after a query changes neither its output nor any gradient, to the last bit."""
    grid = Grid(1, 11, 1)
    layer = built(config, grid).to(dtype)
    x = torch.randn(2, 12, 8).to(dtype).requires_grad_()
    other = x.detach().clone()
    other[:, 7:] = torch.randn(2, 5, 8).to(dtype) * 3
    assert torch.equal(layer(x, grid)[:, :7], layer(other, grid)[:, :7])
    assert not torch.equal(layer(x, grid)[:, 8:], layer(other, grid)[:, 8:])
    (grad,) = torch.autograd.grad(layer(x, grid)[:, 1:7].sum(), x)
    assert (grad[:, 7:] == 0).all()
    assert (grad[:, 6] != 0).any()


def test_a_causal_sequence_is_a_left_padded_conv1d():
    grid = Grid.sequence(9)
    layer = built(Conv(axes=1, causal=True, kernel=3), grid)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    expected = F.conv1d(F.pad(x.mT, (2, 0)), layer.conv.weight[:, :, 0], layer.conv.bias).mT
    assert torch.allclose(layer(x, grid), expected, rtol=0, atol=1e-12)
    assert torch.equal(layer(x, grid, Mask(causal=True)), layer(x, grid))


@pytest.mark.untyped
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [Conv(), DeformableConv(version=2), DynamicConv(groups=4), Factors()], ids=str)
def test_a_torchscript_trace_is_the_layer(config):
    """There shapes are tensors."""
    grid = Grid(3, 4, 1)
    layer = built(config, grid).requires_grad_(False)  # a trace of a function holds weights as constants
    x, other = torch.randn(2, 2, grid.tokens, 8, dtype=torch.float64)
    traced = torch.jit.trace(lambda tokens: layer(tokens, grid), x, check_trace=False)
    assert torch.allclose(traced(other), layer(other, grid), rtol=0, atol=1e-12)


@pytest.mark.untyped
def test_wrong_use_is_said():
    site = Site(12, 2, Grid(4, 5, 1))
    for cls in (Conv, DeformableConv, DynamicConv):
        check_error(ConfigError, "odd number of taps", cls, kernel=4)
        check_error(ConfigError, "needs axes=1", cls, causal=True)
        check_error(ConfigError, "axes is 1 or 2", cls, axes=3)
        check_error(ConfigError, "5 groups do not divide 12 .*; nearest possible: 3, 4, 6", cls(groups=5).build, site)
        check_error(ConfigError, "at least 1", cls, groups=0)
        layer = cls(groups=4, axes=1).build(site)
        check_error(GridError, "one row", layer, torch.randn(2, 21, 12), site.grid)
        layer = cls(groups=4).build(site)
        check_error(UnsupportedError, "causal", layer, torch.randn(2, 21, 12), site.grid, Mask(causal=True))


def test_the_mean_of_many_cells_in_half_precision_is_finite() -> None:
    """Their sum exceeds the largest number of float16."""
    grid = Grid(64, 64, 1)
    layer = Conv(kernel=3).build(Site(dim=4, heads=2, grid=grid)).eval()
    x, keep = 40 + torch.randn(1, grid.tokens, 4), torch.ones(1, grid.tokens, dtype=torch.bool)
    with torch.no_grad():
        full = layer(x, grid, Mask(keep=keep))[:, 0]
        half = layer.half()(x.half(), grid, Mask(keep=keep))[:, 0]
    assert torch.allclose(half.float(), full, rtol=0.01, atol=0.05)
