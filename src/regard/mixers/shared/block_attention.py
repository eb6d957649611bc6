"""Attention of every query to the cells of a few groups that were chosen for it: blocks of MoBA and NSA, neighbours.

The executions are those of MiTA's routed branch (a group is an expert), with the extra tokens as the shared branch.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import ConfigError, Grid, Mask, ShapeError, UnsupportedError
from regard.mixers.mita.routed import Parts, choose_form
from regard.mixers.mita.routing import MitaPlan, check_chosen

from .precision import exact_products, wide
from .tiles import Tiles, sized, split_keep, split_tokens

Block = int | tuple[int, int]


class BlockPlan(NamedTuple):
    """blocks (B, H, N, top): the blocks of each query, each once, in any order."""

    blocks: Int[Tensor, "B H N top"]


def block_tiles(grid: Grid, block: Block, device: torch.device) -> Tiles:
    """Blocks of the cells: a number is the length of runs in their order, a pair the sides of tiles."""
    if isinstance(block, int):
        return sized(Grid(1, grid.cells, grid.prefix, grid.suffix), (1, block), device=device)
    return sized(grid, block, device=device)


def block_counts(grid: Grid, block: Block) -> tuple[int, int]:
    """How many blocks the grid has, and the slots of one."""
    if isinstance(block, int):
        return -(-grid.cells // block), block
    return -(-grid.height // block[0]) * -(-grid.width // block[1]), block[0] * block[1]


def block_means(
    x: Float[Tensor, "B H N d"], grid: Grid, tiles: Tiles, mask: Mask
) -> tuple[Float[Tensor, "B H R d"], Bool[Tensor, "B1 R"]]:
    """The mean of every block's tokens that are no padding (0 without any), in float32 at least; whether it has any."""
    real = tiles.tables.real[None]
    if mask.keep is not None:
        real = real & split_keep(mask.keep, grid)[1][:, tiles.tables.cell]
    count = real.sum(-1)  # (B | 1, R)
    cells = wide(tiles.cut(split_tokens(x, grid)[1]))
    if not tiles.even or mask.keep is not None:
        cells = cells.masked_fill(~real[:, None, :, :, None], 0.0)
    return cells.sum(-2) / count.clamp_min(1)[:, None, :, None], count > 0


def attend_groups(
    q: Float[Tensor, "B H n d"],
    k: Float[Tensor, "B H N d"],
    v: Float[Tensor, "B H N e"],
    grid: Grid,
    groups: Int[Tensor, "m A"],
    real: Bool[Tensor, "m A"] | None,
    choice: Int[Tensor, "B H n s"],
    *,
    scale: float | None,
    mask: Mask,
    execution: str,
) -> Float[Tensor, "B H n e"]:
    """One softmax over the cells of the chosen groups and the extra tokens; groups of one query must not overlap.

    groups: cells of every group; real: slots that count, None for all. A query without any key gives zeros.
    """
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    (k_extra, k), (v_extra, v) = split_tokens(k, grid), split_tokens(v, grid)
    keep_extra, bias = None, None
    if mask.keep is not None:
        keep_extra, keep = split_keep(mask.keep, grid)
        bias = wide(k).new_zeros(keep.shape).masked_fill(~keep, -torch.inf)[:, None, None]  # (B, 1, 1, cells)
    if real is not None:  # slots that do not count point at one more key, which nobody sees
        k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[-1])], -2) for x in (k, v))
        groups = torch.where(real, groups, grid.cells)
        none = wide(k).new_full((1 if bias is None else len(bias), 1, 1, 1), -torch.inf)
        bias = torch.cat([none.new_zeros(1, 1, 1, grid.cells) if bias is None else bias, none], -1)
    with exact_products(q.device):
        shared = None
        if grid.extra:
            shared = wide(q) @ wide(k_extra).mT
            if keep_extra is not None:
                shared = shared.masked_fill(~keep_extra[:, None, None], -torch.inf)
        plan = MitaPlan(groups.expand(*q.shape[:2], -1, -1), choice)
        parts = Parts(q=q, k=k, v=v, shared=shared, values=v_extra if grid.extra else None, plan=plan, bias=bias)
        return choose_form(execution, parts)(parts)


def check_block(name: str, block: Block) -> None:
    """Raises ConfigError unless block is a number or a pair, at least 1."""
    sides = block if isinstance(block, tuple) else (block,)
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ConfigError(f"{name}: a block is the length of a run or (rows, columns), at least 1, not {block}")


def check_choice(name: str, top: int, blocks: int) -> None:
    """Raises ShapeError unless 1 <= top <= blocks."""
    if not 1 <= top <= blocks:
        raise ShapeError(f"{name}: top={top} of {blocks} blocks; choose top between 1 and {blocks}")


def check_blocks(name: str, plan: BlockPlan, q: Tensor, top: int, blocks: int) -> None:
    """The door of a given plan. Raises: ShapeError, as `check_chosen`."""
    check_chosen(f"{name}: plan.blocks", plan.blocks, (*q.shape[:3], top), blocks)


def padding_only(name: str, mask: Mask | None) -> Mask:
    """The mask, an empty one for None. Raises: UnsupportedError for a causal mask or a bias."""
    mask = mask or Mask()
    if mask.causal or mask.bias is not None:
        raise UnsupportedError(f"{name} cannot apply a causal or bias mask: keys are chosen in groups")
    return mask
