"""Bi-level routing: its selection, regions that do not divide the grid, padding, positions."""

import pytest
import torch

from operators import check_error, check_hidden, draw_on
from regard import BRA, ConfigError, Grid, Mask, Site
from regard.core import GridError, ShapeError
from regard.mixers.bra import BRAPlan
from regard.ops import bra, bra_plan, bra_reference
from regard.testing.subject import gap


def test_routing_by_hand_on_a_rectangular_grid() -> None:
    """Means over regions, all heads together: the paper's A_r with loops."""
    grid = Grid(4, 6, 1)
    q, k, _ = (x.detach() for x in draw_on(grid))
    plan = bra_plan(q, k, grid, (2, 3), 2).regions
    for b in range(3):
        means = {}
        for name, x in (("q", q), ("k", k)):
            cells = x[b, :, 1:].transpose(0, 1).reshape(4, 6, 16)
            means[name] = [cells[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((0, 1)) for i in range(2) for j in range(3)]
        scores = torch.stack([torch.stack([a @ c for c in means["k"]]) for a in means["q"]])
        for r in range(6):
            assert set(plan[b, r].tolist()) == set(scores[r].topk(2).indices.tolist())


def test_regions_with_equal_scores_are_distinct_and_serve_both_forms() -> None:
    """Ties are broken arbitrarily, but a query attends to exactly `top` different regions."""
    grid = Grid(4, 6)
    q, k, v = (x.detach() for x in draw_on(grid))
    k = k[:, :, :1].expand_as(k)  # every region scores the same
    plan = bra_plan(q, k, grid, (2, 3), 4)
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in plan.regions.flatten(0, 1).tolist())
    fast, plain = (form(q, k, v, grid, (2, 3), 4, plan=plan) for form in (bra, bra_reference))
    assert gap(fast, plain) < 1e-12
    means = v.unflatten(2, (2, 2, 3, 2)).mean((3, 5)).flatten(2, 3)  # (B, H, 6, e): of the regions
    expected = torch.stack([means[image][:, rows].mean(2) for image, rows in enumerate(plan.regions)])
    assert gap(fast.unflatten(2, (2, 2, 3, 2))[:, :, :, 0, :, 0].flatten(2, 3), expected) < 1e-12
    assert bra(q, k, v, grid, (2, 3), 4).isfinite().all()


def test_a_changed_cell_changes_the_regions_that_choose_its_region() -> None:
    """Region 1 of 2x3 on 4x6 cells (rows 0-1, columns 2-3) attends to region 5 (rows 2-3, columns 4-5)."""
    grid = Grid(4, 6, 1)
    q, k, v = (x.detach() for x in draw_on(grid))
    plan = BRAPlan(torch.tensor([[[0], [5], [2], [3], [4], [1]]] * 3))
    base = bra(q, k, v, grid, (2, 3), 1, plan=plan)
    v[:, :, 1 + 3 * 6 + 4] += 1  # row 3, column 4
    changed = (bra(q, k, v, grid, (2, 3), 1, plan=plan) - base).abs().amax((0, 1, 3)) > 1e-9
    assert changed[0]  # the prefix token attends to all tokens
    assert changed[1:].view(4, 6).nonzero().tolist() == [[0, 2], [0, 3], [1, 2], [1, 3]]


def test_one_token_regions_are_top_k_on_cells() -> None:
    """Fact 4.13: one token a region and one head: exact top-k."""
    grid = Grid(3, 5)
    q, k, v = (x[:, :1] for x in draw_on(grid))
    best = (q @ k.mT).topk(4).indices
    allowed = torch.zeros(3, 1, 15, 15, dtype=torch.bool).scatter(-1, best, True)
    expected = ((q @ k.mT) * 8**-0.5).masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    assert gap(bra(q, k, v, grid, (3, 5), 4), expected) < 1e-12


def test_padding_is_not_averaged_and_empty_regions_come_last() -> None:
    grid = Grid(4, 4, 1)
    q, k, v = (x.detach() for x in draw_on(grid))
    keep = torch.ones(3, 17, dtype=torch.bool)
    keep[:, 1 + 8 :] = False  # the lower half: regions 2 and 3
    assert set(bra_plan(q, k, grid, 2, 2, mask=Mask(keep=keep)).regions[:, :2].flatten().tolist()) == {0, 1}
    check_hidden(lambda *inputs: bra(*inputs, grid, 2, 2, mask=Mask(keep=keep)), (k, v), keep, queries=q)


def test_official_scale_uses_all_channels() -> None:
    """Fact 4.13: the published code scales by C^-0.5, not d^-0.5."""
    grid = Grid(4, 4)
    q, k, v = draw_on(grid)
    site = Site(16, 2, grid)
    paper, official = (BRA(regions=2, k=2, preset=p).operator(site)(q, k, v, grid=grid) for p in ("paper", "official"))
    assert gap(official, bra(q, k, v, grid, 2, 2, scale=16**-0.5)) == 0
    assert gap(paper, bra(q, k, v, grid, 2, 2, scale=8**-0.5)) < 1e-12
    assert gap(paper, official) > 1e-2


@pytest.mark.untyped
def test_what_is_refused() -> None:
    grid = Grid(4, 6)
    q, k, v = draw_on(grid)
    check_error(GridError, r"nearest possible: \(4, 6\)", bra, q, k, v, grid, 7, 4)
    check_error(GridError, r"nearest: regions=\(4, 6\)", BRA().build, Site(16, 2, grid))
    check_error(ShapeError, "top=5 of 4 regions", bra, q, k, v, grid, 2, 5)
    check_error(ConfigError, "k=5 of 4 regions", BRA, regions=2, k=5)
    with pytest.raises(ShapeError, match="plan.regions"):
        bra(q, k, v, grid, 2, 1, plan=BRAPlan(torch.zeros(3, 4, 2, dtype=torch.long)))
    for wrong in (4, -1):  # would be a region of the next or of the last head
        plan = BRAPlan(torch.full((3, 4, 1), wrong))
        with pytest.raises(ShapeError, match=f"plan.regions has indices from {wrong} to {wrong}; expected 0 to 3"):
            bra(q, k, v, grid, 2, 1, plan=plan)
    with pytest.raises(GridError):
        bra(q, k, v, Grid(4, 4), 2, 1)


def test_counts_of_deit_tiny() -> None:
    """Facts 4.13, 6: no parameters; with a 3x3 convolution 5,740,456; 1.09 GMAC in the paper's counting."""
    site = Site(192, 3, Grid(14, 14, 1))
    config = BRA(regions=7, k=4)
    assert config.operator_cost(site).params == 0
    assert 5_717_416 + 12 * (BRA(dwc=3).cost(site).params - config.cost(site).params) == 5_740_456
    layer = 4 * 197 * 192**2 + 8 * 197 * 192**2 + config.operator_cost(site, "paper").macs
    total = 196 * 768 * 192 + 12 * layer + 192 * 1000
    assert round(total / 1e9, 2) == 1.09
