"""MHLA: blocks on ragged grids, the mixture of blocks, and the normaliser of each query by itself."""

import pytest
import torch

from operators import check_error, draw_qkv
from regard.core import ConfigError, Grid, GridError, Mask, ShapeError, Site
from regard.mixers.linear import linear_reference
from regard.mixers.mhla import MHLA, block_of, mhla

F64 = torch.float64
GRIDS = (Grid(4, 6, 2), Grid(7, 5, 1), Grid(3, 5, 1, 2), Grid(6, 6), Grid(1, 12))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equal_mixture_is_global_linear_attention(grid):
    q, k, v = draw_qkv(grid.tokens, grid.tokens)
    m = 3 if grid.height in (1, 3, 6) else (2, 3)
    number = (m if m == 3 else 6) + bool(grid.extra)
    out = mhla(q, k, v, torch.ones(number, number, dtype=F64), grid, m)
    assert torch.allclose(out, linear_reference(q, k, v, feature="relu"), atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_identity_is_linear_attention_within_each_block(grid):
    q, k, v = draw_qkv(grid.tokens, grid.tokens)
    block = block_of(grid, (1, 3))
    number = 3 + bool(grid.extra)
    out = mhla(q, k, v, torch.eye(number, dtype=F64), grid, (1, 3))
    for member in (block == i for i in range(number)):
        inside = linear_reference(q[:, :, member], k[:, :, member], v[:, :, member], feature="relu")
        assert torch.allclose(out[:, :, member], inside, atol=1e-12)


def test_one_block_is_linear_attention():
    q, k, v = draw_qkv(15, 15)
    config = MHLA(m=1)
    operator = config.operator(Site(16, 2, Grid(3, 5))).double()
    assert torch.allclose(operator(q, k, v, grid=Grid(3, 5)), linear_reference(q, k, v, feature="relu"), atol=1e-12)


def test_blocks_by_hand():
    """7 rows in 2, 5 columns in 3: rows 0-2 and 3-6, columns 0, 1-2 and 3-4; one extra token before, two after."""
    block = block_of(Grid(7, 5, 1, 2), (2, 3))
    rows = [[0, 1, 1, 2, 2]] * 3 + [[3, 4, 4, 5, 5]] * 4
    assert block.tolist() == [6, *(number for row in rows for number in row), 6, 6]


@pytest.mark.parametrize("init", ["cos", "linear", "exp", "gaussian", "local"])
def test_start_of_the_mixture(init):
    """Columns sum to 1; the own block has the largest entry; the extra block starts at the mean."""
    operator = MHLA(m=(2, 3), init=init).operator(Site(16, 2, Grid(4, 6, 1)))
    mixing = operator.mixing.detach()
    assert torch.allclose(mixing.sum(0), torch.ones(7))
    assert (mixing[:6, :6].argmax(0) == torch.arange(6)).all()
    assert torch.allclose(mixing[:, 6], torch.full((7,), 1 / 7))


def test_cosine_start_by_hand():
    """Three tiles in a row: distances 0, 1/2 and 1 of the largest."""
    mixing = MHLA(m=(1, 3)).operator(Site(16, 2, Grid(3, 6))).mixing.detach()
    near, far = torch.cos(torch.tensor([torch.pi / 8, torch.pi / 4]))
    expected = torch.stack([torch.stack(row) for row in ((near / near, near, far), (near, near / near, near))])
    assert torch.allclose(mixing[:2] * torch.stack([1 + near + far, 1 + 2 * near, 1 + near + far]), expected)


def test_all_hidden_and_negative_mixtures_are_finite():
    grid = Grid(3, 5, 1)
    operator = MHLA(m=(1, 3)).operator(Site(16, 2, grid)).double()
    q, k, v = draw_qkv(16, 16)
    with torch.no_grad():
        operator.mixing[1] = -1.0
    out = operator(q, k, v, grid=grid)
    assert out.isfinite().all()
    assert torch.equal(out[:, :, 2:3], torch.zeros_like(out[:, :, 2:3]))  # its row of M has no positive part
    v[:, :, 5:] = torch.nan
    hidden = operator(q, k, v, grid=grid, mask=Mask(keep=torch.zeros(3, 16, dtype=torch.bool)))
    assert torch.equal(hidden, torch.zeros_like(out))


def test_counts_of_the_paper():
    """Section 4.5: 256 tokens without class token, 16 blocks of 16: m^2 + 2 C more a layer; 2 N d C + m^2 d C MACs."""
    site = Site(192, 3, Grid(16, 16))
    config = MHLA(normalize="none", norm=True)
    assert config.cost(site).params - 4 * 192**2 - 4 * 192 == 16**2 + 2 * 192
    host = 5_717_416 + (256 - 197 - 1) * 192  # positions of 256 tokens, no class token
    assert host + 12 * (16**2 + 2 * 192) == 5_736_232
    assert config.operator_cost(site).macs == 2 * 256 * 64 * 192 + 16**2 * 64 * 192
    assert MHLA().operator_cost(site, "paper") == config.operator_cost(site)


def test_another_grid_keeps_the_blocks_and_extra_tokens_are_checked():
    operator = MHLA(m=(2, 2)).operator(Site(16, 2, Grid(4, 4, 1)))
    q, k, v = (x.float() for x in draw_qkv(36, 36))
    assert operator(q, k, v, grid=Grid(5, 7, 1)).shape == (3, 2, 36, 5)
    check_error(GridError, "prefix and suffix tokens are a block", operator, q, k, v, grid=Grid(6, 6))


def test_refusals():
    check_error(GridError, "4x4 landmarks cannot be laid on", MHLA(m=(4, 4)).operator, Site(16, 2, Grid(3, 5)))
    check_error(ConfigError, "m is at least 1", MHLA, m=0)


@pytest.mark.untyped
def test_wrong_calls_say_what_was_expected():
    q, k, v = draw_qkv(15, 15)
    where = Grid(3, 5), (1, 3)
    with pytest.raises(ShapeError, match=r"mixing has shape \(2, 2\); expected \(3, 3\)"):
        mhla(q, k, v, torch.ones(2, 2, dtype=F64), *where)
    check_error(ShapeError, "k has tokens 15, q has 14", mhla, q[:, :, 1:], k, v, torch.ones(3, 3, dtype=F64), *where)
    check_error(GridError, "15", mhla, q, k, v, torch.ones(3, 3, dtype=F64), Grid(4, 4), (1, 3))
    with pytest.raises(GridError, match="4x1 landmarks cannot be laid on"):
        mhla(q, k, v, torch.ones(4, 4, dtype=F64), Grid(3, 5), (4, 1))
    with pytest.raises(ConfigError, match="normalize is correct or none"):
        mhla(q, k, v, torch.ones(3, 3, dtype=F64), *where, normalize="official")
    check_error(ConfigError, "did you mean cos", MHLA, init="cosine")
