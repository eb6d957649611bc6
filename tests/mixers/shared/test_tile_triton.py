"""Window and neighbourhood attention in Triton, against the plain forms in float64."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import DEVICE, EXACT, check_close, draw, elsewhere, here, run_in_interpreter
from regard import Grid, Mask, Site, Window
from regard.core import UnsupportedError
from regard.mixers.neighbourhood import neighbourhood, neighbourhood_reference
from regard.mixers.window import window, window_reference

pytestmark = pytest.mark.untyped
CASES: dict[str, tuple[Grid, Any, dict[str, Any]]] = {
    "even": (Grid(8, 12), 4, {}), "uneven, shifted": (Grid(7, 9), (3, 4), {"shift": (1, 2)}),
    "spread": (Grid(7, 9), (2, 3), {"pattern": "grid"}), "more than a step": (Grid(9, 18), 9, {}),
    "class token": (Grid(5, 6, prefix=1), 3, {}), "larger than the grid": (Grid(3, 2), 7, {}),
    "prefix and suffix": (Grid(4, 5, prefix=2, suffix=3), 2, {"shift": 1}),
    "frames": (Grid(4, 4, prefix=1, depth=3), (2, 2, 2), {"shift": (1, 1, 0)}),
}  # fmt: skip


@elsewhere
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def drawn(name: str, dtype: torch.dtype = EXACT, width: int = 12, out: int = 20) -> list[Tensor]:
    """q, k and v as heads are split, and a table."""
    grid, size, _ = CASES[name]
    tokens, sides = grid.tokens, (size,) * len(grid.sides) if isinstance(size, int) else size
    shapes = [(2, tokens, 3, width), (2, tokens, 3, width), (2, tokens, 3, out), (3, *(2 * side - 1 for side in sides))]
    *heads, table = draw(*shapes, dtype=dtype)
    return [*(x.detach().transpose(1, 2).requires_grad_() for x in heads), table]


def forms(name: str, mask: Mask | None = None, with_table: bool = True) -> list[Any]:
    grid, size, options = CASES[name]

    def run(form: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None) -> Tensor:
        return form(q, k, v, grid, size, table=table, scale=0.3, mask=mask, **options)

    return [partial(run, partial(window, execution="triton")), partial(run, window_reference)]


@here
@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, table: bool) -> None:
    check_close(*forms(name), drawn(name)[: 3 + table])


NEAR: dict[str, tuple[Grid, int, dict[str, Any]]] = {
    "shift": (Grid(9, 10), 3, {}), "cut, class token": (Grid(8, 5, prefix=1), 5, {"border": "cut"}),
    "blocks": (Grid(11, 6), 7, {"border": "blocks"}), "dilated": (Grid(7, 15, suffix=2), 3, {"dilation": 2}),
    "larger than the grid": (Grid(2, 3), 9, {}), "a line": (Grid(1, 70), 5, {"border": "cut"}),
}  # fmt: skip


@here
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NEAR)
def test_neighbourhood(name: str, masked: bool) -> None:
    grid, size, options = NEAR[name]
    sizes = (2, grid.tokens, 3, 12), (2, grid.tokens, 3, 12), (2, grid.tokens, 3, 20)
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in draw(*sizes)]
    side = {"cut": size, "blocks": 2 * size - 3}.get(options.get("border", ""), 2 * size - 1)
    leaves += [torch.randn(3, side, side, dtype=EXACT, device=DEVICE).requires_grad_()] if masked else []
    keep = torch.arange(grid.tokens, device=DEVICE).expand(2, -1) % torch.tensor([[3], [90]], device=DEVICE) > 0
    mask = Mask(keep=keep) if masked else None

    def run(form: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None) -> Tensor:
        return form(q, k, v, grid, size, table=table, scale=0.3, mask=mask, **options)

    check_close(partial(run, partial(neighbourhood, execution="triton")), partial(run, neighbourhood_reference), leaves)


@here
@pytest.mark.parametrize("name", ["even", "uneven, shifted", "prefix and suffix"])
def test_hidden_keys(name: str) -> None:
    tokens = CASES[name][0].tokens
    keep = torch.arange(tokens, device=DEVICE).expand(2, -1) % torch.tensor([[3], [tokens]], device=DEVICE) > 0
    leaves = drawn(name)
    check_close(*forms(name, Mask(keep=keep)), leaves)
    wild = [x.detach().masked_fill(~keep[:, None, :, None], torch.nan) for x in leaves[1:3]]
    run = forms(name, Mask(keep=keep))[0]
    assert torch.equal(run(leaves[0], *wild, leaves[3]), run(*leaves))


@here
def test_no_key_gives_zeros() -> None:
    q, k, v, table = drawn("even")
    keep = torch.zeros(2, q.shape[2], dtype=torch.bool, device=DEVICE)
    out = forms("even", Mask(keep=keep))[0](q, k, v, table)
    assert not out.any()
    assert not torch.autograd.grad(out.sum(), q)[0].any()


@here
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    check_close(*forms("class token"), drawn("class token", dtype))


@here
def test_a_layer_reads_heads_in_place() -> None:
    layer = Window(size=3, shift=1).build(Site(32, 2, Grid(7, 5))).to(DEVICE, EXACT)
    torch.nn.init.normal_(layer.operator.table)
    x = torch.randn(2, 35, 32, device=DEVICE, dtype=EXACT)
    expected = layer(x, Grid(7, 5))
    layer.operator.execution = "triton"
    assert torch.allclose(layer(x, Grid(7, 5)), expected, atol=1e-5)
    assert forms("even")[0](*drawn("even")).transpose(1, 2).is_contiguous()


@here
def test_no_image() -> None:
    q, k, v, table = drawn("even")
    out = forms("even")[0](q[:0], k[:0], v[:0], table)
    assert out.shape == v[:0].shape
    assert not torch.autograd.grad(out.sum(), table)[0].any()


@here
def test_the_operators_keep_the_rules_of_pytorch() -> None:
    from regard.mixers.neighbourhood import _pairs
    from regard.mixers.shared import tile_triton  # noqa: F401
    from regard.mixers.shared import tiles as tiling
    from regard.mixers.window import _offsets, _token_tables

    grid = Grid(4, 6, prefix=1)
    tiles = tiling.fixed_size_tiles(grid, (2, 3), (1, 0), torch.device(DEVICE))
    q, k, v, table = draw((2, 3, 25, 8), (2, 3, 25, 8), (2, 3, 25, 8), (3, 3, 5))
    keep = torch.ones(2, 25, dtype=torch.int8, device=DEVICE)
    bias = _offsets(table.detach(), (2, 3)).requires_grad_()
    for one, mask in ((bias, keep), (None, None)):
        arguments = (q, k, v, one, *_token_tables(tiles, grid), None, None, mask, 6, 0.5)
        torch.library.opcheck(torch.ops.regard.tile_attention, arguments)
    keys, queries, entries = _pairs(grid, 3, 1, "cut", torch.device(DEVICE))
    bias = torch.ones(3, 10, dtype=EXACT, device=DEVICE, requires_grad=True)
    arguments = (q, k, v, bias, keys, None, queries, entries, keep, queries.shape[1], 0.5)
    torch.library.opcheck(torch.ops.regard.tile_attention, arguments)


@here
def test_no_second_derivative() -> None:
    leaves = drawn("even")
    out = forms("even")[0](*leaves)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(UnsupportedError, match='differentiated twice: use execution="tiles"'):
        first.sum().backward()


@here
def test_wide_heads_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="at most 128 channels, not 129"):
        forms("even")[0](*drawn("even", out=129))


@elsewhere
def test_without_a_gpu_it_is_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        forms("even")[0](*drawn("even"))
