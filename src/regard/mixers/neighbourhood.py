"""Neighbourhood attention: every query attends to a window around it (NAT, DiNAT, Longformer, ViL).

Hassani et al. 2023: the window is shifted inwards at the border, so that each query has window^2 keys. With a dilation
(Hassani and Shi 2022) it takes every dilation-th cell, and the borders are those of the cells with the same remainder.
Longformer (Beltagy et al. 2020) and ViL (Zhang et al. 2021) cut the window off at the border, and have global tokens.
Prefix and suffix tokens are global: they attend to all tokens and all attend to them, without a position bias.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.core import Card, ConfigError, Cost, Grid, Inputs, ShapeError, Site, operator_function
from regard.core.mask import Mask, hide, softmax_rows

from .shared.bias_table import BiasTableOperator
from .shared.checks import padding_only
from .shared.executions import TILED
from .shared.heads import HeadMixerConfig
from .shared.kept import kept
from .shared.routed_attention import names_triton
from .shared.sdpa import sdpa
from .shared.tiles import join_global_tokens, join_sides, pad_pairs

__all__ = ["Neighbourhood", "neighbourhood", "neighbourhood_reference"]

Border = Literal["shift", "cut", "blocks"]


@operator_function
def neighbourhood_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, window: int, *,
    dilation: int = 1, border: Border = "shift", table: Float[Tensor, "H y x"] | None = None,
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax over all keys, those outside the query's window at -inf. Along each axis cell i has place i // dilation
    among the cells with the same remainder.
    """
    mask = padding_only("neighbourhood", mask)
    k, v = hide(k, mask), hide(v, mask)
    near, offset = [], []
    for side in (grid.height, grid.width):
        i = torch.arange(side, device=q.device)
        place, group = i // dilation, i % dilation
        number = (side - group + dilation - 1) // dilation  # cells with the same remainder
        inside = _is_near(place[:, None], place, number[:, None], window, border)
        near.append(inside & (group[:, None] == group))
        offset.append(place[:, None] - place)
    together = (near[0][:, None, :, None] & near[1][:, None]).flatten(2).flatten(0, 1)  # (cells, cells)
    cells = q.new_zeros(()).expand(q.shape[1], grid.cells, grid.cells)
    if table is not None:
        most = table.shape[-1] // 2
        dy, dx = (x.clamp(-most, most) + most for x in offset)  # outside the table only where attention is not allowed
        cells = table[:, dy[:, None, :, None], dx[None, :, None]].flatten(3).flatten(1, 2)
    bias = pad_pairs(cells.masked_fill(~together, -torch.inf), grid)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return softmax_rows(mask.add_to(logits)).to(v.dtype) @ v


