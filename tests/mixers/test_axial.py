"""Axial and criss-cross attention: rows and columns query by query, what reaches what, counts."""

import pytest
import torch
from torch import Tensor

from operators import draw_on
from regard import Axial, Grid, Site
from regard.ops import axial, axial_reference, softmax_reference
from regard.testing.subject import gap

GRIDS = (Grid(4, 6, 2), Grid(5, 3, 1, 2), Grid(3, 7), Grid(1, 5, 1), Grid(1, 1))
grids = pytest.mark.parametrize("grid", GRIDS, ids=str)


def query_by_query(q: Tensor, k: Tensor, v: Tensor, grid: Grid, rows: bool, columns: bool) -> Tensor:
    """CCNet, Eq. 1-2, with a loop over the tokens: a softmax over row and column, the own position once."""
    out = softmax_reference(q, k, v)
    extra = [*range(grid.prefix), *range(grid.prefix + grid.cells, grid.tokens)]
    for y in range(grid.height):
        for x in range(grid.width):
            near = {(y, x)}
            near |= {(y, j) for j in range(grid.width)} if rows else set()
            near |= {(i, x) for i in range(grid.height)} if columns else set()
            keys = [grid.prefix + i * grid.width + j for i, j in near] + extra
            own = grid.prefix + y * grid.width + x
            logits = (q[:, :, own, None] * k[:, :, keys]).sum(-1) * q.shape[-1] ** -0.5
            out[:, :, own] = (logits.softmax(-1)[..., None] * v[:, :, keys]).sum(-2)
    return out


@grids
def test_rows_and_columns_query_by_query(grid: Grid) -> None:
    q, k, v = (x.detach() for x in draw_on(grid))
    row, column = (query_by_query(q, k, v, grid, axis == 0, axis == 1) for axis in range(2))
    expected = {
        "rows": row,
        "columns": column,
        "sum": row + column,
        "both": query_by_query(q, k, column, grid, True, False),
        "cross": query_by_query(q, k, v, grid, True, True),
    }
    for along, out in expected.items():
        for form in (axial, axial_reference):
            assert gap(form(q, k, v, grid, along), out) < 1e-12


def test_criss_cross_has_h_plus_w_minus_1_keys_and_both_axes_reach_all() -> None:
    grid = Grid(4, 6)
    q, k, _ = (x.detach() for x in draw_on(grid))
    one = torch.eye(24, dtype=torch.float64).expand(3, 2, -1, -1)
    assert ((axial(q, k, one, grid, "cross") > 0).sum(-1) == 4 + 6 - 1).all()
    for along, total in (("cross", 1.0), ("both", 1.0), ("sum", 2.0)):
        assert (axial(q, k, one, grid, along).sum(-1) - total).abs().max() < 1e-12
    assert (axial(q, k, one, grid, "both") > 0).all()


@pytest.mark.parametrize("along", ["both", "cross"])
def test_on_a_line_it_is_softmax_attention(along: str) -> None:
    grid = Grid(1, 7, 1)
    q, k, v = draw_on(grid)
    expected = softmax_reference(q, k, v)
    if along == "both":  # each column is one patch token
        expected = softmax_reference(q, k, axial(q, k, v, grid, "columns"))
    assert gap(axial(q, k, v, grid, along), expected) < 1e-12


def test_autocast_along_both_axes() -> None:
    grid = Grid(4, 6)
    q, k, v = (x.detach().float() for x in draw_on(grid))
    with torch.autocast("cpu", torch.bfloat16):
        out = axial(q, k, v, grid)
    assert gap(out, axial(q, k, v, grid)) < 0.05


def test_counts() -> None:
    """2 N (H + W) C, and for one axis 2 N W C or 2 N H C."""
    site = Site(192, 3, Grid(10, 14))
    for along, keys in (("rows", 14), ("columns", 10), ("both", 24), ("sum", 24), ("cross", 24)):
        assert Axial(along=along).operator_cost(site).macs == 2 * 140 * keys * 192
