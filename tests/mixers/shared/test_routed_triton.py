"""BRA, MoBA and NSA on the Triton kernel for routed attention, against their plain forms in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interpreter import CLOSE, DEVICE, EXACT, check_close, draw, elsewhere, here, run_in_interpreter
from regard import Grid, Mask, Site, parse
from regard.core import UnsupportedError
from regard.mixers.bra import bra, bra_plan, bra_reference
from regard.mixers.moba import moba, moba_plan, moba_reference
from regard.mixers.nsa import nsa, nsa_reference
from regard.mixers.shared.block_attention import BlockPlan

pytestmark = pytest.mark.untyped
GRIDS = {"rectangle": Grid(4, 6), "prefix and suffix": Grid(6, 4, 2, 1), "not divisible": Grid(5, 7, 1)}
DTYPES = [EXACT, torch.float32, torch.float16, torch.bfloat16]


@elsewhere
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def heads(grid: Grid, dtype: torch.dtype = EXACT) -> list[Tensor]:
    """q, k (2, 2, N, 8) and v (2, 2, N, 12)."""
    return draw(*((2, 2, grid.tokens, width) for width in (8, 8, 12)), dtype=dtype)


def moba_passes(leaves: list[Tensor], grid: Grid, mask: Mask | None = None) -> tuple[Callable, Callable]:
    plan = moba_plan(leaves[0].detach(), leaves[1].detach(), grid, (2, 3), 2, mask=mask)
    return (
        lambda *x: moba(*x, grid, (2, 3), 2, mask=mask, plan=plan, execution="triton"),
        lambda *x: moba_reference(*x, grid, (2, 3), 2, mask=mask, plan=plan),
    )


def bra_passes(leaves: list[Tensor], grid: Grid, mask: Mask | None = None) -> tuple[Callable, Callable]:
    plan = bra_plan(leaves[0].detach(), leaves[1].detach(), grid, (2, 2), 3, mask=mask)
    return (
        lambda *x: bra(*x, grid, (2, 2), 3, mask=mask, plan=plan, execution="triton"),
        lambda *x: bra_reference(*x, grid, (2, 2), 3, mask=mask, plan=plan),
    )


PASSES = {"MoBA": moba_passes, "BRA": bra_passes}


@here
@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
@pytest.mark.parametrize("passes", PASSES.values(), ids=list(PASSES))
def test_outputs_and_gradients(passes: Callable, grid: Grid) -> None:
    leaves = heads(grid)
    check_close(*passes(leaves, grid), leaves)


@here
def test_no_second_derivative() -> None:
    leaves = heads(Grid(4, 6))
    out = moba_passes(leaves, Grid(4, 6))[0](*leaves)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated twice"):
        first.sum().backward()


@here
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("passes", PASSES.values(), ids=list(PASSES))
def test_lower_precision(passes: Callable, dtype: torch.dtype) -> None:
    leaves = heads(GRIDS["prefix and suffix"], dtype)
    check_close(*passes(leaves, GRIDS["prefix and suffix"]), leaves)


@here
@pytest.mark.parametrize("passes", PASSES.values(), ids=list(PASSES))
def test_padding_hides_keys_and_their_nan(passes: Callable) -> None:
    grid = GRIDS["not divisible"]
    leaves = heads(grid)
    mask = Mask(keep=torch.arange(grid.tokens, device=DEVICE).expand(2, -1) < torch.tensor([[9], [36]], device=DEVICE))
    check_close(*passes(leaves, grid, mask), leaves)
    with torch.no_grad():
        clean = passes(leaves, grid, mask)[0](*leaves)
        leaves[2][0, :, 20:] = torch.nan
        assert torch.equal(passes(leaves, grid, mask)[0](*leaves), clean)


@here
def test_all_queries_at_one_block() -> None:
    """A ragged plan: most blocks have no query, one has all."""
    grid = GRIDS["rectangle"]
    leaves = heads(grid)
    plan = BlockPlan(torch.tensor([3, 1], device=DEVICE).expand(2, 2, grid.tokens, -1))
    check_close(
        lambda *x: moba(*x, grid, (2, 3), 2, plan=plan, execution="triton"),
        lambda *x: moba_reference(*x, grid, (2, 3), 2, plan=plan),
        leaves,
    )


@here
@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
def test_nsa(grid: Grid) -> None:
    leaves = [*heads(grid), draw((2, 2, grid.tokens, 3))[0]]
    plan = moba_plan(leaves[0].detach(), leaves[1].detach(), grid, (2, 3), 2)
    check_close(
        lambda q, k, v, gates: nsa(q, k, v, gates, grid, (2, 3), 2, 3, plan=plan, execution="triton"),
        lambda q, k, v, gates: nsa_reference(q, k, v, gates, grid, (2, 3), 2, 3, plan=plan),
        leaves,
    )


@here
@pytest.mark.parametrize("text", ["BRA(regions=(2, 3), k=2)", "MoBA(block=(2, 2), k=3)", "NSA(k=2)"])
def test_layers(text: str) -> None:
    grid = Grid(4, 6, 1)
    torch.manual_seed(0)
    layer = parse(text).build(Site(16, 2, grid)).to(DEVICE, EXACT)
    x = torch.randn(2, grid.tokens, 16, dtype=EXACT, device=DEVICE)
    expected = layer.reference(x, grid)
    layer.operator.execution = "triton"
    assert torch.allclose(layer(x, grid), expected, rtol=0, atol=CLOSE[EXACT])


@here
def test_the_operators_are_registered_properly() -> None:
    from regard.mixers.shared.routed_triton import LEAST, lay_out_pairs

    q, k, v = (x.detach().requires_grad_() for x in draw(*[(1, 2, 20, 8)] * 3, dtype=torch.float32))
    keys, experts = torch.arange(20, device=DEVICE).view(1, 1, 4, 5).expand(1, 2, -1, -1).contiguous(), None
    for choices in (1, 2):
        experts = torch.arange(40 * choices, device=DEVICE).remainder(4).view(1, 2, 20, choices)
        torch.library.opcheck(torch.ops.regard.lay_out, (experts, 4, LEAST))
        layout = lay_out_pairs(experts, 4, LEAST)
        start = (torch.zeros_like(v), torch.full(q.shape[:3], -torch.inf, device=DEVICE))
        torch.library.opcheck(torch.ops.regard.routed, (q, k, v, None, keys, *layout, *start, choices, 1.0))


@here
@pytest.mark.parametrize(
    ("shape", "number"), [((2, 3, 70, 1), 5), ((1, 2, 33, 3), 20), ((1, 1, 5, 1), 1), ((2, 1, 700, 2), 130)]
)
@pytest.mark.parametrize("most", [512, 0], ids=["kernel", "sorted"])
def test_every_pair_is_in_one_block_of_its_expert(
    shape: tuple[int, ...], number: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.mixers.shared import routed_triton

    monkeypatch.setattr(routed_triton, "MOST_EXPERTS", most)
    torch.manual_seed(0)
    experts = (torch.rand(shape, device=DEVICE) ** 3 * number).long()  # some have many pairs, some none
    source, expert = routed_triton.lay_out_pairs(experts, number, 16)
    rows = source.view(-1, 16)
    assert torch.equal(source[source >= 0].sort().values, torch.arange(experts.numel(), device=DEVICE))
    head = torch.arange(shape[0] * shape[1], device=DEVICE).repeat_interleave(shape[2] * shape[3])
    own = head * number + experts.flatten()  # of each pair
    live = rows >= 0
    assert torch.equal(own[rows[live]], expert[:, None].expand(-1, 16)[live])
    assert torch.equal(live, live.cummin(1).values)  # filled from the first row on
    assert torch.equal(source[source >= 0], own.argsort(stable=True))
    assert int(live.any(1).sum()) == int(
        torch.bincount(own, minlength=number).add(15).div(16, rounding_mode="floor").sum()
    )


@here
def test_no_image_is_laid_out() -> None:
    from regard.mixers.shared.routed_triton import lay_out_pairs

    source, expert = lay_out_pairs(torch.zeros(0, 2, 5, 1, dtype=torch.long, device=DEVICE), 3, 16)
    assert len(source) == len(expert) == 0
