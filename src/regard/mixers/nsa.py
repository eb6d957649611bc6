"""A gated sum of compressed, selected and sliding attention: an NSA-like mechanism for images (Yuan et al. 2025).

Every query has three attentions, each with its own softmax: to the means of all blocks; to the tokens of the k blocks
with the largest weights of the first attention; to the patch tokens around it. out = sum of gate x output (Eq. 5). The
original is causal and compresses with an MLP; this form is not causal and uses means. Unlike MiTA, the branches have no
common softmax. Prefix and suffix tokens are keys in all three branches; as queries they choose blocks, and their window
is the whole sequence.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core import Card, ConfigError, Contract, Grid, Inputs, Operator, ShapeError, Site, merge, operator_function
from regard.core.cost import Cost, linear_cost
from regard.core.mask import Mask, hide, softmax_rows

from .shared import block_attention as blocks
from .shared.block_attention import Block, BlockPlan
from .shared.checks import padding_only
from .shared.heads import HeadMixerConfig
from .shared.kept import kept
from .shared.precision import upcast, without_autocast
from .shared.tiles import cell_ids, join_global_tokens, join_sides, pad_pairs, split_keep, split_tokens

__all__ = ["NSA", "nsa", "nsa_reference"]


@operator_function(depth=True)
def nsa_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"],
    gates: Float[Tensor, "B H N 3"], grid: Grid, block: Block, top: int, window: int, *, group: int = 1,
    scale: float | None = None, mask: Mask | None = None, plan: BlockPlan | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """gates . (softmax over block means, softmax over chosen blocks, softmax over the window), with N x N logits."""
    blocks.check_blocks("nsa", q, grid, block, top, plan)
    _check_numbers(q, window, group)
    mask = padding_only("nsa", mask)
    k, v = hide(k, mask), hide(v, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tiles = blocks.block_tiles(grid, block, q.device)
    block_of = cell_ids(tiles.tile_of_cell, grid, tiles.number)  # (N,): prefix and suffix tokens have number R
    keep = torch.ones(q.shape[0], grid.tokens, dtype=torch.bool, device=q.device) if mask.keep is None else mask.keep
    member = (block_of == torch.arange(tiles.number, device=q.device)[:, None]) & keep[:, None]  # (B, R, N)
    mean = member.to(q.dtype) / member.sum(-1, keepdim=True).clamp_min(1).to(q.dtype)
    logits = (q @ k.mT * scale).masked_fill(~keep[:, None, None], -torch.inf)  # (B, H, N, N)
    to_means = (q @ (mean[:, None] @ k).mT * scale).masked_fill(~member.any(-1)[:, None, None], -torch.inf)
    extra = block_of == tiles.number
    to_extra = logits.masked_fill(~extra, -torch.inf)
    first = torch.cat([to_means, to_extra], -1)
    compressed = softmax_rows(first) @ torch.cat([mean[:, None] @ v, v], -2)
    if plan is None:
        plan = _choose(first, member.any(-1), top, group)
    selected = softmax_rows(logits.masked_fill(~blocks.block_mask(plan, grid, tiles), -torch.inf)) @ v
    cell = torch.arange(grid.cells, device=q.device)
    near = torch.ones(grid.cells, grid.cells, dtype=torch.bool, device=q.device)
    for side in reversed(grid.sides):
        place, cell = cell % side, cell // side
        near &= (place[:, None] - place).abs() <= window // 2
    sliding = softmax_rows(logits.masked_fill(~pad_pairs(near, grid), -torch.inf)) @ v
    return (torch.stack([compressed, selected, sliding], -1) * gates[..., None, :]).sum(-1)


def _choose(logits: Tensor, any_token: Tensor, top: int, group: int) -> BlockPlan:
    """The `top` blocks with the largest weights, summed over groups of heads, by their logarithms: weights underflow.

    logits (B, H, N, R + extra): of R blocks, then of prefix and suffix tokens. any_token (B | 1, R).
    """
    total = logits.detach()
    if group > 1:
        total = total.log_softmax(-1).unflatten(1, (-1, group)).logsumexp(2)
    total = total[..., : any_token.shape[-1]].masked_fill(~any_token[:, None, None], -torch.inf)
    return BlockPlan(total.topk(top, sorted=False).indices.repeat_interleave(group, 1))


def _check_numbers(q: Tensor, window: int, group: int) -> None:
    if window < 1 or window % 2 == 0:
        raise ConfigError(f"nsa: window is the odd side of a square of cells, not {window}")
    if group < 1 or q.shape[1] % group:
        raise ConfigError(f"nsa: group={group} does not divide {q.shape[1]} heads")


@operator_function(depth=True)
def nsa(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"],
    gates: Float[Tensor, "B H N 3"], grid: Grid, block: Block, top: int, window: int, *, group: int = 1,
    scale: float | None = None, mask: Mask | None = None, plan: BlockPlan | None = None, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Gated sum of attention to block means, to the tokens of `top` blocks and to a window of the grid.

    gates: of compressed, selected, sliding. block: length of runs of patch tokens, or (rows, columns) of tiles.
    window: odd side of the square of cells around a query, cut off at the border. group: heads that choose blocks
    together. scale: None = d^-0.5. mask: padding only; a query without any key gives zeros. plan: a selection to use
    instead. execution: of the selected blocks, see `moba`; "dense" and "gather" are also of the window, for which
    others take "gather".
    Raises: ShapeError, GridError for tensors or plans that do not fit (indices of a plan are read in eager mode on the
    CPU); UnsupportedError for other masks; ConfigError for impossible numbers.
    """
    blocks.check_blocks("nsa", q, grid, block, top, plan)
    _check_numbers(q, window, group)
    if tuple(gates.shape) != (*q.shape[:3], 3):
        raise ShapeError(f"nsa: gates have shape {tuple(gates.shape)}; expected {(*q.shape[:3], 3)}")
    mask = padding_only("nsa", mask)
    k, v = hide(k, mask), hide(v, mask)
    tiles = blocks.block_tiles(grid, block, q.device)
    groups, real = tiles.tables.cell[None, None], None if tiles.even else tiles.tables.real[None, None]
    compressed, chosen = _attend_compressed(q, k, v, grid, block, top, group, scale, mask, plan)
    selected = blocks.attend_groups(
        q, k, v, grid, groups, real, chosen.blocks, scale=scale, mask=mask, execution=execution
    )
    sliding = _attend_window(q, k, v, grid, window, scale, mask, execution)
    return compressed * gates[..., :1] + selected * gates[..., 1:2] + sliding * gates[..., 2:]


