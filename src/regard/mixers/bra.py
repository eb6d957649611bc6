"""Bi-level routing attention: regions choose regions, then tokens attend to all tokens of the chosen ones (BiFormer).

The grid is cut into S x S regions. A_r = q_r k_r^T of the regions' mean queries and keys, all heads together; each
region keeps its k best; its queries attend to every token of those in one softmax (Zhu et al. 2023, Eq. 3-7).
Extra tokens have no region: they attend to everything, and everything attends to them.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core import (
    Card,
    ConfigError,
    Cost,
    Grid,
    GridError,
    Mask,
    Operator,
    ShapeError,
    Site,
    UnsupportedError,
    hide,
    softmax_rows,
)
from regard.mixers.mita.routing import check_chosen
from regard.mixers.shared.heads import HeadMixerConfig, check_qkv
from regard.mixers.shared.precision import exact_products, wide
from regard.mixers.shared.sdpa import sdpa
from regard.mixers.shared.tiles import Tiles, balanced, cell_ids, join_tokens, split_keep, split_tokens

__all__ = ["BRA", "bra", "bra_plan", "bra_reference"]

Regions = int | tuple[int, int]


class BRAPlan(NamedTuple):
    """regions (B, R, top): the regions that each region attends to, in any order; all heads have them in common."""

    regions: Int[Tensor, "B R top"]


def bra_plan(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H N d"],
    grid: Grid,
    regions: Regions,
    top: int,
    *,
    mask: Mask | None = None,
) -> BRAPlan:
    """Each region takes the `top` regions whose mean key has the largest product with its mean query.

    Means are over tokens that are not padding; a region without any is taken last. Equal scores are broken
    arbitrarily. No gradient. Raises: GridError for regions that do not fit, ShapeError for top not in 1..R.
    """
    q, k = hide(q, mask), hide(k, mask)
    tiles = balanced(grid, _counts(regions), q.device)
    _check_top(top, tiles.number)
    with torch.no_grad(), exact_products(q.device):
        member = torch.nn.functional.one_hot(cell_ids(tiles.owner, grid, tiles.number), tiles.number + 1)
        member = member[:, :-1].mT.to(wide(q).dtype)  # (R, N)
        if mask is not None and mask.keep is not None:
            member = member * mask.keep[:, None, None, :].to(member.dtype)
        mean = member / member.sum(-1, keepdim=True).clamp_min(1.0)  # (R, N) or (B, 1, R, N)
        score = torch.einsum("bhrd,bhsd->brs", mean @ wide(q), mean @ wide(k))
        if mask is not None and mask.keep is not None:
            score = score.masked_fill(~member.any(-1), -torch.inf)  # (B, 1, R): empty regions as keys
        return BRAPlan(score.topk(top, sorted=False).indices)


def bra_reference(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H N d"],
    v: Float[Tensor, "B H N e"],
    grid: Grid,
    regions: Regions,
    top: int,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    plan: BRAPlan | None = None,
) -> Float[Tensor, "B H N e"]:
    """softmax over all keys, with those outside the chosen regions at -inf; extra tokens belong to every region."""
    mask = _check_mask("bra", mask)
    k, v = hide(k, mask), hide(v, mask)
    plan = bra_plan(q, k, grid, regions, top, mask=mask) if plan is None else plan
    tiles = balanced(grid, _counts(regions), q.device)
    number = tiles.number
    own = cell_ids(tiles.owner, grid, number)  # (N,): extra tokens are region R
    chosen = torch.zeros(q.shape[0], number + 1, number + 1, dtype=torch.bool, device=q.device)
    chosen[:, :number, :number] = chosen[:, :number, :number].scatter(-1, plan.regions, True)
    chosen[:, number] = chosen[:, :, number] = True
    allowed = chosen[:, own][:, :, own][:, None]  # (B, 1, N, N)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return softmax_rows(mask.added(logits.masked_fill(~allowed, -torch.inf))).to(v.dtype) @ v


def bra(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H N d"],
    v: Float[Tensor, "B H N e"],
    grid: Grid,
    regions: Regions,
    top: int,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    plan: BRAPlan | None = None,
) -> Float[Tensor, "B H N e"]:
    """Attention from each of the regions (a number a side, or (rows, columns)) to the `top` regions that it chooses.

    Sides that do not divide give regions that differ by one row or column; no padding is attended to. scale: None =
    d^-0.5. mask: padding only. plan: a selection to use instead of the best. A query without any key gives zeros.
    Raises: ShapeError, GridError for what does not fit, also indices of a plan (read in eager mode on the CPU);
    UnsupportedError for other masks.
    """
    check_qkv("bra", q, k, v)
    if q.shape[-2] != k.shape[-2]:
        raise ShapeError(f"bra: q has {q.shape[-2]} tokens, k has {k.shape[-2]}; regions need one grid for both")
    grid.check(q)
    mask = _check_mask("bra", mask)
    k, v = hide(k, mask), hide(v, mask)
    tiles = balanced(grid, _counts(regions), q.device)
    if plan is None:
        plan = bra_plan(q, k, grid, regions, top, mask=mask)
    else:
        check_chosen("bra: plan.regions", plan.regions, (q.shape[0], tiles.number, top), tiles.number)
    (q_extra, q_cells), (k_extra, k_cells), (v_extra, v_cells) = (split_tokens(x, grid) for x in (q, k, v))
    groups = q.shape[0] * q.shape[1]
    start = tiles.number * torch.arange(groups, device=q.device).view(*q.shape[:2], 1, 1)
    rows = (plan.regions[:, None] + start).flatten()  # (B*H*R*top,) rows of regions over all heads
    keys = _chosen(tiles.cut(k_cells), rows, top, k_extra)  # (B, H*R, top*A + E, d)
    values = _chosen(tiles.cut(v_cells), rows, top, v_extra)
    queries = tiles.cut(q_cells).flatten(1, 2)
    out = sdpa(queries, keys, values, attn_mask=_allowed(tiles, plan, mask, grid, q.shape[1]), scale=scale)
    cells = tiles.join(out.unflatten(1, (q.shape[1], tiles.number)))
    if not grid.extra:
        return cells
    return join_tokens(sdpa(q_extra, k, v, attn_mask=mask.dense(q_extra, k.shape[-2]), scale=scale), cells, grid)


def _chosen(x: Tensor, rows: Tensor, top: int, extra: Tensor) -> Tensor:
    """Whole regions of x (B, H, R, A, c) by row, then the extra tokens (B, H, E, c): (B, H*R, top*A+E, c)."""
    batch, number, regions, area, width = x.shape
    own = x.reshape(-1, area * width).index_select(0, rows).view(batch, number * regions, top * area, width)
    if not extra.shape[-2]:
        return own
    again = extra[:, :, None].expand(-1, -1, regions, -1, -1).flatten(1, 2)
    return torch.cat([own, again], -2)


def _allowed(tiles: Tiles, plan: BRAPlan, mask: Mask, grid: Grid, number: int) -> Tensor | None:
    """Which of the chosen keys exist and are no padding, (B, H*R, 1, top*A + E); None if all."""
    if tiles.even and mask.keep is None:
        return None
    real = tiles.tables.real.expand(len(plan.regions), -1, -1)  # (B, R, A)
    extra = real.new_ones(len(real), grid.extra)
    if mask.keep is not None:
        extra, cells = split_keep(mask.keep, grid)
        real = real & cells[:, tiles.tables.cell]
    batch = torch.arange(len(real), device=real.device)[:, None, None]
    own = real[batch, plan.regions].flatten(2)  # (B, R, top*A)
    own = torch.cat([own, extra[:, None].expand(-1, tiles.number, -1)], -1)
    return own[:, None, :, None].expand(-1, number, -1, -1, -1).flatten(1, 2)


def _counts(regions: Regions) -> tuple[int, int]:
    return (regions, regions) if isinstance(regions, int) else regions


def _check_top(top: int, number: int) -> None:
    if not 1 <= top <= number:
        raise ShapeError(f"bra: top={top} of {number} regions; choose top between 1 and {number}")


def _check_mask(name: str, mask: Mask | None) -> Mask:
    mask = mask or Mask()
    if mask.causal or mask.bias is not None:
        raise UnsupportedError(
            f"{name} cannot apply a causal or bias mask: regions are chosen for many queries at once"
        )
    return mask


@dataclass(frozen=True, kw_only=True)
class BRA(HeadMixerConfig):
    """regions: S a side, or (rows, columns). k: regions that each region attends to (BiFormer: 7 and 1, 4, 16).

    preset: "paper" scales logits by d^-0.5; "official" by C^-0.5, as the published code does for every head. scale:
    another factor. The paper adds a depth-wise convolution of the values: `dwc=5`.
    Raises: ConfigError for numbers below 1, k above the number of regions or an unknown preset; building, GridError
    if the site's grid has fewer rows or columns than regions.
    """

    regions: int | tuple[int, int] = 7
    k: int = 4
    scale: float | None = None
    preset: Literal["paper", "official"] = "paper"

    card: ClassVar[Card] = Card(
        title="Bi-level routing attention",
        source="Zhu et al. 2023 (BiFormer), Eq. 3-7",
        formula="softmax(q K_r^T / sqrt(d)) V_r,  r = the k best regions of mean(q) mean(k)^T",
        complexity="O(N^2 k C / S^2 + S^4 C)",
        query_content=True,
        key_content=True,
        relative_position=False,
        dynamic="two-step",
        scaling=frozenset({"routing"}),
        expert_type="MLP of width k n",
        expert_count="N / n",
        construction="locality prior",
        topology="N/n-to-N/n",
        conditions="Q, K, position",
        discrete=True,
        prefix="global: attended by all and attending to all, in no region",
    )
    masks: ClassVar[frozenset[str]] = frozenset({"padding"})
    samples: ClassVar[tuple[str, ...]] = (
        "BRA(regions=(2, 2), k=2)",
        'BRA(regions=(1, 3), k=2, preset="official", dwc=5)',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = _counts(self.regions)
        if min(*sides, self.k) < 1:
            raise ConfigError(f"regions (a side, or two) and k are at least 1, not regions={self.regions}, k={self.k}")
        if self.k > sides[0] * sides[1]:
            raise ConfigError(f"k={self.k} of {sides[0] * sides[1]} regions; k is at most their number")

    def operator(self, site: Site) -> "BRAOperator":
        rows, columns = _counts(self.regions)
        if rows > site.grid.height or columns > site.grid.width:
            fits = min(rows, site.grid.height), min(columns, site.grid.width)
            raise GridError(f"{rows}x{columns} regions cannot be laid on {site.grid}; nearest possible: regions={fits}")
        return BRAOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Attention in regions; the mean queries and keys, and their products; attention of extra tokens.

        "paper" takes regions as N k / S^2 keys and means as free.
        """
        grid, (rows, columns) = site.grid, _counts(self.regions)
        number, area = rows * columns, -(-grid.height // rows) * -(-grid.width // columns)
        if accounting == "paper":
            return Cost(0, int((2 * grid.cells * self.k * grid.cells / number + number**2) * site.inner))
        routing = 2 * number * grid.tokens + number**2
        extra = 2 * grid.extra * (grid.tokens + number * area)
        return Cost(0, (2 * number * area * self.k * area + routing + extra) * site.inner)


class BRAOperator(Operator):
    """No parameters."""

    def __init__(self, config: BRA, site: Site) -> None:
        super().__init__()
        self.config = config
        self.scale = site.inner**-0.5 if config.preset == "official" and config.scale is None else config.scale

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
        return bra(q, k, v, grid, self.config.regions, self.config.k, scale=self.scale, mask=mask)

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
        return bra_reference(q, k, v, grid, self.config.regions, self.config.k, scale=self.scale, mask=mask)
