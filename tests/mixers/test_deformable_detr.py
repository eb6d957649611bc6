"""Multi-scale deformable attention: several maps, its start, prefix tokens. Beside transformers: testing/external."""

import math

import pytest
import torch

from operators import check_error, check_gradients
from regard import ConfigError, DeformableDETR, Grid, Mask, Site
from regard.core import ShapeError
from regard.ops import deformable_detr, deformable_detr_reference, softmax_reference
from regard.projections import LinearQKV
from regard.testing.subject import gap, perturb

F64 = torch.float64


def draw(
    sides: list[tuple[int, int]], n: int = 6, points: int = 3
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Maps, points inside and outside them, and weights of maps and points together."""
    torch.manual_seed(0)
    maps = [torch.randn(3, 2, 5, *side, dtype=F64, requires_grad=True) for side in sides]
    place = (9 * torch.rand(3, 2, n, len(sides), points, 2, dtype=F64) - 2).requires_grad_()
    weights = torch.randn(3, 2, n, len(sides) * points, dtype=F64).softmax(-1).unflatten(-1, (len(sides), points))
    return maps, place, weights.requires_grad_()


@pytest.mark.parametrize("sides", [[(5, 7)], [(4, 6), (2, 3), (1, 5)]], ids=str)
def test_sampling_agrees_with_hat_functions_inside_and_outside_the_maps(sides: list[tuple[int, int]]) -> None:
    maps, place, weights = draw(sides)
    fast, plain = deformable_detr(maps, place, weights), deformable_detr_reference(maps, place, weights)
    assert gap(fast, plain) < 1e-12
    check_gradients(fast, plain, (*maps, place, weights))
    one = maps[0], place[:, :, :, :1], weights[:, :, :, :1]
    assert torch.autograd.gradcheck(lambda *x: deformable_detr([x[0]], *x[1:]), one, fast_mode=True)


def test_whole_cells_with_the_weights_of_softmax_are_attention() -> None:
    """Deformable DETR, Sec. 4.1: with a point on every cell it is attention over all cells, if its weights are."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 2, 15, 4, dtype=F64)
    cells = torch.cartesian_prod(torch.arange(3.0), torch.arange(5.0)).to(F64).expand(3, 2, 15, 1, 15, 2)
    weights = (q @ k.mT / 2).softmax(-1)[:, :, :, None]
    out = deformable_detr([v.mT.unflatten(-1, (3, 5))], cells, weights)
    assert gap(out, softmax_reference(q, k, v)) < 1e-12


def test_the_published_start() -> None:
    """App. A.4: equal weights, and the offsets of head 1 to 8 are k times the eight neighbours."""
    grid = Grid(9, 9)
    operator = DeformableDETR(points=3).operator(Site(32, 8, grid))
    points = operator.points(torch.randn(1, 8, 81, 4), grid, grid) - torch.tensor([4.0, 4.0])
    neighbours = {(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)} - {(0, 0)}
    for k in (1, 2, 3):
        found = {tuple(offset) for offset in points[0, :, 40, k - 1].round(decimals=4).add(0.0).tolist()}
        assert found == {(float(k * i), float(k * j)) for i, j in neighbours}
    assert not operator.weight.weight.any()
    assert not operator.weight.bias.any()
    assert operator.lr_scale() == {"offset.weight": 0.1, "offset.bias": 0.1}


def test_prefix_tokens_start_in_the_middle_and_are_never_sampled() -> None:
    grid = Grid(4, 6, 1, 2)
    layer = perturb(DeformableDETR().build(Site(16, 2, grid)))
    q = torch.zeros(1, 2, grid.tokens, 8, dtype=F64)
    starts = layer.operator.points(q, grid, grid)[0, :, :, :] - layer.operator.offset.bias.view(2, 1, 4, 2)
    for i, expected in ((0, (1.5, 2.5)), (1, (0, 0)), (24, (3, 5)), (26, (1.5, 2.5))):
        assert gap(starts[:, i], torch.tensor(expected, dtype=F64).expand(2, 4, 2)) < 1e-12
    x = torch.randn(2, grid.tokens, 16, dtype=F64)
    moved = x.clone()
    moved[:, 26] += 1
    changed = (layer(moved, grid) - layer(x, grid)).abs().amax((0, 2)) > 1e-12
    assert changed.nonzero().flatten().tolist() == [26]


def test_padding_reads_as_zero() -> None:
    """As in the published code: weights are not normalised again."""
    grid = Grid(3, 5)
    layer = perturb(DeformableDETR().build(Site(16, 2, grid)))
    x = torch.randn(2, 15, 16, dtype=F64)
    out = layer(x, grid, mask=Mask(keep=torch.zeros(2, 15, dtype=torch.bool)))
    assert gap(out, layer.proj.bias.expand_as(out)) < 1e-12


def test_queries_of_another_grid_start_at_the_same_place_of_the_image() -> None:
    queries, memory = Grid(2, 3, 1), Grid(4, 6)
    operator = DeformableDETR().operator(Site(16, 2, queries, memory=memory)).double()
    points = operator.points(torch.zeros(1, 2, 7, 8, dtype=F64), queries, memory) - operator.offset.bias.view(
        2, 1, 4, 2
    )
    assert (
        gap(points[0, 0, 1:, 0], torch.cartesian_prod(torch.tensor([0.5, 2.5]), torch.tensor([0.5, 2.5, 4.5]))) < 1e-12
    )


def test_half_precision_keeps_its_points() -> None:
    maps, place, weights = draw([(48, 64)])
    place = place.detach() * 6
    low = deformable_detr([maps[0].bfloat16()], place.float(), weights.float())
    assert low.dtype == torch.bfloat16
    assert gap(low.double(), deformable_detr_reference(maps, place, weights)) < 0.03


def test_cost() -> None:
    """App. A.1: 3 M K outputs of a linear map, and 5 products of each sample."""
    site = Site(192, 3, Grid(14, 14, 1))
    cost = DeformableDETR(points=4).operator_cost(site)
    assert (cost.params, cost.macs) == (36 * 193, 197 * 36 * 192)
    assert DeformableDETR(points=4).operator_cost(site, "paper").macs - cost.macs == 5 * 197 * 4 * 192
    assert math.isclose(DeformableDETR().cost(site).params, 2 * 192 * 193 + 36 * 193)


@pytest.mark.untyped
def test_what_is_refused() -> None:
    maps, place, weights = draw([(4, 6), (2, 3)])
    check_error(ConfigError, "points is at least 1, not 0", DeformableDETR, points=0)
    check_error(ShapeError, "1 maps, points", deformable_detr, maps[:1], place, weights)
    check_error(ShapeError, "a map has shape", deformable_detr, [maps[0], maps[1][:, :, :3]], place, weights)
    wide = Site(16, 2, Grid(4, 4), width=4)
    check_error(ConfigError, "use LinearQKV", DeformableDETR().build, wide)
    DeformableDETR(projection=LinearQKV()).build(wide)
