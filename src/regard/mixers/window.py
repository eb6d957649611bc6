"""Window attention with shifts and a table of relative positions (Swin, Liu et al. 2021, Eq. 3-4).

The grid is cut into size x size windows; tokens of a window attend to each other. With a shift the cut begins `shift`
cells from the top left, and what lies before it shares windows with the other end of the grid without seeing it.
Where windows do not divide the grid they are smaller at the bottom and right: the published code fills them up with
zero tokens and lets queries attend to those; here nothing but the grid is attended to.
Extra tokens lie in no window: they attend to everything, and everything attends to them, without a position bias.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import (
    Card,
    ConfigError,
    Cost,
    Grid,
    Mask,
    Operator,
    ShapeError,
    Site,
    UnsupportedError,
    hide,
    softmax_rows,
)
from regard.mixers.shared.heads import HeadMixerConfig, check_qkv
from regard.mixers.shared.sdpa import sdpa
from regard.mixers.shared.tiles import Tiles, join_tokens, sized, split_keep, split_tokens

__all__ = ["Window", "window", "window_reference"]

Side = int | tuple[int, int]


def window_reference(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H N d"],
    v: Float[Tensor, "B H N e"],
    grid: Grid,
    size: Side,
    *,
    shift: Side = 0,
    table: Float[Tensor, "H y x"] | None = None,
    scale: float | None = None,
    mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:
    """softmax over all keys; those in another window are at -inf. Cell y is in window (y - shift) // size."""
    mask = _check_mask(mask)
    k, v = hide(k, mask), hide(v, mask)
    (rows, columns), (down, across) = _pair(size), _pair(shift)
    y = torch.arange(grid.height, device=q.device).repeat_interleave(grid.width)
    x = torch.arange(grid.width, device=q.device).repeat(grid.height)
    window = torch.stack(
        [(y - down).div(rows, rounding_mode="floor"), (x - across).div(columns, rounding_mode="floor")]
    )
    together = (window[:, :, None] == window[:, None]).all(0)  # (cells, cells)
    bias = q.new_zeros(q.shape[1], grid.tokens, grid.tokens)
    cells = q.new_zeros(()).expand(q.shape[1], grid.cells, grid.cells)
    if table is not None:
        dy = (y[:, None] - y + rows - 1).clamp(0, 2 * rows - 2)  # beyond the table only where windows differ
        dx = (x[:, None] - x + columns - 1).clamp(0, 2 * columns - 2)
        cells = table[:, dy, dx]
    inside = torch.zeros(grid.tokens, dtype=torch.bool, device=q.device)
    inside[grid.span] = True
    both = inside[:, None] & inside
    bias = bias.masked_scatter(both.expand_as(bias), cells.masked_fill(~together, -torch.inf))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return softmax_rows(mask.added(logits)).to(v.dtype) @ v


