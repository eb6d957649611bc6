"""The four factors: every subset and execution against the materialised form, known special cases, and geometry."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from factor_inputs import DETECTION, SEGMENTATION, TERMS, executions, inputs, paper_gmacs
from operators import check_error, check_hidden, check_layer_transforms, count_flops
from regard.core import ConfigError, Grid, GridError, Mask, ShapeError, Site, UnsupportedError
from regard.mixers.factors import forms
from regard.mixers.factors.factors import Factors, factor_logits, factors, factors_reference
from regard.mixers.factors.forms import COMPRESSED_CELLS, sinusoid_basis, sinusoids
from regard.mixers.softmax import softmax, softmax_reference
from regard.mixers.spelling import parse, spell
from regard.testing.subject import gap

GRIDS = [Grid(4, 4), Grid(4, 6, 2), Grid(6, 4, 1), Grid(3, 5, 1, 2), Grid(1, 12)]


def one_by_one(q, k, v, full, *, terms, tables, u, t, stride=1, query_stride=1, scale=1.0, window=0, **_):
    """From the equation, cell by cell of the full map, with loops: nothing is taken from the package."""

    def places(step):
        cells = [(y, x) for y in range(0, full.height, step) for x in range(0, full.width, step)]
        return [None] * full.prefix + cells + [None] * full.suffix

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
                r = tables[0][:, dx + full.width - 1] + tables[1][:, dy + full.height - 1]
                total = total + on[1] * (q[:, :, i] * r).sum(-1) + on[3] * (t * r).sum(-1)
                if window and max(abs(dy), abs(dx)) > window // 2:
                    total = total - math.inf
            logits.append(scale * total)
        rows.append(torch.stack(logits, -1).softmax(-1)[..., None, :] @ v)
    return torch.cat(rows, -2)


REACHES = [(1, 1, 0), (1, 1, 1), (1, 1, 3), (1, 1, 9), (1, 2, 0), (1, 2, 3), (1, 3, 5)]
STRIDED = [(2, 1, 0), (2, 2, 3), (3, 2, 5), (2, 3, 0), (3, 1, 3)]


@pytest.mark.parametrize(("query_stride", "stride", "window"), REACHES + STRIDED)
@pytest.mark.parametrize("terms", ["1111", "0110", "0000", "1000", "0100", "0010", "0001"])
def test_the_reference_is_the_equation(terms, query_stride, stride, window):
    """Spatial reference 1.6: strided queries and keys too."""
    full = Grid(5, 4, 1, 2)
    made, rest = inputs(terms, full, stride, query_stride, batch=1)
    expected = one_by_one(**made, full=full, **rest, scale=0.7, window=window)
    assert gap(factors_reference(**made, **rest, scale=0.7, window=window), expected) <= 1e-12


LINES_AND_POINTS = [Grid(1, 5), Grid(5, 1, 1), Grid(1, 1), Grid(1, 1, 1)]
REDUCED = [
    *itertools.product(
        [Grid(4, 7, 2), Grid(7, 4, 1, 1), Grid(1, 12)], [(1, 3, 1), (1, 1, 1), (2, 0, 1), (2, 3, 1), (3, 7, 1)]
    ),
    *itertools.product([Grid(5, 8, 1, 2)], [(1, 0, 2), (1, 3, 2), (2, 3, 2), (2, 0, 3), (3, 7, 2)]),
]
"""(stride of keys, window, stride of queries)"""


@pytest.mark.parametrize(
    ("grid", "reach"), [*((grid, (1, 0, 1)) for grid in GRIDS + LINES_AND_POINTS), *REDUCED], ids=str
)
@pytest.mark.parametrize("terms", TERMS)
def test_every_execution_is_the_reference(terms, grid, reach):
    stride, window, query_stride = reach
    made, rest = inputs(terms, grid, stride, query_stride)
    expected = factors_reference(**made, **rest, window=window, scale=0.7)
    for execution in executions(terms):
        got = factors(**made, **rest, window=window, scale=0.7, execution=execution)
        assert gap(got, expected) <= 1e-12, execution


@pytest.mark.parametrize("terms", TERMS)
def test_masks(terms):
    grid = Grid(3, 4, 1)
    made, rest = inputs(terms, grid)
    keep = torch.rand(3, grid.tokens) > 0.4
    keep[1] = False  # a fully padded sample
    bias = torch.randn(1, 2, 1, grid.tokens, dtype=torch.float64)
    for mask in (Mask(keep=keep), Mask(causal=True), Mask(bias=bias), Mask(keep=keep, bias=bias, causal=True)):
        for window in (0, 3):
            expected = factors_reference(**made, **rest, mask=mask, window=window)
            assert expected.isfinite().all()
            for execution in ("auto", "compressed", "materialised"):
                got = factors(**made, **rest, mask=mask, execution=execution, window=window)
                assert (got - expected).abs().max() <= 1e-12
    expected = factors(**made, **rest, mask=Mask(keep=keep))
    assert (expected[1] == 0).all()


@pytest.mark.parametrize("terms", TERMS)
def test_gradients(terms):
    grid = Grid(2, 3, 1)
    made, rest = inputs(terms, grid, batch=1, heads=1, d=2, e=2)
    names = [name for name, flags in (("q", (0, 1)), ("k", (0, 2))) if "1" in [terms[i] for i in flags]] + ["v"]
    leaves = [made[name].requires_grad_() for name in names]
    extra = []
    if "1" in (terms[1], terms[3]):
        extra = [table.requires_grad_() for table in rest["tables"]]
    extra += [rest[name].requires_grad_() for name, flag in (("u", terms[2]), ("t", terms[3])) if flag == "1"]
    for execution in ("compressed", *(["factorised"] if terms[0] == "0" else [])):
        options = rest | {"execution": execution}
        call = lambda *_, o=options: factors(**made, **o)  # noqa: E731
        assert torch.autograd.gradcheck(call, (*leaves, *extra), fast_mode=True)


def test_content_alone_is_softmax_attention():
    made, rest = inputs("1000", Grid(3, 5, 1))
    for expected in (softmax_reference(**made), F.scaled_dot_product_attention(*made.values())):
        assert gap(factors(**made, **rest, scale=None), expected) < 1e-12


def test_no_term_in_a_window_is_average_pooling():
    grid = Grid(5, 7)
    made, _ = inputs("0000", grid)
    pooled = F.avg_pool2d(made["v"].mT.reshape(6, 6, 5, 7), 3, stride=1, padding=1, count_include_pad=False).reshape(
        3, 2, 6, 35
    )
    got = factors(None, None, made["v"], terms="0000", grid=grid, window=3)
    assert torch.allclose(got, pooled.mT, rtol=0, atol=1e-12)


def test_positions_alone_in_a_window_are_a_normalised_convolution():
    grid = Grid(5, 7)
    made, rest = inputs("0001", grid)
    (x, y), t = rest["tables"], rest["t"]
    kernel = torch.zeros(2, 3, 3, dtype=torch.float64)
    for dy, dx in itertools.product((-1, 0, 1), repeat=2):
        kernel[:, dy + 1, dx + 1] = ((x[:, dx + 6] + y[:, dy + 4]) * t).sum(-1).exp()
    value = made["v"].mT.reshape(3, 12, 5, 7)
    weight = kernel.repeat_interleave(6, 0)[:, None]
    top = F.conv2d(value, weight, padding=1, groups=12)
    below = F.conv2d(torch.ones_like(value), weight, padding=1, groups=12)
    expected = (top / below).reshape(3, 2, 6, 35).mT
    assert torch.allclose(factors(**made, **rest, window=3), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("call", [factors, factors_reference], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shift", [(1, 0), (-1, 0), (0, 1), (0, -1), (2, -1)])
@pytest.mark.parametrize("grid", [Grid(4, 6, 1), Grid(6, 4, 0, 2)], ids=str)
def test_a_peaked_table_shifts_the_map(call, shift, grid):
    """delta = key - query: a peak at delta (dy, dx) makes cell (y, x) show what is at (y + dy, x + dx)."""
    dy, dx = shift
    x, y = (torch.zeros(1, 2 * side - 1, 1, dtype=torch.float64) for side in (grid.width, grid.height))
    x[0, dx + grid.width - 1], y[0, dy + grid.height - 1] = 400.0, 400.0
    v = torch.randn(1, 1, grid.tokens, 1, dtype=torch.float64)
    t = torch.ones(1, 1, dtype=torch.float64)
    out = call(None, None, v, terms="0001", grid=grid, tables=(x, y), t=t)
    _, before = grid.to_map(v[0])
    _, after = grid.to_map(out[0])
    before, after = before[0, 0], after[0, 0]
    rows, columns = range(max(0, -dy), grid.height - max(0, dy)), range(max(0, -dx), grid.width - max(0, dx))
    for row, column in itertools.product(rows, columns):
        assert after[row, column] == pytest.approx(before[row + dy, column + dx].item())


@pytest.mark.parametrize("terms", ["0010", "0011", "0110", "0111"])
@pytest.mark.parametrize("grid", [Grid(4, 6), Grid(4, 6, 2)], ids=str)
def test_adversarial_logits_do_not_underflow(terms, grid):
    """Position favours one corner by 300, content the opposite one by 500: the product of the factors is exp(-300)."""
    for dtype, atol in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        for sharp in (1.0, 3.0):
            made, rest = inputs(terms, grid, dtype=dtype)
            x, y = (torch.zeros(2, 2 * side - 1, 4, dtype=dtype) for side in (grid.width, grid.height))
            x[..., 0] = -150.0 * torch.arange(11.0, dtype=dtype) * sharp / 5
            y[..., 0] = -150.0 * torch.arange(7.0, dtype=dtype) * sharp / 3
            made["q"][..., 0], rest["t"] = 1.0, torch.eye(4, dtype=dtype)[0].repeat(2, 1) * 0.01
            made["k"][..., 1], rest["u"] = 0.0, torch.eye(4, dtype=dtype)[1].repeat(2, 1)
            made["k"][:, :, grid.prefix + 23, 1] = 320.0 * sharp
            rest["tables"] = (x, y)
            expected = factors_reference(**made, **rest)
            got = factors(**made, **rest, execution="factorised")
            assert got.isfinite().all()
            assert torch.allclose(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("grid", [Grid(14, 20, 1), Grid(25, 3), Grid(1, 64)], ids=str)
@pytest.mark.parametrize("terms", ["1111", "0110", "0001", "1100"])
def test_compressed_positions_are_as_exact_as_float32(terms, grid):
    site = Site(32, 2, grid, qkv_bias=False)
    torch.manual_seed(0)
    layer = Factors(terms, execution="compressed").build(site)
    x = torch.randn(2, grid.tokens, 32)
    exact = layer.double().reference(x.double(), grid)
    assert torch.allclose(layer(x.double(), grid), exact, rtol=0, atol=1e-12)
    layer.float()
    own = (layer.reference(x, grid) - exact).abs().max()
    assert (layer(x, grid) - exact).abs().max() <= 4 * own + 1e-7


def test_few_waves_span_the_sinusoids():
    basis = sinusoid_basis(64, 128, 1000.0)
    assert basis.shape[1] < 34
    waves = sinusoids(torch.arange(-63, 64, dtype=torch.float64), 128, 1000.0)
    rows = waves[torch.arange(64) - torch.arange(64)[:, None] + 63]  # (query, key, P)
    assert (rows - basis @ (basis.T @ rows)).abs().max() <= 2e-6
    assert sinusoid_basis(12, 128, 1000.0).shape == (12, 12)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_layer_is_its_reference_on_any_grid(terms, grid):
    layer = Factors(terms).build(Site(16, 2, Grid(4, 5, 1), qkv_bias=False)).double()
    x = torch.randn(3, grid.tokens, 16, dtype=torch.float64)
    assert torch.allclose(layer(x, grid), layer.reference(x, grid), rtol=0, atol=1e-12)


def test_the_layer_with_strides_windows_and_memory():
    grid, memory = Grid(5, 7, 1), Grid(6, 8, 2)
    site = Site(16, 2, grid, qkv_bias=False)
    x = torch.randn(3, grid.tokens, 16, dtype=torch.float64)
    keep = torch.rand(3, grid.tokens) > 0.3
    for config in (Factors("1111", stride=2), Factors("0110", window=3), Factors("0011", preset="mmcv")):
        layer = config.build(site).double()
        mask = Mask(keep=keep)
        assert torch.allclose(layer(x, grid, mask), layer.reference(x, grid, mask), rtol=0, atol=1e-12)
        with torch.no_grad():
            hidden = x.clone()
            hidden[~keep] = 0  # padded keys do not matter to the queries that stay
            assert torch.allclose(layer(hidden, grid, mask)[keep], layer(x, grid, mask)[keep], rtol=0, atol=1e-12)
    for terms in TERMS:
        cross = Factors(terms).build_cross(Site(16, 2, grid, memory=memory, qkv_bias=False)).double()
        y = torch.randn(3, memory.tokens, 16, dtype=torch.float64)
        assert cross(x, grid, memory=y, memory_grid=memory).shape == x.shape


PLAIN = [{}, {"window": 3}, {"stride": 2}, {"execution": "compressed"}]
QUERIES = [{"query_stride": 2, **options} for options in PLAIN]


@pytest.mark.parametrize("terms", TERMS)
def test_parameters_and_executed_macs(terms):
    places = {
        Grid(5, 7, 2): PLAIN + QUERIES,
        Grid(24, 18, 1): [*PLAIN, {"execution": "materialised"}],
        Grid(42, 39): QUERIES,
    }
    for grid, options in ((place, options) for place in places for options in places[place]):
        site = Site(32, 4, grid, qkv_bias=False)
        config = Factors(terms, **options)
        layer, cost = config.build(site), config.cost(site)
        assert cost.params == sum(p.numel() for p in layer.parameters())
        assert cost.flops == count_flops(layer, torch.randn(1, grid.tokens, 32), grid), (grid, options)


@pytest.mark.parametrize("terms", ["0100", "0101", "0110", "0111"])
def test_costs_know_where_the_product_is_too_large(terms, monkeypatch):
    """With E2 "auto" leaves the product over axes above a number of vectors, and costs count what runs then."""
    grid = Grid(24, 18, 1)
    site = Site(32, 4, grid, qkv_bias=False)
    config, named = Factors(terms), Factors(terms, execution="compressed")
    assert config.cost(site) != named.cost(site)
    monkeypatch.setattr(forms, "FACTORISED_LIMIT", 4 * 24 * 18 * 24 * 9 - 1)
    assert config.cost(site) == named.cost(site)
    assert config.exponentials(site) == named.exponentials(site) == 4 * grid.tokens**2
    assert config.cost(site).flops == count_flops(config.build(site), torch.randn(1, grid.tokens, 32), grid)


PUBLISHED_PARAMETERS = {
    "0000": 2081, "0001": 3137, "0010": 3137, "0011": 4193, "0101": 4161,
    "1000": 4129, "1001": 5185, "1010": 4161, "1111": 5217,
}  # fmt: skip


@pytest.mark.parametrize(("terms", "count"), PUBLISHED_PARAMETERS.items())
def test_parameters_by_hand(terms, count):
    """C = P = 32 with the residual's gamma, which is no part of the layer."""
    assert Factors(terms).cost(Site(32, 8, Grid(4, 4), qkv_bias=False)).params + 1 == count