def _attend_compressed(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, block: Block, top: int, group: int, scale: float | None, mask: Mask,
    plan: BlockPlan | None,
) -> tuple[Tensor, BlockPlan]:  # fmt: skip
    """Attention to block means and to prefix and suffix tokens; and the selection."""
    tiles = blocks.block_tiles(grid, block, q.device)
    (keys, any_token), (values, _) = blocks.block_means(k, grid, tiles, mask), blocks.block_means(v, grid, tiles, mask)
    k_extra, v_extra = split_tokens(k, grid)[0], split_tokens(v, grid)[0]
    with without_autocast(q.device):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        logits = upcast(q) @ torch.cat([keys, upcast(k_extra)], -2).mT * scale
        if mask.keep is None:
            a = logits.softmax(-1)
        else:
            keep = torch.cat([any_token, split_keep(mask.keep, grid)[0]], -1)
            logits = logits.masked_fill(~keep[:, None, None], -torch.inf)
            a = softmax_rows(logits)
        chosen = _choose(logits, any_token, top, group) if plan is None else plan
        return a.to(v.dtype) @ torch.cat([values.to(v.dtype), v_extra], -2), chosen


def _attend_window(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, window: int, scale: float | None, mask: Mask, execution: str
) -> Tensor:
    """Attention to the cells around a query and to prefix and suffix tokens, which attend to all tokens."""
    q_cells = split_tokens(q, grid)[1]
    cells, real = neighbours(grid, window, q.device)
    window_of = torch.arange(grid.cells, device=q.device)[:, None].expand(*q.shape[:2], -1, -1)
    real = None if real is None else real[None, None]
    form = execution if execution in ("auto", "dense") else "gather"
    near = blocks.attend_groups(
        q_cells, k, v, grid, cells[None, None], real, window_of, scale=scale, mask=mask, execution=form,
        rules="NSA's window",
    )  # fmt: skip
    return join_global_tokens(near, q, k, v, grid, scale, mask)


