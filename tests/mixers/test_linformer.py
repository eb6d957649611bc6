"""Linformer: what special projections give, other grids, warm start, sharing."""

import pytest
import torch

from operators import check_error, check_hidden, draw_qkv
from regard.core import ConfigError, Grid, GridError, Mask, ShapeError, Site
from regard.mixers.linformer import Linformer, linformer
from regard.mixers.shared.landmarks import pool_landmarks, pool_matrix
from regard.mixers.softmax import softmax_reference

F64 = torch.float64


def test_identity_is_softmax_and_the_mean_is_the_mean():
    """Section 4.8: E = F = I and E = F = 1 / N."""
    q, k, v = draw_qkv()
    eye = torch.eye(9, dtype=F64)[None]
    assert torch.allclose(linformer(q, k, v, eye, eye), softmax_reference(q, k, v), atol=1e-12)
    mean = torch.full((1, 1, 9), 1 / 9, dtype=F64)
    assert torch.allclose(linformer(q, k, v, mean, mean), v.mean(2, keepdim=True).expand(-1, -1, 13, -1), atol=1e-12)


def test_pooling_is_attention_to_averaged_keys():
    """Section 4.8: E = F = P, which is also what init="pool" starts from."""
    grid = Grid(4, 6, 1)
    q, k, v = draw_qkv(25, 25)
    pooled = softmax_reference(q, pool_landmarks(k, grid, 6), pool_landmarks(v, grid, 6))
    matrix = pool_matrix(grid, 6, dtype=F64)[None]
    assert torch.allclose(linformer(q, k, v, matrix, matrix), pooled, atol=1e-12)
    operator = Linformer(m=6, init="pool").operator(Site(16, 2, grid)).double()
    assert torch.allclose(operator(q, k, v, grid=grid), pooled, atol=1e-6)


def test_hidden_keys_may_hold_anything():
    q, k, v = draw_qkv()
    matrix = torch.randn(1, 4, 9, dtype=F64)
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[:, 5:] = False
    cropped = linformer(q, k[:, :, :5], v[:, :, :5], matrix[..., :5], matrix[..., :5])
    out = check_hidden(lambda k, v: linformer(q, k, v, matrix, matrix, mask=Mask(keep=keep)), (k, v), keep)
    assert torch.allclose(out, cropped, atol=1e-12)
    empty = linformer(q, k, v, matrix, matrix, mask=Mask(keep=torch.zeros_like(keep)))
    assert torch.equal(empty, torch.zeros_like(empty))


def test_another_grid_keeps_constants_and_extra_columns():
    """Columns of cells are resampled and scaled by the old over the new number; constant keys stay constant."""
    grid, larger = Grid(3, 5, 1, 2), Grid(6, 7, 1, 2)
    projection = Linformer(m=4).operator(Site(16, 2, grid)).project_k.double()
    with torch.no_grad():
        projection.cells.copy_(torch.rand(4)[:, None].expand(1, 4, 15))
    resampled = projection(larger)
    assert resampled.shape == (1, 4, 45)
    assert torch.allclose(resampled[..., 1:43].sum(-1), projection.cells.sum(-1), atol=1e-9)
    assert torch.equal(resampled[..., [0, 43, 44]], projection.extra)
    check_error(GridError, "prefix and suffix tokens must be the same", projection, Grid(3, 5))


def test_resampling_follows_the_image():
    """Only the first row of cells counts: on a grid of twice the rows the first two rows count most."""
    grid, larger = Grid(3, 5), Grid(6, 5)
    projection = Linformer(m=4).operator(Site(16, 2, grid)).project_k
    with torch.no_grad():
        projection.cells.zero_()[..., :5] = 1.0
    resampled = projection(larger)[0, 0].unflatten(0, (6, 5))
    assert (resampled[:2] > 0.25).all()
    assert (resampled[3:].abs() < 0.1).all()


@pytest.mark.parametrize(("share", "per_head", "factor"), [("", False, 2), ("kv", False, 1), ("", True, 6)])
def test_counts(share, per_head, factor):
    """Section 4.8: 2 m N a layer, with m = 64 in DeiT-T 302,592 in all; 4 N m C MACs."""
    site = Site(192, 3, Grid(14, 14, prefix=1))
    cost = Linformer(share=share, per_head=per_head).operator_cost(site)
    assert cost.params == factor * 64 * 197
    assert cost.macs == 4 * 197 * 64 * 192
    if factor == 2:
        assert 12 * cost.params == 302_592


def test_too_many_rows_are_refused():
    with pytest.raises(ConfigError, match="m=16, but the site has 15 keys; choose m between 1 and 15"):
        Linformer(m=16).operator(Site(16, 2, Grid(3, 5)))
    check_error(GridError, "nearest possible", Linformer(m=7, init="pool").operator, Site(16, 2, Grid(3, 5)))


def test_float32_projections_stand_beside_inputs_of_half_precision():
    q, k, v = (x.bfloat16() for x in draw_qkv())
    matrix = torch.randn(1, 4, k.shape[-2])
    assert torch.equal(linformer(q, k, v, matrix, matrix), linformer(q, k, v, matrix.bfloat16(), matrix.bfloat16()))


@pytest.mark.untyped
def test_wrong_calls_say_what_was_expected():
    q, k, v = draw_qkv()
    matrix = torch.randn(1, 4, 8, dtype=F64)
    check_error(ShapeError, "project_k has tokens 8, k has 9", linformer, q, k, v, matrix, matrix)
