"""Cost: arithmetic, and the count of a DeiT-T layer by hand."""

from regard import Cost, Grid, Site, Softmax
from regard.core import attend, linear


def test_flops_are_two_per_product() -> None:
    assert Cost(3, 5).flops == 10
    assert Cost(1, 2) + Cost(10, 20) == Cost(11, 22)


def test_a_linear_map() -> None:
    assert linear(10, 3, 4) == Cost(16, 120)
    assert linear(10, 3, 4, bias=False) == Cost(12, 120)
    assert attend(7, 5, 3) == Cost(0, 210)


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
