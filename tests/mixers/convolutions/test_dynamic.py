"""Dynamic convolution: the exact cases, published complexity, memory and chunks."""

import pytest
import torch
import torch.nn.functional as F

from factor_inputs import DETECTION, SEGMENTATION, paper_gmacs
from operators import check_error, check_layer_transforms, check_same
from regard.core import ConfigError, Grid, Mask, ShapeError, Site
from regard.mixers.convolutions.dynamic import (
    CHUNK,
    DynamicConv,
    by_matrices,
    by_taps,
    dynamic_conv,
    dynamic_conv_reference,
    small,
    taps_between,
)
from regard.mixers.convolutions.sampling import margins

BOTH = pytest.mark.parametrize("call", [dynamic_conv, dynamic_conv_reference], ids=lambda f: f.__name__)


def inputs(kernel=3, groups=2, channels=6, sides=(4, 7)):
    torch.manual_seed(0)
    x = torch.randn(3, channels, *sides, dtype=torch.float64)
    return x, torch.randn(3, groups, kernel**2, *sides, dtype=torch.float64).softmax(2)


@BOTH
def test_the_equation_cell_by_cell(call):
    x, kernels = inputs()
    expected = torch.zeros_like(x)
    for row in range(4):
        for column in range(7):
            for tap in range(9):
                y, z = row + tap // 3 - 1, column + tap % 3 - 1
                if 0 <= y < 4 and 0 <= z < 7:
                    share = kernels[:, :, tap, row, column].repeat_interleave(3, 1)
                    expected[..., row, column] += share * x[..., y, z]
    assert torch.allclose(call(x, kernels, groups=2), expected, rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("kernel", [1, 3, 5, 9])
def test_spatial_3_3_one_kernel_everywhere_is_a_depthwise_convolution(call, kernel):
    x, _ = inputs()
    shared = torch.randn(2, kernel**2, dtype=torch.float64).softmax(-1)
    weight = shared.repeat_interleave(3, 0).view(6, 1, kernel, kernel)
    expected = F.conv2d(x, weight, padding=kernel // 2, groups=6)
    kernels = shared[None, :, :, None, None].expand(3, -1, -1, 4, 7)
    assert torch.allclose(call(x, kernels, groups=2), expected, rtol=0, atol=1e-12)


def layer_of(config, grid, dim=8, seed=0):
    torch.manual_seed(seed)
    layer = config.build(Site(dim, 2, grid)).double().eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return layer


def gated(layer, x):
    return F.glu(layer.enter(x), -1)


@pytest.mark.parametrize("renorm", [False, True])
def test_spatial_3_3_zero_logits_are_average_pooling(renorm):
    """Taps outside count in the softmax (count_include_pad) unless the padding is renormalised."""
    grid = Grid(4, 7)
    layer = layer_of(DynamicConv(kernel=5, groups=4, renorm_padding=renorm), grid)
    with torch.no_grad():
        layer.kernels.weight.zero_()
    x = torch.randn(3, 28, 8, dtype=torch.float64)
    _, h = grid.to_map(gated(layer, x))
    pooled = F.avg_pool2d(h, 5, stride=1, padding=2, count_include_pad=not renorm)
    expected = layer.leave(pooled.flatten(2).mT)
    for call in (layer, layer.reference):
        assert torch.allclose(call(x, grid), expected, rtol=0, atol=1e-12)


def test_spatial_3_3_constant_logits_are_a_convolution_with_softmax_of_the_bias():
    grid = Grid(5, 6)
    layer = layer_of(DynamicConv(kernel=3, groups=4, kernel_bias=True), grid)
    with torch.no_grad():
        layer.kernels.weight.zero_()
    x = torch.randn(3, 30, 8, dtype=torch.float64)
    _, h = grid.to_map(gated(layer, x))
    weight = layer.kernels.bias.view(4, 9).softmax(-1).repeat_interleave(2, 0).view(8, 1, 3, 3)
    expected = layer.leave(F.conv2d(h, weight, padding=1, groups=8).flatten(2).mT)
    assert torch.allclose(layer(x, grid), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [3, 5])
def test_spatial_3_3_on_a_line_it_is_the_published_unfolded_form(kernel, causal):
    """DynamicConv1dTBC of fairseq, its unfolded path: padding K // 2 in encoders, K - 1 on the left in decoders."""
    grid = Grid.sequence(11)
    layer = layer_of(DynamicConv(axes=1, kernel=kernel, groups=4, causal=causal), grid)
    x = torch.randn(3, 11, 8, dtype=torch.float64)
    h = gated(layer, x).transpose(0, 1)  # (T, B, C)
    left = kernel - 1 if causal else kernel // 2
    padded = F.pad(h, (0, 0, 0, 0, left, kernel - 1 - left))
    unfolded = padded.unfold(0, kernel, 1)  # (T, B, C, K)
    weight = (layer.kernels(h).view(11 * 3 * 4, kernel)).softmax(-1)
    mixed = torch.bmm(unfolded.reshape(11 * 3 * 4, 2, kernel), weight[:, :, None]).view(11, 3, 8)
    assert torch.allclose(layer(x, grid), layer.leave(mixed).transpose(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [3, 5])
def test_gradients_of_the_sum_and_of_the_product(kernel):
    x, kernels = inputs(kernel, sides=(3, 4), channels=4)
    assert small(x.unflatten(1, (2, -1)), kernel**2) == (kernel == 5)
    leaves = (x.requires_grad_(), kernels.detach().requires_grad_())
    assert torch.autograd.gradcheck(lambda *t: dynamic_conv(*t, groups=2), leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("size", "sides", "causal"),
    [((4, 7), (3, 3), False), ((4, 7), (9, 5), False), ((2, 3), (9, 9), False), ((1, 6), (1, 4), True),
     ((1, 6), (1, 9), True), ((1, 6), (1, 5), False), ((1, 1), (3, 3), False)],
)  # fmt: skip
def test_the_product_of_matrices_is_the_sum_over_taps(size, sides, causal):
    """Whatever the size beside the kernel, with its gradients and theirs: the way back is a product too."""
    torch.manual_seed(0)
    maps = torch.randn(2, 3, 2, *size, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(2, 3, sides[0] * sides[1], *size, dtype=torch.float64, requires_grad=True)
    taps = taps_between(size, sides, causal, maps.device)
    product = by_matrices(maps, kernels.flatten(3).permute(0, 3, 1, 2), taps)
    total = by_taps(F.pad(maps, margins(sides, 1, causal)), kernels, sides)
    check_same(product, total, (maps, kernels), 1e-12, 1e-12)
    rows = kernels.detach().flatten(3).permute(0, 3, 1, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda m, k: by_matrices(m, k, taps), (maps, rows), fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("renorm", [False, True])
def test_chunks_of_rows_are_the_whole_and_keep_little(renorm):
    """With gradients nothing of the size of the kernels is kept: they are predicted again on the way back."""
    grid = Grid(24, 40)
    config = DynamicConv(kernel=25, groups=16, renorm_padding=renorm)
    kernels = grid.cells * 16 * 25**2
    assert kernels > CHUNK
    torch.manual_seed(0)
    layer = config.build(Site(32, 2, grid))
    x = torch.randn(1, grid.cells, 32)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        out = layer(x, grid)
    assert max(sizes) < kernels / 8
    out.square().sum().backward()
    fast = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    plain = layer.reference(x, grid)
    plain.square().sum().backward()
    assert torch.allclose(out, plain, rtol=1e-4, atol=1e-5)
    for one, p in zip(fast, layer.parameters(), strict=True):
        assert (one - p.grad).norm() <= 1e-4 * p.grad.norm()


@pytest.mark.parametrize("options", [{}, {"renorm_padding": True}, {"axes": 1, "causal": True}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_chunks_of_images_are_the_whole_and_keep_little(options, padded, monkeypatch):
    """Maps that are small beside the kernels: a chunk is some images, of five here the last one alone."""
    grid = Grid(1, 12, 1) if "axes" in options else Grid(3, 4, 1)
    layer = layer_of(DynamicConv(kernel=15, groups=4, **options), grid)
    x = torch.randn(5, grid.tokens, 8, dtype=torch.float64)
    keep = torch.ones(5, grid.tokens, dtype=torch.bool)
    keep[2:, 9:] = False
    mask = Mask(keep=keep) if padded else None
    kernels = 12 * 4 * layer.config.taps  # of an image
    monkeypatch.setattr("regard.mixers.convolutions.dynamic.CHUNK", 2 * kernels)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        out = layer(x, grid, mask)
    assert max(sizes) < 2 * kernels
    check_same(out, layer.reference(x, grid, mask), list(layer.parameters()), gradients=1e-9)


PUBLISHED = {31: (352.9, 1029.0), 25: (306.8, 840.4), 19: (270.6, 692.1), 13: (244.3, 584.3)}


@pytest.mark.parametrize(("kernel", "published"), PUBLISHED.items())
@pytest.mark.parametrize("accounting", ["paper", "executed"])
def test_spatial_fact_1_macs_of_the_paper(kernel, published, accounting):
    """Zhu et al. 2019, Table 3."""
    config = DynamicConv(kernel=kernel)
    assert paper_gmacs(config, DETECTION, accounting) == pytest.approx(published[0], abs=0.1)
    assert paper_gmacs(config, SEGMENTATION, accounting) == pytest.approx(published[1], abs=0.2)


def test_parameters_by_hand():
    """2 C^2 + 2 C, C N_g N_k (+ N_g N_k), C^2 + C."""
    site = Site(32, 2, Grid(4, 5, 1))
    assert DynamicConv(kernel=3).cost(site).params == 2 * 32**2 + 64 + 32 * 16 * 9 + 32**2 + 32
    assert DynamicConv(kernel=3, kernel_bias=True).cost(site).params == 2 * 32**2 + 64 + 33 * 16 * 9 + 32**2 + 32
    assert DynamicConv(kernel=3, glu=False).cost(site).params == 32**2 + 32 + 32 * 16 * 9 + 32**2 + 32


def test_half_precision():
    x, kernels = inputs(kernel=9, channels=8, sides=(9, 11))
    exact = dynamic_conv_reference(x, kernels, groups=2)
    out = dynamic_conv(x.bfloat16(), kernels.bfloat16(), groups=2)
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() <= 1e-2 * exact.norm()
    grid = Grid(4, 5, 1)
    layer = DynamicConv(kernel=3, groups=4).build(Site(8, 2, grid))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(torch.randn(2, 21, 8), grid)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("kernel", [3, 9])
@pytest.mark.parametrize("options", [{}, {"renorm_padding": True}, {"axes": 1, "causal": True}], ids=str)
def test_function_transforms_take_plain_sums_and_products(options, kernel, monkeypatch):
    """In rows as well as in images, which are not made again there."""
    grid = Grid(1, 6, 1) if "axes" in options else Grid(3, 4, 1)
    layer = layer_of(DynamicConv(kernel=kernel, groups=2, **options), grid)
    monkeypatch.setattr("regard.mixers.convolutions.dynamic.CHUNK", 1)
    check_layer_transforms(layer, torch.randn(2, grid.tokens, 8, dtype=torch.float64), grid)


@pytest.mark.untyped
def test_wrong_use_is_said():
    x, kernels = inputs()
    check_error(ShapeError, "4 groups do not divide 6 channels", dynamic_conv, x, kernels, groups=4)
    said = r"expected \(B, groups, taps, h, w\) = \(3, 3, 9, 4, 7\)"
    check_error(ShapeError, said, dynamic_conv, x, kernels, groups=3)
    check_error(ShapeError, "8 taps are not 2x2", dynamic_conv, x, kernels[:, :, :8], groups=2)
    check_error(ShapeError, "odd in number", dynamic_conv, x, kernels[:, :, :4], groups=2)
    check_error(ShapeError, "one row", dynamic_conv, x, kernels, groups=2, causal=True)
    check_error(ShapeError, "one dtype", dynamic_conv, x.float(), kernels, groups=2)
    check_error(ShapeError, r"expected \(batch, channels, h, w\)", dynamic_conv, x[0], kernels, groups=2)
    check_error(ConfigError, "16 groups do not divide 24 channels", DynamicConv().build, Site(24, 2, Grid(4, 4)))
