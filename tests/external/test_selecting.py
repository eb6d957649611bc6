"""Selecting mechanisms (windows, spatial reduction, sampling, hashing) against timm, torchvision and transformers."""

import pytest
import torch
import torch.nn.functional as F

from regard import DAT, Grid, Site
from regard.core import merge
from regard.testing.external import largest
from regard.testing.external.packages import hashing_pairs, pvt_pairs, sampling_pairs, window_pairs
from regard.testing.subject import gap


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("sides", [(14, 7), (14, 21)], ids=str)
def test_window_is_timms_swin_attention(shift: int, sides: tuple[int, int]) -> None:
    """Fact 4.19, with copied weights, table and shift; timm masks with -100 where ours is exact."""
    pytest.importorskip("timm.models.swin_transformer")
    assert largest(window_pairs(shift, sides)) < 1e-12


@pytest.mark.parametrize(("ratio", "pool"), [(1, 0), (2, 0), (2, 7)])
def test_pvt_is_timms_attention(ratio: int, pool: int) -> None:
    """Fact 4.17, with copied weights, on a rectangular map that the ratio divides."""
    pytest.importorskip("timm.models.pvt_v2")
    assert largest(pvt_pairs(ratio, pool)) < 1e-12


def test_sampling_is_torchvisions_deformable_convolution() -> None:
    """A 1x1 deformable convolution with the identity as its weight samples at cell + offset, inside the map."""
    pytest.importorskip("torchvision")
    assert largest(sampling_pairs()) < 1e-5


def test_dat_is_a_plain_layer_of_grid_sample() -> None:
    """The layer of the paper with PyTorch's modules, two groups, half-pixel reference points, unbounded offsets."""
    torch.manual_seed(0)
    h, w, stride, groups = 6, 8, 2, 2
    grid = Grid(h, w)
    layer = DAT(stride=stride, groups=groups, kernel=3).build(Site(16, 4, grid)).double()
    net = layer.operator
    x = torch.randn(2, h * w, 16, dtype=torch.float64)
    with torch.no_grad():
        net.offset.weight.mul_(2)
        net.table.normal_()
        q, _, _ = F.linear(x, layer.qkv.weight, layer.qkv.bias).chunk(3, -1)
        image = q.mT.reshape(2 * groups, 8, h, w)
        hidden = net.conv(image)
        hidden = F.gelu(F.layer_norm(hidden.permute(0, 2, 3, 1), (8,), net.norm.weight, net.norm.bias))
        offset = hidden @ net.offset.weight.mT  # (4, 3, 4, 2) as (y, x)
        ys, xs = (2 * torch.arange(3) + 1) / 3 - 1, (2 * torch.arange(4) + 1) / 4 - 1
        points = (torch.stack(torch.meshgrid(ys, xs, indexing="ij"), -1) + offset).clamp(-1, 1)
        sampled = F.grid_sample(x.mT.reshape(2 * groups, 8, h, w), points.flip(-1), "bilinear", "border", False)
        tokens = sampled.reshape(2, 16, 12).mT
        k, v = F.linear(tokens, layer.qkv.weight[16:], layer.qkv.bias[16:]).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in (q, k, v))
        cy, cx = (2 * torch.arange(h) + 1) / h - 1, (2 * torch.arange(w) + 1) / w - 1
        cells = torch.stack(torch.meshgrid(cy, cx, indexing="ij"), -1).flatten(0, 1).double()
        offsets = cells[None, :, None] - points.flatten(1, 2)[:, None]  # (4, 48, 12, 2) of the map from -1 to 1
        position = offsets * torch.tensor([h / (2 * (h - 1)), w / (2 * (w - 1))], dtype=torch.float64)
        table = net.table.unflatten(0, (groups, 2)).repeat(2, 1, 1, 1)
        bias = F.grid_sample(table, position.flip(-1), "bilinear", "border", True).reshape(2, 4, 48, 12)
        expected = layer.proj(merge((q @ k.mT / 2 + bias).softmax(-1) @ v))
        assert gap(layer(x, grid), expected) < 1e-6  # the reference points above are in float32
        assert (points.abs() == 1).any()


@pytest.mark.parametrize(("chunk", "length"), [(8, 16), (4, 24)])
def test_one_round_of_hashing_is_that_of_transformers(chunk: int, length: int) -> None:
    """Fact 4.11 for one round, with its buckets; its logits have no scale, its keys an epsilon of 1e-6 d."""
    pytest.importorskip("transformers.models.reformer.modeling_reformer")
    assert largest(hashing_pairs(chunk, length)) < 1e-5
    assert largest(hashing_pairs(chunk, length, scale=None)) > 1e-2