PUBLISHED_GMACS = {
    "0001": (247.6, 781.1), "0010": (221.1, 489.5), "0011": (250.1, 794.4), "0100": (251.1, 800.7),
    "0101": (251.1, 800.7), "0110": (253.6, 814.0), "0111": (253.6, 814.0), "1000": (281.2, 1111.2),
    "1010": (281.2, 1111.2), "1001": (281.4, 1112.1), "1011": (281.4, 1112.1), "1111": (281.4, 1112.1),
}  # fmt: skip


@pytest.mark.parametrize(("terms", "published"), PUBLISHED_GMACS.items())
def test_macs_of_the_paper(terms, published):
    """Zhu et al., Table 2 and Figure 3 (spatial reference 3.4)."""
    assert paper_gmacs(Factors(terms), DETECTION) == pytest.approx(published[0], abs=0.1)
    slack = 0.4 if terms in ("1000", "1010") else 0.2
    assert paper_gmacs(Factors(terms), SEGMENTATION) == pytest.approx(published[1], abs=slack)


@pytest.mark.parametrize(("window", "published"), [(31, 229.4), (25, 226.6), (19, 224.4), (13, 222.7)])
def test_macs_of_the_paper_in_windows(window, published):
    assert paper_gmacs(Factors("0100", window=window), DETECTION) == pytest.approx(published, abs=0.1)


