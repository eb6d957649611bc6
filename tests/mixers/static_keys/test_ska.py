"""Static key attention: against softmax attention and hand-made cases; keys on other grids, frozen and calibrated."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import regard
from cska_variants import VARIANTS
from operators import check_error, check_hidden, count_flops
from regard.core import ConfigError, Grid, GridError, Mask, ShapeError, Site, SwapError, UnsupportedError, merge
from regard.measure.cost import count_macs
from regard.mixers.softmax import Softmax, softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.cska import CSKA
from regard.mixers.static_keys.grids import former_grid, resample
from regard.mixers.static_keys.keys import ACTIVATIONS, calibrate, freeze_keys
from regard.mixers.static_keys.ska import SKA, SKAOperator, ska, ska_reference
from regard.models.create import create_model
from regard.swapping.per_window import PerWindow
from regard.swapping.swap import plan_swap, swap
from regard.testing.subject import perturb

GRIDS = (Grid(3, 5), Grid(4, 6, 2), Grid(6, 4, 1), Grid(3, 5, 1, 2), Grid(1, 12))
F64 = torch.float64


def tensors(n=17, m=17, heads=2, batch=3, d=8, e=8):
    make = lambda *shape: torch.randn(*shape, dtype=F64)  # noqa: E731
    return make(batch, heads, n, d), make(heads, m, d), make(batch, heads, m, e)


def mixer(config, grid=GRIDS[0], heads=2, dim=16, **options):
    return config.build(Site(dim=dim, heads=heads, grid=grid, **options)).double()


def masks(n, m, batch=3):
    keep = torch.rand(batch, m) > 0.3
    keep[:, 0] = True
    bias = torch.randn(2, n, m, dtype=F64)
    made = {"none": None, "padding": Mask(keep=keep), "bias": Mask(bias=bias), "key bias": Mask(bias=bias[:, :1])}
    if n == m:
        made |= {"causal": Mask(causal=True), "all": Mask(causal=True, keep=keep, bias=bias)}
    return made


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("n", "m", "e"), [(17, 17, 8), (5, 9, 3), (1, 1, 4)])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_fast_equals_reference(activation, n, m, e, scale):
    q, keys, v = tensors(n, m, e=e)
    for name, mask in masks(n, m).items():
        own = ska_reference(q, keys, v, scale=scale, mask=mask, activation=activation)
        assert torch.allclose(ska(q, keys, v, scale=scale, mask=mask, activation=activation), own, atol=1e-12), name


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_by_hand(activation):
    """One query, two keys, scale 1: logits 1 and -2 and values 1 and 10."""
    q, keys, v = torch.ones(1, 1, 1, 1), torch.tensor([[[1.0], [-2.0]]]), torch.tensor([[[[1.0], [10.0]]]])
    a, b = torch.tensor(1.0), torch.tensor(-2.0)
    expected = {
        "softmax": (a.exp() * 1 + b.exp() * 10) / (a.exp() + b.exp()),
        "relu": torch.tensor(1.0),
        "gelu": F.gelu(a) + 10 * F.gelu(b),
        "starrelu": torch.tensor((0.8944 - 0.4472) - 4.472),
        "none": torch.tensor(-19.0),
    }[activation]
    assert torch.allclose(ska(q, keys, v, scale=1.0, activation=activation).squeeze(), expected, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_bias_of_minus_infinity_forbids_a_key_in_value_and_gradient(activation):
    q, keys, v = (x.requires_grad_() for x in tensors())
    bias = torch.zeros(17, 17, dtype=F64)
    bias[:, 5] = -torch.inf
    keep = torch.ones(3, 17, dtype=torch.bool)
    keep[:, 5] = False
    made = []
    for mask in (Mask(bias=bias), Mask(keep=keep)):
        out = ska(q, keys, v, mask=mask, activation=activation)
        made.append((out, *torch.autograd.grad(out.square().sum(), (q, keys, v))))
    for one, other in zip(*made, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_s1_softmax_attention_in_which_all_images_have_the_same_keys():
    q, keys, v = tensors()
    assert torch.allclose(ska(q, keys, v), softmax(q, keys.expand(3, -1, -1, -1), v), atol=1e-12)


def test_s10_resampling_keeps_the_same_grid_and_constants():
    keys = torch.randn(2, 15, 8)
    assert resample(keys, Grid(3, 5), Grid(3, 5)) is keys
    for dtype in (torch.float32, F64):
        constant = keys[:, :1].to(dtype).expand(2, 15, 8)
        for new in (Grid(7, 4), Grid(2, 9), Grid(30, 50)):
            made = resample(constant, Grid(3, 5), new)
            assert (made / constant[:, :1] - 1).abs().max() <= 4 * torch.finfo(dtype).eps, new


def test_resampling_keeps_rows_and_columns_apart():
    """Keys that depend on the row alone still do so on another grid, and follow its order."""
    rows = torch.arange(4.0)[:, None].expand(4, 6).reshape(1, 24, 1)
    out = resample(rows, Grid(4, 6), Grid(8, 3)).reshape(8, 3)
    assert torch.allclose(out, out[:, :1].expand(8, 3), atol=1e-5)
    assert (out[:, 0].diff() > 0).all()


@pytest.mark.parametrize("new", [Grid(7, 4), Grid(2, 9), Grid(2, 2)], ids=str)
def test_resampling_is_that_of_timm(new):
    timm_layers = pytest.importorskip("timm.layers")
    keys = torch.randn(2, 15, 8)
    for head, image in zip(resample(keys, Grid(3, 5), new), keys, strict=True):
        theirs = timm_layers.resample_abs_pos_embed(
            image[None], [new.height, new.width], [3, 5], num_prefix_tokens=0, interpolation="bicubic", antialias=True
        )
        assert torch.allclose(head, theirs[0], atol=1e-5)


def test_resampling_is_antialiased_and_float32():
    keys = torch.randn(1, 256, 3)
    small = resample(keys, Grid(16, 16), Grid(4, 4))
    assert small.std() < 0.6 * keys.std()  # without the filter the deviation stays
    half = resample(keys.bfloat16(), Grid(16, 16), Grid(4, 4))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, resample(keys.bfloat16().float(), Grid(16, 16), Grid(4, 4)).bfloat16())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_keys_stand_in_token_order(grid):
    operator = mixer(SKA(init="paper"), grid).operator
    extra = torch.zeros(2, 0, 8, dtype=F64) if grid.extra == 0 else operator.extra_keys
    keys = torch.cat([extra[:, : grid.prefix], operator.keys, extra[:, grid.prefix :]], 1)
    assert operator.keys.shape == (2, grid.cells, 8)
    assert torch.equal(operator.keys_on(grid), keys)
    q, v = torch.randn(2, 3, 2, grid.tokens, 8, dtype=F64)
    assert torch.allclose(operator(q, None, v, grid=grid), ska(q, keys, v), atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_another_grid_resamples_the_cells_alone(grid):
    layer = mixer(SKA(init="paper"), grid)
    new = Grid(5, 7, grid.prefix, grid.suffix)
    keys, old = layer.operator.keys_on(new), layer.operator.keys_on(grid)
    assert torch.equal(keys[:, : grid.prefix], old[:, : grid.prefix])
    assert torch.equal(keys[:, new.tokens - new.suffix :], old[:, grid.tokens - grid.suffix :])
    assert torch.equal(keys[:, new.span], resample(layer.operator.keys, grid, new))
    x = torch.randn(2, new.tokens, 16, dtype=F64, requires_grad=True)
    layer(x, new).sum().backward()
    assert layer.operator.keys.grad.abs().sum() > 0
    assert torch.allclose(layer(x, new), layer.reference(x, new), atol=1e-12)


@pytest.mark.parametrize("config", [SKA(), CSKA(), CSKA(reading="key")], ids=spell)
def test_other_extra_tokens_are_refused(config):
    grids = (Grid(3, 5), Grid(3, 5, 1), Grid(3, 5, 2), Grid(3, 5, 0, 1))
    for built, called in itertools.permutations(grids, 2):
        x, said = torch.randn(1, called.tokens, 16, dtype=F64), "prefix and suffix tokens must be the same"
        check_error(GridError, said, mixer(config, built), x, called)


@pytest.mark.parametrize("kind", [SKA, CSKA])
def test_resize_error_names_both_grids(kind):
    layer = mixer(kind(resize="error"))
    layer(torch.randn(1, 15, 16, dtype=F64), Grid(3, 5))
    check_error(GridError, "3x5.*5x3", layer, torch.randn(1, 15, 16, dtype=F64), Grid(5, 3))


@pytest.mark.parametrize(
    ("built", "grid", "memory"),
    [
        ((Grid.sequence(5), Grid(2, 4, 1)), Grid.sequence(5), Grid(2, 4, 1)),
        ((Grid(4, 6), Grid(2, 3)), Grid(8, 10), Grid(4, 5)),  # strided keys, resampled
    ],
    ids=str,
)
def test_cross_attention_has_a_key_for_every_token_of_the_memory(built, grid, memory):
    layer = SKA(init="paper").build_cross(Site(dim=16, heads=2, grid=built[0], memory=built[1])).double()
    assert layer.operator.keys.shape == (2, built[1].cells, 8)
    x, y = torch.randn(3, grid.tokens, 16, dtype=F64), torch.randn(3, memory.tokens, 16, dtype=F64)
    (q,), (v,) = layer.project(x, "q"), layer.project(y, "v")
    expected = layer.proj(merge(ska_reference(q, layer.operator.keys_on(memory), v)))
    assert torch.allclose(layer(x, grid, memory=y, memory_grid=memory), expected, atol=1e-12)


@pytest.mark.parametrize(("init", "low", "high"), [("trunc_normal", 0.015, 0.025), ("paper", 0.9, 1.1)])
def test_initial_deviation(init, low, high):
    operator = SKAOperator(SKA(init=init), Site(dim=64, heads=2, grid=Grid(10, 9, 4)))
    assert low < operator.keys.std() < high
    assert low * 0.8 < operator.extra_keys.std() < high * 1.2
    first = operator.keys.detach().clone()
    operator.reset_parameters()
    assert not torch.equal(first, operator.keys)


TINY, SMALL, PLAIN = (
    Site(192, 3, Grid(14, 14, 1)),
    Site(384, 6, Grid(14, 14, 1)),
    Site(512, 8, Grid(8, 8, 1), qkv_bias=False),
)


@pytest.mark.parametrize(
    ("site", "layers", "host", "config", "total"),
    [
        (TINY, 12, 5717416, SKA(), 5726632),
        (TINY, 12, 5717416, CSKA(), 9800248),
        (TINY, 12, 5717416, CSKA(rows="centre"), 9346360),
        (SMALL, 12, 22050664, SKA(), 21184360),
        (PLAIN, 6, 9523722, SKA(), 8150538),
        (PLAIN, 6, 9523722, SKA(heads=10), 9478896 - 6 + 8150538 - 8249322),  # model B without its 6 temperatures
        (PLAIN, 6, 9523722, CSKA(cols="conv"), 9950778),
        (PLAIN, 6, 9523722, CSKA(), 9926154),
        (PLAIN, 6, 9523722, CSKA(rows="centre", cols="conv"), 9751098),
        (PLAIN, 6, 9523722, CSKA(rows="centre"), 9726474),
    ],
)
def test_totals_of_deit_and_of_table_1(site, layers, host, config, total):
    assert host + layers * (config.cost(site).params - Softmax().cost(site).params) == total


@pytest.mark.parametrize("config", [SKA(activation="gelu"), SKA(activation="none", resize="window")], ids=spell)
def test_normalise_divides_by_the_number_of_keys(config):
    """In windows by that of a window's keys, for the queries of extra tokens by that of all keys."""
    home = Grid(3, 5, 1)
    layer, divided = mixer(config, home), mixer(replace(config, normalise="1/N"), home)
    divided.load_state_dict(layer.state_dict())
    for grid in (home, Grid(4, 7, 1)):
        q, v = torch.randn(2, 2, grid.tokens, 8, dtype=F64), torch.randn(2, 2, grid.tokens, 8, dtype=F64)
        out = layer.operator(q, None, v, grid=grid) / grid.tokens
        if config.resize == "window":
            out[:, :, 1:] *= grid.tokens / 16
        assert torch.allclose(divided.operator(q, None, v, grid=grid), out, atol=1e-12)
        assert torch.allclose(divided.operator.reference(q, None, v, grid=grid), out, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    q, keys, v = (x.requires_grad_() for x in tensors(4, 5, batch=1, d=3, e=2))
    for activation in ("softmax", "gelu", "none"):
        assert torch.autograd.gradcheck(lambda *a, act=activation: ska(*a, activation=act), (q, keys, v))


def test_half_precision():
    q, keys, v = (x.bfloat16() for x in tensors())
    exact = ska_reference(q.double(), keys.double(), v.double())
    assert (ska(q, keys, v).double() - exact).abs().max() < 0.05
    layer = SKA().build(Site(dim=16, heads=2, grid=Grid(3, 5)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 15, 16), Grid(3, 5)).isfinite().all()


# windows of the trained grid, and hosts that bring windows


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("grid", [Grid(7, 9, 1, 2), Grid(6, 10, 1, 2), Grid(2, 3, 1, 2)], ids=str)
def test_s9_windows_equal_tiled_keys_and_a_block_mask(activation, grid):
    """Also where windows stand out of the grid, with padding; the reference masks the full matrix."""
    layer = mixer(SKA(resize="window", init="paper", activation=activation), Grid(3, 5, 1, 2))
    x = torch.randn(3, grid.tokens, 16, dtype=F64)
    keep = torch.rand(3, grid.tokens) > 0.3
    for mask in (None, Mask(keep=keep)):
        assert torch.allclose(layer(x, grid, mask), layer.reference(x, grid, mask), atol=1e-12)
    for mask in (Mask(causal=True), Mask(bias=torch.zeros(1, grid.tokens, dtype=F64))):
        check_error(UnsupportedError, "windows of static keys cannot apply", layer, x, grid, mask)


@pytest.mark.parametrize("kind", [SKA, CSKA])
def test_windows_see_nothing_of_their_neighbours(kind):
    layer, grid = mixer(kind(resize="window", init="paper"), Grid(3, 5)), Grid(7, 12)
    x = torch.randn(1, 84, 16, dtype=F64)
    other = x.clone()
    other[:, 4 * 12 + 6] += 1.0  # row 4, column 6: the window of rows 3-5 and columns 5-9
    changed = (layer(x, grid) != layer(other, grid)).any(-1).view(7, 12)
    assert changed[3:6, 5:10].all()
    assert changed.sum() == 15


def test_windows_that_do_not_divide_alike_are_refused():
    site = Site(dim=16, heads=2, grid=Grid(4, 6), memory=Grid(2, 3))
    layer = SKA(resize="window").build_cross(site).double()
    x = torch.randn(1, 96, 16, dtype=F64)
    run = lambda grid: layer(x, Grid(8, 12), memory=torch.randn(1, grid.tokens, 16, dtype=F64), memory_grid=grid)  # noqa: E731
    assert run(Grid(4, 6)).shape == (1, 96, 16)
    with pytest.raises(GridError, match="queries and keys have different numbers of windows: 4x6 on 8x12.*2x3 on 4x9"):
        run(Grid(4, 9))


def test_swin_shares_one_key_among_windows_and_keeps_its_position_bias():
    """26,343,778 parameters for Swin-T; and one window alone gives what it gives among others."""
    site = Site(dim=96, heads=3, grid=Grid(7, 7))
    less = 0
    for dim, depth in ((96, 2), (192, 2), (384, 6), (768, 2)):
        site = Site(dim=dim, heads=dim // 32, grid=Grid(7, 7))
        less += depth * (Softmax().cost(site).params - SKA().cost(site).params)
    assert 28288354 - less == 26343778
    layer = mixer(SKA(init="paper"), Grid(2, 3))
    x, bias = torch.randn(8, 6, 16, dtype=F64), torch.randn(8, 2, 6, 6, dtype=F64)
    out = layer(x, Grid(2, 3), Mask(bias=bias))
    assert torch.allclose(out[3:4], layer(x[3:4], Grid(2, 3), Mask(bias=bias[3:4])), atol=1e-12)


def test_the_papers_swin_has_a_key_for_each_window():
    """A host lends the operator the heads of all windows: sample i of the batch meets key i mod 4."""
    grid, config = Grid(2, 3), SKA(init="paper")
    every = PerWindow(config.operator(Site(dim=64, heads=8, grid=grid)).double(), 4)
    q, v, bias = torch.randn(12, 2, 6, 8, dtype=F64), torch.randn(12, 2, 6, 8, dtype=F64), torch.randn(2, 6, 6)
    out = every(q, None, v, grid=grid, mask=Mask(bias=bias.double()))
    alone = config.operator(Site(dim=16, heads=2, grid=grid)).double()
    alone.load_state_dict({"keys": every.inner.keys[4:6]})
    expected = alone(q[2::4], None, v[2::4], grid=grid, mask=Mask(bias=bias.double()))
    assert torch.allclose(out[2::4], expected, atol=1e-12)


# export and keys from a teacher


@pytest.mark.parametrize("config", [SKA(), SKA(resize="window"), *VARIANTS], ids=spell)
def test_frozen_keys_are_constants_for_one_grid(config):
    layer = perturb(mixer(config, Grid(3, 5, 1)))
    new, x = Grid(5, 6, 1), torch.randn(2, 31, 16, dtype=F64)
    out = layer(x, new)
    layer.operator.freeze(new)
    assert torch.allclose(layer(x, new), out, atol=1e-13)
    assert not any("frozen" in name for name in layer.state_dict())
    layer(x, new).sum().backward()
    assert all(parameter.grad is None for parameter in layer.operator.parameters())
    check_error(GridError, "frozen for 5x6.*not for 3x5", layer, torch.randn(2, 16, 16, dtype=F64), Grid(3, 5, 1))
    layer.load_state_dict(mixer(replace(config, init="paper"), Grid(3, 5, 1)).state_dict())
    assert layer.operator.frozen is None
    assert not torch.allclose(layer(x, new), out, atol=1e-3)


@pytest.mark.parametrize("config", [SKA(init="calibrate"), CSKA(init="calibrate")], ids=spell)
def test_s1_keys_calibrated_on_one_image_give_the_teachers_output_and_end_a_freeze(config):
    """The output follows the new keys, not the constants of the old ones."""
    host = vit(None)
    teacher, student = swap(copy.deepcopy(host), Softmax()), swap(copy.deepcopy(host), config)
    image = torch.randn(1, *first_shape(host), dtype=F64)
    names = freeze_keys(student, image)
    assert not torch.allclose(student(image), teacher(image), atol=1e-6)
    assert calibrate(student, teacher, [image]) == names
    assert len(names) == 2
    assert all(student.get_submodule(name).frozen is None for name in names)
    assert torch.allclose(student(image), teacher(image), atol=1e-12)
    assert torch.allclose(student(image), host(image), atol=1e-10)


def test_calibration_is_found_and_a_plan_names_it():
    assert (regard.calibrate, regard.freeze_keys) == (calibrate, freeze_keys)
    said = {init: str(plan_swap(vit(None), SKA(init=init))) for init in ("trunc_normal", "calibrate", "positions")}
    assert ["regard.calibrate" in text for text in said.values()] == [False, True, True]


def vit(mixer):
    """With a class token."""
    torch.manual_seed(1)
    host = "vit_tiny_patch16_224(img_size=12, patch_size=3, embed_dim=16, depth=2, num_heads=2)"
    return create_model(host, mixer).double().eval()


def test_calibration_is_a_running_mean_over_batches():
    host = vit(None)
    teacher = swap(copy.deepcopy(host), Softmax())
    images = torch.randn(5, *first_shape(host), dtype=F64)
    made = []
    for batches in ([images], [images[:1], images[1:3], images[3:]]):
        student = swap(copy.deepcopy(host), SKA(init="calibrate"))
        names = calibrate(student, teacher, batches)
        made.append(student.get_submodule(names[0]).keys.detach())
    assert torch.allclose(*made, atol=1e-12)
    assert made[0].abs().max() > 1e-3


def test_calibration_on_an_image_that_is_not_finite_sets_no_key():
    teacher, student = swap(vit(None), Softmax()), swap(vit(None), SKA(init="calibrate"))
    images = torch.randn(2, *first_shape(teacher), dtype=F64)
    images[1, 0, 0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"^blocks\.0\..*: the teacher's mean keys are not finite; leave out"):
        calibrate(student, teacher, [images])
    assert all(value.isfinite().all() for value in student.parameters())


def first_shape(model):
    return next(p.shape[1] for p in model.parameters() if p.ndim == 4), 12, 12


def test_keys_from_positions_are_the_projected_position_embedding():
    host = vit(None)
    teacher, student = swap(copy.deepcopy(host), Softmax()), swap(copy.deepcopy(host), SKA(init="positions"))
    names = calibrate(student, teacher)
    block = host.blocks[0]
    weight, bias = block.attn.qkv.weight[16:32], block.attn.qkv.bias
    k = F.linear(block.norm1(host.pos_embed), weight, None if bias is None else bias[16:32])
    keys = k[0].unflatten(-1, (2, 8)).transpose(0, 1)
    operator = student.get_submodule(names[0])
    assert torch.allclose(operator.keys_on(operator.grid)[:, operator.grid.span], keys[:, -operator.grid.cells :])


def test_keys_are_read_and_frozen_in_evaluation_mode():
    """Dropout noise does not enter the keys, statistics do not move, and every module gets its own mode back."""
    host = vit(None)
    host.norm_pre, host.pos_drop.p = torch.nn.BatchNorm1d(host.pos_embed.shape[1]).double(), 0.5
    host.train().blocks[1].eval()
    images = torch.randn(4, *first_shape(host), dtype=F64)
    teacher, student = swap(copy.deepcopy(host), Softmax()), swap(copy.deepcopy(host), SKA(init="calibrate"))
    names = calibrate(student, teacher, [images])
    found = student.get_submodule(names[0]).keys.detach().clone()
    assert freeze_keys(student, images) == names
    for model in (student, teacher):
        assert model.norm_pre.num_batches_tracked == 0
        assert (model.training, model.blocks[0].training, model.blocks[1].training) == (True, True, False)
    calibrate(student, teacher.eval(), [images])
    assert torch.equal(student.get_submodule(names[0]).keys, found)


@pytest.mark.parametrize("heads", [1, 2])  # one would be broadcast
def test_keys_of_other_heads_are_refused(heads):
    host = create_model(f"vit_desk(size=12, patch=3, dim={8 * heads}, depth=1, heads={heads})", None).double()
    teacher = swap(copy.deepcopy(host), Softmax())
    images = torch.randn(2, *first_shape(host), dtype=F64)
    student = swap(copy.deepcopy(host), SKA(init="calibrate", heads=4))
    said = rf"keys are \({heads}, 16, 8\) .*the student's \(4, 16, 8\); leave out heads="
    check_error(SwapError, said, calibrate, student, teacher, [images])


def test_calibration_says_what_is_missing():
    host = vit(None)
    teacher = swap(copy.deepcopy(host), Softmax())
    check_error(ConfigError, "no layer has static keys", calibrate, swap(copy.deepcopy(host), SKA()), teacher, [])
    student = swap(copy.deepcopy(host), SKA(init="calibrate"))
    check_error(ConfigError, "at least one batch", calibrate, student, teacher, [])
    check_error(SwapError, "swap Softmax", calibrate, student, host, [])
    check_error(ConfigError, "no static keys to freeze", freeze_keys, teacher, torch.zeros(1))
    image = torch.randn(1, *first_shape(host), dtype=F64)
    out = student(image)
    assert len(freeze_keys(student, image)) == 2
    assert torch.equal(student(image), out)


def test_a_checkpoint_of_another_grid_or_prefix_says_what_to_do():
    layer = mixer(SKA(), Grid(3, 5, 1))
    for grid in (Grid(4, 6, 1), Grid(3, 5, 2)):
        with pytest.raises(
            RuntimeError, match="trained on another grid or with other prefix and suffix tokens; build the model"
        ):
            layer.load_state_dict(mixer(SKA(), grid).state_dict())


def test_a_former_grid_is_square_or_of_the_same_shape():
    known = {(196, Grid(24, 24)): (14, 14), (196, Grid(12, 16)): (14, 14), (24, Grid(8, 12)): (4, 6)}
    for (cells, now), (height, width) in known.items():
        assert former_grid(cells, now) == Grid(height, width)
    assert former_grid(24, Grid(6, 6)) is None
    assert former_grid(64, Grid(8, 2)) is None  # 8x8 or 16x4


@pytest.mark.parametrize(
    "config",
    [SKA(), CSKA(), CSKA(factorised=True), CSKA(rows="centre", cols="conv", bias=False)],
    ids=spell,
)
@pytest.mark.parametrize(("old", "new"), [(Grid(4, 4, 1), Grid(6, 6, 1)), (Grid(4, 4, 1), Grid(3, 5, 1, 0))], ids=str)
def test_a_checkpoint_of_another_grid_is_resampled(config, old, new):
    """It then is the trained layer, called on the new grid; keys of extra tokens are bit-identical."""
    trained, layer = (mixer(replace(config, init="paper"), grid) for grid in (old, new))
    state = trained.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    layer.load_state_dict(state)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    x = torch.randn(2, new.tokens, 16, dtype=F64)
    assert torch.allclose(layer(x, new), trained(x, new), atol=1e-12)
    for name, value in layer.named_parameters():
        if "extra" in name or "col" in name:
            assert torch.equal(value, before[name])
    for resize in ("window", "error"):
        with pytest.raises(RuntimeError, match="trained on another grid"):
            mixer(replace(config, resize=resize), new).load_state_dict(state)


@pytest.mark.untyped
@pytest.mark.parametrize("field", ["init", "resize", "activation", "normalise"])
def test_unknown_values_are_refused_with_the_known_ones(field):
    check_error(ConfigError, f"no {field}=", SKA, **{field: "nonsense"})


@pytest.mark.untyped
def test_wrong_shapes_say_what_was_expected():
    q, keys, v = tensors()
    check_error(ShapeError, "v has tokens 17, keys has 16", ska, q, keys[:, 1:], v)
    check_error(ShapeError, "one dtype", ska, q, keys.float(), v)
    check_error(ConfigError, "relu", ska, q, keys, v, activation="rellu")
    for config in (SKA(heads=3), CSKA(heads=3), CSKA(heads=3, reading="key")):
        with pytest.raises(ShapeError, match="bias is of 2 heads, the queries have 3"):
            mixer(config)(torch.randn(1, 15, 16, dtype=F64), GRIDS[0], Mask(bias=torch.zeros(2, 15, 15, dtype=F64)))
    check_error(ConfigError, "not heads=-1", SKA, heads=-1)
    check_error(ConfigError, "sums to 1 already", CSKA, normalise="1/N")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", [ska, ska_reference])
def test_a_hidden_value_may_hold_anything(form, activation):
    (q, keys, v), keep = tensors(), torch.arange(17).expand(3, -1) % 4 > 0
    check_hidden(lambda v: form(q, keys, v, mask=Mask(keep=keep), activation=activation), (v,), keep)
    assert not form(q, keys, v, mask=Mask(keep=torch.zeros_like(keep)), activation=activation).any()
    later = v.clone()
    later[:, :, 5:] = 100.0
    first, same = (form(q, keys, x, mask=Mask(causal=True), activation=activation)[:, :, :5] for x in (v, later))
    assert torch.equal(first, same)


@pytest.mark.parametrize(("config", "side"), [(SKA(resize="window"), 64), (SKA(resize="window"), 72)])
def test_windows_are_counted_as_they_run(config, side):
    options = {"img_size": 32, "patch_size": 8, "dynamic_img_size": True, "class_token": False, "global_pool": "avg"}
    model = create_model("vit_tiny_patch16_224", config, depth=2, **options).eval()
    images = torch.zeros(1, 3, side, side)
    assert 2 * count_macs(model, images) == count_flops(model, images)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_float32_bias_keeps_half_precision(activation):
    q, keys, v = (torch.randn(shape).bfloat16() for shape in ((2, 2, 9, 4), (2, 7, 4), (2, 2, 7, 4)))
    bias = torch.randn(2, 9, 7)
    out = ska(q, keys, v, mask=Mask(bias=bias), activation=activation)
    assert out.dtype == torch.bfloat16
    exact = ska_reference(q.double(), keys.double(), v.double(), mask=Mask(bias=bias.double()), activation=activation)
    assert (out - exact).abs().max() <= 0.05 * exact.abs().max()


@pytest.mark.parametrize("activation", ["none", "relu", "softmax"])
@pytest.mark.parametrize("hiding", [-1e9, torch.finfo(torch.float32).min])
def test_large_negative_biases_hide_keys_as_infinite_ones_do(activation: str, hiding: float) -> None:
    layer = SKA(activation=activation).build(Site(32, 2, Grid(4, 4)))
    x, keep = torch.randn(2, 16, 32), torch.rand(2, 1, 1, 16) > 0.4
    finite, infinite = (
        layer(x, mask=Mask(bias=torch.zeros(keep.shape).masked_fill(~keep, low))) for low in (hiding, -torch.inf)
    )
    torch.testing.assert_close(finite, infinite)
