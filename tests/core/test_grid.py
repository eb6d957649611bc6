"""Grid: places of tokens, windows, layers without a grid. Round trips of random grids: tests/fuzz/test_values.py."""

import pytest
import torch

from operators import check_error
from regard import Grid, Site, parse
from regard.core import GridError


def test_rows_come_first_and_extra_tokens_stay_outside() -> None:
    grid = Grid(2, 3, prefix=1, suffix=2)
    x = torch.arange(9.0)[None, :, None]
    extra, cells = grid.to_map(x)
    assert cells[0, 0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert extra[0, :, 0].tolist() == [0, 7, 8]
    assert x[0, grid.span, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_counts() -> None:
    grid = Grid(14, 14, prefix=1, suffix=4)
    assert (grid.cells, grid.extra, grid.tokens) == (196, 5, 201)
    assert Grid.sequence(7, prefix=2) == Grid(1, 7, 2)


def test_a_grid_has_cells() -> None:
    check_error(GridError, "at least 1x1", Grid, 0, 3)


def test_wrong_number_of_tokens_says_both_numbers() -> None:
    said = r"203 tokens do not fit 14x14 patch \+ 1 prefix \+ 0 suffix tokens \(= 197\)"
    check_error(GridError, said, Grid(14, 14, 1).check, torch.zeros(1, 203, 4))


def test_a_transposed_map_is_refused() -> None:
    grid = Grid(2, 3)
    check_error(GridError, "3x2", grid.from_map, torch.zeros(1, 0, 4), torch.zeros(1, 4, 3, 2))


@pytest.mark.parametrize(
    ("grid", "m", "expected"),
    [
        (Grid(14, 14), 25, (5, 5)),
        (Grid(14, 14), 24, (6, 4)),
        (Grid(32, 64), 32, (4, 8)),
        (Grid(7, 9), 12, (3, 4)),
        (Grid(7, 14), 8, (2, 4)),
        (Grid(14, 7), 8, (4, 2)),
        (Grid(14, 14), 8, (4, 2)),  # a tie takes more rows
        (Grid(1, 12), 4, (1, 4)),
        (Grid(3, 5), 1, (1, 1)),
    ],
)
def test_windows_follow_the_aspect(grid: Grid, m: int, expected: tuple[int, int]) -> None:
    assert grid.factor(m) == expected


def test_an_absurd_number_of_windows_is_refused_at_once() -> None:
    """No loop goes to the number itself."""
    check_error(GridError, "nearest possible: 24, 25, 28, 30", Grid(5, 7).factor, 26)
    check_error(GridError, "nearest possible: 25, 28, 30, 35", Grid(5, 7).factor, 10**10)


@pytest.mark.parametrize("text", ["Softmax", "Conv", "PVT", "ViT3"])
def test_a_layer_without_a_grid_takes_that_of_its_site(text: str) -> None:
    grid = Grid(4, 6, 1)
    layer, x = parse(text).build(Site(16, 2, grid)), torch.randn(2, 25, 16)
    for run in (layer, layer.reference):
        assert torch.equal(run(x), run(x, grid))
        check_error(GridError, "24 tokens do not fit 4x6 patch", run, x[:, 1:])


def test_cross_attention_without_grids_takes_those_of_its_site() -> None:
    site = Site(16, 2, Grid(4, 6, 1), memory=Grid(2, 3))
    layer, x, memory = parse("Softmax").build_cross(site), torch.randn(2, 25, 16), torch.randn(2, 6, 16)
    assert torch.equal(layer(x, memory=memory), layer(x, site.grid, memory=memory, memory_grid=site.memory))
    check_error(GridError, "5 tokens do not fit 2x3 patch", layer, x, memory=memory[:, 1:])