def test_macs_of_the_paper_on_a_line():
    """N = M = C = 64 on one axis, by hand: displacements, the window's keys along it, and never its square."""
    site = Site(64, 8, Grid.sequence(64), qkv_bias=False)
    positions = 64 * 64
    by_hand = {0: (127 * positions, 64), 7: (7 * positions, 7), 31: (31 * positions, 31)}
    for window, (table, seen) in by_hand.items():
        each = 64 * seen * 64
        for terms, products in (("1111", 2), ("0100", 2), ("0011", 1)):
            macs = Factors(terms, axes=1, window=window).operator_cost(site, "paper").macs
            assert macs == table + products * each, (terms, window)


@pytest.mark.parametrize("grid", [Grid(8, 8), Grid(5, 9, 2)], ids=str)
@pytest.mark.parametrize("terms", TERMS)
def test_macs_of_the_paper_know_no_more_keys_than_the_map_has(terms, grid):
    site = Site(64, 8, grid, qkv_bias=False)
    macs = {w: Factors(terms, window=w).operator_cost(site, "paper").macs for w in (0, 1, 3, 7, 13, 17, 31)}
    assert macs[17] == macs[31] == macs[0]
    assert macs[1] <= macs[3] <= macs[7] <= macs[13] <= macs[0]


def test_card_and_uses_follow_the_terms():
    assert [Factors(terms).uses for terms in ("0000", "0001", "0010", "0100", "1000")] == ["v", "v", "kv", "qv", "qkv"]
    assert not Factors("1010").card.relative_position
    assert Factors("0001").card.relative_position
    assert not Factors("0011").card.query_content
    assert Factors("0110").card.key_content
    for config in (Factors("0110"), Factors("0000", window=3), Factors(sign=-1, position_scale=0.5)):
        assert parse(spell(config)) == config
    assert parse('Factors("0110")') == Factors(terms="0110")


