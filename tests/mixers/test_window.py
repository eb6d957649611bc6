"""Windows: shifts, ragged borders, the table of positions, padding, places."""

import pytest
import torch

from operators import check_error, draw_on
from regard import ConfigError, Grid, Mask, Site, Window
from regard.core import ShapeError
from regard.mixers.shared.tiles import balanced_tiles, fixed_size_tiles, grid_tiles
from regard.mixers.spelling import parse
from regard.ops import softmax_reference, window, window_reference
from regard.testing.subject import gap


@pytest.mark.parametrize("shift", [0, 1])
def test_a_token_is_attended_to_in_its_window_only(shift: int) -> None:
    """4x6 cells in 2x2 windows; with a shift of 1 the windows start one cell later, and nothing wraps around."""
    grid = Grid(4, 6, 1)
    q, k, v = (x.detach() for x in draw_on(grid))
    base = window(q, k, v, grid, 2, shift=shift)
    corner = {0: [(2, 4), (2, 5), (3, 4), (3, 5)], 1: [(3, 5)]}
    middle = {0: [(0, 4), (0, 5), (1, 4), (1, 5)], 1: [(1, 3), (1, 4), (2, 3), (2, 4)]}
    for cell, expected in (((3, 5), corner), ((1, 4), middle)):
        moved = v.clone()
        moved[:, :, 1 + cell[0] * 6 + cell[1]] += 1
        changed = (window(q, k, moved, grid, 2, shift=shift) - base).abs().amax((0, 1, 3)) > 1e-9
        assert changed[0]
        assert [tuple(x) for x in changed[1:].view(4, 6).nonzero().tolist()] == expected[shift]


def test_the_table_is_indexed_by_query_minus_key() -> None:
    """A table with one large entry at (dy, dx) = (1, -1): a query takes the value of the cell above right of it."""
    grid = Grid(3, 4)
    q, k, v = (x.detach() for x in draw_on(grid))
    table = torch.zeros(2, 5, 7, dtype=torch.float64)
    table[:, 1 + 2, -1 + 3] = 1e4
    out = window(q, k, v, grid, (3, 4), table=table).unflatten(2, (3, 4))
    assert gap(out[:, :, 1:, :3], v.unflatten(2, (3, 4))[:, :, :2, 1:]) < 1e-12


def test_a_window_of_the_grid_pattern_is_spread_over_the_map() -> None:
    """7x6 cells, 3x2 in a window: rows 3 apart, columns 3 apart; 7 rows have 3, 2 and 2 cells."""
    grid = Grid(7, 6, 1)
    q, k, v = (x.detach() for x in draw_on(grid))
    for form in (window, window_reference):
        base = form(q, k, v, grid, (3, 2), pattern="grid")
        for cell, rows, columns in (((3, 4), (0, 3, 6), (1, 4)), ((5, 0), (2, 5), (0, 3))):
            moved = v.clone()
            moved[:, :, 1 + cell[0] * 6 + cell[1]] += 1
            changed = (form(q, k, moved, grid, (3, 2), pattern="grid") - base).abs().amax((0, 1, 3)) > 1e-9
            assert changed[0]
            assert changed[1:].view(7, 6).nonzero().tolist() == [[y, x] for y in rows for x in columns]


def test_tiles_hold_every_cell_once() -> None:
    for grid in (Grid(5, 7), Grid(4, 6), Grid(1, 12)):
        fixed = [((2, 3),), ((4, 3), (1, 2)), ((8, 16), (5, 3))]
        spread = (grid_tiles(grid, size) for size in ((1, 2), (1, 6), (1, 7)))
        for tiles in (*(fixed_size_tiles(grid, *sizes) for sizes in fixed), balanced_tiles(grid, (1, 4)), *spread):
            assert tiles.tables.cell[tiles.tables.real].sort().values.tolist() == list(range(grid.cells))
            assert tiles.tables.cell.flatten()[tiles.tables.slot].tolist() == list(range(grid.cells))
            x = torch.randn(2, 1, grid.cells, 3)
            assert torch.equal(tiles.join(tiles.cut(x)), x)
            assert torch.equal(tiles.cut(x)[:, :, tiles.tables.real], x[:, :, tiles.tables.cell[tiles.tables.real]])


