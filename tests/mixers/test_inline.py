"""InLine attention: the equation, counts, long sums. The residual branch: published_layers.py."""

import pytest
import torch

from operators import draw_qkv
from regard.core import ConfigError, Grid, Site, UnsupportedError
from regard.mixers.inline import InLine, inline, inline_reference


@pytest.mark.parametrize("keys", [9, 1])
def test_the_equation(keys):
    """Section 4.6: q (K^T V) a / N + (1 - q.mean k a) mean v."""
    q, k, v = draw_qkv(m=keys)
    a, k_mean, v_mean = 8**-0.5, k.mean(2, keepdim=True), v.mean(2, keepdim=True)
    expected = q @ (k.mT @ v) * a / keys + (1 - q @ k_mean.mT * a) * v_mean
    assert torch.allclose(inline(q, k, v), expected, atol=1e-12)


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
