"""Small windows in tiles: the same as the mask over all pairs, for every cut, and with what falls outside of it."""

import itertools

import pytest
import torch

from factor_inputs import inputs
from operators import check_gradients
from regard.core import Grid, Mask, Site
from regard.mixers.factors.factors import Factors, factors, factors_reference
from regard.mixers.factors.window_tiles import attend_in_tiles, cut
from regard.testing.subject import gap

# rows and columns that tiles of 8 do not divide, extra tokens on either side, a line, more columns than rows
GRIDS = [(Grid(17, 26, 2, 1), 3), (Grid(25, 24), 5), (Grid(1, 300, 1), 9), (Grid(300, 1, 0, 2), 5), (Grid(9, 64), 3)]


@pytest.mark.parametrize("terms", ["1111", "0110", "0001", "0000"])
@pytest.mark.parametrize(("grid", "window"), GRIDS, ids=str)
def test_tiles_are_the_reference(grid, window, terms):
    assert cut(grid, window) is not None
    made, rest = inputs(terms, grid, d=2, e=3)
    for execution in ("auto", "compressed"):
        got = factors(**made, **rest, window=window, execution=execution)
        assert gap(got, factors_reference(**made, **rest, window=window)) < 1e-12


def test_every_cell_sees_its_window_and_nothing_else():
    """Without logits the output is the mean over the window: cell by cell, with values that name their cell."""
    grid, window = Grid(21, 30), 5
    v = torch.arange(630, dtype=torch.float64).view(1, 1, 630, 1)
    none = v.new_zeros(1, 1, 630, 1)
    out = attend_in_tiles(none, none, v, grid, grid, cut(grid, window)).view(21, 30)
    for y, x in itertools.product(range(21), range(30)):
        near = v.view(21, 30)[max(0, y - 2) : y + 3, max(0, x - 2) : x + 3]
        assert out[y, x].item() == pytest.approx(near.mean().item())


def test_gradients_of_tiles():
    """Queries beyond the map (21 rows in tiles of 7, 20 columns of 7) must not bring NaN."""
    grid = Grid(21, 20, 1)
    assert cut(grid, 3) is not None
    made, rest = inputs("1111", grid, batch=1, d=2, e=3)
    leaves = [x.requires_grad_() for x in (*made.values(), *rest["tables"], rest["u"], rest["t"])]
    fast, plain = (call(**made, **rest, window=3) for call in (factors, factors_reference))
    check_gradients(fast, plain, leaves, 1e-10)


def test_tiles_are_for_small_windows_without_masks():
    assert cut(Grid(40, 40), 7) is not None
    for grid, window in ((Grid(40, 40), 0), (Grid(40, 40), 13), (Grid(14, 14), 3), (Grid.sequence(100), 5)):
        assert cut(grid, window) is None
    grid = Grid(24, 20)
    made, rest = inputs("1111", grid, d=2, e=3)
    options = {**made, **rest, "window": 3, "mask": Mask(keep=torch.rand(3, grid.tokens) > 0.3)}
    assert torch.allclose(factors(**options), factors_reference(**options), rtol=0, atol=1e-12)


@pytest.mark.untyped
def test_tiles_compile_without_breaks():
    torch._dynamo.reset()
    grid = Grid(24, 20, 1)
    assert cut(grid, 3) is not None
    layer = Factors("1111", window=3).build(Site(16, 2, grid))
    x = torch.randn(2, grid.tokens, 16)
    fast = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.allclose(fast(x, grid), layer(x, grid), rtol=0, atol=1e-5)
