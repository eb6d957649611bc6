"""Convolutional static keys: facts C1 to C8 of the mathematics, extra tokens, other grids, cost and memory."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from operators import check_error, check_hidden, count_flops
from regard.core import ConfigError, Grid, GridError, Mask, ShapeError, Site, UnsupportedError
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import parse, spell
from regard.mixers.static_keys.cska import CSKA, cska, cska_reference
from regard.mixers.static_keys.cska_forms import CONV_CELLS, LEAN_LOGITS, choose_path
from regard.mixers.static_keys.grids import resample
from regard.mixers.static_keys.keys import ACTIVATIONS, calibrate, freeze_keys
from regard.mixers.static_keys.ska import SKA, ska

GRIDS = (Grid(3, 5), Grid(4, 6, 2), Grid(3, 5, 1, 2), Grid(1, 12))
EVERY = (
    CSKA(),
    CSKA(rows="centre", cols="conv"),
    CSKA(rows="centre", bias=False),
    CSKA(factorised=True),
    CSKA(factorised=True, rows="centre"),
)
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
    return moved(config.build(Site(dim=dim, heads=heads, grid=grid, **options)).double())


def moved(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


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
        made, expected = (
            run(*values, grid, mask=mask, path=path, activation=activation) for run in (cska, cska_reference)
        )
        assert torch.allclose(made, expected, atol=1e-12)
        gradients = (torch.autograd.grad(out.square().sum(), values) for out in (made, expected))
        for one, other in zip(*gradients, strict=True):
            assert torch.allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_c1_kernel_1_is_ska_for_every_activation(activation):
    q, weight, _, v = tensors(kernel=1)
    out = cska(q, weight, None, v, Grid(3, 5), activation=activation)
    assert torch.allclose(out, ska(q, weight.view(2, 15, 4), v, activation=activation), atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
def test_float32_error_is_that_of_the_reference(path):
    grid = Grid(14, 11)
    values = tensors(grid)
    exact = cska_reference(*values, grid)
    single = [x.float() for x in values]
    own = (cska_reference(*single, grid) - exact).abs().max()
    assert (cska(*single, grid, path=path) - exact).abs().max() <= 4 * own + 1e-7


def test_the_reference_by_hand_reads_the_cell_above():
    """A filter of one tap in its upper row: the cell in row i is scored by the query in row i - 1; row 0 by zero."""
    grid = Grid(3, 2)
    q = torch.arange(1.0, 7.0, dtype=F64).view(1, 1, 6, 1)
    weight = torch.zeros(2, 1, 3, 3, dtype=F64)
    weight[1, 0, 0, 1] = 1.0
    v = torch.tensor([0.0, 1.0], dtype=F64).view(1, 1, 2, 1)
    above = torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0, 4.0], dtype=F64)
    for run in (cska, cska_reference):
        assert torch.allclose(run(q, weight, None, v, grid, scale=1.0).flatten(), above.sigmoid(), atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
def test_c2_the_centre_tap_alone_is_kernel_1(path):
    q, weight, bias, v = tensors(kernel=1)
    wide = F.pad(weight, (1, 1, 1, 1))
    grid = Grid(3, 5)
    assert torch.allclose(cska(q, wide, bias, v, grid, path=path), cska(q, weight, bias, v, grid), atol=1e-12)


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


@pytest.mark.parametrize("path", PATHS)
def test_c5_gradients_of_filters_and_biases_sum_to_zero_over_keys(path):
    q, weight, bias, v = tensors()
    weight.requires_grad_(), bias.requires_grad_()
    out = cska(q, weight, bias, v, Grid(3, 5), path=path)
    for gradient in torch.autograd.grad(out.square().sum(), (weight, bias)):
        assert gradient.abs().max() > 1e-3
        assert gradient.unflatten(0, (2, 15)).sum(1).abs().max() < 1e-11


def test_c6_a_constant_map_is_ska_with_summed_taps_inside_and_not_at_the_border():
    grid = Grid(4, 5)
    q, weight, bias, v = tensors(grid)
    q = q[:, :, :1].expand_as(q).contiguous()
    out = cska(q, weight, bias, v, grid).unflatten(2, (4, 5))
    keys = weight.sum((-1, -2)).view(2, 20, 4)
    expected = ska(q, keys, v, mask=Mask(bias=bias.view(2, 1, 20) / 2)).unflatten(2, (4, 5))
    assert torch.allclose(out[:, :, 1:3, 1:4], expected[:, :, 1:3, 1:4], atol=1e-12)
    assert (out[:, :, 0] - expected[:, :, 0]).abs().max() > 1e-2


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
@pytest.mark.parametrize("config", EVERY, ids=spell)
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
@pytest.mark.parametrize("config", EVERY, ids=spell)
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
    assert parse(spell(config)) == config


EMPTY = (*EVERY, *(CSKA(path=path) for path in PATHS), CSKA(reading="key"), CSKA(activation="gelu"), SKA())


@pytest.mark.parametrize("config", EMPTY, ids=spell)
def test_an_empty_batch_goes_forward_and_back(config):
    home = Grid(3, 5, 1)
    grids = [home, Grid(11, 13, 1)] if config.resize == "interpolate" else [home]
    windows = [] if config == CSKA(reading="key") else [replace(config, resize="window")]
    for made in (config, *windows):
        layer = made.build(Site(dim=16, heads=2, grid=home))
        for grid in grids:
            for run in (layer, layer.reference):
                x = torch.randn(0, grid.tokens, 16, requires_grad=True)
                out = run(x, grid)
                assert out.shape == (0, grid.tokens, 16)
                out.sum().backward()
                assert x.grad.shape == x.shape


def test_keys_stand_in_token_order():
    """With v one-hot per token and a key that is strong for every query, the output names that key's token."""
    grid = Grid(3, 5, 1, 2)
    for config in EVERY:
        operator = config.operator(Site(dim=16, heads=2, grid=grid)).double()
        for token in range(grid.tokens):
            keys = torch.zeros(2, grid.tokens, 8, dtype=F64)
            keys[:, token] = 100.0
            operator.set_keys(keys)
            a = operator.weights(
                torch.ones(1, 2, 18, 8, dtype=F64), None, torch.zeros(1, 2, 18, 8, dtype=F64), grid=grid
            )
            assert (a.argmax(-1) == token).all()