def window(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H N d"],
    v: Float[Tensor, "B H N e"],
    grid: Grid,
    size: Side,
    *,
    shift: Side = 0,
    table: Float[Tensor, "H y x"] | None = None,
    scale: float | None = None,
    mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:
    """Attention within windows of `size` cells (a side, or (rows, columns)), the cut begun at `shift`.

    table (H, 2 rows - 1, 2 columns - 1): added logits by offset, entry (query - key + size - 1). scale: None = d^-0.5.
    mask: padding only; a query that may attend to nothing gives zeros. A window as large as the grid, or larger, is
    softmax attention. Raises: ShapeError, GridError for what does not fit; UnsupportedError for other masks.
    """
    check_qkv("window", q, k, v)
    if q.shape[-2] != k.shape[-2]:
        raise ShapeError(f"window: q has {q.shape[-2]} tokens, k has {k.shape[-2]}; windows need one grid for both")
    grid.check(q)
    mask = _check_mask(mask)
    k, v = hide(k, mask), hide(v, mask)
    (rows, columns), shifts = _pair(size), _pair(shift)
    _check_sizes((rows, columns), shifts)
    if table is not None and tuple(table.shape) != (q.shape[1], 2 * rows - 1, 2 * columns - 1):
        expected = (q.shape[1], 2 * rows - 1, 2 * columns - 1)
        raise ShapeError(f"window: table has shape {tuple(table.shape)}; expected {expected}")
    tiles = sized(grid, (rows, columns), shifts, q.device)
    (q_extra, q_cells), (k_extra, k_cells), (v_extra, v_cells) = (split_tokens(x, grid) for x in (q, k, v))
    keys, values = _with_extra(tiles.cut(k_cells), k_extra), _with_extra(tiles.cut(v_cells), v_extra)
    added = _added(tiles, table, mask, grid, q)
    queries = tiles.cut(q_cells)  # (B, H, T, A, d)
    if added is not None:  # (B | 1, H | 1, T, A | 1, A + E)
        added = added.expand(*q.shape[:2], *added.shape[2:]).flatten(0, 1)
    out = sdpa(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), attn_mask=added, scale=scale)
    cells = tiles.join(out.unflatten(0, q.shape[:2]))
    if not grid.extra:
        return cells
    return join_tokens(sdpa(q_extra, k, v, attn_mask=mask.dense(q_extra, k.shape[-2]), scale=scale), cells, grid)


def _with_extra(tiles: Tensor, extra: Tensor) -> Tensor:
    """Extra tokens (B, H, E, d) behind the slots of every window (B, H, T, A, d)."""
    if not extra.shape[-2]:
        return tiles
    return torch.cat([tiles, extra[:, :, None].expand(-1, -1, tiles.shape[2], -1, -1)], -2)


def _added(tiles: Tiles, table: Tensor | None, mask: Mask, grid: Grid, like: Tensor) -> Tensor | None:
    """What is added to the logits, or what is allowed where there is no table: (B | 1, H | 1, T, A | 1, A + E)."""
    allowed = None
    if not tiles.even:
        same = (tiles.tables.part[:, :, None] == tiles.tables.part[:, None]) & tiles.tables.real[:, None]  # (T, A, A)
        # an empty slot attends to something, so that no row is without a key; nobody reads it
        same = same | ~tiles.tables.real[:, :, None]
        allowed = torch.nn.functional.pad(same, (0, grid.extra), value=True)[None, None]
    if mask.keep is not None:
        extra, cells = split_keep(mask.keep, grid)
        keep = torch.cat([cells[:, tiles.tables.cell], extra[:, None].expand(-1, tiles.number, -1)], -1)[
            :, None, :, None
        ]
        allowed = keep if allowed is None else allowed & keep
    if table is None:
        return allowed
    bias = _offsets(table, tiles.size).to(like.dtype)  # (H, A, A)
    bias = torch.nn.functional.pad(bias, (0, grid.extra))[None, :, None]
    if allowed is None:
        return bias.expand(-1, -1, tiles.number, -1, -1)
    return torch.where(allowed, bias, -torch.inf)


def _offsets(table: Tensor, size: tuple[int, int]) -> Tensor:
    """The table's entry for every pair of slots, (H, A, A)."""
    y = torch.arange(size[0], device=table.device).repeat_interleave(size[1])
    x = torch.arange(size[1], device=table.device).repeat(size[0])
    place = (y[:, None] - y + size[0] - 1) * (2 * size[1] - 1) + x[:, None] - x + size[1] - 1
    return table.flatten(1).index_select(1, place.flatten()).unflatten(1, place.shape)


def _pair(side: Side) -> tuple[int, int]:
    return (side, side) if isinstance(side, int) else side