@kept
def neighbours(
    grid: Grid, window: int, device: torch.device | None = None
) -> tuple[Int[Tensor, "cells W"], Bool[Tensor, "cells W"] | None]:
    """The cells of the square (with frames, the cube) around every cell; True where they lie on the grid (None for a
    window of one cell)."""
    reach = _reach(grid, window)
    cells, outside = (
        torch.zeros(1, 1, dtype=torch.long, device=device),
        torch.zeros(1, 1, dtype=torch.long, device=device),
    )
    for side, far in zip(grid.sides, reach, strict=True):
        near = torch.arange(side, device=device)[:, None] + torch.arange(-far, far + 1, device=device)
        cells = join_sides(cells * side, near)
        outside = join_sides(outside, ((near < 0) | (near >= side)).long())
    real = outside == 0
    return torch.where(real, cells, 0), real if any(reach) else None


def _reach(grid: Grid, window: int) -> tuple[int, ...]:
    """Cells to each side (frames, rows, columns), limited to the grid."""
    return tuple(min(window // 2, side - 1) for side in grid.sides)


@dataclass(frozen=True, kw_only=True)
class NSA(HeadMixerConfig):
    """block: length of runs of patch tokens, or (rows, columns) of tiles. k: blocks of each query. window: odd side.

    group: heads that choose blocks together, as heads with shared keys do in the paper. Gates are sigmoid(W q + b) of
    the queries of all heads (in the paper of the layer's inputs), three for each head and token.
    Raises: ConfigError for numbers below 1 or an even window; building, if the site has fewer than k blocks or group
    does not divide its heads.
    """

    block: int | tuple[int, int] | tuple[int, int, int] = (2, 2)
    k: int = 4
    window: int = 3
    group: int = 1
    scale: float | None = None

    card = Card(
        title="Compressed, selected and sliding attention (NSA-like)",
        source="Yuan et al. 2025 (NSA), Eq. 5-12, without the causal order",
        formula="g_c A(q, mean K_b) + g_s A(q, K_best) + g_w A(q, K_near)", complexity="O(N^2 C / n + N (k n + w^2) C)",
        query_content=True, key_content=True, relative_position=True, dynamic="two-step",
        scaling=frozenset({"routing", "compression"}), expert_type="MLP of width k n (+ shared width N / n)",
        expert_count="N / n (+1)", construction="locality prior", topology="N-to-N/n", conditions="Q, K, V, position",
        discrete=True,
        prefix="keys in all branches; as queries they choose blocks, and their window is the whole sequence",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    samples = ("NSA(block=(2, 3), k=2)", "NSA(block=5, k=2, window=5, group=2, dwc=3)")

    @property
    def contract(self) -> Contract:
        return Contract(counted={"execution": "gather"})

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks.check_block("NSA", self.block)
        if min(self.k, self.window, self.group) < 1 or self.window % 2 == 0:
            raise ConfigError(
                "NSA: k, group and the odd window are at least 1, "
                f"not k={self.k}, group={self.group}, window={self.window}"
            )

    def operator(self, site: Site) -> "NSAOperator":
        blocks.check_block_count(self.k, site.grid, self.block)
        if site.heads % self.group:
            raise ConfigError(f"group={self.group} does not divide {site.heads} heads")
        return NSAOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Three branches, each with prefix and suffix tokens, and the gates."""
        grid, inner = site.grid, site.inner
        number, area = blocks.block_counts(grid, self.block)
        near = math.prod([2 * far + 1 for far in _reach(grid, self.window)])
        first = 2 * grid.tokens * (number + self.k * area + 2 * grid.extra) * inner
        sliding = 2 * (grid.cells * (near + grid.extra) + grid.extra * grid.tokens) * inner
        return linear_cost(grid.tokens, inner, 3 * site.heads) + Cost(0, first + sliding)


class NSAOperator(Operator):
    """gates: linear map from the queries of all heads to three gates per head. execution: see `nsa`."""

    def __init__(self, config: NSA, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        self.gates = nn.Linear(site.inner, 3 * site.heads)

    def gate_values(self, q: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N 3"]:
        """The gates, between 0 and 1."""
        return self.gates(merge(q)).sigmoid().to(q.dtype).unflatten(-1, (-1, 3)).transpose(1, 2)

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        config = self.config
        form = nsa_reference if plain else partial(nsa, execution=self.execution)
        arguments = (inputs.q, inputs.k, inputs.v, self.gate_values(inputs.q), inputs.grid)
        sizes = (config.block, config.k, config.window)
        return form(*arguments, *sizes, group=config.group, scale=config.scale, mask=inputs.mask)
