"""Attention of every query to the cells of a few groups: chosen blocks (MoBA, NSA) or its neighbours.

It is routed attention: a group is an expert, and prefix and suffix tokens are the shared branch.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import ConfigError, Grid, Mask

from .checks import check_chosen, check_top
from .executions import Situation, check_execution, choose, trains, true_facts
from .precision import upcast, without_autocast
from .routed import Parts
from .routed_attention import FORMS, attend, few_logits, runs_triton
from .tiles import Tiles, along_sides, cell_ids, fixed_size_tiles, parts_of, split_keep, split_tokens

Block = int | tuple[int, int] | tuple[int, int, int]


class BlockPlan(NamedTuple):
    """blocks (B, H, N, top): the different blocks of each query, in any order."""

    blocks: Int[Tensor, "B H N top"]


def block_tiles(grid: Grid, block: Block, device: torch.device) -> Tiles:
    """Blocks of cells. block: the length of runs in row-major order, or the sides (rows, columns) of tiles, which have
    one frame unless there is a third."""
    if isinstance(block, int):
        return fixed_size_tiles(grid.row_major(), (1, block), device=device)
    return fixed_size_tiles(grid, along_sides(block, grid), device=device)


def block_counts(grid: Grid, block: Block) -> tuple[int, int]:
    """The number of blocks of the grid, and of slots of a block."""
    if isinstance(block, int):
        return -(-grid.cells // block), block
    sides = along_sides(block, grid)
    return math.prod(parts_of(grid.sides, sides)), math.prod(sides)


def block_means(
    x: Float[Tensor, "B H N d"], grid: Grid, tiles: Tiles, mask: Mask
) -> tuple[Float[Tensor, "B H R d"], Bool[Tensor, "B1 R"]]:
    """The mean of each block's tokens without padding, in float32 at least (else 0), and whether it has any."""
    real = tiles.tables.real[None]
    if mask.keep is not None:
        real = real & split_keep(mask.keep, grid)[1][:, tiles.tables.cell]
    count = real.sum(-1)  # (B | 1, R)
    cells = upcast(tiles.cut(split_tokens(x, grid)[1]))
    if not tiles.even or mask.keep is not None:
        cells = cells.masked_fill(~real[:, None, :, :, None], 0.0)
    return cells.sum(-2) / count.clamp_min(1)[:, None, :, None], count > 0


def attend_groups(
    q: Float[Tensor, "B H n d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid,
    groups: Int[Tensor, "#B #H m A"], real: Bool[Tensor, "#B #H m A"] | None, choice: Int[Tensor, "B H n s"], *,
    scale: float | None, mask: Mask, execution: str, rules: str = "MoBA, NSA",
) -> Float[Tensor, "B H n e"]:  # fmt: skip
    """One softmax over the cells of the chosen groups and all prefix and suffix tokens.

    groups: the cells of every group. real: slots that are not empty, None for all. choice: s groups for each query,
    which must not overlap. A query without any key gives zeros. rules: of `executions.RULES`.
    Raises: ConfigError for an unknown execution, UnsupportedError for one that cannot run.
    """
    check_execution(execution, FORMS)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    (k_extra, k), (v_extra, v) = split_tokens(k, grid), split_tokens(v, grid)
    keep_extra, bias = None, None
    if mask.keep is not None:
        keep_extra, keep = split_keep(mask.keep, grid)
        bias = upcast(k).new_zeros(keep.shape).masked_fill(~keep, -torch.inf)[:, None, None]  # (B, 1, 1, cells)
    if real is not None:  # empty slots point at one additional key, which is hidden from all
        k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[-1])], -2) for x in (k, v))
        groups = torch.where(real, groups, grid.cells)
        none = upcast(k).new_full((1 if bias is None else len(bias), 1, 1, 1), -torch.inf)
        bias = torch.cat([none.new_zeros(1, 1, 1, grid.cells) if bias is None else bias, none], -1)
    with without_autocast(q.device):
        shared = None
        if grid.extra:
            shared = upcast(q) @ upcast(k_extra).mT
            if keep_extra is not None:
                shared = shared.masked_fill(~keep_extra[:, None, None], -torch.inf)
        keys = groups.expand(*q.shape[:2], -1, -1)
        values = v_extra if grid.extra else None
        parts = Parts(q=q, k=k, v=v, keys=keys, experts=choice, shared=shared, values=values, bias=bias)
        chosen = groups.shape[-1] * choice.shape[-1]
        facts = {"triton": runs_triton(q, bias), "few": few_logits(q, k.shape[-2])}
        situation = Situation(
            device=q.device, dtype=q.dtype, tokens=q.shape[-2], keys=k.shape[-2], m=groups.shape[-2], top=chosen,
            trains=trains(q, k, v), facts=true_facts(facts),
        )  # fmt: skip
        return attend(choose(rules, execution, situation), parts)


def check_block(name: str, block: Block) -> None:
    """Raises ConfigError unless block is a number, a pair or a triple of numbers, at least 1."""
    sides = block if isinstance(block, tuple) else (block,)
    if len(sides) not in (1, 2, 3) or min(sides) < 1:
        raise ConfigError(f"{name}: a block is the length of a run or (rows, columns), at least 1, not {block}")


def check_blocks(name: str, q: Tensor, grid: Grid, block: Block, top: int, plan: BlockPlan | None) -> None:
    """The input checks of an operator function. Raises: ShapeError, GridError, ConfigError."""
    grid.check(q)
    check_block(name, block)
    number, _ = block_counts(grid, block)
    check_top(name, top, number, "blocks")
    if plan is not None:
        check_chosen(f"{name}: plan.blocks", plan.blocks, (*q.shape[:3], top), number)


def check_block_count(top: int, grid: Grid, block: Block) -> None:
    """Raises ConfigError unless the grid of a site has `top` blocks."""
    number, _ = block_counts(grid, block)
    if top > number:
        raise ConfigError(f"k={top}, but {grid} has {number} blocks of {block}; k is at most {number}")


def block_mask(plan: BlockPlan, grid: Grid, tiles: Tiles) -> Bool[Tensor, "B H N N"]:
    """True where the key is in a block of the query's plan, or is a prefix or suffix token. For references."""
    chosen = plan.blocks.new_zeros(*plan.blocks.shape[:-1], tiles.number + 1, dtype=torch.bool)
    chosen = chosen.scatter(-1, plan.blocks, True)
    chosen[..., -1] = True
    return chosen[..., cell_ids(tiles.tile_of_cell, grid, tiles.number)]