def test_terms_can_be_looked_at_apart():
    made, rest = inputs("1111", Grid(3, 4, 1))
    parts = factor_logits(made["q"], made["k"], **rest)
    assert list(parts) == ["E1", "E2", "E3", "E4"]
    assert (parts["E2"][:, :, 0] == 0).all()
    assert (parts["E4"][..., 0] == 0).all()
    a = sum(parts.values()).softmax(-1)
    assert torch.allclose(a @ made["v"], factors(**made, **rest), rtol=0, atol=1e-12)


@pytest.mark.parametrize("terms", TERMS)
def test_half_precision(terms):
    """2e-2 of the output's size; logits of a standard deviation near 1."""
    grid = Grid(9, 13, 1)
    made, rest = inputs(terms, grid, d=16, e=16, dtype=torch.float32)
    expected = factors_reference(**made, **rest, scale=None)
    low = {name: value.bfloat16() for name, value in made.items()}
    got = factors(**low, **rest, scale=None)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() <= 2e-2 * expected.norm()
    layer = Factors(terms).build(Site(16, 2, grid))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(torch.randn(2, grid.tokens, 16), grid)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.operator.parameters())


@pytest.mark.parametrize("terms", ["0001", "0011", "0110", "1111"])
def test_positions_ignore_autocast(terms):
    """A bfloat16 displacement of 300 cells is off by one; float32 inputs stay float32."""
    grid = Grid(1, 300, 1)
    operator = Factors(terms).build(Site(8, 2, grid)).operator
    q, k, v = torch.randn(3, 1, 2, grid.tokens, 4)
    expected, tables = operator(q, k, v, grid=grid), operator.tables(grid, grid)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(operator.tables(grid, grid)[0], tables[0])
        assert torch.equal(operator(q, k, v, grid=grid), expected)


