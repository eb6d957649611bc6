"""Spatial reduction: ragged maps, places, what it starts with, what it refuses. timm's layer: tests/external."""

import pytest
import torch

from operators import check_error
from regard import PVT, ConfigError, Grid, Site
from regard.core import GridError, UnsupportedError


def tokens(grid: Grid, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(3, grid.tokens, 16, dtype=torch.float64)


@pytest.mark.parametrize("grid", [Grid(4, 6, 2), Grid(3, 5, 1, 2), Grid(1, 12)], ids=str)
@pytest.mark.parametrize("config", [PVT(), PVT(ratio=3), PVT(pool=1)], ids=str)
def test_fast_and_plain_reduction_agree(grid: Grid, config: PVT) -> None:
    operator = config.operator(Site(16, 2, grid)).double()
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter.add_(torch.randn_like(parameter))
        x = tokens(grid)
        fast, plain = (operator.memory(x, x, grid, plain)[0] for plain in (False, True))
    rows, columns = config.sides(grid)
    assert fast.shape == (3, rows * columns + grid.extra, 16)
    assert (fast - plain).abs().max() < 1e-12
    assert torch.equal(fast[:, rows * columns + grid.prefix :], x[:, grid.prefix + grid.cells :])


def test_rows_that_the_ratio_does_not_divide_are_kept() -> None:
    """Fact 4.17: 5 rows at ratio 2 are 3 rows of keys, the last of one row and zeros; timm drops it."""
    grid = Grid(5, 4)
    operator = PVT(ratio=2).operator(Site(16, 2, grid)).double()
    x = tokens(grid)
    memory = operator.memory(x, x, grid, plain=False)[0].unflatten(1, (3, 2))
    last = torch.nn.functional.layer_norm(x.unflatten(1, (5, 4))[:, 4].unflatten(1, (2, 2)).sum(2) / 4, (16,))
    assert (memory[:, 2] - last).abs().max() < 1e-12


def test_a_changed_cell_changes_its_key_only() -> None:
    grid = Grid(4, 6, 1)
    operator = PVT(ratio=2).operator(Site(16, 2, grid)).double()
    x = tokens(grid)
    changed = x.clone()
    changed[:, 1 + 3 * 6 + 2, 0] += 1  # row 3, column 2: the patch in row 1, column 1
    memories = [operator.memory(y, y, grid, plain=False)[0] for y in (x, changed)]
    assert ((memories[0] - memories[1]).abs().amax((0, 2)) > 1e-9).nonzero().flatten().tolist() == [1 * 3 + 1]


def test_counts() -> None:
    """Fact 4.17: r^2 C^2 + C + 2 C parameters; 2 N (N/r^2) C + N C^2 (the convolution) MACs, fewer keys projected."""
    site = Site(192, 3, Grid(14, 14))
    cost = PVT(ratio=2).operator_cost(site)
    assert cost.params == 4 * 192**2 + 3 * 192
    assert cost.macs == 2 * 196 * 49 * 192 + 196 * 192**2
    projections = PVT(ratio=2).cost(site).macs - cost.macs
    assert projections == (2 * 196 + 2 * 49) * 192**2


def test_what_is_refused() -> None:
    check_error(ConfigError, "dwc must be 0", PVT, dwc=3)
    check_error(ConfigError, "remove ratio=4", PVT, ratio=4, pool=7)
    check_error(GridError, "pool=7 is larger", PVT(pool=7).build, Site(16, 2, Grid(4, 9)))
    check_error(UnsupportedError, "no rotary", PVT().build, Site(16, 2, Grid(4, 4), rotary=True))
