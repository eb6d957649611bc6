"""MoBA: its executions, the choice of blocks by hand, ragged blocks, padding."""

import pytest
import torch

from operators import check_error, draw_on
from regard import ConfigError, Grid, MoBA, Site
from regard.core import ShapeError
from regard.mixers.shared.block_attention import BlockPlan
from regard.ops import moba, moba_plan
from regard.testing.subject import gap

FORMS = ("dense", "gather", "grouped")


def test_the_choice_by_hand() -> None:
    """Own block always, then the block with the best mean key; per head; runs of 5 on 3x4 cells are 5, 5 and 2."""
    grid = Grid(3, 4, 1)
    q, k, _ = (x.detach() for x in draw_on(grid))
    for own in (True, False):
        plan = moba_plan(q, k, grid, 5, 2, own=own).blocks
        for h in range(2):
            means = torch.stack([part.mean(0) for part in k[1, h, 1:].split(5)])
            for i in range(13):
                scores = q[1, h, i] @ means.mT
                if own and i:
                    scores[(i - 1) // 5] = torch.inf
                assert set(plan[1, h, i].tolist()) == set(scores.topk(2).indices.tolist())


def test_one_own_block_is_window_attention() -> None:
    """Fact 4.12: t = 1 with the own block is attention in windows; a cell of another block does not matter."""
    grid = Grid(4, 6)
    q, k, v = (x.detach() for x in draw_on(grid))
    base = moba(q, k, v, grid, (2, 3), 1)
    v[:, :, 3 * 6 + 1] += 1  # row 3, column 1
    changed = (moba(q, k, v, grid, (2, 3), 1) - base).abs().amax((0, 1, 3)).view(4, 6) > 1e-9
    assert changed.nonzero().tolist() == [[y, x] for y in (2, 3) for x in (0, 1, 2)]


def test_blocks_of_one_cell_are_top_k() -> None:
    """Fact 4.12: n = 1 without the own block is exact top-k."""
    grid = Grid(3, 5)
    q, k, v = draw_on(grid)
    logits = q @ k.mT * 8**-0.5
    best = logits.topk(4)
    expected = torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1)) @ v
    for form in FORMS:
        assert gap(moba(q, k, v, grid, 1, 4, own=False, execution=form), expected) < 1e-12


def test_gates_pass_no_gradient() -> None:
    grid = Grid(4, 4)
    q, k, v = draw_on(grid)
    plan = moba_plan(q, k, grid, 4, 2)
    grads = (torch.autograd.grad(moba(q, k, v, grid, 4, 2, plan=p).square().sum(), (q, k, v)) for p in (None, plan))
    assert all(gap(a, b) == 0 for a, b in zip(*grads, strict=True))


@pytest.mark.untyped
def test_what_is_refused() -> None:
    grid = Grid(4, 6)
    q, k, v = draw_on(grid)
    check_error(ShapeError, "top=5 of 4 blocks", moba, q, k, v, grid, (2, 3), 5)
    check_error(ConfigError, r"4 blocks of \(2, 3\); k is at most 4", MoBA(block=(2, 3), k=5).build, Site(16, 2, grid))
    check_error(ConfigError, "at least 1", MoBA, block=0)
    with pytest.raises(ShapeError, match="plan.blocks"):
        moba(q, k, v, grid, 4, 1, plan=BlockPlan(torch.zeros(3, 2, 24, 2, dtype=torch.long)))
    with pytest.raises(ConfigError, match="execution is auto, triton, varlen, dense, gather or grouped, not 'native'"):
        moba(q, k, v, grid, 4, 1, execution="native")
    plan = BlockPlan(torch.arange(24).expand(3, 2, -1)[..., None] % 7)
    for form in FORMS:
        with pytest.raises(ShapeError, match="plan.blocks has indices from 0 to 6; expected 0 to 5"):
            moba(q, k, v, grid, 4, 1, plan=plan, execution=form)


def test_cost() -> None:
    """Fact 4.12: N (N/n) C + 2 N t n C."""
    cost = MoBA(block=(7, 7), k=2).operator_cost(Site(192, 3, Grid(14, 14)))
    assert cost.macs == 196 * 4 * 192 + 2 * 196 * 2 * 49 * 192
