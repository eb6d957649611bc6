"""Tables that follow from sizes are kept, and never those of a graph, of fake tensors or of inference mode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from regard import Grid, Site, parse
from regard.mixers.shared.kept import kept
from regard.mixers.shared.tiles import fixed_size_tiles
from regard.mixers.window import window

GRID = Grid(5, 7)


def drawn() -> list[torch.Tensor]:
    return [torch.randn(1, 2, GRID.tokens, 4, requires_grad=True) for _ in range(3)]


def test_equal_sizes_share_tables() -> None:
    first, again, other = (fixed_size_tiles(GRID, size).tables for size in ((2, 3), (2, 3), (3, 3)))
    assert first.cell is again.cell
    assert first.cell.shape != other.cell.shape


@pytest.mark.untyped
def test_tables_of_fake_tensors_are_not_kept() -> None:
    tiles = fixed_size_tiles(Grid(4, 9), (3, 2))
    with FakeTensorMode():
        assert isinstance(tiles.tables.cell, FakeTensor)
    assert not isinstance(tiles.tables.cell, FakeTensor)


def test_inference_first_then_training() -> None:
    with torch.inference_mode():
        before = window(*drawn(), GRID, 3, shift=1)
    leaves = drawn()
    window(*leaves, GRID, 3, shift=1).sum().backward()
    assert leaves[0].grad is not None
    assert before.shape == leaves[0].shape


def test_nothing_is_kept_in_a_function_transform() -> None:
    calls = []

    @kept
    def build(number: int) -> torch.Tensor:
        calls.append(number)
        return torch.arange(number)

    for _ in range(2):
        torch.func.vmap(lambda x: x + build(3))(torch.zeros(2, 3))
    assert calls == [3, 3]
    assert build(3) is build(3)
    assert calls == [3, 3, 3]


@pytest.mark.parametrize("text", ["Window(size=3, shift=1)", "Neighbourhood(window=3)", "BRA(regions=2, k=2)", "NSA()"])
def test_the_second_pass_and_grid_are_as_the_first(text: str) -> None:
    layer = parse(text).build(Site(8, 2, GRID)).eval()
    for grid in (GRID, Grid(7, 5), GRID):
        x = torch.randn(2, grid.tokens, 8)
        first = layer(x, grid)
        assert torch.allclose(first, layer.reference(x, grid), atol=1e-6)
        assert torch.equal(first, layer(x, grid))
