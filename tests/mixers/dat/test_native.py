"""The position bias of deformable attention in compiled code against the plain form."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels import check_once, check_threads, needs_kernels, opcheck, runs_kernel
from operators import check_same
from regard import DAT, Grid, Site
from regard.mixers.dat.dat import DATOperator
from regard.mixers.dat.native import position_bias_native
from regard.testing.subject import gap

pytestmark = needs_kernels


def draw(grid: Grid, heads: int = 2, groups: int = 1, stride: int = 1) -> tuple[DATOperator, Tensor]:
    """An operator in float64, and points of two samples inside and outside the map."""
    torch.manual_seed(0)
    config = DAT(stride=stride, groups=groups)
    operator = config.operator(Site(8 * heads, heads, grid)).double()
    rows, columns = config.sides(grid)
    sides = torch.tensor([grid.height, grid.width])
    points = torch.rand(2, groups, rows * columns, 2, dtype=torch.float64) * (3 * sides + 4) - sides - 2
    return operator, points.requires_grad_()


@pytest.mark.parametrize(
    ("grid", "heads", "groups", "stride"),
    [
        (Grid(4, 6, 1), 2, 1, 1),
        (Grid(7, 5, 0, 2), 4, 2, 2),
        (Grid(1, 9), 1, 1, 1),
        (Grid(9, 1, 1, 1), 2, 2, 1),
        (Grid(17, 33), 2, 2, 3),
    ],
    ids=str,
)
def test_it_equals_the_plain_form(grid: Grid, heads: int, groups: int, stride: int) -> None:
    operator, points = draw(grid, heads, groups, stride)
    plain = operator._bias(points, grid, torch.float64, plain=True)
    fast = position_bias_native(operator.table, points, grid)
    check_same(fast, plain, (operator.table, points), 1e-13)


def test_gradients_are_those_of_finite_differences_and_have_none() -> None:
    grid = Grid(3, 4, 1)
    operator, points = draw(grid)
    assert torch.autograd.gradcheck(lambda *x: position_bias_native(*x, grid), (operator.table, points))
    check_once(position_bias_native(operator.table, points, grid), points)


def test_points_that_are_not_finite() -> None:
    """NaN gives NaN for its point alone, infinity a border value, as the plain form."""
    grid = Grid(4, 5)
    operator, points = draw(grid)
    with torch.no_grad():
        points[0, 0, 3, 0], points[1, 0, 2, 1], points[1, 0, 4, 1] = math.nan, math.inf, -math.inf
    bias = position_bias_native(operator.table, points, grid)
    assert bias[0, :, :, 3].isnan().all()
    assert bias.isnan().sum() == bias[0, :, :, 3].numel()
    with torch.no_grad():
        points[0, 0, 3, 0], points[1, 0, 2, 1], points[1, 0, 4, 1] = 0.3, 1e3, -1e3
    near = position_bias_native(operator.table, points, grid)
    assert gap(bias[1], near[1]) == 0


def test_threads_change_no_bit() -> None:
    grid = Grid(24, 25)
    operator, points = draw(grid, heads=4, groups=2)
    check_threads(lambda *x: position_bias_native(*x, grid), (operator.table, points))


@pytest.mark.untyped
def test_opcheck_and_vmap() -> None:
    grid = Grid(4, 5, 1)
    operator, points = draw(grid)
    opcheck("position_bias", operator.table, points, [4, 5, 1, 0])
    stacked, table = torch.stack([points, points.flip(0)]).detach(), operator.table.detach()
    mapped = torch.vmap(lambda points: torch.ops.regard.position_bias(table, points, [4, 5, 1, 0]))(stacked)
    assert gap(mapped[1], mapped[0].flip(0)) == 0


def test_the_default_takes_it_and_a_stretched_table_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(4, 6)
    operator, _ = draw(grid)
    q, x = torch.randn(2, 2, 24, 8, dtype=torch.float64), torch.randn(2, 24, 16, dtype=torch.float64)

    def taken(grid: Grid, tokens: int) -> bool:
        call = partial(operator.memory, x[:, :tokens], q[:, :, :tokens], grid, plain=False)
        return runs_kernel("position_bias", call)

    assert taken(grid, 24)
    assert not taken(Grid(4, 5), 20)
    monkeypatch.setenv("REGARD_NATIVE", "0")
    assert not taken(grid, 24)