RANKS = {14: 12, 25: 16, 42: 22, 50: 24, 64: 28, 84: 32, 97: 35, 128: 40}


@pytest.mark.parametrize(("side", "rank"), RANKS.items())
def test_spatial_2_3_ranks_of_the_sinusoids(side, rank):
    """P = 256 (128 an axis) at 1e-6; a square map has twice as many features: 24, 32, 48, 56 for 14, 25, 50, 64."""
    assert sinusoid_basis(side, 128, 1000.0, tolerance=1e-6).shape == (side, rank)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_positions_are_as_exact_after_half_precision(half):
    layer = Factors("0101", axes=1).build(Site(32, 2, Grid.sequence(64)))
    before = layer.operator.basis_x.clone()
    assert before.shape[0] != before.shape[1]
    layer.to(half).float()
    assert torch.equal(layer.operator.basis_x, before)


def test_bases_lie_on_the_default_device():
    with torch.device("meta"):
        operator = Factors("1111").build(Site(32, 2, Grid(40, 40))).operator
    assert operator.basis_x.is_meta
    assert operator.basis_y.is_meta
    operator = operator.to_empty(device="cpu")
    assert torch.equal(operator.basis_x, Factors("1111").build(Site(32, 2, Grid(40, 40))).operator.basis_x)


