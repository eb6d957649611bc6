"""Mixture of block attention, for images: every query attends to its own block and to the best other blocks (MoBA).

Blocks are tiles of the grid, or runs of patch tokens. A query scores blocks by q . mean(k_block), always takes its own
block, and attends to the tokens of its k best blocks in one softmax (Lu et al. 2025, Eq. 2-8, without causal order).
Prefix and suffix tokens are keys of every query; as queries they have no own block and choose k blocks.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import Card, ConfigError, Contract, Cost, Grid, Inputs, Operator, Site, operator_function
from regard.core.mask import Mask, hide, join_product, softmax_rows

from .shared import block_attention as blocks
from .shared.block_attention import Block, BlockPlan
from .shared.checks import check_top, padding_only
from .shared.heads import HeadMixerConfig
from .shared.precision import upcast, without_autocast
from .shared.tiles import cell_ids

__all__ = ["MoBA", "moba", "moba_plan", "moba_reference"]


@operator_function(depth=True)
def moba_plan(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], grid: Grid, block: Block, top: int, *, own: bool = True,
    mask: Mask | None = None,
) -> BlockPlan:  # fmt: skip
    """Each query takes the `top` blocks with the largest product with their mean key; its own first if `own`.

    Means are over tokens that are not padding; a block of padding is chosen last. Scores are in float32 for half
    precision; ties are broken arbitrarily; no gradient.
    Raises: ShapeError, GridError for tensors that do not fit or top not in 1..blocks; UnsupportedError for masks other
    than padding; ConfigError for a block below 1.
    """
    grid.check(q)
    blocks.check_block("moba_plan", block)
    mask = padding_only("moba_plan", mask)
    check_top("moba_plan", top, blocks.block_counts(grid, block)[0], "blocks")
    with torch.no_grad(), without_autocast(q.device):
        tiles = blocks.block_tiles(grid, block, q.device)
        mean, any_token = blocks.block_means(hide(k, mask), grid, tiles, mask)
        score = (upcast(q) @ mean.mT).masked_fill(~any_token[:, None, None], -torch.inf)  # (B, H, N, R)
        if own:
            own_block = torch.nn.functional.one_hot(cell_ids(tiles.tile_of_cell, grid, tiles.number), tiles.number + 1)
            score = score.masked_fill(own_block[:, :-1].bool(), torch.inf)
        return BlockPlan(score.topk(top, sorted=False).indices)


@operator_function(depth=True)
def moba_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, block: Block,
    top: int, *, own: bool = True, scale: float | None = None, mask: Mask | None = None, plan: BlockPlan | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax over all keys, with those outside the chosen blocks at -inf."""
    mask = padding_only("moba", mask)
    plan = moba_plan(q, k, grid, block, top, own=own, mask=mask) if plan is None else plan
    k, v = hide(k, mask), hide(v, mask)
    allowed = blocks.block_mask(plan, grid, blocks.block_tiles(grid, block, q.device))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return softmax_rows(mask.add_to(logits.masked_fill(~allowed, -torch.inf))).to(v.dtype) @ v


@operator_function(depth=True)
def moba(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, block: Block,
    top: int, *, own: bool = True, scale: float | None = None, mask: Mask | None = None, plan: BlockPlan | None = None,
    execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Attention to the tokens of `top` blocks per query and head, and to prefix and suffix tokens, in one softmax.

    block: length of runs of patch tokens, or (rows, columns) of tiles; the last block may be smaller. own: the query's
    own block is one of them. scale: None = d^-0.5. mask: padding only; a query without any key gives zeros. plan: a
    selection to use instead. execution: "auto", "dense", "gather", "grouped", or "triton" and "varlen" for GPUs, which
    differ only in speed and memory.
    Raises: ShapeError, GridError for tensors or plans that do not fit (indices of a plan are read in eager mode on the
    CPU); UnsupportedError for other masks, or an execution that cannot run here; ConfigError for a block below 1 or an
    unknown execution.
    """
    blocks.check_blocks("moba", q, grid, block, top, plan)
    mask = padding_only("moba", mask)
    plan = moba_plan(q, k, grid, block, top, own=own, mask=mask) if plan is None else plan
    tiles = blocks.block_tiles(grid, block, q.device)
    k, v, real = hide(k, mask), hide(v, mask), None if tiles.even else tiles.tables.real[None, None]
    groups = tiles.tables.cell[None, None]
    return blocks.attend_groups(q, k, v, grid, groups, real, plan.blocks, scale=scale, mask=mask, execution=execution)


@dataclass(frozen=True, kw_only=True)
class MoBA(HeadMixerConfig):
    """block: length of runs of patch tokens, or (rows, columns) of tiles, of a clip (frames, rows, columns).

    k: blocks of each query, with its own. own: whether a query always takes its own block. scale: factor of the logits,
    None = d^-0.5.
    Raises: ConfigError for numbers below 1; building, if the site has fewer than k blocks.
    """

    block: int | tuple[int, int] | tuple[int, int, int] = (7, 7)
    k: int = 2
    own: bool = True
    scale: float | None = None

    card = Card(
        title="Mixture of block attention", source="Lu et al. 2025 (MoBA), Eq. 2-8",
        formula="softmax(q K_b^T / sqrt(d)) V_b,  b = own block and the best of q . mean(K_block)",
        complexity="O(N^2 C / n + N k n C)", query_content=True, key_content=True, dynamic="two-step",
        scaling=frozenset({"routing"}), expert_type="MLP of width n", expert_count="N / n",
        construction="locality prior", topology="N-to-N/n", conditions="Q, K, position", discrete=True,
        prefix="keys of every query; as queries they choose blocks and have no own block",
    )  # fmt: skip
    masks = frozenset({"padding", "product"})
    depth = True
    samples = ("MoBA(block=(2, 3), k=2)", "MoBA(block=5, k=2, own=False, dwc=3)")

    @property
    def contract(self) -> Contract:
        return Contract(counted={"execution": "gather"})

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks.check_block("MoBA", self.block)
        if self.k < 1:
            raise ConfigError(f"MoBA: k is at least 1, not {self.k}")

    def operator(self, site: Site) -> "MoBAOperator":
        blocks.check_block_count(self.k, site.grid, self.block)
        return MoBAOperator(self)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Scores of the blocks; logits and values of k blocks and of prefix and suffix tokens."""
        grid = site.grid
        number, area = blocks.block_counts(grid, self.block)
        return Cost(0, grid.tokens * (number + 2 * self.k * area + 2 * grid.extra) * site.inner)


class MoBAOperator(Operator):
    """No parameters. execution: see `moba`."""

    def __init__(self, config: MoBA, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        config = self.config
        form = moba_reference if plain else partial(moba, execution=self.execution)
        q, k, mask, scale = join_product(inputs.q, inputs.k, inputs.mask, config.scale)
        return form(q, k, inputs.v, inputs.grid, config.block, config.k, own=config.own, scale=scale, mask=mask)
