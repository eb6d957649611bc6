"""Neighbourhood attention: windows cell by cell, by the definitions of NAT, DiNAT, Longformer and ViL; counts."""

from itertools import product

import pytest
import torch
from torch import Tensor

from operators import check_error, draw_on
from regard import ConfigError, Grid, Neighbourhood, Site, Softmax
from regard.core import ShapeError
from regard.ops import neighbourhood, neighbourhood_reference, softmax_reference
from regard.testing.subject import gap

FURTHEST = {"shift": lambda w: w - 1, "cut": lambda w: w // 2, "blocks": lambda w: 2 * (w // 2) - 1}


def window_along(i: int, side: int, window: int, dilation: int, border: str) -> list[int]:
    """The cells along one axis that cell i attends to."""
    own = list(range(i % dilation, side, dilation))
    if border == "shift":  # the nearest ones, as many as the window has
        return sorted(own, key=lambda j: abs(j - i))[:window]
    if border == "cut":
        return [j for j in own if abs(j - i) <= dilation * (window // 2)]
    blocks = [own[start : start + window // 2] for start in range(0, len(own), window // 2)]
    at = next(number for number, block in enumerate(blocks) if i in block)
    return [j for block in blocks[max(at - 1, 0) : at + 2] for j in block]


def cell_by_cell(q: Tensor, k: Tensor, v: Tensor, grid: Grid, table: Tensor, **options: object) -> Tensor:
    """One softmax for each query; prefix and suffix tokens attend to all."""
    out, step, most = softmax_reference(q, k, v), options["dilation"], table.shape[-1] // 2
    extra = [*range(grid.prefix), *range(grid.prefix + grid.cells, grid.tokens)]
    for y, x in product(range(grid.height), range(grid.width)):
        near = [window_along(i, side, **options) for i, side in ((y, grid.height), (x, grid.width))]
        pairs = list(product(*near))
        i, keys = grid.prefix + y * grid.width + x, [grid.prefix + a * grid.width + b for a, b in pairs] + extra
        bias = [table[:, (y - a) // step + most, (x - b) // step + most] for a, b in pairs]
        bias = torch.stack([*bias, *[torch.zeros_like(table[:, 0, 0])] * len(extra)], -1)
        logits = (q[:, :, i, None] * k[:, :, keys]).sum(-1) * q.shape[-1] ** -0.5 + bias
        out[:, :, i] = (logits.softmax(-1)[..., None] * v[:, :, keys]).sum(-2)
    return out


@pytest.mark.parametrize("border", ["shift", "cut", "blocks"])
@pytest.mark.parametrize("grid", [Grid(4, 6, 2), Grid(9, 5, 1, 1), Grid(8, 15), Grid(1, 12, 1)], ids=str)
def test_windows_cell_by_cell(grid: Grid, border: str) -> None:
    q, k, v = (x.detach() for x in draw_on(grid))
    for window, dilation in ((3, 1), (5, 1), (3, 2), (5, 3), (7, 1), (3, 20)):
        side = 2 * FURTHEST[border](window) + 1
        table = torch.randn(2, side, side, dtype=torch.float64)
        options = {"window": window, "dilation": dilation, "border": border}
        expected = cell_by_cell(q, k, v, grid, table, **options)
        for form in (neighbourhood, neighbourhood_reference):
            assert gap(form(q, k, v, grid, table=table, **options), expected) < 1e-12


def test_each_query_has_as_many_keys_as_the_window() -> None:
    """NAT: also in the corner, where the window is shifted inwards."""
    grid = Grid(6, 7)
    q, k, _ = (x.detach() for x in draw_on(grid))
    one = torch.eye(grid.tokens, dtype=torch.float64).expand(3, 2, -1, -1)
    for form in (neighbourhood, neighbourhood_reference):
        assert ((form(q, k, one, grid, 5) > 0).sum(-1) == 25).all()
        assert ((form(q, k, one, grid, 3, dilation=2) > 0).sum(-1) == 9).all()


def test_a_window_as_large_as_the_grid_is_softmax_attention() -> None:
    grid = Grid(4, 6, 1)
    q, k, v = draw_on(grid)
    for window, border in ((7, "shift"), (101, "shift"), (11, "cut"), (7, "blocks")):
        assert gap(neighbourhood(q, k, v, grid, window, border=border), softmax_reference(q, k, v)) < 1e-12


def test_counts_and_start() -> None:
    """NAT: (2w - 1)^2 H parameters, 2 N w^2 C; the table starts at zero and is not decayed."""
    site = Site(192, 3, Grid(14, 14))
    cost = Neighbourhood(window=7).operator_cost(site, "paper")
    assert (cost.params, cost.macs) == (13 * 13 * 3, 2 * 196 * 49 * 192)
    assert Neighbourhood(window=7, border="cut").operator_cost(site).params == 7 * 7 * 3
    assert Neighbourhood(window=15, border="blocks").operator_cost(site).params == 27 * 27 * 3  # ViL: 4 * 7 - 1


def test_products_grow_with_the_tokens() -> None:
    """Tiles of 8 x 8 queries with 14 x 14 keys; softmax attention has 4096 keys."""
    site = Site(192, 3, Grid(64, 64))
    assert Neighbourhood(window=7).operator_cost(site).macs == 2 * 4096 * 14**2 * 192
    assert Softmax().operator_cost(site).macs == 2 * 4096**2 * 192


def test_what_is_refused() -> None:
    grid = Grid(4, 6)
    q, k, v = draw_on(grid)
    check_error(ConfigError, "odd side of a square of cells, at least 1, .* not window=4", Neighbourhood, window=4)
    check_error(ConfigError, "at least 3", Neighbourhood, window=1, border="blocks")
    check_error(ConfigError, "dilation=0", neighbourhood, q, k, v, grid, 3, dilation=0)
    with pytest.raises(ShapeError, match="table has shape"):
        neighbourhood(q, k, v, grid, 3, table=torch.zeros(2, 3, 3, dtype=torch.float64))
