"""CSKA(reading="key"): the convolution makes keys, as the authors' code for Swin does (reading B)."""

import pytest
import torch
import torch.nn.functional as F

from operators import check_error
from regard.core import ConfigError, Grid, Mask, Site, UnsupportedError
from regard.measure.cost import count_macs
from regard.mixers.static_keys.cska import CSKA
from regard.mixers.static_keys.cska_keys import query_keys, query_keys_reference
from regard.models.create import create_model
from regard.swapping.per_window import PerWindow
from regard.testing.subject import perturb

F64 = torch.float64
KEY = CSKA(reading="key")


GRID = Grid(3, 5)


def operator(config=KEY, grid=GRID, heads=2, dim=16):
    return perturb(config.operator(Site(dim=dim, heads=heads, grid=grid)))


def heads_of(grid, batch=3, heads=2, d=8):
    return torch.randn(batch, heads, grid.tokens, d, dtype=F64)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(1, 7), Grid(6, 2)], ids=str)
def test_the_convolution_equals_the_sum_over_taps(grid, kernel):
    q = heads_of(grid)
    weight, bias = torch.randn(16, 8, kernel, kernel, dtype=F64), torch.randn(16, dtype=F64)
    for b in (bias, None):
        assert torch.allclose(query_keys(q, weight, b, grid), query_keys_reference(q, weight, b, grid), atol=1e-12)


def test_keys_stand_in_token_order_and_extra_tokens_are_not_on_the_map():
    """A strong learned key of each extra token draws all queries; queries of extra tokens move no key of a cell."""
    grid = Grid(3, 5, 1, 2)
    made = operator(grid=grid)
    q = torch.ones(1, 2, 18, 8, dtype=F64)
    for index, token in enumerate((0, 16, 17)):
        with torch.no_grad():
            made.extra_keys.zero_()
            made.extra_keys[:, index] = 100.0
        assert (made.weights(q, None, q, grid=grid).argmax(-1) == token).all()
    q, v = heads_of(grid), heads_of(grid)
    other = q.clone()
    other[:, :, [0, 16, 17]] += 1.0
    same = made(other, None, v, grid=grid) == made(q, None, v, grid=grid)
    assert same[:, :, 1:16].all()


def test_any_grid_runs_without_resampling():
    made = operator()
    for grid in (Grid(2, 3), Grid(7, 4)):
        q, v = heads_of(grid), heads_of(grid)
        assert torch.allclose(made(q, None, v, grid=grid), made.reference(q, None, v, grid=grid), atol=1e-12)
        image = q.mT.reshape(3, 16, grid.height, grid.width)
        k = F.conv2d(image, made.weight, made.bias, padding=1, groups=2).view(3, 2, 8, -1).mT
        assert torch.allclose(made(q, None, v, grid=grid), F.scaled_dot_product_attention(q, k, v), atol=1e-12)


def test_filters_for_each_window_are_groups_of_heads_and_windows():
    """Two windows an image, each with the filters of its own heads."""
    grid = Grid(4, 4)
    both = operator(grid=grid, heads=4, dim=32)  # 2 windows of 2 heads
    q, v = heads_of(grid, batch=6), heads_of(grid, batch=6)
    out = PerWindow(both, 2)(q, None, v, grid=grid)
    for window in (0, 1):
        alone = operator(grid=grid)
        with torch.no_grad():
            for name in ("weight", "bias"):
                alone.get_parameter(name).copy_(both.get_parameter(name).chunk(2)[window])
        expected = alone(q[window::2], None, v[window::2], grid=grid)
        assert torch.allclose(out[window::2], expected, atol=1e-12)


def test_cost_is_that_of_the_built_operator():
    for kernel, bias in ((3, True), (5, False)):
        config = CSKA(reading="key", kernel=kernel, bias=bias)
        for grid in (Grid(3, 5), Grid(3, 5, 1, 2)):
            site = Site(dim=18, heads=2, width=8, grid=grid)
            cost = config.operator_cost(site)
            assert cost.params == sum(p.numel() for p in config.operator(site).parameters())
            assert cost.params == kernel**2 * 8 * 16 + 16 * bias + 16 * grid.extra
            assert cost.macs == 15 * kernel**2 * 8 * 16 + 2 * grid.tokens**2 * 16


def test_fact_section4_2_official_cska_swin() -> None:
    """The count of the authors' CSKA-Swin-T, and its 1.0497 GFLOPs; 100 classes have 90 outputs of 769 more."""
    with torch.device("meta"):
        model = create_model("swin_t_32(keys='window', num_classes=10)", KEY)
    assert sum(value.numel() for value in model.parameters()) == 26_883_574 == 26_952_784 - 90 * 769
    assert round(2 * count_macs(model, torch.empty(1, 3, 32, 32, device="meta")) / 1e9, 4) == 1.0497


def test_fact_section4_3_official_cskaformers_have_heads_of_16() -> None:
    """Twice the heads only add biases: 28,983,186 and 119,492,662 parameters instead of 28,973,778 and 119,417,398."""
    for dim, layers, ours, theirs in ((128, 3, 28_973_778, 28_983_186), (256, 12, 119_417_398, 119_492_662)):
        wide, narrow = (
            CSKA().cost(Site(dim=dim, heads=dim // width, grid=Grid(28, 28), qkv_bias=False)).params
            for width in (32, 16)
        )
        assert ours + layers * (narrow - wide) == theirs


def test_a_host_with_keys_on_a_coarser_grid_is_refused():
    with torch.device("meta"), pytest.raises(UnsupportedError, match="kv_stride=1"):
        create_model("cvt_13", KEY)


def test_initial_values():
    made = KEY.operator(Site(dim=64, heads=2, grid=Grid(5, 6, 1)))
    assert 0.015 < made.weight.std() < 0.025
    assert not made.bias.any()
    paper = CSKA(reading="key", init="paper").operator(Site(dim=64, heads=2, grid=Grid(5, 6, 1)))
    theirs = torch.nn.Conv2d(64, 64, 3, groups=2)
    assert paper.weight.shape == theirs.weight.shape
    assert abs(paper.weight.abs().max() / theirs.weight.abs().max() - 1) < 0.05
    assert 0 < paper.bias.abs().max() <= (9 * 32) ** -0.5
    assert 0.7 < paper.extra_keys.std() < 1.3


@pytest.mark.untyped
def test_wrong_options_are_refused():
    for options, said in (
        ({"reading": "keys"}, "key"),
        ({"reading": "key", "factorised": True}, "has no factorised"),
        ({"reading": "key", "rows": "centre", "resize": "window"}, "has no rows, resize"),
        ({"reading": "key", "init": "calibrate"}, "has no init='calibrate'"),
        ({"reading": "key", "activation": "relu"}, "has no activation"),
    ):
        check_error(ConfigError, said, CSKA, **options)
    with pytest.raises(UnsupportedError, match="cross-attention"):
        KEY.build_cross(Site(dim=16, heads=2, grid=Grid(3, 5), memory=Grid(2, 2)))
    layer = KEY.build(Site(dim=16, heads=2, grid=Grid(3, 5)))
    check_error(UnsupportedError, "causal", layer, torch.randn(1, 15, 16), Grid(3, 5), Mask(causal=True))