def test_centre_taps_are_ska():
    """C2 for a whole layer: CSKA with keys in its centre taps is SKA with these keys, for cells and extra tokens."""
    grid = Grid(3, 5, 1, 2)
    keys = torch.randn(2, 18, 8, dtype=F64)
    q, v = torch.randn(3, 2, 18, 8, dtype=F64), torch.randn(3, 2, 18, 8, dtype=F64)
    for config in EVERY:
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


@pytest.mark.parametrize("config", EVERY, ids=spell)
@pytest.mark.parametrize("grid", [Grid(7, 9, 1, 1), Grid(6, 10, 1, 1), Grid(2, 3, 1, 1)], ids=str)
def test_windows_of_the_trained_grid_cover_others(config, grid):
    """Each window alone gives the same, also where windows stand out of the grid, with padding and without."""
    layer = mixer(replace(config, resize="window"), Grid(3, 5, 1, 1))
    x = torch.randn(2, grid.tokens, 16, dtype=F64)
    keep = torch.rand(2, grid.tokens) > 0.3
    for mask in (None, Mask(keep=keep)):
        assert torch.allclose(layer(x, grid, mask), layer.reference(x, grid, mask), atol=1e-12)
    check_error(UnsupportedError, "bias", layer, x, grid, Mask(bias=torch.zeros(grid.tokens, grid.tokens, dtype=F64)))


def test_a_detection_grid_runs_in_windows():
    """800 x 1333 at stride 32, ragged in both directions, with a key trained on 7x7."""
    grid = Grid(25, 42)
    layer = mixer(CSKA(resize="window"), Grid(7, 7)).float()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layer(torch.randn(1, grid.tokens, 16), grid).isfinite().all()