def _check_sizes(size: tuple[int, int], shift: tuple[int, int]) -> None:
    if len(size) != 2 or len(shift) != 2 or min(size) < 1:
        raise ConfigError(f"a window has at least 1x1 cells, a side or two, not size={size}, shift={shift}")
    if not all(0 <= o < s for o, s in zip(shift, size, strict=True)):
        raise ConfigError(f"a shift is at least 0 and below the window's side, not shift={shift} for size={size}")


def _check_mask(mask: Mask | None) -> Mask:
    mask = mask or Mask()
    if mask.causal or mask.bias is not None:
        raise UnsupportedError("window cannot apply a causal or bias mask; give table= for positions")
    return mask


@dataclass(frozen=True, kw_only=True)
class Window(HeadMixerConfig):
    """size: side of a window, or (rows, columns). shift: where the first window begins (Swin: 0 and 3 in turn).

    table: whether there is a learned bias by relative position, (2 size - 1)^2 numbers a head. It starts at zero, so
    that a swapped layer is not disturbed (Swin starts it with standard deviation 0.02). scale: None = d^-0.5.
    Raises: ConfigError for a size below 1 or a shift that is not below the size.
    """

    size: int | tuple[int, int] = 7
    shift: int | tuple[int, int] = 0
    table: bool = True
    scale: float | None = None

    card: ClassVar[Card] = Card(
        title="Window attention",
        source="Liu et al. 2021 (Swin), Eq. 3-4",
        formula="softmax(q K_w^T / sqrt(d) + B) V_w,  w = the query's window",
        complexity="O(N w^2 C)",
        query_content=True,
        key_content=True,
        relative_position=True,
        dynamic="one-step",
        scaling=frozenset({"routing"}),
        expert_type="MLP of width w^2",
        expert_count="N / w^2",
        construction="locality prior",
        topology="N/w^2 x w^2-to-one",
        conditions="position",
        prefix="global: attended by all and attending to all, in no window",
    )
    masks: ClassVar[frozenset[str]] = frozenset({"padding"})
    samples: ClassVar[tuple[str, ...]] = (
        "Window(size=3)",
        "Window(size=(2, 4), shift=(1, 2))",
        "Window(size=2, shift=1, table=False, dwc=3)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(_pair(self.size), _pair(self.shift))

    def operator(self, site: Site) -> "WindowOperator":
        return WindowOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """All slots of all windows and the extra tokens; "paper" is 2 N w^2 C for the grid's cells."""
        grid, (rows, columns) = site.grid, _pair(self.size)
        params = site.heads * (2 * rows - 1) * (2 * columns - 1) if self.table else 0
        area = rows * columns
        if accounting == "paper":
            return Cost(params, 2 * grid.cells * area * site.inner)
        slots = -(-grid.height // rows) * -(-grid.width // columns) * area
        return Cost(params, 2 * (slots * (area + grid.extra) + grid.extra * grid.tokens) * site.inner)


class WindowOperator(Operator):
    """table (H, 2 rows - 1, 2 columns - 1), or None."""

    def __init__(self, config: Window, site: Site) -> None:
        super().__init__()
        self.config = config
        rows, columns = _pair(config.size)
        shape = (site.heads, 2 * rows - 1, 2 * columns - 1)
        self.table = nn.Parameter(torch.empty(shape)) if config.table else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The table to zero."""
        if self.table is not None:
            nn.init.zeros_(self.table)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to keep out of weight decay: the table, as in Swin."""
        return {"table"} if self.table is not None else set()

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        q, k, v = cast(Tensor, q), cast(Tensor, k), cast(Tensor, v)
        return window(q, k, v, grid, self.config.size, **self._options(q, mask))

    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        q, k, v = cast(Tensor, q), cast(Tensor, k), cast(Tensor, v)
        return window_reference(q, k, v, grid, self.config.size, **self._options(q, mask))

    def _options(self, q: Tensor, mask: Mask | None) -> dict:
        table = None if self.table is None else self.table.to(q.dtype)
        return {"shift": self.config.shift, "table": table, "scale": self.config.scale, "mask": mask}
