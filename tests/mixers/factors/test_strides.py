"""Strides of the four factors: keys and queries on every s-th cell, in every form and in the layer (spatial 1.6)."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from operators import check_error, count_flops
from regard.core import ConfigError, Grid, Inputs, Mask, Site, UnsupportedError
from regard.mixers.factors.factors import Factors, factors, factors_reference
from regard.mixers.spelling import parse, spell
from regard.testing import check

TERMS = ["".join(flags) for flags in itertools.product("01", repeat=4)]
EXECUTIONS = ["auto", "compressed", "factorised", "materialised"]
FULL = Grid(5, 8, 1, 2)  # the map; queries and keys lie on some of its cells


def coarse(grid, stride):
    return Grid(math.ceil(grid.height / stride), math.ceil(grid.width / stride), grid.prefix, grid.suffix)


def case(terms, query_stride, stride, batch=3):
    """Tensors for an operator call with queries on every query_stride-th cell of FULL and keys on every stride-th."""
    torch.manual_seed(1)
    queries, keys = coarse(FULL, query_stride), coarse(FULL, stride)
    shape = {"q": (queries.tokens, 4), "k": (keys.tokens, 4), "v": (keys.tokens, 6)}
    made = {name: torch.randn(batch, 2, *size, dtype=torch.float64) for name, size in shape.items()}
    tables = tuple(torch.randn(2, 2 * side - 1, 4, dtype=torch.float64) for side in (FULL.width, FULL.height))
    u, t = torch.randn(2, 2, 4, dtype=torch.float64)
    rest = {"terms": terms, "grid": queries, "key_grid": keys, "tables": tables, "u": u, "t": t}
    return made, rest | {"stride": stride, "query_stride": query_stride, "scale": 0.7}


def by_hand(q, k, v, *, terms, tables, u, t, query_stride, stride, window):
    """From the equation, cell by cell of the full map, with loops: nothing is taken from the package."""

    def places(step):
        cells = [(y, x) for y in range(0, FULL.height, step) for x in range(0, FULL.width, step)]
        return [None] * FULL.prefix + cells + [None] * FULL.suffix

    on, rows = [flag == "1" for flag in terms], []
    for i, at in enumerate(places(query_stride)):
        logits = []
        for j, there in enumerate(places(stride)):
            total = torch.zeros(v.shape[:2], dtype=v.dtype)
            if on[0]:
                total = total + (q[:, :, i] * k[:, :, j]).sum(-1)
            if on[2]:
                total = total + (u * k[:, :, j]).sum(-1)
            if at is not None and there is not None:
                dy, dx = there[0] - at[0], there[1] - at[1]
                r = tables[0][:, dx + FULL.width - 1] + tables[1][:, dy + FULL.height - 1]
                total = total + on[1] * (q[:, :, i] * r).sum(-1) + on[3] * (t * r).sum(-1)
                if window and max(abs(dy), abs(dx)) > window // 2:
                    total = total - math.inf
            logits.append(0.7 * total)
        rows.append(torch.stack(logits, -1).softmax(-1)[..., None, :] @ v)
    return torch.cat(rows, -2)


@pytest.mark.parametrize(("query_stride", "stride", "window"), [(2, 1, 0), (2, 2, 3), (3, 2, 5), (2, 3, 0), (3, 1, 3)])
@pytest.mark.parametrize("terms", ["1111", "0110", "0011", "1001", "0000"])
def test_spatial_1_6_strided_queries_are_the_equation(terms, query_stride, stride, window):
    made, rest = case(terms, query_stride, stride, batch=1)
    expected = by_hand(
        **made,
        terms=terms,
        tables=rest["tables"],
        u=rest["u"],
        t=rest["t"],
        query_stride=query_stride,
        stride=stride,
        window=window,
    )
    got = factors_reference(**made, **rest, window=window)
    assert (got - expected).abs().max() <= 1e-12


@pytest.mark.parametrize(("query_stride", "stride", "window"), [(2, 1, 0), (2, 1, 3), (2, 2, 3), (3, 2, 0), (2, 3, 7)])
@pytest.mark.parametrize("terms", TERMS)
def test_strided_queries_in_every_execution(terms, query_stride, stride, window):
    made, rest = case(terms, query_stride, stride)
    expected = factors_reference(**made, **rest, window=window)
    for execution in EXECUTIONS[:2] + EXECUTIONS[3:] if terms[0] == "1" else EXECUTIONS:
        got = factors(**made, **rest, window=window, execution=execution)
        assert (got - expected).abs().max() <= 1e-12, execution


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


def test_strided_queries_of_no_images():
    layer = Factors("1111", query_stride=2).build(Site(16, 2, FULL))
    assert layer(torch.randn(0, FULL.tokens, 16), FULL).shape == (0, FULL.tokens, 16)


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


@pytest.mark.parametrize("terms", TERMS)
def test_cost_of_strided_queries(terms):
    """Parameters and multiply-accumulates as executed; on paper the pairs fall by the square of the stride."""
    for grid, options in itertools.product(
        (Grid(5, 7, 2), Grid(42, 39)), ({}, {"window": 3}, {"stride": 2}, {"execution": "compressed"})
    ):
        site = Site(32, 4, grid, qkv_bias=False)
        config = Factors(terms, query_stride=2, **options)
        layer, cost = config.build(site), config.cost(site)
        assert cost.params == sum(p.numel() for p in layer.parameters())
        assert cost.flops == count_flops(layer, torch.randn(1, grid.tokens, 32), grid), (grid, options)
    site = Site(32, 4, Grid(8, 12), qkv_bias=False)
    one, two = (Factors("1000", query_stride=n).operator_cost(site, "paper").macs for n in (1, 2))
    assert (one, two) == (2 * 96 * 96 * 32, 2 * 24 * 96 * 32)


@pytest.mark.parametrize("terms", ["1111", "0110"])
def test_strided_queries_in_bfloat16(terms):
    grid = Grid(9, 13, 1)
    layer = Factors(terms, query_stride=2, scale=None).build(Site(16, 2, grid))
    x = torch.randn(2, grid.tokens, 16)
    expected, got = layer(x, grid), layer.bfloat16()(x.bfloat16(), grid)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() <= 3e-2 * expected.norm()


def test_strided_queries_keep_the_contract():
    """No padding: what a hidden query would get is interpolated into its neighbours."""
    config = Factors("1111", query_stride=2)
    assert config.masks == {"bias"}
    assert {"macs", "masks", "gradients", "geometry", "cross"} <= set(check(config).passed)


@pytest.mark.untyped
def test_strided_queries_compile_without_breaks():
    torch._dynamo.reset()
    grid = Grid(6, 5, 1)
    layer = Factors("0110", query_stride=2, stride=2).build(Site(16, 2, grid))
    x = torch.randn(2, grid.tokens, 16)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(fast(x, grid), layer(x, grid), rtol=0, atol=1e-5)


@pytest.mark.untyped
def test_wrong_strides_are_said():
    check_error(ConfigError, "query_stride is at least 1, not 0", Factors, query_stride=0)
    check_error(ConfigError, "query_stride", parse, "Factors('1111', q_stride=2)")
    made, rest = case("1111", 2, 1)
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
