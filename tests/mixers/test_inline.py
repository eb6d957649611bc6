"""InLine attention: weights that sum to 1 and may be negative, and the residual branch with its own kernels."""

import pytest
import torch
import torch.nn.functional as F

from operators import draw_qkv
from regard.core import ConfigError, Grid, Site, UnsupportedError
from regard.mixers.inline import InLine, inline, inline_reference

F64 = torch.float64


def test_the_equation():
    """Section 4.6: q (K^T V) a / N + (1 - q.mean k a) mean v."""
    q, k, v = draw_qkv()
    a, k_mean, v_mean = 8**-0.5, k.mean(2, keepdim=True), v.mean(2, keepdim=True)
    expected = q @ (k.mT @ v) * a / 9 + (1 - q @ k_mean.mT * a) * v_mean
    assert torch.allclose(inline(q, k, v), expected, atol=1e-12)


def test_weights_sum_to_1_and_may_be_negative():
    q, k, _ = draw_qkv()
    a = inline_reference(10 * q, k, torch.eye(9, dtype=F64).expand(3, 2, 9, 9))
    assert torch.allclose(a.sum(-1), torch.ones(3, 2, 13, dtype=F64), atol=1e-12)
    assert a.min() < 0
    v = torch.full((3, 2, 9, 5), 2.5, dtype=F64)
    assert torch.allclose(inline(10 * q, k, v), torch.full((3, 2, 13, 5), 2.5, dtype=F64), atol=1e-12)


def test_one_key_gives_its_value_and_zero_queries_the_mean():
    q, k, v = draw_qkv()
    assert torch.allclose(inline(q, k[:, :, :1], v[:, :, :1]), v[:, :, :1].expand(-1, -1, 13, -1), atol=1e-12)
    assert torch.allclose(inline(0 * q, k, v), v.mean(2, keepdim=True).expand(-1, -1, 13, -1), atol=1e-12)


def test_residual_branch_by_hand():
    """Kernels of each image from the mean of its input, 3x3 for each channel, on the cells of a rectangular grid."""
    grid = Grid(3, 5, 1, 2)
    layer = InLine(residual=True).build(Site(16, 2, grid)).double()
    x = torch.randn(3, 18, 16, dtype=F64)
    v = layer.project_heads(x, grid)["v"].transpose(1, 2).flatten(2)
    zero = torch.zeros_like(v)
    for image in range(3):
        hidden = F.gelu(layer.first(x[image].mean(0)[:, None]))
        kernels = layer.second(hidden).reshape(16, 1, 3, 3)
        local = F.conv2d(v[image, 1:16].T.reshape(1, 16, 3, 5), kernels, padding=1, groups=16)
        expected = zero[image].index_add(0, torch.arange(1, 16), local.flatten(2)[0].T)
        out = layer.add_branches(x, zero, layer.project_heads(x, grid)["v"], grid, None)
        assert torch.allclose(out[image], expected, atol=1e-12)


def test_counts_of_the_paper():
    """Section 4.6: 10 C d + 10 C a layer: InLine-DeiT-T, 6 heads of 32, has 6,477,736 parameters."""
    site = Site(192, 6, Grid(14, 14, prefix=1))
    extra = InLine(residual=True).cost(site).params - InLine().cost(site).params
    assert extra == 10 * 192 * 32 + 10 * 192
    assert 5_717_416 + 12 * extra == 6_477_736
    assert InLine().operator_cost(site).macs == 2 * 197 * 32 * 192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_long_sums(dtype):
    q, k, v = draw_qkv(4, 20000)
    out = inline(*(x.to(dtype) for x in (q, 10 + k, 10 + v)))
    assert (out.double() - inline_reference(q, 10 + k, 10 + v)).abs().max() < 0.2


def test_refusals():
    with pytest.raises(UnsupportedError, match="InLine has no cross-attention: its local branch"):
        InLine(residual=True).build_cross(Site(16, 2, Grid(3, 5)))
    with pytest.raises(ConfigError, match=r"needs heads \* width = dim, not 2 \* 4 for 16"):
        InLine(residual=True).build(Site(16, 2, Grid(3, 5), width=4))