@pytest.mark.parametrize("execution", ["auto", "compressed", "materialised"])
def test_a_bias_in_float32_meets_halves(execution):
    grid = Grid(4, 5, 1)
    layer = Factors("1111", execution=execution).build(Site(16, 2, grid)).half()
    out = layer(torch.randn(2, 21, 16).half(), grid, Mask(bias=torch.randn(1, 1, 21, 21)))
    assert out.dtype == torch.float16
    assert out.isfinite().all()


@pytest.mark.parametrize("terms", ["0110", "1111", "0011"])
def test_function_transforms_take_a_form_that_never_underflows(terms):
    """Above 400 cells with E2 and E3 the eager form looks at its denominators, which vmap does not allow."""
    grid = Grid(21, 20)
    assert grid.cells > COMPRESSED_CELLS
    torch.manual_seed(0)
    layer = Factors(terms).build(Site(8, 2, grid, qkv_bias=False)).double()
    check_layer_transforms(layer, torch.randn(2, grid.tokens, 8, dtype=torch.float64), grid)


@pytest.mark.parametrize("terms", TERMS)
def test_a_window_larger_than_the_map_is_none(terms):
    made, rest = inputs(terms, Grid(3, 5, 1))
    for window in (9, 31):
        assert torch.equal(factors(**made, **rest, window=window), factors(**made, **rest))


