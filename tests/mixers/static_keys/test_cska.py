"""Convolutional static keys: against convolutions and hand-made cases, extra tokens, other grids, cost and memory."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cska_variants import VARIANTS
from operators import check_error, check_hidden, check_same, count_flops
from regard.core import ConfigError, Grid, GridError, Mask, ShapeError, Site, UnsupportedError
from regard.mixers.spelling import spell
from regard.mixers.static_keys.cska import CSKA, cska, cska_reference
from regard.mixers.static_keys.cska_forms import CONV_CELLS, LEAN_LOGITS, choose_path
from regard.mixers.static_keys.grids import resample
from regard.mixers.static_keys.keys import ACTIVATIONS, freeze_keys
from regard.mixers.static_keys.ska import SKA, ska
from regard.testing.subject import perturb

GRIDS = (Grid(3, 5), Grid(4, 6, 2), Grid(3, 5, 1, 2), Grid(1, 12))
PATHS = ("conv", "patches", "lean")
F64 = torch.float64


def tensors(grid=GRIDS[0], m=None, heads=2, batch=3, d=4, e=6, kernel=3):
    make = lambda *shape: torch.randn(*shape, dtype=F64)  # noqa: E731
    m = grid.cells if m is None else m
    return (
        make(batch, heads, grid.cells, d),
        make(heads * m, d, kernel, kernel),
        make(heads * m),
        make(batch, heads, m, e),
    )


def mixer(config, grid=GRIDS[0], heads=2, dim=16, **options):
    return perturb(config.build(Site(dim=dim, heads=heads, grid=grid, **options)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("grid", "m"), [(Grid(3, 5), 15), (Grid(30, 9), 7), (Grid(1, 200), 3)], ids=str)
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_every_path_equals_the_reference(path, grid, m, kernel):
    q, weight, bias, v = tensors(grid, m, kernel=kernel)
    rows = torch.randn(2, grid.cells, m, dtype=F64)
    keep = torch.rand(3, m) > 0.3
    keep[1] = False
    for mask in (None, Mask(keep=keep), Mask(bias=rows), Mask(bias=rows[:, :1]), Mask(keep=keep, bias=rows)):
        for options in ({}, {"scale": 0.3}):
            expected = cska_reference(q, weight, bias, v, grid, mask=mask, **options)
            made = cska(q, weight, bias, v, grid, mask=mask, path=path, **options)
            assert torch.allclose(made, expected, atol=1e-12)
    assert torch.allclose(cska(q, weight, None, v, grid, path=path), cska_reference(q, weight, None, v, grid))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_every_activation_on_every_path_equals_the_reference(activation, path):
    """In value and gradient; a bias of -inf is a forbidden key as well."""
    grid = Grid(26, 10)
    values = [x.requires_grad_() for x in tensors(grid, 5)]
    rows = torch.randn(2, grid.cells, 5, dtype=F64)
    rows[:, ::7, 2] = -torch.inf
    keep = torch.rand(3, 5) > 0.3
    keep[1] = False
    for mask in (None, Mask(keep=keep), Mask(bias=rows), Mask(keep=keep, bias=rows)):
        made, plain = (
            run(*values, grid, mask=mask, path=path, activation=activation) for run in (cska, cska_reference)
        )
        check_same(made, plain, values, gradients=1e-9)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_c1_kernel_1_is_ska_for_every_activation(activation):
    q, weight, _, v = tensors(kernel=1)
    out = cska(q, weight, None, v, Grid(3, 5), activation=activation)
    assert torch.allclose(out, ska(q, weight.view(2, 15, 4), v, activation=activation), atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
def test_c3_logits_are_the_sum_of_nine_shifted_static_keys(path):
    """Weights (from v = identity) of `cska` against products of shifted queries, written out per tap."""
    grid = Grid(3, 5)
    q, weight, _, _ = tensors(grid)
    logits = torch.zeros(3, 2, 15, 15, dtype=F64)
    taps = weight.view(2, 15, 4, 3, 3)
    for i in range(15):
        for dy in (-1, 0, 1):
            for dx in (-1, 0, 1):
                y, x = i // 5 + dy, i % 5 + dx
                if 0 <= y < 3 and 0 <= x < 5:
                    logits[:, :, i] += torch.einsum("bhd,hmd->bhm", q[:, :, y * 5 + x], taps[..., dy + 1, dx + 1])
    eye = torch.eye(15, dtype=F64).expand(3, 2, 15, 15)
    assert torch.allclose(cska(q, weight, None, eye, grid, path=path), (logits / 2).softmax(-1), atol=1e-12)


def test_c4_unfolded_queries_and_a_one_in_softmax_attention():
    grid = Grid(3, 5)
    q, weight, bias, v = tensors(grid)
    image = q.mT.reshape(3, 8, 3, 5)
    unfolded = F.unfold(image, 3, padding=1).view(3, 2, 36, 15).mT
    wide = torch.cat([unfolded, torch.ones(3, 2, 15, 1, dtype=F64)], -1)
    keys = torch.cat([weight.view(2, 15, 36), bias.view(2, 15, 1)], -1).expand(3, -1, -1, -1)
    expected = F.scaled_dot_product_attention(wide, keys, v, scale=0.5)
    assert torch.allclose(cska(q, weight, bias, v, grid), expected, atol=1e-12)


@pytest.mark.parametrize("factorised", [False, True])
def test_c7_the_class_row_of_rows_centre_is_the_filter_on_a_map_of_one_cell(factorised):
    grid = Grid(3, 5, 1)
    operator = mixer(CSKA(rows="centre", factorised=factorised), grid).operator
    q, v = torch.randn(3, 2, 16, 8, dtype=F64), torch.randn(3, 2, 16, 8, dtype=F64)
    out = operator(q, None, v, grid=grid)[:, :, :1]
    made = operator.on(grid)
    if factorised:
        weight = (made["keys"][..., None, None] * made["kernel"].view(2, 1, 8, 3, 3)).flatten(0, 1)
        expected = cska(q[:, :, :1], weight, None, v, Grid(1, 1))
    else:
        expected = cska(q[:, :, :1], made["weight"], made["bias"], v, Grid(1, 1))
    assert torch.allclose(out, expected, atol=1e-12)


def test_c8_heads_of_width_1_are_depthwise_convolutions():
    grid = Grid(3, 5)
    q, weight, bias, v = tensors(grid, heads=4, d=1)
    logits = torch.stack(
        [
            F.conv2d(q[:, h].view(3, 1, 3, 5), weight.view(4, 15, 1, 3, 3)[h], bias.view(4, 15)[h], padding=1)
            for h in range(4)
        ],
        1,
    )
    expected = logits.flatten(3).mT.softmax(-1) @ v
    assert torch.allclose(cska(q, weight, bias, v, grid, scale=1.0), expected, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("config", VARIANTS, ids=spell)
def test_parameters_and_macs_are_those_of_the_formula(config, grid):
    site = Site(dim=18, heads=2, width=8, grid=grid)
    cells, extra = grid.cells, grid.extra
    per_key = 16 if config.factorised else 9 * 16 + 2 * config.bias
    params = cells * per_key + 9 * 16 * config.factorised
    params += extra * (per_key if config.cols == "conv" else 16)
    params += grid.tokens * 16 if extra and config.rows == "static" else 0
    assert config.operator_cost(site).params == params
    assert sum(p.numel() for p in config.operator(site).parameters()) == params


@pytest.mark.parametrize("activation", ["relu", "none"])
@pytest.mark.parametrize("config", VARIANTS, ids=spell)
def test_a_layer_with_another_activation(config, activation):
    """Equals its plain form, also divided by the number of keys, in windows and hidden; its cost is exact."""
    home = Grid(3, 5, 1, 1)
    config = replace(config, activation=activation, normalise="1/N", resize="window")
    layer = mixer(config, home)
    for grid in (home, Grid(4, 9, 1, 1)):
        x, keep = torch.randn(2, grid.tokens, 16, dtype=F64), torch.rand(2, grid.tokens) > 0.3
        for mask in (None, Mask(keep=keep)):
            assert torch.allclose(layer(x, grid, mask), layer.reference(x, grid, mask), atol=1e-12)
    whole = mixer(replace(config, normalise="none"), home)
    whole.load_state_dict(layer.state_dict())
    q, v = torch.randn(2, 2, 17, 8, dtype=F64), torch.randn(2, 2, 17, 8, dtype=F64)
    out = layer.operator(q, None, v, grid=home)
    assert torch.allclose(17 * out, whole.operator(q, None, v, grid=home), atol=1e-12)
    for grid in (Grid(3, 5), home):
        site = Site(dim=18, heads=2, width=8, grid=grid)
        layer = config.build(site)
        assert config.cost(site).flops == count_flops(layer, torch.randn(1, grid.tokens, 18), grid)


@pytest.mark.parametrize("reading", ["logits", "key"])
def test_heads_are_groups_and_have_the_width_of_the_hosts(reading):
    config, site = CSKA(heads=5, reading=reading), Site(dim=16, heads=2, grid=Grid(3, 5, 1))
    layer = config.build(site)
    assert layer.operator.weight.shape == ((75, 8, 3, 3) if reading == "logits" else (40, 8, 3, 3))
    assert layer.site.heads == 5
    assert layer(torch.randn(2, 16, 16), site.grid).shape == (2, 16, 16)
    assert config.cost(site).params == sum(p.numel() for p in layer.parameters())
    assert config.cost(site).flops == count_flops(layer, torch.randn(1, 16, 16), site.grid)
    for kind in (SKA, CSKA):
        cross = kind(heads=4).build_cross(Site(dim=16, heads=2, grid=site.grid, memory=Grid(2, 3))).operator
        assert (cross.heads, cross.width) == (4, 8)


def test_centre_taps_are_ska():
    """C2 for a whole layer: CSKA with keys in its centre taps is SKA with these keys, for cells and extra tokens."""
    grid = Grid(3, 5, 1, 2)
    keys = torch.randn(2, 18, 8, dtype=F64)
    q, v = torch.randn(3, 2, 18, 8, dtype=F64), torch.randn(3, 2, 18, 8, dtype=F64)
    for config in VARIANTS:
        operator = mixer(config, grid).operator
        operator.set_keys(keys)
        assert torch.allclose(operator(q, None, v, grid=grid), ska(q, keys, v), atol=1e-12)


def test_factorised_is_the_product_of_keys_and_taps():
    grid = Grid(3, 5)
    layer = mixer(CSKA(factorised=True), grid)
    full = mixer(CSKA(bias=False), grid)
    state = layer.state_dict()
    taps = state.pop("operator.kernel").view(2, 1, 8, 3, 3)
    state["operator.weight"] = (state.pop("operator.keys")[..., None, None] * taps).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(2, 15, 16, dtype=F64)
    assert torch.allclose(layer(x, grid), full(x, grid), atol=1e-12)


def test_another_grid_resamples_keys_and_biases_but_not_taps():
    operator = mixer(CSKA(), Grid(3, 5)).operator
    made = operator.on(Grid(4, 7))
    weight = operator.weight.view(2, 15, 8, 3, 3)
    for row, column in ((0, 1), (2, 2)):
        one = resample(weight[..., row, column], Grid(3, 5), Grid(4, 7))
        assert torch.allclose(made["weight"].view(2, 28, 8, 3, 3)[..., row, column], one, atol=1e-12)
    assert torch.allclose(made["bias"].view(2, 28, 1), resample(operator.bias.view(2, 15, 1), Grid(3, 5), Grid(4, 7)))
    assert torch.equal(operator.on(Grid(3, 5))["weight"], operator.weight)


@pytest.mark.parametrize("config", VARIANTS, ids=spell)
@pytest.mark.parametrize("grid", [Grid(7, 9, 1, 1), Grid(6, 10, 1, 1), Grid(2, 3, 1, 1)], ids=str)
def test_windows_of_the_trained_grid_cover_others(config, grid):
    """Each window alone gives the same, also where windows stand out of the grid, with padding and without."""
    layer = mixer(replace(config, resize="window"), Grid(3, 5, 1, 1))
    x = torch.randn(2, grid.tokens, 16, dtype=F64)
    keep = torch.rand(2, grid.tokens) > 0.3
    for mask in (None, Mask(keep=keep)):
        assert torch.allclose(layer(x, grid, mask), layer.reference(x, grid, mask), atol=1e-12)
    check_error(UnsupportedError, "bias", layer, x, grid, Mask(bias=torch.zeros(grid.tokens, grid.tokens, dtype=F64)))


def test_an_expensive_key_warns_with_its_number():
    with pytest.warns(UserWarning, match=r"11\.33 GMAC"):  # 56^4 * 9 * 128 / 1e9
        CSKA().operator(Site(dim=128, heads=4, grid=Grid(56, 56)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = CSKA().build(Site(dim=128, heads=4, grid=Grid(28, 28)))
        CSKA(factorised=True).build(Site(dim=128, heads=4, grid=Grid(56, 56)))
        layer, grid = mixer(CSKA(resize="window"), Grid(7, 7)), Grid(25, 42)  # a detector's, at stride 32
        assert layer(torch.randn(1, grid.tokens, 16, dtype=F64), grid).isfinite().all()
    layer = CSKA().build(Site(dim=64, heads=1, grid=Grid(4, 4)))
    with torch.no_grad(), pytest.warns(UserWarning, match=r"2\.36 GMAC.*45x45"):
        layer(torch.randn(1, 2025, 64), Grid(45, 45))
    assert layer.config.key_macs(layer.site, Grid(28, 28), Grid(28, 28)) == 784**2 * 9 * 64


def test_lean_holds_less_than_0_6_of_the_convolution_at_28x28():
    """Peak of all tensors that are alive, forward and forward with backward, in bytes as the profiler counts them."""
    grid, peaks = Grid(28, 28), {}
    q, weight, bias, v = (x.float().requires_grad_() for x in tensors(grid, heads=4, batch=1, d=32, e=32))
    for path in ("conv", "lean"):
        for trained in (False, True):
            with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                with torch.set_grad_enabled(trained):
                    out = cska(q, weight, bias, v, grid, path=path)
                if trained:
                    out.sum().backward()
            q.grad = weight.grad = bias.grad = v.grad = out = None
            used = peak = 0
            for event in seen.profiler.kineto_results.events():
                if event.name() == "[memory]":
                    used += event.nbytes()
                    peak = max(peak, used)
            peaks[path, trained] = peak
    assert peaks["lean", False] <= 0.6 * peaks["conv", False], peaks
    assert peaks["lean", True] <= 0.6 * peaks["conv", True], peaks


@pytest.mark.parametrize("trained", [False, True])
def test_auto_takes_the_convolution_on_small_maps_and_strips_where_logits_are_many(trained):
    """As the table of benchmarks/README.md has it: patches are faster than strips, with gradients and without."""
    for cells, batch, path in ((CONV_CELLS, 10**6, "conv"), (196, 100, "patches"), (784, 13, "patches")):
        q = torch.empty(batch, 2, cells, 4, device="meta", requires_grad=trained)
        assert choose_path(q, q) == path
    q = torch.empty(LEAN_LOGITS // (2 * 784**2) + 1, 2, 784, 4, device="meta", requires_grad=trained)
    assert choose_path(q, q) == "lean"


def test_cross_attention_frees_the_grid_of_the_queries():
    site = Site(dim=16, heads=2, grid=Grid(4, 6), memory=Grid(2, 3, 1))
    layer = perturb(CSKA().build_cross(site))
    assert layer.operator.weight.shape == (12, 8, 3, 3)
    memory = torch.randn(3, 7, 16, dtype=F64)
    for grid in (Grid(4, 6), Grid(5, 9)):
        x = torch.randn(3, grid.tokens, 16, dtype=F64)
        (q,), (v,) = layer.project(x, "q"), layer.project(memory, "v")
        out = layer.operator.reference(q, None, v, grid=grid, memory=Grid(2, 3, 1))
        made = layer(x, grid, memory=memory, memory_grid=Grid(2, 3, 1))
        assert torch.allclose(made, layer.proj(out.transpose(1, 2).flatten(2)), atol=1e-12)


@pytest.mark.parametrize("scale", [None, 0.7])
def test_with_kernel_1_and_centre_rows_it_is_attention_to_filters_with_a_key_bias_under_every_mask(scale):
    """Queries of prefix and suffix tokens too: the bias of the filters is scaled, and added to that of the mask."""
    grid = Grid(3, 5, 1, 2)
    config = CSKA(kernel=1, rows="centre", cols="conv", scale=scale)
    operator = perturb(config.operator(Site(dim=8, heads=2, grid=grid)))
    q, v = torch.randn(3, 2, 18, 4, dtype=F64), torch.randn(3, 2, 18, 4, dtype=F64)
    constants = operator.constants(grid)
    keys, own = constants["weight"].view(2, 18, 4), constants["bias"].view(2, 1, 18) * (scale or 4**-0.5)
    keep, rows = torch.rand(3, 18) > 0.3, torch.randn(2, 18, 18, dtype=F64)
    for mask in (Mask(), Mask(keep=keep), Mask(bias=rows), Mask(bias=rows[:, :1]), Mask(keep=keep, bias=rows)):
        bias = own if mask.bias is None else own + mask.bias
        hidden = q if mask.keep is None else q * mask.keep[:, None, :, None]  # a hidden query is zero for the filters
        expected = ska(hidden, keys, v, scale=scale, mask=Mask(keep=mask.keep, bias=bias))
        assert torch.allclose(operator(q, None, v, grid=grid, mask=mask), expected, atol=1e-12)
        assert torch.allclose(operator.reference(q, None, v, grid=grid, mask=mask), expected, atol=1e-12)


def test_padding_of_the_memory_does_not_hide_queries():
    grid = Grid(3, 5, 1)
    operator = perturb(CSKA().operator(Site(dim=8, heads=2, grid=grid, memory=grid)))
    q, v, keep = torch.randn(3, 2, 16, 4, dtype=F64), torch.randn(3, 2, 16, 4, dtype=F64), torch.rand(3, 16) > 0.3
    bias = torch.zeros(3, 1, 1, 16, dtype=F64).masked_fill(~keep[:, None, None], -torch.inf)
    for i in range(3):  # a bias of -inf for one image, which hides no query
        made = operator(q[i : i + 1], None, v[i : i + 1], grid=grid, memory=grid, mask=Mask(keep=keep[i : i + 1]))
        expected = operator(q[i : i + 1], None, v[i : i + 1], grid=grid, memory=grid, mask=Mask(bias=bias[i]))
        assert torch.allclose(made, expected, atol=1e-12)


def test_macs_by_hand():
    """15 patch tokens, 3 others, 8 channels of 2 heads, 9 taps; the paper counts one tap of a static column."""
    site = Site(dim=8, heads=2, grid=Grid(3, 5, 1, 2))
    values, rows = 15 * 18 * 8, 2 * 3 * 18 * 8
    assert CSKA().operator_cost(site).macs == 9 * 15 * 18 * 8 + values + rows
    assert CSKA().operator_cost(site, "paper").macs == 9 * 15 * 15 * 8 + 15 * 3 * 8 + values + rows
    conv = CSKA(cols="conv")
    assert conv.operator_cost(site, "paper") == conv.operator_cost(site)
    linear = (3 + 18) * 8 * 4  # q (keys^T v), in which the bias of centre rows cannot be
    assert CSKA(activation="none").operator_cost(site).macs == 9 * 15 * 18 * 8 + values + linear
    assert CSKA(activation="none", rows="centre").operator_cost(site).macs == 9 * 15 * 18 * 8 + values + rows
    bare = CSKA(activation="none", rows="centre", bias=False)
    assert bare.operator_cost(site).macs == 9 * 15 * 18 * 8 + values + linear


class AtGrid(torch.nn.Module):
    def __init__(self, layer, grid):
        super().__init__()
        self.layer, self.grid = layer, grid

    def forward(self, x):
        return self.layer(x, self.grid)


def test_initial_values():
    operator = CSKA().operator(Site(dim=64, heads=2, grid=Grid(5, 6, 1)))
    assert 0.015 < operator.weight.std() < 0.025
    assert not operator.bias.any()
    paper = CSKA(init="paper").operator(Site(dim=64, heads=2, grid=Grid(5, 6)))
    theirs = torch.nn.Conv2d(64, 60, 3, groups=2)
    assert paper.weight.shape == theirs.weight.shape
    assert abs(paper.weight.abs().max() / theirs.weight.abs().max() - 1) < 0.05
    assert 0 < paper.bias.abs().max() <= (9 * 32) ** -0.5


def test_freeze_keys_follows_one_forward_pass():
    model = torch.nn.Sequential(mixer(CSKA(), Grid(3, 5)), mixer(SKA(), Grid(3, 5)))
    for i in (0, 1):
        model[i] = AtGrid(model[i], Grid(4, 6))
    x = torch.randn(1, 24, 16, dtype=F64)
    out = model(x)
    with torch.inference_mode():
        assert freeze_keys(model, x) == ["0.layer.operator", "1.layer.operator"]
    assert torch.equal(model(x), out)
    model(x).sum().backward()  # trained with frozen keys
    assert model[0].layer.qkv.weight.grad.abs().sum() > 0


@pytest.mark.untyped
def test_wrong_calls_say_what_was_expected():
    q, weight, bias, v = tensors()
    grid = Grid(3, 5)
    check_error(ShapeError, "bias has HM 30, weight has 29", cska, q, weight[1:], bias, v, grid)
    check_error(ShapeError, r"bias has HM 29, weight has 30", cska, q, weight, bias[1:], v, grid)
    check_error(ShapeError, "one dtype|cast filters", cska, q, weight.float(), bias, v, grid)
    check_error(GridError, "patch tokens alone", cska, q, weight, bias, v, Grid(2, 5, 5))
    check_error(GridError, "do not fit", cska, q, weight, bias, v, Grid(3, 4))
    check_error(ConfigError, "lean", cska, q, weight, bias, v, grid, path="leen")
    check_error(ConfigError, "gelu", cska, q, weight, bias, v, grid, activation="gellu")
    for wrong in ({"kernel": 2}, {"rows": "x"}, {"cols": "x"}, {"resize": "x"}, {"factorised": True, "cols": "conv"}):
        with pytest.raises(ConfigError):
            CSKA(**wrong)


@pytest.mark.untyped
def test_windows_and_strips_compile_as_one_graph():
    torch.compiler.reset()
    grid = Grid(7, 6, 1)
    layer, x = mixer(CSKA(resize="window", path="lean"), Grid(3, 5, 1)), torch.randn(2, grid.tokens, 16, dtype=F64)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x, grid), layer(x, grid), atol=1e-12)


@pytest.mark.parametrize(
    "config", [CSKA(path="conv"), CSKA(path="patches"), CSKA(factorised=True), CSKA(reading="key")], ids=spell
)
@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
def test_hidden_tokens_may_hold_anything(config, plain):
    grid = Grid(3, 5, 1)
    operator = mixer(config, grid).operator
    run = operator.reference if plain else operator
    q, v = (torch.randn(3, 2, 16, 8, dtype=F64) for _ in "qv")
    keep = torch.arange(16).expand(3, -1) % 5 < 4
    check_hidden(lambda q, v: run(q, None, v, grid=grid, mask=Mask(keep=keep)), (q, v), keep)
