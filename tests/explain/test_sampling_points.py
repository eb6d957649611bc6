"""Where taps sample and what kernels weigh: outputs of the layers come out of what is shown."""

import pytest
import torch
from torch import nn

from regard.core import Grid, Mask, Site, UnsupportedError
from regard.explain.sampling_points import DynamicKernels, dynamic_kernels, sampling_points
from regard.mixers.convolutions.deformable import DeformableConv, DeformableConv2d
from regard.mixers.convolutions.dynamic import DynamicConv
from regard.mixers.softmax import Softmax
from regard.models.create import create_model

VIT = "vit_desk(size=(12, 20), patch=4, dim=16, depth=2, heads=2)"  # 3 rows, 5 columns


def deformable(version: int = 1, groups: int = 1, stride: int = 1, spread: float = 0.3) -> DeformableConv2d:
    torch.manual_seed(0)
    options = DeformableConv(version=version, groups=groups)  # type: ignore[arg-type]
    conv = DeformableConv2d(4, 6, 3, stride=stride, padding=1, options=options).double()
    nn.init.normal_(conv.offset.weight, std=spread)
    return conv


@pytest.mark.parametrize(("version", "groups", "stride"), [(1, 1, 1), (2, 2, 1), (2, 2, 2), (1, 4, 2)])
def test_the_output_of_a_cell_comes_out_of_the_points_shown(version: int, groups: int, stride: int) -> None:
    conv, x = deformable(version, groups, stride), torch.randn(4, 7, 9, dtype=torch.float64)
    cell = (2, 3)
    (result,) = sampling_points(nn.Sequential(conv), x, cell)
    assert (result.source.height, result.source.width) == (7, 9)
    assert (result.factors is None) == (version == 1)
    rows, columns = torch.arange(7), torch.arange(9)
    near_y = (1 - (result.points[..., 0, None] - rows).abs()).clamp_min(0)  # (g, K, 7)
    near_x = (1 - (result.points[..., 1, None] - columns).abs()).clamp_min(0)
    outputs = torch.einsum("gcij,gki,gkj->gck", x.unflatten(0, (groups, -1)), near_y, near_x)
    if result.factors is not None:
        outputs = outputs * result.factors[:, None]
    with torch.no_grad():
        expected = conv(x[None])[0, :, cell[0], cell[1]]
        out = torch.einsum("ock,ck->o", conv.weight.flatten(2), outputs.flatten(0, 1)) + conv.bias
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)


def test_planted_offsets_are_found_tap_by_tap() -> None:
    """Taps run rows first, an offset is (down, right), and with a stride of 2 cell 1,2 lies around 2,4."""
    conv = deformable(stride=2, spread=0.0)
    bias = conv.offset.bias
    assert bias is not None
    with torch.no_grad():
        bias[2 * 5], bias[2 * 5 + 1] = 0.5, -2.0  # the sixth tap: middle row, right
    (result,) = sampling_points(nn.Sequential(conv), torch.randn(4, 7, 9, dtype=torch.float64), (1, 2))
    assert result.regular.tolist() == [[1 + i, 3 + j] for i in range(3) for j in range(3)]
    moved = result.points[0] - result.regular
    assert moved[5].tolist() == [0.5, -2.0]
    assert moved[[0, 1, 2, 3, 4, 6, 7, 8]].abs().max() == 0
    assert torch.allclose(result.field, torch.tensor([0.5, -2.0], dtype=torch.float64) / 9)
    assert result.field.shape == (4, 5, 2)
    assert torch.allclose(result.lengths, torch.full((4, 5), 4.25**0.5 / 9, dtype=torch.float64))


def test_new_layers_sample_where_a_convolution_does() -> None:
    model = create_model(VIT, DeformableConv(version=2))
    result = sampling_points(model.eval(), torch.randn(3, 12, 20), (0, 4))
    assert [one.layer for one in result] == ["blocks.0.attn", "blocks.1.attn"]
    for one in result:
        assert torch.equal(one.points[0], one.regular)
        assert one.regular.tolist() == [[i, 4 + j] for i in (-1, 0, 1) for j in (-1, 0, 1)]
        assert one.factors is not None
        assert (one.factors == 1).all()


