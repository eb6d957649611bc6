"""Strides of the four factors in the layer: keys and queries on every s-th cell (spatial 1.6)."""

import pytest
import torch
import torch.nn.functional as F

from factor_inputs import inputs
from operators import check_error
from regard.core import ConfigError, Grid, Inputs, Mask, Site, UnsupportedError
from regard.mixers.factors.factors import Factors, factors
from regard.mixers.spelling import parse, spell
from regard.testing import check

FULL = Grid(5, 8, 1, 2)


@pytest.mark.parametrize("terms", ["1111", "0110", "0001", "0010"])
@pytest.mark.parametrize("stride", [1, 2])
def test_strided_queries_are_those_of_the_full_map(terms, stride):
    """The outputs of strided queries do not depend on the other queries; the rest is interpolated between them."""
    site = Site(16, 2, FULL, qkv_bias=False)
    full = Factors(terms, stride=stride).build(site).double()
    layer = Factors(terms, stride=stride, query_stride=2).build(site).double()
    layer.load_state_dict(full.state_dict())
    x = torch.randn(3, FULL.tokens, 16, dtype=torch.float64)
    whole = full(x, FULL)
    extra, cells = FULL.to_map(whole)
    wide = F.interpolate(cells[:, :, ::2, ::2], (5, 8), mode="bilinear", align_corners=False)
    assert torch.allclose(layer(x, FULL), FULL.from_map(extra, wide), rtol=0, atol=1e-12)
    assert torch.allclose(layer.reference(x, FULL), layer(x, FULL), rtol=0, atol=1e-12)


def test_a_query_stride_of_one_is_the_layer_without():
    torch.manual_seed(0)
    layer = Factors("1111", query_stride=1).build(Site(16, 2, FULL))
    torch.manual_seed(0)
    plain = Factors("1111").build(Site(16, 2, FULL))
    x = torch.randn(2, FULL.tokens, 16)
    assert torch.equal(layer(x, FULL), plain(x, FULL))


@pytest.mark.parametrize("terms", ["1111", "0110", "0011", "0000"])
def test_strided_queries_with_other_grids_windows_biases_and_memory(terms):
    """Another grid than the layer was built for, one with a single row; a bias with a row a query, or one for all."""
    config = Factors(terms, query_stride=2, stride=2, window=5)
    layer = config.build(Site(16, 2, FULL, qkv_bias=False)).double()
    assert parse(spell(config)) == config
    for grid in (Grid(7, 4), Grid(1, 9, 2), Grid(1, 1), Grid(4, 4, 0, 1)):
        x = torch.randn(3, grid.tokens, 16, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(1, 2, grid.tokens, grid.tokens, dtype=torch.float64)
        for mask in (None, Mask(bias=bias), Mask(bias=bias[:, :, :1])):
            out = layer(x, grid, mask)
            assert torch.allclose(out, layer.reference(x, grid, mask), rtol=0, atol=1e-12)
            (gradient,) = torch.autograd.grad(out.sum(), x)
            assert gradient.isfinite().all()
    memory = Grid(6, 3, 1)
    cross = Factors(terms, query_stride=2, stride=2).build_cross(Site(16, 2, FULL, memory=memory, qkv_bias=False))
    y = torch.randn(3, memory.tokens, 16)
    assert cross(torch.randn(3, FULL.tokens, 16), FULL, memory=y, memory_grid=memory).shape == (3, FULL.tokens, 16)


def test_a_row_of_a_bias_belongs_to_its_query():
    """Query cell (2, 4) may only see key 3, by the bias of its own row of the full map."""
    grid = Grid(5, 7)
    layer = Factors("1111", query_stride=2).build(Site(8, 2, grid, out_bias=False)).double()
    query = 2 * 7 + 4
    bias = torch.zeros(1, 1, 35, 35, dtype=torch.float64)
    bias[:, :, query] = -torch.inf
    bias[:, :, query, 3] = 0
    q, k, v = torch.randn(3, 1, 2, 35, 4, dtype=torch.float64)
    query_grid, strided_q, mask = layer.operator._queries(Inputs(q, k, v, grid, mask=Mask(bias=bias)))
    assert query_grid == Grid(3, 4)
    out = factors(
        strided_q, k, v, terms="1111", grid=query_grid, key_grid=grid, tables=layer.operator.tables(query_grid, grid),
        u=layer.operator.u, t=layer.operator.t, query_stride=2, mask=mask,
    )  # fmt: skip
    assert torch.allclose(out[:, :, 1 * 4 + 2], v[:, :, 3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("terms", ["1111", "0110"])
def test_strided_queries_in_bfloat16(terms):
    grid = Grid(9, 13, 1)
    layer = Factors(terms, query_stride=2, scale=None).build(Site(16, 2, grid))
    x = torch.randn(2, grid.tokens, 16)
    expected, got = layer(x, grid), layer.bfloat16()(x.bfloat16(), grid)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() <= 3e-2 * expected.norm()


def test_pairs_on_paper_fall_by_the_square_of_the_stride():
    site = Site(32, 4, Grid(8, 12), qkv_bias=False)
    one, two = (Factors("1000", query_stride=n).operator_cost(site, "paper").macs for n in (1, 2))
    assert (one, two) == (2 * 96 * 96 * 32, 2 * 24 * 96 * 32)


@pytest.mark.untyped
def test_strided_queries_keep_the_contract():
    """No padding: what a hidden query would get is interpolated into its neighbours."""
    config = Factors("1111", query_stride=2)
    assert config.masks == {"bias"}
    assert {"shape", "macs", "masks", "gradients", "compile", "geometry", "cross"} <= set(check(config).passed)


@pytest.mark.untyped
def test_wrong_strides_are_said():
    check_error(ConfigError, "query_stride is at least 1, not 0", Factors, query_stride=0)
    check_error(ConfigError, "query_stride", parse, "Factors('1111', q_stride=2)")
    made, rest = inputs("1111", FULL, query_stride=2)
    check_error(ConfigError, "give key_grid=", factors, **made, **rest | {"key_grid": None})
    with pytest.raises(UnsupportedError, match="a window needs keys on the grid of the queries"):
        factors(**made, **(rest | {"query_stride": 1}), window=3)
    layer = Factors("1111", query_stride=2).build(Site(16, 2, Grid(1, 6)))
    for mask in (Mask(causal=True), Mask(keep=torch.ones(1, 6, dtype=torch.bool))):
        with pytest.raises(UnsupportedError, match="Factors cannot apply a .* mask .it can: bias."):
            layer(torch.randn(1, 6, 16), Grid(1, 6), mask)
        with pytest.raises(UnsupportedError, match="mask needs every query: query_stride=1"):
            layer.operator(*torch.randn(3, 1, 2, 6, 8), grid=Grid(1, 6), mask=mask)
    keys = Factors("1111", stride=2)
    assert keys.masks == {"padding", "bias"}
    with pytest.raises(UnsupportedError, match="Factors cannot apply a causal mask .it can: bias, padding."):
        keys.build(Site(16, 2, Grid(1, 6)))(torch.randn(1, 6, 16), Grid(1, 6), Mask(causal=True))