def _is_near(query: Tensor, key: Tensor, number: Tensor, window: int, border: Border) -> Tensor:
    """Whether the place of a key is in the window of the place of a query, along an axis of `number` places."""
    reach = window // 2
    if border == "cut":
        return (query - key).abs() <= reach
    if border == "blocks":
        return (query // reach - key // reach).abs() <= 1
    start = (query - reach).clamp_min(0).minimum((number - window).clamp_min(0))
    return (key >= start) & (key < start + window)


@operator_function
def neighbourhood(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, window: int, *,
    dilation: int = 1, border: Border = "shift", table: Float[Tensor, "H y x"] | None = None,
    scale: float | None = None, mask: Mask | None = None, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Attention to the window around each query; memory grows with N (window + 14)^2, not with N^2.

    Arguments as in `Neighbourhood`. table (H, S, S): added logits by offset in steps of the dilation, entry
    (query - key + S // 2); S is 2 window - 1, window or 2 window - 3 for the borders "shift", "cut" and "blocks".
    mask: padding only; a query without any key gives zeros. A window larger than the grid gives softmax attention.
    execution: "tiles" are cut, for PyTorch's fused attention; "triton", for GPUs, reads them in place; or
    "auto", today tiles.
    Raises: ShapeError, GridError for tensors that do not fit; ConfigError for an impossible window or dilation;
    UnsupportedError for other masks or an execution that cannot run here.
    """
    grid.check(q)
    mask = padding_only("neighbourhood", mask)
    _check_window(window, dilation, border)
    side = 2 * _furthest(window, border) + 1
    if table is not None and tuple(table.shape) != (q.shape[1], side, side):
        expected = (q.shape[1], side, side)
        raise ShapeError(f"neighbourhood: table has shape {tuple(table.shape)}; expected {expected}")
    k, v = hide(k, mask), hide(v, mask)
    if names_triton(TILED, "tiles", execution, q):
        return _in_place(q, k, v, grid, _pairs(grid, window, dilation, border, q.device), table, scale, mask)
    tables = _tables(grid, window, dilation, border, q.device)
    allowed = tables.allowed
    if mask.keep is not None:
        allowed = allowed & mask.keep[:, None, tables.key][..., None, :]
    bias = allowed.expand(-1, q.shape[1], -1, -1, -1)
    if table is not None:
        places = table.flatten(1).index_select(1, tables.entry.flatten()).unflatten(1, tables.entry.shape)
        bias = torch.where(allowed, F.pad(places, (0, grid.extra)).to(q.dtype), -torch.inf)
    tiles = [_take(t, at).flatten(1, 2) for t, at in ((q, tables.query), (k, tables.key), (v, tables.key))]
    out = sdpa(*tiles, attn_mask=bias.flatten(1, 2), scale=scale)
    cells = out.unflatten(1, (q.shape[1], -1)).flatten(2, 3).index_select(2, tables.slot)
    return join_global_tokens(cells, q, k, v, grid, scale, mask)


def _in_place(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, pairs: tuple[Tensor, Tensor, Tensor], table: Tensor | None,
    scale: float | None, mask: Mask,
) -> Tensor:  # fmt: skip
    """By the Triton kernel, imported where it runs, since Triton is not everywhere."""
    from .shared.tile_triton import tile_attention

    keys, queries, entries = pairs
    bias = None if table is None else F.pad(table.flatten(1), (0, 1))  # 0 for prefix and suffix tokens
    tables = keys, None, queries, entries
    out = tile_attention(q, k, v, tables, queries.shape[1], bias=bias, keep=mask.keep, scale=scale)
    return join_global_tokens(out[..., grid.span, :] if grid.extra else out, q, k, v, grid, scale, mask)


@kept
def _pairs(
    grid: Grid, window: int, dilation: int, border: Border, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of the keys (T, K + E) and queries (T, A) of tiles, -1 for none, and the entry of the flat table of
    biases for each pair, that behind the last for prefix and suffix tokens, -1 where a query may not attend."""
    tables = _tables(grid, window, dilation, border, device)
    queries = torch.full((tables.query.numel(),), -1, dtype=torch.int32, device=device)
    queries[tables.slot] = torch.arange(grid.cells, dtype=torch.int32, device=device) + grid.prefix
    entries = F.pad(tables.entry, (0, grid.extra), value=(2 * _furthest(window, border) + 1) ** 2)
    entries = torch.where(tables.allowed[0, 0], entries, -1)
    return tables.key.int(), queries.view(tables.query.shape), entries.int()


class _Tables(NamedTuple):
    """query (T, A), key (T, K + E): the tokens of tiles. allowed (1, 1, T, A, K + E): keys of a query. entry (T, A, K):
    of the flat table of biases, any one where the offset is not in it. slot (cells,): the flat slot of each cell.
    """

    query: Tensor
    key: Tensor
    allowed: Tensor
    entry: Tensor
    slot: Tensor


@kept
def _tables(grid: Grid, window: int, dilation: int, border: Border, device: torch.device) -> _Tables:
    y, x = (_axis(sizes, window, border, device) for sizes in _sizes(grid, window, dilation, border))
    query, key = (join_sides(down * grid.width, across) for down, across in ((y.query, x.query), (y.key, x.key)))
    allowed = (y.allowed[:, None, :, None, :, None] & x.allowed[:, None, :, None]).flatten(4).flatten(2, 3)
    allowed = F.pad(allowed.flatten(0, 1), (0, grid.extra), value=True)[None, None]
    tokens = torch.arange(grid.tokens, device=device)
    extra = torch.cat([tokens[: grid.prefix], tokens[grid.prefix + grid.cells :]]).expand(len(key), -1)
    far = _furthest(window, border)
    dy, dx = ((axis.offset + far).clamp(0, 2 * far) for axis in (y, x))
    entry = dy[:, None, :, None, :, None] * (2 * far + 1) + dx[:, None, :, None]
    slot = (y.tile[:, None] * len(x.query) + x.tile) * query.shape[1] + y.slot[:, None] * x.query.shape[1] + x.slot
    return _Tables(
        query + grid.prefix, torch.cat([key + grid.prefix, extra], -1), allowed,
        entry.flatten(4).flatten(2, 3).flatten(0, 1).int(), slot.flatten(),
    )  # fmt: skip


class _Sizes(NamedTuple):
    """One axis: its cells, the dilation, tiles for each remainder, places of a tile and keys of a tile."""

    cells: int
    dilation: int
    tiles: int
    places: int
    keys: int


class _Axis(NamedTuple):
    """Tables of one axis: cells in the slots of tiles; allowed keys and their offsets; tile and slot of each cell."""

    query: Tensor  # (T, A)
    key: Tensor  # (T, K)
    allowed: Tensor  # (T, A, K)
    offset: Tensor  # (T, A, K)
    tile: Tensor  # (cells,)
    slot: Tensor  # (cells,)


TILE = 7
"""The smallest side of a tile of queries, on lines its square: smaller products do not pay."""


def _sizes(grid: Grid, window: int, dilation: int, border: Border) -> list[_Sizes]:
    """The tiles of queries along each axis; the keys of a tile are its cells and those within window // 2."""
    found, reach = [], window // 2
    least = TILE if min(grid.height, grid.width) > 1 else TILE**2
    for cells in (grid.height, grid.width):
        step = min(dilation, cells)
        length = -(-cells // step)
        places = -(-length // max(1, length // least))
        if border == "blocks":
            places = min(reach * max(1, least // reach), length)
        found.append(_Sizes(cells, step, -(-length // places), places, min(places + 2 * reach, length)))
    return found


def _axis(sizes: _Sizes, window: int, border: Border, device: torch.device) -> _Axis:
    cells, step, tiles, places, keys = sizes
    group = torch.arange(step, device=device).repeat_interleave(tiles)[:, None]  # (T, 1)
    number = (cells - group + step - 1) // step  # cells with this remainder
    first = torch.arange(tiles, device=device).repeat(step)[:, None] * places
    query = first + torch.arange(places, device=device)
    start = (first - window // 2).clamp_min(0).minimum((number - keys).clamp_min(0))
    key = start + torch.arange(keys, device=device)
    allowed = _is_near(query[..., None], key[:, None], number[..., None], window, border) & (key < number)[:, None]
    allowed = allowed | (query >= number)[..., None]  # queries of empty slots keep keys, so that no row is empty
    query_cell, key_cell = (torch.where(x < number, x * step + group, 0) for x in (query, key))
    cell = torch.arange(cells, device=device)
    place = cell // step
    return _Axis(
        query_cell, key_cell, allowed, query[..., None] - key[:, None], cell % step * tiles + place // places,
        place % places,
    )  # fmt: skip


def _take(tokens: Float[Tensor, "B H N d"], index: Tensor) -> Float[Tensor, "B H T A d"]:
    return tokens.index_select(2, index.flatten()).unflatten(2, tuple(index.shape))


def _furthest(window: int, border: Border) -> int:
    """The largest distance from a query to a key, in steps of the dilation."""
    return {"shift": window - 1, "cut": window // 2, "blocks": 2 * (window // 2) - 1}[border]


def _check_window(window: int, dilation: int, border: Border) -> None:
    least = 3 if border == "blocks" else 1
    if window < least or window % 2 == 0 or dilation < 1:
        raise ConfigError(
            f"window is the odd side of a square of cells, at least {least}, and dilation is at least 1, "
            f"not window={window}, dilation={dilation}"
        )


@dataclass(frozen=True, kw_only=True)
class Neighbourhood(HeadMixerConfig):
    """window: odd side of the square of cells around a query (NAT: 7). dilation: cells from one key to the next.

    border: "shift" moves the window inwards (NAT); "cut" cuts it off (Longformer); "blocks" is ViL:
    the grid is divided into blocks of side window // 2, and a query attends to its own block and the eight around it,
    among which are all cells of its window (ViL's blocks of 7: window=15).
    table: whether to add a learned bias by relative position, for each head. It starts at 0, so that it does not change
    a swapped layer (NAT starts it with standard deviation 0.02). ViL has biases of global tokens too, and, as
    Longformer, projections of their own; here they share the others'. scale: None = d^-0.5.
    Raises: ConfigError for an even window, or numbers below 1.
    """

    window: int = 7
    dilation: int = 1
    border: Border = "shift"
    table: bool = True
    scale: float | None = None

    card = Card(
        title="Neighbourhood attention", source="Hassani et al. 2023 (NAT); Hassani and Shi 2022 (DiNAT)",
        formula="softmax(q K_w^T / sqrt(d) + B) V_w,  w = the window around the query", complexity="O(N w^2 C)",
        query_content=True, key_content=True, relative_position=True, dynamic="one-step",
        scaling=frozenset({"routing"}), expert_type="MLP of width w^2", expert_count="N", construction="locality prior",
        topology="N x one-to-one", conditions="position",
        prefix="global: attend to all tokens and are attended by all; in no window",
    )  # fmt: skip
    masks = frozenset({"padding"})
    samples = (
        "Neighbourhood(window=3)", "Neighbourhood(window=3, dilation=2)",
        'Neighbourhood(window=3, border="cut", table=False, dwc=3)',
        'Neighbourhood(window=5, border="blocks", scale=0.9)',
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_window(self.window, self.dilation, self.border)

    def operator(self, site: Site) -> "NeighbourhoodOperator":
        return NeighbourhoodOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """All keys of all tiles of queries, and prefix and suffix tokens; "paper" counts 2 N w^2 C for patch tokens."""
        grid, side = site.grid, 2 * _furthest(self.window, self.border) + 1
        params = site.heads * side**2 if self.table else 0
        if accounting == "paper":
            return Cost(params, 2 * grid.cells * self.window**2 * site.inner)
        y, x = _sizes(grid, self.window, self.dilation, self.border)
        slots = y.dilation * y.tiles * y.places * x.dilation * x.tiles * x.places
        return Cost(params, 2 * (slots * (y.keys * x.keys + grid.extra) + grid.extra * grid.tokens) * site.inner)


class NeighbourhoodOperator(BiasTableOperator):
    """table (H, S, S), or None. execution: see `neighbourhood`."""

    def __init__(self, config: Neighbourhood, site: Site, execution: str = "auto") -> None:
        side = 2 * _furthest(config.window, config.border) + 1
        super().__init__((site.heads, side, side), config.table)
        self.config, self.execution = config, execution

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form = neighbourhood_reference if plain else partial(neighbourhood, execution=self.execution)
        config, q = self.config, inputs.q
        return form(
            *(q, inputs.k, inputs.v, inputs.grid, config.window), dilation=config.dilation, border=config.border,
            table=self.table_like(q), scale=config.scale, mask=inputs.mask,
        )  # fmt: skip
