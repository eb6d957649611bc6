"""Focused linear attention: its features, positions and local branch."""

import pytest
import torch
import torch.nn.functional as F

from operators import check_error, draw_qkv
from regard.core import ConfigError, Grid, GridError, Site, UnsupportedError
from regard.mixers.flatten import FLatten, flatten, flatten_reference, focus_features
from regard.mixers.linear import linear_reference


@pytest.mark.parametrize("over", ["channels", "head"])
def test_power_1_is_relu_linear_attention(over):
    q, k, v = draw_qkv()
    out = flatten(q, k, v, power=1.0, over=over)
    assert torch.allclose(out, linear_reference(q, k, v, feature="relu"), atol=1e-12)


@pytest.mark.parametrize(("over", "axes"), [("channels", (1, 3)), ("head", (3,))])
def test_length_is_kept_for_every_power(over, axes):
    x, _, _ = draw_qkv()
    for power in (1.0, 2.0, 3.0, 8.0):
        y = focus_features(x, power, over, None)
        assert torch.allclose(y.norm(dim=axes), (x.clamp_min(0) + 1e-6).norm(dim=axes), rtol=1e-12)


def test_powers_do_not_overflow():
    """50^3 leaves float16's range, 1e13^3 float32's."""
    for dtype, size in ((torch.float16, 1e4), (torch.bfloat16, 1e13), (torch.float32, 1e13)):
        q, k, v = (x.to(dtype) for x in draw_qkv())
        out = flatten(size * q, size * k, v, power=3.0)
        assert out.isfinite().all()
        assert (out.double() - flatten_reference(*(x.double() for x in (size * q, size * k, v)))).abs().max() < 0.05


@pytest.mark.parametrize("over", ["channels", "head"])
def test_the_plain_form_takes_tokens_without_a_positive_channel(over):
    """1e-6^5, squared, is 0 in float32."""
    q, k, v = (x.float() for x in draw_qkv())
    q[:, :, 0] = k[:, :, 1] = -1.0
    expected = flatten(q, k, v, power=5.0, over=over)
    assert torch.allclose(flatten_reference(q, k, v, power=5.0, over=over), expected, rtol=1e-4, atol=1e-5)


def test_counts_of_the_paper():
    """FLatten-T of DeiT size: C + N C more a layer, 26 d more with the convolution (6,173,608 and 6,193,576)."""
    site = Site(192, 3, Grid(14, 14, prefix=1))
    plain, base = FLatten().cost(site).params, 4 * 192**2 + 4 * 192
    assert plain - base == 192 + 197 * 192
    assert FLatten(local=5).cost(site).params - plain == 26 * 64
    assert 5_717_416 + 12 * (plain - base) == 6_173_608
    assert 5_717_416 + 12 * (FLatten(local=5).cost(site).params - base) == 6_193_576


def test_positions_are_added_to_keys_and_resampled():
    grid, larger = Grid(3, 5, 1, 2), Grid(6, 5, 1, 2)
    operator = FLatten().operator(Site(16, 2, grid)).double()
    q, k, v = draw_qkv(18, 18, 8, 8)
    before = operator(q, k, v, grid=grid)
    torch.nn.init.normal_(operator.positions.cells)
    torch.nn.init.normal_(operator.positions.extra)
    positions = operator.positions(grid)
    assert torch.equal(positions[:, 1:16], operator.positions.cells)
    assert torch.equal(positions[:, [0, 16, 17]], operator.positions.extra)
    assert torch.allclose(operator(q, k, v, grid=grid), flatten(q, k + positions, v, spread=F.softplus(operator.sigma)))
    assert not torch.allclose(operator(q, k, v, grid=grid), before)
    with torch.no_grad():  # a ramp along the rows stays a ramp along the rows
        operator.positions.cells.copy_(torch.arange(3.0).repeat_interleave(5)[:, None].expand(2, 15, 8))
    resized = operator.positions(larger)[:, 1:31, 0].unflatten(1, (6, 5))
    assert torch.allclose(resized, resized[:, :, :1].expand_as(resized), atol=1e-9)
    assert (resized.diff(dim=1) > 0).all()
    check_error(GridError, "prefix and suffix tokens must be the same", operator.positions, Grid(3, 5, 1))


@pytest.mark.untyped
def test_refusals():
    with pytest.raises(UnsupportedError, match="FLatten has no cross-attention: its local branch"):
        FLatten(local=5).build_cross(Site(16, 2, Grid(3, 5)))
    check_error(ConfigError, "odd kernel", FLatten, local=4)
    check_error(ConfigError, "over is channels or head", FLatten, over="tokens")
