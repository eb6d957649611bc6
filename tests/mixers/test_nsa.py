"""NSA-like attention: each branch alone, the choice, executions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from operators import check_error, draw_on
from regard import NSA, ConfigError, Grid, Site
from regard.core import ShapeError
from regard.mixers.nsa import neighbours
from regard.mixers.shared.block_attention import BlockPlan
from regard.ops import moba, nsa, nsa_reference, softmax_reference
from regard.testing.subject import gap

GRIDS = (Grid(4, 6, 2), Grid(3, 5, 1, 2), Grid(1, 12))


def draw(grid: Grid) -> tuple[Tensor, ...]:
    return *draw_on(grid), torch.rand(3, 2, grid.tokens, 3, dtype=torch.float64, requires_grad=True)


def only(branch: int, like: Tensor) -> Tensor:
    return torch.eye(3, dtype=like.dtype)[branch].expand_as(like)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_branch_alone(grid: Grid) -> None:
    """Facts 4.14: selected with all blocks and sliding with a window beyond the grid are softmax; compressed is
    Linformer with block means; the sum is not one softmax."""
    q, k, v, gates = draw(grid)
    full = softmax_reference(q, k, v)
    assert gap(nsa(q, k, v, only(1, gates), grid, 5, -(-grid.cells // 5), 3), full) < 1e-12
    assert gap(nsa(q, k, v, only(2, gates), grid, 5, 1, 25), full) < 1e-12
    cells = [x[:, :, grid.span].split(5, 2) for x in (k, v)]
    extra = [torch.cat([x[:, :, : grid.prefix], x[:, :, grid.prefix + grid.cells :]], 2) for x in (k, v)]
    few = [torch.cat([torch.stack([c.mean(2) for c in x], 2), e], 2) for x, e in zip(cells, extra, strict=True)]
    assert gap(nsa(q, k, v, only(0, gates), grid, 5, 1, 3), softmax_reference(q, *few)) < 1e-12
    assert gap(nsa(q, k, v, torch.ones_like(gates), grid, 5, -(-grid.cells // 5), 25), full) > 1e-2


def test_blocks_are_chosen_by_the_compressed_weights_of_the_group() -> None:
    grid = Grid(4, 5)
    q, k, v, gates = draw(grid)
    means = torch.stack([x.mean(2) for x in k.split(4, 2)], 2)
    weights = (q @ means.mT * 8**-0.5).softmax(-1)
    for group, score in ((1, weights), (2, weights.sum(1, keepdim=True).expand_as(weights))):
        plan = BlockPlan(score.topk(2).indices)
        out = nsa(q, k, v, only(1, gates), grid, 4, 2, 3, group=group)
        assert gap(out, nsa(q, k, v, only(1, gates), grid, 4, 2, 3, plan=plan)) < 1e-12
    assert gap(out, moba(q, k, v, grid, 4, 2, plan=BlockPlan(plan.blocks))) < 1e-12


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("form", [nsa, nsa_reference])
def test_blocks_are_chosen_where_all_weights_but_one_underflow(form: Callable[..., Tensor], group: int) -> None:
    q, k, v, gates = draw(grid := Grid(4, 5))
    q, k = 30 * q, 30 * k
    means = torch.stack([x.mean(2) for x in k.split(4, 2)], 2)
    score = (q @ means.mT * 8**-0.5).log_softmax(-1)
    if group == 2:
        score = score.logsumexp(1, keepdim=True).expand_as(score)
    q, k, v, gates = (x.float() for x in (q, k, v, only(1, gates)))
    out = form(q, k, v, gates, grid, 4, 3, 3, group=group)
    assert gap(out, form(q, k, v, gates, grid, 4, 3, 3, plan=BlockPlan(score.topk(3).indices))) < 1e-5


def test_neighbours_of_a_corner() -> None:
    cells, real = neighbours(Grid(3, 4), 3)
    assert real is not None
    assert sorted(cells[0][real[0]].tolist()) == [0, 1, 4, 5]
    assert sorted(cells[7][real[7]].tolist()) == [2, 3, 6, 7, 10, 11]


@pytest.mark.untyped
def test_what_is_refused() -> None:
    q, k, v, gates = draw(grid := Grid(4, 6))
    check_error(ConfigError, "odd", nsa, q, k, v, gates, grid, 4, 1, 2)
    check_error(ConfigError, "group=3 does not divide 2 heads", NSA(group=3).build, Site(16, 2, grid))
    check_error(ShapeError, "top=7 of 6 blocks", nsa, q, k, v, gates, grid, 4, 7, 3)
    plan = BlockPlan(torch.full((3, 2, 24, 1), 6))
    with pytest.raises(ShapeError, match="plan.blocks has indices from 6 to 6; expected 0 to 5"):
        nsa(q, k, v, gates, grid, 4, 1, 3, plan=plan)
    with pytest.raises(ShapeError, match="gates has tokens 23, q has 24"):
        nsa(q, k, v, torch.zeros(3, 2, 23, 3, dtype=torch.float64), grid, 4, 1, 3)


def test_parameters_of_the_gates() -> None:
    """Fact 4.14: 3 (C H + H)."""
    assert NSA().operator_cost(Site(192, 3, Grid(14, 14, 1))).params == 3 * (192 * 3 + 3)
