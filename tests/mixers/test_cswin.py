"""CSWin: stripes query by query and head by head, counts."""

import pytest
import torch

from operators import check_error, draw_on
from regard import ConfigError, CSWin, Grid, Site
from regard.ops import cswin, cswin_reference, softmax_reference
from regard.testing.subject import gap


@pytest.mark.parametrize("grid", [Grid(4, 6, 2), Grid(5, 3, 1, 2), Grid(6, 7), Grid(1, 5, 1)], ids=str)
@pytest.mark.parametrize("heads", [2, 3])
def test_stripes_query_by_query(grid: Grid, heads: int) -> None:
    """Head by head: horizontal stripes in the first half, vertical ones in the second."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, heads, grid.tokens, 8, dtype=torch.float64)
    extra = [*range(grid.prefix), *range(grid.prefix + grid.cells, grid.tokens)]
    for stripe in (1, 2, 4, 9):
        out = softmax_reference(q, k, v)
        for cell in range(grid.cells):
            y, x = divmod(cell, grid.width)
            for head in range(heads):
                if head < heads / 2:
                    start = y // stripe * stripe
                    near = [(i, j) for i in range(start, min(start + stripe, grid.height)) for j in range(grid.width)]
                else:
                    start = x // stripe * stripe
                    near = [(i, j) for i in range(grid.height) for j in range(start, min(start + stripe, grid.width))]
                keys = [grid.prefix + i * grid.width + j for i, j in near] + extra
                logits = (q[:, head, grid.prefix + cell, None] * k[:, head, keys]).sum(-1) * 8**-0.5
                out[:, head, grid.prefix + cell] = (logits.softmax(-1)[..., None] * v[:, head, keys]).sum(-2)
        for form in (cswin, cswin_reference):
            assert gap(form(q, k, v, grid, stripe), out) < 1e-12


def test_a_stripe_as_wide_as_the_map_is_softmax_attention() -> None:
    """As in the paper's last stage: 7 x 7 tokens in stripes of 7."""
    grid = Grid(7, 7, 1)
    q, k, v = draw_on(grid)
    assert gap(cswin(q, k, v, grid, 7), softmax_reference(q, k, v)) < 1e-12


def test_counts() -> None:
    """The paper, Sec. 3.2: N C (s H + s W) for heads of equal halves."""
    macs = CSWin(stripe=7).operator_cost(Site(192, 6, Grid(14, 28))).macs
    assert macs == 14 * 28 * 192 * (7 * 14 + 7 * 28)


def test_what_is_refused() -> None:
    grid = Grid(4, 6)
    q, k, v = draw_on(grid)
    check_error(ConfigError, "at least 1, not 0", CSWin, stripe=0)
    check_error(ConfigError, "at least 1, not 0", cswin, q, k, v, grid, 0)
    check_error(ConfigError, "two heads or more", CSWin().build, Site(16, 1, grid))