@pytest.mark.parametrize("terms", TERMS)
def test_a_stride_larger_than_the_map_leaves_the_first_cell(terms):
    made, rest = inputs(terms, Grid(3, 4), stride=5)
    for execution in executions(terms):
        got = factors(**made, **rest, execution=execution)
        assert gap(got, made["v"].expand(-1, -1, 12, -1)) < 1e-12


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("preset", ["esa", "transformer_xl"])
def test_sequences_with_causal_and_padding_masks(terms, preset):
    """Masks and the window combine by and; a query that sees nothing gets zeros, not NaN."""
    grid = Grid.sequence(9)
    config = Factors(terms, axes=1, preset=preset, scale=None, window=5)
    layer = config.build(Site(16, 2, grid, qkv_bias=False, out_bias=False)).double()
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[0, 6:], keep[1, :4], keep[2] = False, False, False
    mask = Mask(causal=True, keep=keep)
    out = layer(x, grid, mask)
    assert torch.allclose(out, layer.reference(x, grid, mask), rtol=0, atol=1e-12)
    assert (out[1, :4] == 0).all()
    assert (out[2] == 0).all()
    later = x.clone()
    later[:, 5:] += 1
    assert torch.allclose(layer(later, grid, mask)[:, :5], out[:, :5], rtol=0, atol=1e-12)
    far = x.clone()
    far[:, 0] += 1  # more than two cells before query 3
    assert torch.allclose(layer(far, grid, mask)[:, 3:], out[:, 3:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("terms", ["0100", "0001", "0111", "1111"])
@pytest.mark.parametrize("preset", ["esa", "transformer_xl"])
def test_cross_attention_counts_source_index_minus_target_index(terms, preset):
    target, source = Grid.sequence(5), Grid.sequence(8)
    site = Site(16, 2, target, memory=source, qkv_bias=False)
    layer = Factors(terms, axes=1, preset=preset).build_cross(site).double()
    operator, sign = layer.operator, 1 if preset == "esa" else -1
    q, k = torch.randn(2, 2, 5, 8, dtype=torch.float64), torch.randn(2, 2, 8, 8, dtype=torch.float64)
    v = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    logits = torch.zeros(2, 2, 5, 8, dtype=torch.float64)
    for i, j in itertools.product(range(5), range(8)):
        delta = torch.tensor([sign * (j - i)], dtype=torch.float64)
        wave = sinusoids(delta, 16, operator.base)[0]
        r = (operator.positions_x @ wave).view(2, 8)
        parts = [(q[:, :, i] * k[:, :, j]).sum(-1), (q[:, :, i] * r).sum(-1)]
        parts.append(0.0 if operator.u is None else (operator.u * k[:, :, j]).sum(-1))
        parts.append(0.0 if operator.t is None else (operator.t * r).sum(-1).expand(2, -1))
        logits[:, :, i, j] = sum(part for part, flag in zip(parts, terms, strict=True) if flag == "1")
    expected = logits.softmax(-1) @ v
    for call in (operator, operator.reference):
        assert torch.allclose(call(q, k, v, grid=target, memory=source), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("terms", ["0110", "0111"])
def test_auto_does_not_underflow_where_it_takes_the_product(terms):
    """Above 400 cells "auto" factorises: with logits spread over 600 it notices and takes the compressed form."""
    grid = Grid(3, 150)
    made, rest = inputs(terms, grid, batch=1, dtype=torch.float32)
    assert grid.cells > COMPRESSED_CELLS
    x, y = (torch.zeros(2, 2 * side - 1, 4) for side in (grid.width, grid.height))
    x[..., 0] = -torch.arange(299.0).flip(0) * 4
    made["q"][..., 0], made["k"][..., 1] = 1.0, 0.0
    made["k"][:, :, 0, 1] = 550.0
    rest |= {"tables": (x, y), "u": torch.eye(4)[1].repeat(2, 1), "t": torch.eye(4)[0].repeat(2, 1) * 0.01}
    expected = factors_reference(**made, **rest)
    assert torch.allclose(factors(**made, **rest), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "base", "sign", "factor", "stride"),
    [
        ({"preset": "esa"}, 1000.0, 1, 1.0, 1),
        ({"preset": "mmcv"}, 1000.0, -1, 2**-0.5, 2),
        ({"preset": "transformer_xl"}, 10000.0, -1, 1.0, 1),
        ({"preset": "transformer_xl", "sign": 1}, 10000.0, 1, 1.0, 1),
        ({"sign": -1, "position_scale": 0.5}, 1000.0, -1, 0.5, 1),
    ],
    ids=str,
)
def test_spatial_1_6_conventions_of_the_presets_and_options(options, base, sign, factor, stride):
    """Entry delta + size - 1 of a table is V_R R(sign * delta), with the wavelengths base^(i / F)."""
    grid = Grid(4, 6)
    config = Factors("0100", **options)
    operator = config.build(Site(16, 2, grid, qkv_bias=False)).double().operator
    assert config.key_stride == stride
    x, y = operator.tables(grid, grid.every(stride))
    for table, weight in ((x, operator.positions_x), (y, operator.positions_y)):
        half = table.shape[1] // 2
        for delta in (-2, 0, 3):
            angle = [sign * delta / base ** (i / 4) for i in range(4)]
            wave = torch.tensor([*map(math.sin, angle), *map(math.cos, angle)], dtype=torch.float64)
            expected = (weight @ wave * factor).view(2, 8)
            assert torch.allclose(table[:, half + delta], expected, rtol=0, atol=1e-12)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("backend", "terms", "options"),
    [
        ("eager", "0110", {"window": 3}),
        *(
            pytest.param("aot_eager", *case, marks=pytest.mark.slow)
            for case in itertools.product(("1111", "0110", "0011", "0010", "0101", "0000"), PLAIN[:3])
        ),
    ],
    ids=str,
)
def test_compiles_without_breaks_for_one_grid_after_another(backend, terms, options):
    torch._dynamo.reset()
    layer = Factors(terms, **options).build(Site(16, 2, Grid(6, 4, 1)))
    fast = torch.compile(layer, fullgraph=True, backend=backend)
    for grid in (Grid(6, 4, 1), Grid(5, 20)):
        x = torch.randn(2, grid.tokens, 16)
        assert torch.allclose(fast(x, grid), layer(x, grid), rtol=0, atol=1e-5)


@pytest.mark.parametrize("terms", ["1000", "0110", "1111"])
def test_padding_may_hold_anything(terms):
    """In softmax attention too, which is E1 alone."""
    grid = Grid(3, 5, 1, 2)
    made, rest = inputs(terms, grid)
    keep = torch.rand(3, grid.tokens) > 0.3
    runs = [partial(factors_reference, **rest)]
    runs += [partial(factors, **rest, execution=execution) for execution in ("compressed", "materialised")]
    for run in runs + [softmax, softmax_reference] * (terms == "1000"):
        check_hidden(partial(run, mask=Mask(keep=keep)), (made["k"], made["v"]), keep, made["q"])


@pytest.mark.untyped
def test_wrong_use_is_said():
    for bad in ("111", "1121", ""):
        check_error(ConfigError, "four of 0/1", Factors, bad)
    check_error(ConfigError, "terms", Factors, 1111)
    check_error(ConfigError, "window", Factors, window=4)
    check_error(ConfigError, "window", Factors, window=1, stride=2)
    check_error(ConfigError, "factorised", Factors, "1111", execution="factorised")
    check_error(ConfigError, "did you mean mmcv", Factors, preset="mmvc")
    check_error(ConfigError, "multiple of 4", Factors("0100").build, Site(6, 2, Grid(3, 3)))
    check_error(ConfigError, "position_scale", Factors, "0100", position_scale=-1.0)
    for wrong in ({"magnitude": 0.0}, {"base": -1.0}):
        check_error(ConfigError, "base, position_scale and stride are positive", Factors, "0100", **wrong)
    check_error(ConfigError, "positions=7", Factors, "0100", positions=7)
    check_error(ConfigError, "dim 10 is not a multiple of 4 heads", lambda: Factors().build(Site(10, 4, Grid(3, 3))))
    grid = Grid(3, 4, 1)
    made, rest = inputs("1111", grid)
    for name in ("u", "t", "tables"):
        check_error(ConfigError, name, factors, **made, **rest | {name: None})
    check_error(ConfigError, "needs q", factors, **made | {"q": None}, **rest)
    check_error(GridError, "do not fit", factors, **made, **rest | {"grid": Grid(4, 4)})
    check_error(ShapeError, "table of x", factors, **made, **rest | {"tables": rest["tables"][::-1]})
    check_error(ShapeError, "u has width 3, q has 4", factors, **made, **rest | {"u": rest["u"][:, :3]})
    check_error(ShapeError, "basis", factors, **made, **rest, basis=(torch.eye(3), torch.eye(4)))
    with pytest.raises(ShapeError, match=r"a basis has shape \(4,\); expected \(4, r\)"):
        factors(**made, **rest, basis=(torch.ones(4), torch.eye(3)))
    check_error(ConfigError, "did you mean compressed", factors, **made, **rest, execution="compresed")
    check_error(UnsupportedError, "E1", factors, **made, **rest, execution="factorised")
    with pytest.raises(UnsupportedError, match="causal mask"):
        factors(**made, **(rest | {"terms": "0110"}), execution="factorised", mask=Mask(causal=True))
    product = Factors("0110", execution="factorised")
    with pytest.raises(UnsupportedError, match="cannot apply a padding mask .it can: none"):
        product.build(Site(16, 2, grid))(torch.randn(2, 13, 16), grid, Mask(keep=torch.ones(2, 13, dtype=torch.bool)))
    check_error(GridError, "axes=1", Factors(axes=1).build(Site(16, 2, grid)), torch.randn(2, 13, 16), grid)