OF_TILES = [
    "Window(size=4)",
    "BRA(regions=2, k=2)",
    "MHLA(m=4)",
    "MoBA(block=(4, 4))",
    "NSA(block=(2, 2))",
    "Neighbourhood()",
]


@pytest.mark.untyped
@pytest.mark.parametrize("text", OF_TILES)
def test_uneven_tiles_compile_whole(text: str) -> None:
    """One graph also where tables are made: 7 x 9 cells in tiles that do not divide them."""
    torch.compiler.reset()
    grid = Grid(7, 9, 1)
    layer = parse(text).build(Site(16, 2, grid)).eval()
    x = torch.randn(2, grid.tokens, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x, grid), layer(x, grid), atol=1e-6)


@pytest.mark.slow
@pytest.mark.untyped
@pytest.mark.parametrize("text", OF_TILES)
def test_tiles_compile_for_one_grid_after_another(text: str) -> None:
    """From the second grid on sizes are symbols to the compiler, which cannot take a slice that may be empty."""
    torch.compiler.reset()
    for grid in (Grid(8, 8), Grid(7, 9, 1), Grid(5, 6, 1, 2)):
        layer = parse(text).build(Site(16, 2, grid)).eval()
        x = torch.randn(2, grid.tokens, 16)
        assert torch.allclose(torch.compile(layer, fullgraph=True)(x, grid), layer(x, grid), atol=1e-6)


def test_counts_and_start() -> None:
    """Fact 4.19: (2w - 1)^2 H parameters, 2 N w^2 C; the table starts at zero and is not decayed."""
    site = Site(192, 3, Grid(14, 14))
    cost = Window(size=7).operator_cost(site)
    assert (cost.params, cost.macs) == (13 * 13 * 3, 2 * 196 * 49 * 192)
    assert Window(size=7, shift=3).operator_cost(Site(192, 3, Grid(14, 14))).macs == cost.macs


def test_a_swapped_window_as_large_as_the_grid_starts_as_softmax() -> None:
    grid = Grid(4, 6, 1)
    q, k, v = draw_on(grid)
    out = Window(size=6).operator(Site(16, 2, grid))(q, k, v, grid=grid)
    assert gap(out, softmax_reference(q, k, v)) < 1e-12


@pytest.mark.untyped
@pytest.mark.parametrize(("size", "shift"), [(101, 0), ((101, 3), (2, 1)), ((5, 101), (1, 99)), (9, 4)])
def test_a_window_larger_than_the_grid_costs_what_the_grid_reaches(
    size: int | tuple[int, int], shift: int | tuple[int, int]
) -> None:
    grid = Grid(4, 6, 1)
    q, k, v = draw_on(grid)
    rows, columns = (size, size) if isinstance(size, int) else size
    table = torch.randn(2, 2 * rows - 1, 2 * columns - 1, dtype=torch.float64)
    keep = torch.rand(3, grid.tokens) > 0.3
    for mask in (None, Mask(keep=keep)):
        fast = window(q, k, v, grid, size, shift=shift, table=table, mask=mask)
        assert gap(fast, window_reference(q, k, v, grid, size, shift=shift, table=table, mask=mask)) < 1e-12
    site = Site(12, 2, grid)
    full, own = (Window(size=s).operator_cost(site).macs for s in (size, (min(rows, 4), min(columns, 6))))
    assert full == own


def test_what_is_refused() -> None:
    grid = Grid(4, 6)
    q, k, v = draw_on(grid)
    check_error(ConfigError, "below the window's side", Window, size=3, shift=3)
    check_error(ConfigError, "have no shift", Window, size=3, shift=1, pattern="grid")
    check_error(ConfigError, "at least 1x1", window, q, k, v, grid, 0)
    with pytest.raises(ShapeError, match="table has shape"):
        window(q, k, v, grid, 2, table=torch.zeros(2, 3, 5, dtype=torch.float64))
    check_error(ShapeError, "k has tokens 24, q has 5", window, q[:, :, :5], k, v, grid, 2)
