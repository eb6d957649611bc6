"""Deformable attention: sampling, its points, its table, gradients. A plain layer of grid_sample: tests/external."""

import pytest
import torch

from operators import check_error, check_gradients
from regard import DAT, ConfigError, Grid, Site
from regard.core import UnsupportedError
from regard.ops import sample_points, sample_points_reference
from regard.testing.subject import gap


@pytest.mark.parametrize("sides", [(5, 7), (1, 6), (4, 1)], ids=str)
def test_sampling_agrees_with_hat_functions_inside_and_outside_the_map(sides: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, *sides, dtype=torch.float64, requires_grad=True)
    points = torch.rand(3, 11, 2, dtype=torch.float64) * 9 - 1.5
    fast, plain = sample_points(x, points), sample_points_reference(x, points)
    assert gap(fast, plain) < 1e-12
    check_gradients(fast, plain, (x,), 1e-12)
    inside = torch.tensor([[[sides[0] - 1.0, 0.0]]], dtype=torch.float64).expand(3, 1, 2)
    assert gap(sample_points(x, inside)[..., 0], x[:, :, -1, 0]) < 1e-12


def test_a_point_that_is_nan_gives_nan_and_the_others_their_values() -> None:
    """grid_sample itself reads and writes outside the map there, which ends the process in backward."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    positions = [[torch.nan, 1.0], [1.0, torch.nan], [torch.inf, 2.0], [-torch.inf, 2.0], [1.5, 2.5]]
    points = torch.tensor([positions], dtype=torch.float64, requires_grad=True)
    fast, plain = sample_points(x, points), sample_points_reference(x, points)
    assert fast[..., :2].isnan().all()
    assert plain[..., :2].isnan().all()
    assert gap(fast[..., 2:], plain[..., 2:]) < 1e-12
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(fast[..., 2:].sum(), (x, points)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_input_that_is_not_finite_spoils_its_own_image_only(value: float) -> None:
    torch.manual_seed(0)
    grid = Grid(4, 6, 1)
    layer = DAT(stride=2, kernel=3).build(Site(16, 2, grid))
    x = torch.randn(2, 25, 16)
    clean = layer(x, grid)[1].detach()
    x[0, 7, 3] = value
    out = layer(x.requires_grad_(), grid)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out[1], clean)
    assert [bool(image.isfinite().all()) for image in (*out, *gradient)] == [False, True] * 2


def test_points_start_in_the_middle_of_their_patches() -> None:
    """Facts 0.9, 4.18: at half-pixel centres, in (y, x); the published points are half a cell off, the last outside."""
    grid = Grid(6, 8, 1)
    operator = DAT(stride=2, init="zero").operator(Site(16, 2, grid))
    points = operator.plan(torch.randn(2, 2, 49, 8), grid).points
    expected = [[0.5 + 2 * i, 0.5 + 2 * j] for i in range(3) for j in range(4)]
    assert gap(points, torch.tensor(expected).expand(2, 1, -1, -1)) < 1e-5
    single = DAT(init="zero").operator(Site(16, 2, Grid(1, 1))).plan(torch.randn(2, 2, 1, 8), Grid(1, 1)).points
    assert gap(single, torch.zeros(2, 1, 1, 2)) < 1e-6


def test_bounded_offsets_stay_within_reach() -> None:
    grid = Grid(6, 8)
    operator = DAT(stride=2, reach=0.5).operator(Site(16, 2, grid))
    with torch.no_grad():
        operator.offset.weight.mul_(1000)
    start = DAT(stride=2, init="zero").operator(Site(16, 2, grid)).plan(torch.randn(2, 2, 48, 8), grid).points
    moved = operator.plan(torch.randn(2, 2, 48, 8), grid).points - start
    assert 0.49 < moved.abs().max() <= 0.5 + 1e-5  # cells: 0.5 halves of the 2 cells between points


def test_the_table_is_indexed_by_query_minus_point() -> None:
    """On whole cells it is Swin's table: entry (query - key + side - 1)."""
    torch.manual_seed(0)
    grid = Grid(3, 5, 1, 1)
    operator = DAT(init="zero").operator(Site(16, 2, grid)).double()
    with torch.no_grad():
        operator.table.normal_()
    x, q = torch.randn(2, 17, 16, dtype=torch.float64), torch.randn(2, 2, 17, 8, dtype=torch.float64)
    for plain in (False, True):
        bias = operator.memory(x, q, grid, plain)[1]
        for i, j in ((0, 0), (0, 14), (14, 0), (7, 3)):
            (y, z), (a, b) = divmod(i, 5), divmod(j, 5)
            assert gap(bias[1, :, 1 + i, j], operator.table[:, y - a + 2, z - b + 4]) < 1e-12
        assert (bias[:, :, [0, 16]] == 0).all()
        assert (bias[..., 15:] == 0).all()


def test_offsets_and_table_learn() -> None:
    torch.manual_seed(0)
    grid = Grid(4, 6, 1)
    layer = DAT(stride=2, groups=2).build(Site(16, 2, grid))
    layer(torch.randn(3, 25, 16), grid).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.operator.parameters())


def test_a_plan_replaces_the_offsets() -> None:
    grid = Grid(4, 6)
    operator = DAT(stride=2).operator(Site(16, 2, grid))
    x, q = torch.randn(2, 24, 16), torch.randn(2, 2, 24, 8)
    expected = operator.memory(x, q, grid, plain=False)
    frozen = operator.memory(x, q + 1, grid, plain=False, plan=operator.plan(q, grid))
    assert gap(expected[0], frozen[0]) == 0
    assert gap(expected[1], frozen[1]) == 0


def test_counts() -> None:
    """Fact 4.18: (C/g)(k^2 + 5) + H (2h - 1)(2w - 1) parameters."""
    cost = DAT(stride=2, groups=3, kernel=5).operator_cost(Site(192, 3, Grid(14, 14, 1)))
    assert cost.params == 64 * 30 + 3 * 27 * 27
    assert cost.macs == 2 * 197 * 50 * 192 + 49 * 192 * 27


def test_what_is_refused() -> None:
    check_error(ConfigError, "groups=3 does not divide 2 heads", DAT(groups=3).build, Site(16, 2, Grid(4, 4)))
    check_error(ConfigError, "odd kernel", DAT, kernel=4)
    check_error(ConfigError, "dwc must be 0", DAT, dwc=3)
    check_error(UnsupportedError, "no rotary", DAT().build, Site(16, 2, Grid(4, 4), rotary=True))
