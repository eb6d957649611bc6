"""Cost: arithmetic, and the count of a DeiT-T layer by hand."""

import pytest
import torch

from operators import check_error, count_flops
from regard import FSNE, PSNE, PVT, SNE, ConfigError, Conv, Cost, Grid, IdentityQuery, LinearQKV, Site, Softmax, parse
from regard.core import attention_cost, linear_cost


def test_flops_are_two_per_product() -> None:
    assert Cost(3, 5).flops == 10
    assert Cost(1, 2) + Cost(10, 20) == Cost(11, 22)


def test_a_linear_map() -> None:
    assert linear_cost(10, 3, 4) == Cost(16, 120)
    assert linear_cost(10, 3, 4, bias=False) == Cost(12, 120)
    assert attention_cost(7, 5, 3) == Cost(0, 210)


def test_a_softmax_layer_of_deit_tiny_by_hand() -> None:
    cost = Softmax().cost(Site(192, 3, Grid(14, 14, 1)))
    assert cost.params == 3 * 192 * 192 + 3 * 192 + 192 * 192 + 192 == 148_224
    assert cost.macs == 4 * 197 * 192 * 192 + 2 * 197 * 197 * 192 == 43_951_488


def test_convolution_gate_and_norms_are_counted() -> None:
    site = Site(8, 2, Grid(3, 4, 1), qk_norm="layer")
    plain = Softmax().cost(Site(8, 2, Grid(3, 4, 1)))
    full = Softmax(dwc=3, gate=True).cost(site)
    assert full.params - plain.params == 8 * (9 + 1) + (8 * 8 + 8) + 2 * (4 + 4)
    assert full.macs - plain.macs == 12 * 8 * 9 + 13 * 8 * 8


def test_cross_attention_makes_keys_and_values_from_the_memory() -> None:
    """10 queries, 40 keys, 32 channels: q and the output 10 times 32^2 each, k and v 40 times, 2 * 10 * 40 * 32."""
    site = Site(32, 4, Grid(2, 5), memory=Grid(5, 8))
    assert Softmax().cost(site) == Cost(4 * (32 * 32 + 32), (2 * 10 + 2 * 40) * 32 * 32 + 2 * 10 * 40 * 32)
    assert Softmax().cost(site).macs == 128_000
    assert Softmax().cost(Site(32, 4, Grid(2, 5))).params == Softmax().cost(site).params


@pytest.mark.parametrize(
    "projection",
    [LinearQKV(), SNE(layers=3), PSNE(width="matched"), FSNE(), FSNE(width="matched", tied=False), IdentityQuery()],
    ids=str,
)
def test_projections_of_two_inputs_cost_what_is_counted(projection) -> None:  # type: ignore[no-untyped-def]
    """Cross-attention, and keys that the mechanism itself makes from fewer tokens."""
    grid, memory = Grid(4, 5, 1), Grid(5, 8)
    site = Site(32, 4, grid, memory=memory)
    config = Softmax(projection=projection)
    layer, x = config.build_cross(site, config.shared()), torch.randn(1, grid.tokens, 32)
    y = torch.randn(1, memory.tokens, 32)
    reduced = PVT(projection=projection)
    other = reduced.build(Site(32, 4, grid), reduced.shared())
    assert config.cost(site).flops == count_flops(lambda: layer(x, grid, memory=y, memory_grid=memory))
    assert reduced.cost(Site(32, 4, grid)).flops == count_flops(other, x, grid)
    assert config.cost(site).params == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("text", ["Softmax", "PVT", "Conv", "DeformableConv", "DynamicConv(groups=4)", "ViT3"])
def test_an_unknown_accounting_is_refused(text: str) -> None:
    site = Site(16, 2, Grid(4, 4))
    check_error(ConfigError, "there is no accounting 'Paper'; did you mean paper", parse(text).cost, site, "Paper")
    assert Conv().cost(site, "paper") == Conv().cost(site)