def test_convolutions_before_attention_are_found() -> None:
    host = (
        "attended_resnet18(channels=(8, 8, 16, 16), stem=1, img_size=(12, 20), stages=(2, 3), heads=2, deformable=True)"
    )
    result = sampling_points(create_model(host, None).eval(), torch.randn(3, 12, 20), layers="*.0.conv1")
    assert [(one.layer, one.source.height, one.grid.height) for one in result] == [
        ("layer2.0.conv1", 12, 6),
        ("layer3.0.conv1", 6, 3),
    ]


@pytest.mark.parametrize("options", [{}, {"renorm_padding": True}, {"glu": False, "kernel": 7}])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_the_output_of_a_cell_comes_out_of_the_kernels_shown(options: dict, padded: bool) -> None:
    torch.manual_seed(0)
    grid = Grid(3, 5, prefix=1)
    config = DynamicConv(**{"kernel": 3, "groups": 4, **options})
    mixer = config.build(Site(dim=8, heads=2, grid=grid)).double()
    nn.init.normal_(mixer.kernels.weight, std=2.0)
    x = torch.randn(1, 16, 8, dtype=torch.float64)
    mask = Mask(keep=(torch.arange(16) != 9)[None]) if padded else None
    y, z = 1, 4
    kernels = mixer.kernels_at(x, grid, (y, z), mask)
    expected = mixer(x, grid, mask)[0, 1 + y * 5 + z]
    _, cells, valid = mixer.split(x, grid, mask)
    h = mixer.hidden(cells, valid)[0].unflatten(-1, (4, -1))  # (3, 5, g, c)
    side = config.kernel
    assert kernels.shape == (1, 4, side, side)
    assert torch.allclose(kernels.sum((2, 3)), torch.ones(1, 4, dtype=torch.float64))
    total = torch.zeros(4, 2, dtype=torch.float64)
    for i in range(side):
        for j in range(side):
            row, column = y + i - side // 2, z + j - side // 2
            if 0 <= row < 3 and 0 <= column < 5:
                total += kernels[0, :, i, j, None] * h[row, column]
    assert torch.allclose(mixer.leave(total.flatten()), expected, rtol=0, atol=1e-12)


def test_kernels_of_a_network_are_those_of_its_layers() -> None:
    torch.manual_seed(0)
    model = create_model(VIT, DynamicConv(kernel=5, groups=4)).double().eval()
    for name, value in model.named_parameters():
        if ".kernels." in name:
            nn.init.normal_(value, std=1.0)
    x, outputs = torch.randn(3, 12, 20, dtype=torch.float64), []
    mixer = model.blocks[1].attn.mixer  # type: ignore[union-attr, index]
    handle = mixer.register_forward_pre_hook(lambda module, args: outputs.append(args))  # type: ignore[union-attr, operator]
    result = dynamic_kernels(model, x, (2, 0))
    handle.remove()
    assert [one.layer for one in result] == ["blocks.0.attn", "blocks.1.attn"]
    with torch.no_grad():
        expected = mixer.kernels_at(outputs[0][0], Grid(3, 5), (2, 0))[0]  # type: ignore[union-attr, operator]
    assert torch.equal(result[1].kernels, expected)
    assert result[1].kernels.std() > 1e-2


def test_a_kernel_is_laid_around_its_cell_and_cut_at_the_border() -> None:
    kernels = torch.zeros(1, 3, 5)
    kernels[0, 0, 4], kernels[0, 2, 0], kernels[0, 1, 2] = 0.5, 0.25, 0.25  # up two right, down two left, itself
    laid = DynamicKernels(layer="", grid=Grid(4, 6), cell=(3, 1), kernels=kernels).map()
    assert laid.shape == (1, 4, 6)
    assert laid[0].nonzero().tolist() == [[2, 3], [3, 1]]
    assert laid.sum() == 0.75


def test_what_has_neither_is_refused() -> None:
    model = create_model(VIT, Softmax())
    with pytest.raises(UnsupportedError, match="no deformable convolution"):
        sampling_points(model, torch.randn(3, 12, 20))
    with pytest.raises(UnsupportedError, match="no dynamic convolution"):
        dynamic_kernels(model, torch.randn(3, 12, 20))
    line = create_model("vit_desk(size=(4, 20), patch=4, dim=16, depth=1, heads=2)", DynamicConv(axes=1, groups=4))
    with pytest.raises(UnsupportedError, match="on sequences"):
        dynamic_kernels(line, torch.randn(3, 4, 20))
