"""Bi-level routing attention: regions choose regions, and tokens attend to the tokens of those regions (BiFormer).

The grid is divided into S x S regions. A_r = q_r k_r^T of the regions' mean queries and keys, all heads together; each
region keeps its k best regions, and its queries attend to all their tokens in one softmax (Zhu et al. 2023, Eq. 3-7).
Prefix and suffix tokens have no region: they attend to all tokens, and all tokens attend to them.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core import Card, ConfigError, Cost, Grid, GridError, Inputs, Operator, Site, operator_function
from regard.core.mask import Mask, hide, join_product, softmax_rows

from .shared.block_attention import attend_groups
from .shared.checks import check_chosen, check_top, padding_only
from .shared.executions import Situation, check_execution, choose, trains
from .shared.flat_rows import flat_rows
from .shared.heads import HeadMixerConfig
from .shared.kept import kept
from .shared.precision import upcast, upcast_dtype, without_autocast
from .shared.sdpa import sdpa
from .shared.tiles import (
    Side,
    Tiles,
    along_sides,
    balanced_tiles,
    cell_ids,
    join_global_tokens,
    pair,
    parts_of,
    split_keep,
    split_tokens,
)

__all__ = ["BRA", "bra", "bra_plan", "bra_reference"]


class BRAPlan(NamedTuple):
    """regions (B, R, top): the regions that each region attends to, in any order; all heads share them."""

    regions: Int[Tensor, "B R top"]


@operator_function(depth=True)
def bra_plan(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], grid: Grid, regions: Side, top: int, *,
    mask: Mask | None = None,
) -> BRAPlan:  # fmt: skip
    """Each region takes the `top` regions whose mean key has the largest product with its mean query.

    Means are over tokens that are not padding; a region of padding is chosen last. Ties are broken arbitrarily. No
    gradient.
    Raises: ShapeError, GridError for tensors or regions that do not fit, or top not in 1..R; UnsupportedError for masks
    other than padding.
    """
    grid.check(q)
    mask = padding_only("bra_plan", mask)
    q, k = hide(q, mask), hide(k, mask)
    tiles = balanced_tiles(grid, along_sides(regions, grid, grid.depth), q.device)
    check_top("bra", top, tiles.number, "regions")
    with torch.no_grad(), without_autocast(q.device):
        member = _members(tiles, grid).to(upcast_dtype(q))
        if mask.keep is not None:
            member = member * mask.keep[:, None, None, :].to(member.dtype)
        mean = member / member.sum(-1, keepdim=True).clamp_min(1.0)  # (R, N) or (B, 1, R, N)
        score = torch.einsum("bhrd,bhsd->brs", mean @ upcast(q), mean @ upcast(k))
        if mask.keep is not None:
            score = score.masked_fill(~member.any(-1), -torch.inf)  # (B, 1, R): empty regions as keys
        return BRAPlan(score.topk(top, sorted=False).indices)


@kept
def _members(tiles: Tiles, grid: Grid) -> Tensor:
    """Whether a token is in a region, (R, N)."""
    regions = torch.arange(tiles.number, device=tiles.device)[:, None]
    return cell_ids(tiles.tile_of_cell, grid, tiles.number) == regions


@operator_function(depth=True)
def bra_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, regions: Side,
    top: int, *, scale: float | None = None, mask: Mask | None = None, plan: BRAPlan | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax over all keys, those outside the chosen regions at -inf; prefix and suffix tokens are in every region."""
    mask = padding_only("bra", mask)
    k, v = hide(k, mask), hide(v, mask)
    plan = bra_plan(q, k, grid, regions, top, mask=mask) if plan is None else plan
    tiles = balanced_tiles(grid, along_sides(regions, grid, grid.depth), q.device)
    number = tiles.number
    region_of = cell_ids(tiles.tile_of_cell, grid, number)  # (N,): prefix and suffix tokens are region R
    chosen = torch.zeros(q.shape[0], number + 1, number + 1, dtype=torch.bool, device=q.device)
    chosen[:, :number, :number] = chosen[:, :number, :number].scatter(-1, plan.regions, True)
    chosen[:, number] = chosen[:, :, number] = True
    allowed = chosen[:, region_of][:, :, region_of][:, None]  # (B, 1, N, N)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return softmax_rows(mask.add_to(logits.masked_fill(~allowed, -torch.inf))).to(v.dtype) @ v