def test_an_expensive_key_warns_with_its_number():
    with pytest.warns(UserWarning, match=r"11\.33 GMAC"):  # 56^4 * 9 * 128 / 1e9
        CSKA().operator(Site(dim=128, heads=4, grid=Grid(56, 56)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = CSKA().build(Site(dim=128, heads=4, grid=Grid(28, 28)))
        CSKA(factorised=True).build(Site(dim=128, heads=4, grid=Grid(56, 56)))
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
    layer = moved(CSKA().build_cross(site).double())
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
    operator = moved(config.operator(Site(dim=8, heads=2, grid=grid)).double())
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
    operator = moved(CSKA().operator(Site(dim=8, heads=2, grid=grid, memory=grid)).double())
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


@pytest.mark.parametrize("kind", [SKA, CSKA])
def test_frozen_keys_do_not_follow_the_parameters_and_heads_are_those_of_the_option(kind):
    grid = Grid(3, 5)
    layer, x = mixer(kind(heads=4), grid), torch.randn(2, 15, 16, dtype=F64)
    layer.operator.freeze(grid)
    out = layer(x, grid)
    moved(layer.operator)
    assert torch.equal(layer(x, grid), out)
    cross = kind(heads=4).build_cross(Site(dim=16, heads=2, grid=grid, memory=Grid(2, 3)))
    assert (cross.operator.heads, cross.operator.width) == (4, 8)


@pytest.mark.parametrize("config", EVERY, ids=spell)
def test_frozen_keys_are_constants_for_one_grid(config):
    layer = mixer(config, Grid(3, 5, 1))
    new, x = Grid(5, 6, 1), torch.randn(2, 31, 16, dtype=F64)
    out = layer(x, new)
    layer.operator.freeze(new)
    assert torch.allclose(layer(x, new), out, atol=1e-13)
    check_error(GridError, "frozen for 5x6", layer, torch.randn(2, 16, 16, dtype=F64), Grid(3, 5, 1))
    assert not any("frozen" in name for name in layer.state_dict())


def test_calibrated_filters_are_the_teachers_attention_for_one_image():
    """S1 and C2 together, for a CSKA layer."""
    grid = Grid(3, 5, 1)
    teacher = torch.nn.Sequential(mixer(Softmax(), grid))
    student = torch.nn.Sequential(mixer(CSKA(init="calibrate"), grid))
    wrap(teacher, grid), wrap(student, grid)
    x = torch.randn(1, 16, 16, dtype=F64)
    same_qvo(student[0].layer, teacher[0].layer)
    assert calibrate(student, teacher, [x]) == ["0.layer.operator"]
    assert torch.allclose(student(x), teacher(x), atol=1e-12)


class AtGrid(torch.nn.Module):
    def __init__(self, layer, grid):
        super().__init__()
        self.layer, self.grid = layer, grid

    def forward(self, x):
        return self.layer(x, self.grid)


def wrap(model, grid):
    model[0] = AtGrid(model[0], grid)


def same_qvo(student, teacher):
    with torch.no_grad():
        student.qkv.weight.copy_(torch.cat([teacher.qkv.weight[:16], teacher.qkv.weight[32:]]))
        student.qkv.bias.copy_(torch.cat([teacher.qkv.bias[:16], teacher.qkv.bias[32:]]))
        student.proj.load_state_dict(teacher.proj.state_dict())


def test_deit_tiny_grows_to_9800248_and_with_centre_rows_to_9346360():
    site = Site(dim=192, heads=3, grid=Grid(14, 14, 1))
    plain = Softmax().cost(site).params
    assert 5717416 + 12 * (CSKA().cost(site).params - plain) == 9800248
    assert 5717416 + 12 * (CSKA(rows="centre").cost(site).params - plain) == 9346360


def test_plain_vit_s_of_table_1_in_all_four_readings():
    site = Site(dim=512, heads=8, grid=Grid(8, 8, 1), qkv_bias=False)
    plain = Softmax().cost(site).params
    for rows, cols, total in (
        ("static", "conv", 9950778),
        ("static", "static", 9926154),
        ("centre", "conv", 9751098),
        ("centre", "static", 9726474),
    ):
        assert 9523722 + 6 * (CSKA(rows=rows, cols=cols).cost(site).params - plain) == total


def test_initial_values():
    operator = CSKA().operator(Site(dim=64, heads=2, grid=Grid(5, 6, 1)))
    assert 0.015 < operator.weight.std() < 0.025
    assert not operator.bias.any()
    paper = CSKA(init="paper").operator(Site(dim=64, heads=2, grid=Grid(5, 6)))
    theirs = torch.nn.Conv2d(64, 60, 3, groups=2)
    assert paper.weight.shape == theirs.weight.shape
    assert abs(paper.weight.abs().max() / theirs.weight.abs().max() - 1) < 0.05
    assert 0 < paper.bias.abs().max() <= (9 * 32) ** -0.5
    assert operator.no_weight_decay() == set(dict(operator.named_parameters()))


def test_freeze_keys_follows_one_forward_pass():
    model = torch.nn.Sequential(mixer(CSKA(), Grid(3, 5)), mixer(SKA(), Grid(3, 5)))
    for i in (0, 1):
        model[i] = AtGrid(model[i], Grid(4, 6))
    x = torch.randn(1, 24, 16, dtype=F64)
    out = model(x)
    assert freeze_keys(model, x) == ["0.layer.operator", "1.layer.operator"]
    assert torch.equal(model(x), out)


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
@pytest.mark.parametrize("grid", [Grid(3, 5, 1), Grid(7, 6, 1)], ids=str)
def test_windows_and_strips_compile_as_one_graph(grid):
    layer = mixer(CSKA(resize="window", path="lean"), Grid(3, 5, 1))
    x = torch.randn(2, grid.tokens, 16, dtype=F64, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
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
