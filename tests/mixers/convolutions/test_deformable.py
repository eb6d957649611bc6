"""Deformable convolution: exact cases, precision, and replacing a convolution. Beside torchvision: tests/external."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.layers import StdConv2d
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels import check_once, needs_kernels, runs_kernel
from operators import check_error, check_same
from regard.core import ConfigError, Grid, ShapeError, Site, UnsupportedError
from regard.mixers.convolutions.deformable import (
    DeformableConv,
    DeformableConv2d,
    deformable_conv,
    deformable_conv_reference,
)
from regard.mixers.convolutions.sampling import sample_maps, sample_rows

EXECUTIONS = pytest.mark.parametrize("execution", ["eager", pytest.param("native", marks=needs_kernels)])
BOTH = pytest.mark.parametrize("call", [deformable_conv, deformable_conv_reference], ids=lambda f: f.__name__)
PLACES = [
    {"padding": 1},
    {"padding": 1, "stride": 2},
    {"padding": 2, "dilation": 2},
    {"padding": (2, 0), "stride": (1, 2), "dilation": (1, 2)},
    {},
]


def inputs(groups=1, weight_groups=1, channels=4, outputs=6, sides=(7, 9), kernel=(3, 3), spread=1.5, **places):
    torch.manual_seed(0)
    x = torch.randn(3, channels, *sides, dtype=torch.float64)
    weight = torch.randn(outputs, channels // weight_groups, *kernel, dtype=torch.float64)
    out = F.conv2d(x[:, :1], weight[:1, :1], **places).shape[2:]
    taps = math.prod(kernel)
    offsets = torch.randn(3, 2 * groups * taps, *out, dtype=torch.float64) * spread
    mask = torch.rand(3, groups * taps, *out, dtype=torch.float64)
    return x, weight, offsets, mask


@BOTH
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("weight_groups", [1, 2, 4])
def test_spatial_3_2_zero_offsets_are_conv2d(call, places, weight_groups):
    x, weight, offsets, _ = inputs(outputs=8, weight_groups=weight_groups, **places)
    expected = F.conv2d(x, weight, groups=weight_groups, **places)
    assert torch.allclose(call(x, weight, offsets * 0, **places), expected, rtol=0, atol=1e-12)


@BOTH
def test_spatial_3_2_half_outside_samples_interpolate_with_zero(call):
    x = torch.arange(1.0, 7.0, dtype=torch.float64).view(1, 1, 2, 3)
    weight, offsets = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 2, 2, 3, dtype=torch.float64)
    offsets[:, 0, 0], offsets[:, 1, 1, 2] = -0.5, 0.25
    expected = torch.tensor([[0.5, 1.0, 1.5], [4.0, 5.0, 4.5]], dtype=torch.float64)
    assert torch.allclose(call(x, weight, offsets)[0, 0], expected, rtol=0, atol=1e-12)
    assert (call(x, weight, offsets + 50) == 0).all()


@EXECUTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_offsets_have_the_right_derivative(execution, dtype):
    """Where new layers start; -1 and 0 lie at the border. Differences of the plain form to the right say the same."""
    x, weight, _, mask = (t.to(dtype) for t in inputs(sides=(5, 13), padding=1))
    offsets = torch.randint(-2, 3, (3, 18, 5, 13)).to(dtype).requires_grad_()
    plain = deformable_conv_reference(x, weight, offsets, mask=mask, padding=1)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    fast = deformable_conv(x, weight, offsets, mask=mask, padding=1, execution=execution)
    check_same(fast, plain, [offsets], tolerance, gradients=tolerance)
    if dtype == torch.float64:
        step = torch.zeros_like(offsets)
        step[:, 7] = 1e-6
        moved = deformable_conv_reference(x, weight, offsets + step, mask=mask, padding=1)
        (slope,) = torch.autograd.grad(plain.sum(), offsets)
        assert torch.allclose((moved - plain).sum(1) / 1e-6, slope[:, 7], rtol=0, atol=1e-6)


@EXECUTIONS
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize(("groups", "weight_groups"), [(1, 1), (2, 1), (2, 2), (4, 4), (1, 4)])
def test_fast_and_plain_form(places, groups, weight_groups, execution):
    x, weight, offsets, mask = inputs(groups, weight_groups, outputs=8, spread=3.0, **places)
    leaves = [t.requires_grad_() for t in (x, weight, offsets, mask)]
    fast = deformable_conv(x, weight, offsets, mask=mask, execution=execution, **places)
    check_same(fast, deformable_conv_reference(x, weight, offsets, mask=mask, **places), leaves, 1e-11)


def test_both_ways_of_sampling_agree():
    x, _, _, mask = inputs(groups=2, padding=1)
    points = torch.randn(3, 2, 9, 7, 9, 2, dtype=torch.float64) * 4 + 3
    factors = mask.unflatten(1, (2, 9))
    one, other = sample_maps(x, points, factors), sample_rows(x, points, factors)
    assert torch.allclose(one, other, rtol=0, atol=1e-12)


@EXECUTIONS
@pytest.mark.parametrize("groups", [1, 2])
def test_bfloat16_keeps_positions_in_float32(groups, execution, monkeypatch):
    """In bfloat16 the place 60.6 would be 60.5: the positions, not the values, would be wrong."""
    monkeypatch.setenv("REGARD_NATIVE", str(int(execution == "native")))
    x, weight, offsets, mask = inputs(groups, channels=16, outputs=8, sides=(5, 70), padding=1)
    exact = deformable_conv(x, weight, offsets, mask=mask, padding=1)
    low = (t.bfloat16() for t in (x, weight))
    out = deformable_conv(*low, offsets.float(), mask=mask.float(), padding=1)
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() <= 1e-2 * exact.norm()
    layer = DeformableConv(version=2, groups=groups).build(Site(16, 2, Grid(5, 70))).bfloat16()
    with torch.no_grad():
        layer.conv.offset.bias.normal_()
    tokens = torch.randn(2, 350, 16).bfloat16()
    out = layer(tokens, Grid(5, 70))
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    exact = layer.double()(tokens.double(), Grid(5, 70))
    assert (out - exact).norm() <= 1e-2 * exact.norm()


def test_autocast_trains_and_keeps_offsets():
    grid = Grid(3, 64)
    layer = DeformableConv(version=2).build(Site(16, 2, grid))
    with torch.no_grad():
        layer.conv.offset.bias.normal_(std=3)
    x = torch.randn(2, grid.tokens, 16)
    exact = layer(x, grid)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, grid)
        later = layer(x.bfloat16(), grid)
    (out.float().sum() + later.float().sum()).backward()
    assert (out - exact).norm() <= 1e-2 * exact.norm()
    assert (later - exact).norm() <= 2e-2 * exact.norm()


@pytest.mark.parametrize(("version", "mask_init"), [(1, 1.0), (2, 1.0), (2, 0.5)])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_replaced_convolution_gives_the_same_output(version, mask_init, stride):
    """mask_init 0.5, the published start, halves a trained convolution (without its bias)."""
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 4, 3, stride=stride, padding=2, dilation=2, groups=2, bias=mask_init == 1.0).double()
    options = DeformableConv(version=version, groups=3, mask_init=mask_init)
    made = DeformableConv2d.from_conv(conv, options)
    x = torch.randn(2, 6, 9, 8, dtype=torch.float64)
    share = 1.0 if version == 1 else mask_init
    assert torch.allclose(made(x), conv(x) * share, rtol=0, atol=1e-12)
    missing, unexpected = made.load_state_dict(conv.state_dict(), strict=False)
    assert {name.split(".")[0] for name in missing} == {"offset"}
    assert not unexpected
    assert made.lr_scale() == {"offset.weight": 0.1, "offset.bias": 0.1}
    assert set(made.lr_scale()) <= dict(made.named_parameters()).keys()


def test_offsets_learn_from_zero():
    for config in (DeformableConv(), DeformableConv(axes=1, version=2)):
        grid = Grid(4, 5) if config.axes == 2 else Grid(1, 20)
        layer = config.build(Site(8, 2, grid))
        x = torch.randn(2, 20, 8)
        layer(x, grid).square().sum().backward()
        assert all((p.grad != 0).any() for p in layer.conv.offset.parameters())


def test_on_a_line_it_is_the_operator_with_one_row():
    """Spatial reference 3.2: the 1-D form is the 2-D operator with H = 1, padding (0, 1) and dy = 0."""
    grid = Grid.sequence(13)
    torch.manual_seed(0)
    layer = DeformableConv(axes=1, version=2, groups=2, dilation=2).build(Site(8, 2, grid)).double()
    with torch.no_grad():
        layer.conv.offset.weight.normal_()
        layer.conv.offset.bias.normal_()
    x = torch.randn(3, 13, 8, dtype=torch.float64)
    cells = x.mT[:, :, None]
    raw = F.conv2d(cells, layer.conv.offset.weight, layer.conv.offset.bias, padding=(0, 2), dilation=(1, 2))
    offsets = torch.stack([torch.zeros_like(raw[:, :6]), raw[:, :6]], 2).flatten(1, 2)
    expected = deformable_conv(
        cells,
        layer.conv.weight,
        offsets,
        mask=2 * raw[:, 6:].sigmoid(),
        bias=layer.conv.bias,
        padding=(0, 2),
        dilation=2,
    )
    assert torch.allclose(layer(x, grid), expected[:, :, 0].mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_without_offsets_a_line_is_conv1d(causal):
    grid = Grid.sequence(10)
    layer = DeformableConv(axes=1, causal=causal).build(Site(8, 2, grid)).double()
    x = torch.randn(2, 10, 8, dtype=torch.float64)
    around = (2, 0) if causal else (1, 1)
    expected = F.conv1d(F.pad(x.mT, around), layer.conv.weight[:, :, 0], layer.conv.bias).mT
    for call in (layer, layer.reference):
        assert torch.allclose(call(x, grid), expected, rtol=0, atol=1e-12)


def test_later_cells_do_not_steer_causal_offsets_at_rest():
    """Where a tap lies on its query, the slope of the bilinear kernel must be the one towards earlier cells."""
    grid, found = Grid.sequence(9), []
    torch.manual_seed(0)
    layer = DeformableConv(axes=1, causal=True).build(Site(8, 2, grid)).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    for later in (x, torch.cat([x[:, :6], x[:, 6:] + 1], 1)):
        layer.zero_grad()
        layer(later, grid)[:, :6].sin().sum().backward()
        found.append(layer.conv.offset.weight.grad.clone())
    assert torch.equal(*found)
    assert (found[0] != 0).any()


def test_costs_by_hand():
    """C = 8 on 4x5 cells, K = 9 taps: the paper leaves the predictor out, as its tables do."""
    site = Site(8, 2, Grid(4, 5, 1))
    config = DeformableConv(version=2, groups=2)
    predictor = 8 * 9 * 3 * 2 * 9
    assert config.cost(site, "paper").macs == 20 * 8 * 8 * 9
    assert config.cost(site).macs == 20 * (8 * 8 * 9 + predictor)
    assert config.cost(site).params == 8 * 8 * 9 + 8 + predictor + 54
    assert DeformableConv(offset_kernel=1).cost(site).macs == 20 * (8 * 8 * 9 + 8 * 18)


# Compiled code


@needs_kernels
@pytest.mark.slow
def test_gradcheck_of_compiled_sampling():
    for mask in (True, False):
        x, weight, offsets, factors = inputs(groups=2, channels=6, outputs=2, sides=(4, 5), padding=1)
        whole = [t[:1] for t in (x, offsets, factors)]
        leaves = [t.requires_grad_() for t in (whole[0], weight, whole[1], whole[2])]

        def run(x, weight, offsets, factors, mask=mask):
            factors = factors if mask else None
            return deformable_conv(x, weight, offsets, mask=factors, padding=1, execution="native")

        assert torch.autograd.gradcheck(run, leaves)


@needs_kernels
def test_compiled_sampling_is_checkpointed():
    leaves = [t.requires_grad_() for t in inputs(groups=2, channels=6, outputs=2, sides=(4, 5), padding=1)]

    def run(x, weight, offsets, factors):
        return deformable_conv(x, weight, offsets, mask=factors, padding=1, execution="native").square().sum()

    expected = torch.autograd.grad(run(*leaves), leaves)
    found = torch.autograd.grad(checkpoint(run, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@needs_kernels
def test_points_far_out_at_the_border_and_unknown():
    """Beyond the border there is nothing, on a whole cell just that cell; NaN is seen in its own output alone."""
    x, weight = torch.randn(1, 3, 4, 4, dtype=torch.float64), torch.randn(2, 3, 1, 1, dtype=torch.float64)
    offsets = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    for i, place in enumerate((-1.0, -0.5, math.inf, -math.inf, 1e9, 3.0, 3.999, 4.0)):
        offsets[0, 0].view(-1)[i] = place
    plain = deformable_conv(x, weight, offsets.nan_to_num(posinf=1e9, neginf=-1e9), execution="eager")
    assert torch.allclose(deformable_conv(x, weight, offsets, execution="native"), plain, rtol=0, atol=1e-12)
    offsets[0, 1, 2, 2] = math.nan
    leaves = [t.requires_grad_() for t in (x, weight, offsets)]
    out = deformable_conv(*leaves, execution="native")
    assert out[0, :, 2, 2].isnan().all()
    assert out.isnan().sum() == 2
    grads = torch.autograd.grad(out.nan_to_num().sum(), leaves)
    assert grads[2][0, :, 2, 2].isnan().all()
    assert grads[2].isnan().sum() == 2


@needs_kernels
def test_threads_and_layouts_change_rounding_at_most():
    """Of a size that is worth the start of threads."""
    x, weight, offsets, mask = (t.float() for t in inputs(groups=2, channels=32, sides=(40, 41), padding=1))
    before, found = torch.get_num_threads(), []
    try:
        for threads, given in ((1, x), (5, x), (5, x.to(memory_format=torch.channels_last)), (1, x.mT.contiguous().mT)):
            torch.set_num_threads(threads)
            leaves = [t.detach().requires_grad_() for t in (given, weight, offsets, mask)]
            out = deformable_conv(*leaves[:3], mask=leaves[3], padding=1, execution="native")
            found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    for more in found[1:]:
        for one, other in zip(found[0], more, strict=True):
            assert (one - other).abs().max() <= 1e-5 * one.abs().max()


@needs_kernels
@pytest.mark.slow
def test_auto_takes_the_kernel_unless_the_environment_forbids(monkeypatch):
    x, weight, offsets, _ = inputs(padding=1)
    x.requires_grad_()

    def taken(**options):
        call = partial(deformable_conv, x, weight, offsets, padding=1, **options)
        return runs_kernel("deformable_sample", call)

    for value, wanted in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv("REGARD_NATIVE", value)
        assert taken() == wanted
    monkeypatch.delenv("REGARD_NATIVE")
    assert not taken(execution="eager")
    compiled = torch.compile(lambda: deformable_conv(x.detach(), weight, offsets, padding=1), backend="eager")
    assert torch.allclose(compiled(), deformable_conv(x, weight, offsets, padding=1), rtol=0, atol=1e-12)
    check_once(deformable_conv(x, weight, offsets, padding=1), x)
    unknown = {"padding": 1, "execution": "fast"}
    check_error(ConfigError, "auto, torchvision, native or eager", deformable_conv, x, weight, offsets, **unknown)
    with pytest.raises(UnsupportedError, match="without torch.func.grad"):
        torch.func.grad(lambda x: deformable_conv(x, weight, offsets, padding=1, execution="native").sum())(x)


@needs_kernels
def test_the_kernel_under_vmap():
    x, weight, offsets, mask = inputs(groups=2, padding=1)
    stacked = [torch.stack([t, t.flip(0)]) for t in (x, offsets, mask)]

    def run(x, offsets, mask):
        return deformable_conv(x, weight, offsets, mask=mask, padding=1, execution="native")

    mapped = torch.vmap(run)(*stacked)
    assert torch.allclose(mapped[0], run(x, offsets, mask), rtol=0, atol=1e-12)
    assert torch.allclose(mapped[1], mapped[0].flip(0), rtol=0, atol=1e-12)


@needs_kernels
@pytest.mark.untyped
@pytest.mark.parametrize("factors", [True, False])
def test_opcheck_of_the_kernel(factors):
    rows, points = torch.randn(2, 5, 6, 4).requires_grad_(), (4 * torch.rand(2, 2, 3, 7, 2)).requires_grad_()
    weights = torch.rand(2, 2, 3, 7).requires_grad_() if factors else None
    torch.library.opcheck(torch.ops.regard.deformable_sample, (rows, points, weights))


@EXECUTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_images(dtype, execution):
    x, weight, offsets, mask = (t.to(dtype) for t in inputs(groups=2, padding=1))
    x = x[:0].requires_grad_()
    y = deformable_conv(x, weight, offsets[:0], mask=mask[:0], padding=1, execution=execution)
    y.sum().backward()
    assert y.shape == (0, 6, 7, 9)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("sides", [(4, 5), (1, 6)])
def test_offsets_may_lie_channels_last(groups, kernel, sides):
    """As those of a layer do, whose maps are views of tokens."""
    x, weight, offsets, mask = inputs(groups, kernel=(kernel, kernel), sides=sides, padding=kernel // 2)
    exact = deformable_conv_reference(x, weight, offsets, mask=mask, padding=kernel // 2)
    last = (y.to(memory_format=torch.channels_last) for y in (x, offsets, mask))
    x, offsets, mask = last
    assert torch.allclose(deformable_conv(x, weight, offsets, mask=mask, padding=kernel // 2), exact, atol=1e-12)
    grid = Grid(*sides)
    layer = DeformableConv(kernel=kernel, groups=groups).build(Site(dim=8, heads=2, grid=grid))
    assert layer(torch.randn(2, grid.tokens, 8), grid).shape == (2, grid.tokens, 8)


@pytest.mark.parametrize("bias", [True, False])
def test_autocast_gives_the_dtype_of_a_convolution(bias):
    conv, x = DeformableConv2d(4, 4, 3, padding=1, bias=bias), torch.randn(2, 4, 5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(x).dtype == nn.Conv2d(4, 4, 3, padding=1, bias=bias)(x).dtype == torch.bfloat16


@pytest.mark.untyped
def test_wrong_use_is_said():
    x, weight, offsets, mask = inputs(groups=2, padding=1)
    said = "offsets have 17 channels; expected 2 x 9 taps x groups"
    check_error(ShapeError, said, deformable_conv, x, weight, offsets[:, :17], padding=1)
    three = torch.cat([offsets, offsets[:, :18]], 1)
    check_error(ShapeError, "dividing 4 channels", deformable_conv, x, weight, three, padding=1)
    check_error(ShapeError, r"offsets \(3, 36, 7, 9\); expected \(3, 36, 5, 7\)", deformable_conv, x, weight, offsets)
    check_error(ShapeError, "mask", deformable_conv, x, weight, offsets, mask=mask[:, :9], padding=1)
    check_error(ShapeError, "does not fit 4 channels", deformable_conv, x, weight[:, :3], offsets, padding=1)
    check_error(ShapeError, "bias", deformable_conv, x, weight, offsets, bias=torch.zeros(5), padding=1)
    said = "3x3 taps with dilation 4 do not fit a map of 7x9 cells with padding 0"
    check_error(ShapeError, said, deformable_conv, x, weight, offsets, dilation=4)
    check_error(ShapeError, r"expected \(batch, channels, h, w\)", deformable_conv, x[0], weight, offsets, padding=1)
    check_error(ConfigError, "stride", deformable_conv, x, weight, offsets, stride=0, padding=1)
    for wrong in ({"version": 3}, {"mask_init": 0.0}, {"offset_kernel": 2}, {"dilation": 0}):
        check_error(ConfigError, next(iter(wrong)), DeformableConv, **wrong)
    check_error(ConfigError, "version=1 has no factors, so no mask_init=0.5", DeformableConv, mask_init=0.5)
    with pytest.raises(ConfigError, match="5 groups of offsets do not divide 6"):
        DeformableConv2d(6, 6, 3, padding=1, options=DeformableConv(groups=5))
    with pytest.raises(ConfigError, match="offset_kernel=1 gives another size"):
        DeformableConv2d(6, 6, 3, options=DeformableConv(offset_kernel=1))
    reflecting, conv = (nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode) for mode in ("reflect", "zeros"))
    only = "only a plain nn.Conv2d can be replaced, not a .*Conv2d with"
    for other, said in (
        (reflecting, "reflect"),
        (nn.utils.parametrizations.weight_norm(copy.deepcopy(conv)), only),
        (StdConv2d(4, 4, 3, padding=1), only),
        (nn.utils.spectral_norm(conv), f"{only} bias, weight_orig"),
    ):
        check_error(UnsupportedError, said, DeformableConv2d.from_conv, other)