@operator_function(depth=True)
def bra(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, regions: Side,
    top: int, *, scale: float | None = None, mask: Mask | None = None, plan: BRAPlan | None = None,
    execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Attention from each region (regions: a number per side, or (rows, columns)) to the `top` regions that it chooses.

    Where they do not divide the grid, regions differ by one row or column. scale: None = d^-0.5. mask: padding only.
    plan: a selection to use instead of the best. A query without any key gives zeros. execution: "regions" copies the
    keys of each region, "triton" gathers them in a kernel for GPUs; "auto" follows the table in docs/mechanisms.md.
    Raises: ShapeError, GridError for tensors, regions or plans that do not fit (indices of a plan are read in eager
    mode on the CPU); UnsupportedError for other masks and for "triton" where it cannot run; ConfigError for an unknown
    execution.
    """
    grid.check(q)
    check_execution(execution, ("regions", "triton"))
    mask = padding_only("bra", mask)
    k, v = hide(k, mask), hide(v, mask)
    tiles = balanced_tiles(grid, along_sides(regions, grid, grid.depth), q.device)
    if plan is None:
        plan = bra_plan(q, k, grid, regions, top, mask=mask)
    else:
        check_chosen("bra: plan.regions", plan.regions, (q.shape[0], tiles.number, top), tiles.number)
    situation = Situation(
        device=q.device, dtype=q.dtype, tokens=grid.cells, keys=grid.cells, m=tiles.number, top=top * tiles.area,
        trains=trains(q, k, v),
    )  # fmt: skip
    if choose("BRA", execution, situation) == "triton":
        cells = _attend_routed(q, k, v, grid, tiles, plan, scale, mask)
    else:
        cells = _by_regions(q, k, v, grid, tiles, plan, scale, mask)
    return join_global_tokens(cells, q, k, v, grid, scale, mask)


def _by_regions(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, tiles: Tiles, plan: BRAPlan, scale: float | None, mask: Mask
) -> Tensor:
    """The patch tokens' outputs: fused attention of each region to copies of its keys."""
    top = plan.regions.shape[-1]
    (_, q_cells), (k_extra, k_cells), (v_extra, v_cells) = (split_tokens(x, grid) for x in (q, k, v))
    rows = flat_rows(plan.regions[:, None].expand(-1, q.shape[1], -1, -1), tiles.number).flatten()
    keys = _chosen_regions(tiles.cut(k_cells), rows, top, k_extra)  # (B, H*R, top*A + E, d)
    values = _chosen_regions(tiles.cut(v_cells), rows, top, v_extra)
    queries = tiles.cut(q_cells).flatten(1, 2)
    out = sdpa(queries, keys, values, attn_mask=_allowed_keys(tiles, plan, mask, grid, q.shape[1]), scale=scale)
    return tiles.join(out.unflatten(1, (q.shape[1], tiles.number)))


def _attend_routed(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, tiles: Tiles, plan: BRAPlan, scale: float | None, mask: Mask
) -> Tensor:
    """The same as routed attention: a region is an expert, its keys are the cells of the regions that it chose."""
    cells = tiles.tables.cell[plan.regions].flatten(2)[:, None]  # (B, 1, R, top*A)
    real = None if tiles.even else tiles.tables.real[plan.regions].flatten(2)[:, None]
    choice = tiles.tile_of_cell[:, None].expand(*q.shape[:2], -1, -1)
    queries = split_tokens(q, grid)[1]
    return attend_groups(queries, k, v, grid, cells, real, choice, scale=scale, mask=mask, execution="triton")


def _chosen_regions(x: Tensor, rows: Tensor, top: int, extra: Tensor) -> Tensor:
    """The chosen regions of x (B, H, R, A, c), then prefix and suffix tokens (B, H, E, c): (B, H*R, top*A+E, c)."""
    batch, number, regions, area, width = x.shape
    cells = x.reshape(-1, area * width).index_select(0, rows).view(batch, number * regions, top * area, width)
    if not extra.shape[-2]:
        return cells
    return torch.cat([cells, extra[:, :, None].expand(-1, -1, regions, -1, -1).flatten(1, 2)], -2)


def _allowed_keys(tiles: Tiles, plan: BRAPlan, mask: Mask, grid: Grid, number: int) -> Tensor | None:
    """True for chosen keys that are not empty slots or padding, (B, H*R, 1, top*A + E); None if all are."""
    if tiles.even and mask.keep is None:
        return None
    real = tiles.tables.real.expand(len(plan.regions), -1, -1)  # (B, R, A)
    extra = real.new_ones(len(real), grid.extra)
    if mask.keep is not None:
        extra, cells = split_keep(mask.keep, grid)
        real = real & cells[:, tiles.tables.cell]
    batch = torch.arange(len(real), device=real.device)[:, None, None]
    keep = real[batch, plan.regions].flatten(2)  # (B, R, top*A)
    keep = torch.cat([keep, extra[:, None].expand(len(keep), tiles.number, -1)], -1)
    return keep[:, None, :, None].expand(-1, number, -1, -1, -1).flatten(1, 2)


@dataclass(frozen=True, kw_only=True)
class BRA(HeadMixerConfig):
    """regions: S per side, or (rows, columns), in each frame of a clip; or (frames, rows, columns).

    k: regions that each region attends to (BiFormer: 7 and 1, 4, 16).

    preset: "paper" scales logits by d^-0.5; "official" by C^-0.5, as the published code does for every head. scale:
    another factor. The paper's layer adds a depth-wise convolution of the values: `dwc=5`.
    Raises: ConfigError for numbers below 1, k above the number of regions or an unknown preset; building, GridError
    if the site's grid has fewer rows or columns than regions.
    """

    regions: int | tuple[int, int] | tuple[int, int, int] = 7
    k: int = 4
    scale: float | None = None
    preset: Literal["paper", "official"] = "paper"

    card = Card(
        title="Bi-level routing attention", source="Zhu et al. 2023 (BiFormer), Eq. 3-7",
        formula="softmax(q K_r^T / sqrt(d)) V_r,  r = the k best regions of mean(q) mean(k)^T",
        complexity="O(N^2 k C / S^2 + S^4 C)", query_content=True, key_content=True, relative_position=False,
        dynamic="two-step", scaling=frozenset({"routing"}), expert_type="MLP of width k n", expert_count="N / n",
        construction="locality prior", topology="N/n-to-N/n", conditions="Q, K, position", discrete=True,
        prefix="global: attend to all tokens and are attended by all; in no region",
    )  # fmt: skip
    masks = frozenset({"padding", "product"})
    depth = True
    samples = ("BRA(regions=(2, 2), k=2)", 'BRA(regions=(1, 3), k=2, preset="official", dwc=5)')

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = pair(self.regions)
        if min(*sides, self.k) < 1:
            raise ConfigError(
                f"regions (per side, or rows and columns) and k are at least 1, not regions={self.regions}, k={self.k}"
            )
        if self.k > math.prod(sides):
            raise ConfigError(f"k={self.k} of {math.prod(sides)} regions; k is at most their number")

    def operator(self, site: Site) -> "BRAOperator":
        counts, sides = along_sides(self.regions, site.grid, site.grid.depth), site.grid.sides
        if any(count > side for count, side in zip(counts, sides, strict=True)):
            given, nearest = "x".join(map(str, counts)), tuple(map(min, counts, sides))
            raise GridError(f"{site.grid} cannot be divided into {given} regions; nearest: regions={nearest}")
        return BRAOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Attention of regions, mean queries and keys and their products, attention of prefix and suffix tokens.

        "paper" counts N k / S^2 keys for each query, and means as free.
        """
        grid, counts = site.grid, along_sides(self.regions, site.grid, site.grid.depth)
        number, area = math.prod(counts), math.prod(parts_of(grid.sides, counts))
        if accounting == "paper":
            return Cost(0, int((2 * grid.cells * self.k * grid.cells / number + number**2) * site.inner))
        routing = 2 * number * grid.tokens + number**2
        extra = 2 * grid.extra * (grid.tokens + number * area)
        return Cost(0, (2 * number * area * self.k * area + routing + extra) * site.inner)


class BRAOperator(Operator):
    """No parameters. execution: see `bra`."""

    def __init__(self, config: BRA, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        self.scale = site.inner**-0.5 if config.preset == "official" and config.scale is None else config.scale

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form, config = bra_reference if plain else partial(bra, execution=self.execution), self.config
        q, k, mask, scale = join_product(inputs.q, inputs.k, inputs.mask, self.scale)
        return form(q, k, inputs.v, inputs.grid, config.regions, config.k, scale=scale, mask=mask)
