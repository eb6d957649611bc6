"""Mechanisms that route, restrict or compress, in degenerate cases that equal softmax attention or each other."""

import pytest
import torch
from torch import Tensor

from regard import BRA, DAT, NSA, PVT, Grid, Mask, MoBA, Reformer, Site, Softmax, TopK, Window
from regard.core import MixerConfig
from regard.mixers.bra import BRAPlan
from regard.mixers.mita.routing import MitaPlan
from regard.mixers.reformer import LSHPlan
from regard.ops import bra, mita, moba, nsa, reformer, softmax_reference, topk, topk_plan, window
from regard.testing.subject import gap

GRIDS = (Grid(4, 6, 2), Grid(3, 5, 1, 2), Grid(7, 4))


def draw(grid: Grid, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(3, 2, grid.tokens, c, dtype=torch.float64) for c in (8, 8, 6))
    return q, k, v


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_with_all_keys_chosen_all_are_softmax(grid: Grid) -> None:
    q, k, v = draw(grid)
    n, keep = grid.tokens, torch.rand(3, grid.tokens) > 0.3
    for mask in (None, Mask(keep=keep)):
        full = softmax_reference(q, k, v, mask=mask, scale=0.5)
        for form in ("dense", "gather"):
            assert gap(topk(q, k, v, n, mask=mask, scale=0.5, execution=form), full) < 1e-12
        assert gap(bra(q, k, v, grid, (3, 2), 6, mask=mask, scale=0.5), full) < 1e-12
        for size in (max(grid.height, grid.width), (grid.height + 3, grid.width)):
            assert gap(window(q, k, v, grid, size, mask=mask, scale=0.5), full) < 1e-12
        for block, number in (
            (5, -(-grid.cells // 5)),
            (grid.cells, 1),
            ((2, 3), -(-grid.height // 2) * -(-grid.width // 3)),
        ):
            for form in ("dense", "gather", "grouped"):
                assert gap(moba(q, k, v, grid, block, number, mask=mask, scale=0.5, execution=form), full) < 1e-12
            gates = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).expand(3, 2, n, 3)
            assert gap(nsa(q, k, v, gates, grid, block, number, 3, mask=mask, scale=0.5), full) < 1e-12


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("config", [PVT(ratio=1), DAT(stride=1, init="zero"), DAT(init="zero", groups=2, reach=1.0)])
def test_layers_without_reduction_or_offsets_are_softmax(config: MixerConfig, grid: Grid) -> None:
    """Facts 4.17, 4.18: ratio 1; zero offsets with stride 1 (the published reference points are not)."""
    site = Site(16, 2, grid)
    full = Softmax().build(site).double()
    layer = config.build(site).double()
    layer.load_state_dict(full.state_dict(), strict=False)
    x = torch.randn(3, grid.tokens, 16, dtype=torch.float64)
    assert gap(layer(x, grid), full(x, grid)) < 1e-12
    assert gap(layer.reference(x, grid), full(x, grid)) < 1e-12


@pytest.mark.parametrize("sides", [(4, 6), (6, 2)], ids=str)
def test_stride_two_without_offsets_is_the_mean_of_two_by_two_cells(sides: tuple[int, int]) -> None:
    """Fact 4.18; and PVT's convolution, which starts as the mean of a patch, gives the same tokens before its norm."""
    grid = Grid(*sides)
    site = Site(16, 2, grid)
    x = torch.randn(3, grid.tokens, 16, dtype=torch.float64)
    mean = x.unflatten(1, (sides[0] // 2, 2, sides[1] // 2, 2)).mean((2, 4)).flatten(1, 2)
    q = torch.randn(3, 2, grid.tokens, 8, dtype=torch.float64)
    dat = DAT(stride=2, init="zero").operator(site).double()
    assert gap(dat.memory(x, q, grid, plain=False)[0], mean) < 1e-12
    pvt = PVT(ratio=2).operator(site).double()
    assert gap(pvt.memory(x, q, grid, plain=False)[0], torch.nn.functional.layer_norm(mean, (16,))) < 1e-12


@pytest.mark.parametrize("form", ["dense", "gather", "grouped"])
def test_top_k_is_mita_with_an_expert_for_every_query(form: str) -> None:
    """Reference 2.4: the landmarks are the queries, each with its own expert, route only."""
    q, k, v = draw(Grid(4, 6, 2))
    experts = torch.arange(26)[:, None].expand(3, 2, -1, -1)
    plan = MitaPlan(topk_plan(q @ k.mT, 7).keys, experts)
    out = mita(q, k, v, q, 7, branches="route", plan=plan, execution=form)
    assert gap(out, topk(q, k, v, 7)) < 1e-12


def test_blocks_of_one_cell_windows_and_regions_agree() -> None:
    """MoBA with its own block alone is window attention; BRA whose regions choose themselves is too."""
    grid = Grid(4, 6, 2)
    q, k, v = draw(grid)
    cells = window(q, k, v, grid, (2, 3))[:, :, grid.span]
    assert gap(moba(q, k, v, grid, (2, 3), 1)[:, :, grid.span], cells) < 1e-12
    identity = BRAPlan(torch.arange(4)[:, None].expand(3, -1, -1))
    assert gap(bra(q, k, v, grid, (2, 2), 1, plan=identity)[:, :, grid.span], cells) < 1e-12


@pytest.mark.parametrize("chunk", [13, 17, 24, 64])
def test_one_or_two_chunks_of_hashing_are_softmax_but_for_the_token_itself(chunk: int) -> None:
    """Fact 4.11: for any number of rounds, as a key counts once; in the published code for one round only."""
    q, _, v = draw(Grid(4, 6))
    logits = q @ torch.nn.functional.normalize(q, dim=-1).mT * 8**-0.5
    full = logits.masked_fill(torch.eye(24, dtype=torch.bool), -torch.inf).softmax(-1) @ v
    for rounds in (1, 4):
        plan = LSHPlan(torch.randint(0, 4, (3, 2, rounds, 24)))
        assert gap(reformer(q, v, plan, chunk), full) < 1e-12
        assert gap(reformer(q, v, plan, chunk, duplicates="every"), full) < 1e-12


def test_all_fit_a_layer_of_deit() -> None:
    site = Site(24, 3, Grid(14, 14, 1))
    x = torch.randn(2, 197, 24)
    for config in (TopK(), BRA(), Window(), PVT(), MoBA(), DAT(), NSA(), Reformer()):
        out = config.build(site)(x, site.grid)
        assert out.shape == x.shape
        assert out.isfinite().all()
