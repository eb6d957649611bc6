"""Token-level multi-head linear attention: a learned mixture of the key-value products of blocks of tokens (MHLA).

Block j of the grid has S_j = sum phi(k_t)^T v_t and z_j = sum phi(k_t). The output for a query of block i is
phi(q) sum_j M_ij S_j / (phi(q) . sum_j M_ij z_j), phi = relu + 1e-6, with M learned and shared by all heads.
The published code mixes the normalisers phi(q).z_j after the product, which pairs queries of different blocks by their
index in the block; here a query is normalised by its own sum. Prefix and suffix tokens are one more block.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core import Card, Cost, Grid, Inputs, Mask, Operator, Site, only_kept, operator_function
from regard.core.errors import ConfigError, GridError, ShapeError

from .shared.checks import padding_only, refuse_unused
from .shared.heads import HeadMixer, HeadMixerConfig
from .shared.kept import kept
from .shared.kernel_features import bfloat16_like, feature_map, safe_divide, takes_triton
from .shared.landmarks import Windows, landmark_count, landmark_windows
from .shared.precision import upcast, without_autocast
from .shared.tiles import Tiles, balanced_tiles, cell_ids, join_tokens, parts_of, split_tokens

__all__ = ["MHLA", "mhla", "mhla_reference"]


@operator_function(depth=True)
def mhla_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], mixing: Float[Tensor, "X X"],
    grid: Grid, m: Windows, *, normalize: str = "correct", eps: float = 1e-6, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """All N x N weights M_b(i)b(j) phi(q_i).phi(k_j), b(i) the block of i, divided by the sum of their row + eps."""
    keep = padding_only("mhla", mask).keep
    phi, block = feature_map("relu"), block_of(grid, m, q.device)
    a = phi(q) @ only_kept(phi(only_kept(k, keep)), keep).mT * mixing[block][:, block]
    a = safe_divide(a, a.sum(-1, keepdim=True) + eps) if normalize == "correct" else a
    return a @ only_kept(v, keep)


@operator_function(depth=True)
def mhla(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], mixing: Float[Tensor, "X X"],
    grid: Grid, m: Windows, *, normalize: str = "correct", eps: float = 1e-6, mask: Mask | None = None,
    execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same in linear time, block by block.

    m: tiles of the grid, a number or (rows, columns). mixing: M over the blocks of `block_of`; not negative where
    weights are normalised. normalize: "correct", or "none" as in MiTA's comparison. eps: added to the normaliser.
    mask: padding only. Features and normalisers are in float32 for half precision. execution: as of `linear`.
    Raises: ShapeError, GridError for tensors that do not fit, UnsupportedError for other masks or an execution that
    cannot run here, ConfigError for another value of `normalize` or an unknown execution.
    """
    grid.check(q)
    keep = padding_only("mhla", mask).keep
    if normalize not in ("correct", "none"):
        raise ConfigError(f"normalize is correct or none, not {normalize!r}")
    tiles = balanced_tiles(grid, landmark_windows(grid, m), q.device)
    number = tiles.number + bool(grid.extra)
    if tuple(mixing.shape) != (number, number):
        raise ShapeError(f"mhla: mixing has shape {tuple(mixing.shape)}; expected {(number, number)} for the blocks")
    with without_autocast(q.device):
        if takes_triton(execution, v):
            return _by_triton(q, k, v, mixing, _token_table(tiles, grid), eps if normalize == "correct" else None, keep)
        phi = feature_map("relu")

        def parts(x: Tensor) -> tuple[Tensor, Tensor]:  # prefix and suffix; patches (B, H, X, A, c), 0 in empty slots
            extra, cells = split_tokens(x, grid)
            cells = tiles.cut(cells)
            return extra, cells if tiles.even else cells.masked_fill(~tiles.tables.real[..., None], 0.0)

        def over_blocks(extra: Tensor, cells: Tensor) -> Tensor:  # prefix and suffix tokens are the last block
            return torch.cat([cells, extra[:, :, None]], 2) if grid.extra else cells

        queries, keys = parts(phi(upcast(q))), parts(only_kept(phi(upcast(only_kept(k, keep))), keep))
        values = parts(only_kept(v if v.dtype == torch.bfloat16 else v.to(keys[1].dtype), keep))
        sums = over_blocks(*(bfloat16_like(f, v).mT @ x for f, x in zip(keys, values, strict=True))).to(keys[1].dtype)
        # one product per head: torch would copy and transpose the sums for a single matrix on the left
        mixing = mixing.to(sums.dtype).expand(*q.shape[:2], -1, -1)
        table = (mixing @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])  # (B, H, X, d, e)
        total = mixing @ over_blocks(*(f.sum(-2) for f in keys)) if normalize == "correct" else None  # (B, H, X, d)

        def outputs(f: Tensor, block: int | slice) -> Tensor:
            out = bfloat16_like(f, v) @ bfloat16_like(table[:, :, block], v)
            if total is None:
                return out
            return safe_divide(out, (f * total[:, :, block][..., None, :]).sum(-1, keepdim=True) + eps)

        cells = tiles.join(outputs(queries[1], slice(tiles.number)))
        extra = outputs(queries[0], -1) if grid.extra else cells[..., :0, :]
        return join_tokens(extra, cells, grid).to(v.dtype)


def _by_triton(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, table: Tensor, eps: float | None, keep: Tensor | None
) -> Tensor:
    """The sums of every block are one tensor, so that one product mixes them."""
    from .shared.linear_triton import read_queries, sum_keys

    sums = sum_keys(k, v, "relu", keep=keep, table=table)
    mixed = mixing.to(sums.dtype).expand(len(sums), -1, -1) @ sums
    return read_queries(q, mixed, v, "relu", eps=eps, table=table)


@kept
def _token_table(tiles: Tiles, grid: Grid) -> Int[Tensor, "X A"]:
    """The tokens of every tile, then prefix and suffix tokens, -1 in empty slots; int32."""
    cell, real, *_ = tiles.tables
    tokens = torch.where(real, cell + grid.prefix, -1)
    extra, _ = split_tokens(torch.arange(grid.tokens, device=cell.device)[:, None], grid)
    length = max(tiles.area, grid.extra)
    rows = [F.pad(x, (0, length - x.shape[1]), value=-1) for x in (tokens, extra.mT)]
    return torch.cat(rows if grid.extra else rows[:1]).int()


def block_of(grid: Grid, m: Windows, device: torch.device | None = None) -> Int[Tensor, " N"]:
    """The block of every token: its tile in row-major order; prefix and suffix tokens are the block after the last.

    Tile i of m_h rows has the rows floor(i h / m_h) to floor((i + 1) h / m_h) - 1. Raises: GridError if the grid cannot
    be divided into m tiles.
    """
    tiles = balanced_tiles(grid, landmark_windows(grid, m), device)
    return cell_ids(tiles.tile_of_cell, grid, tiles.number)


@dataclass(frozen=True, kw_only=True)
class MHLA(HeadMixerConfig):
    """m: blocks, a number or (rows, columns) of tiles of the grid.

    init: how M starts from the distances of the tiles' centres, r = distance / largest: "cos" (cos(pi r / 4)),
    "linear" (1 - r), "exp" (exp(-r)), "gaussian" (exp(-r^2 / 2)) or "local" (a block mixes with itself only);
    columns sum to 1. The row and column of prefix and suffix tokens start at the mean. normalize: "correct", which uses
    the positive part of M, or "none" as in MiTA's comparison. norm: a LayerNorm of the input, as in MiTA's comparison.
    The paper's layer has dwc=5. eps: added to the normaliser, of "correct" alone.
    """

    m: int | tuple[int, int] | tuple[int, int, int] = 16
    init: Literal["cos", "linear", "exp", "gaussian", "local"] = "cos"
    normalize: Literal["correct", "none"] = "correct"
    norm: bool = False
    eps: float = 1e-6

    card = Card(
        title="Token-level multi-head linear attention", source="MHLA (2025)",
        formula="phi(q) sum_j M_ij S_j / (phi(q) . sum_j M_ij z_j),  S_j = sum of phi(k)^T v in block j",
        complexity="O(N d C + m^2 d C)", query_content=True, key_content=True, relative_position=True,
        scaling=frozenset({"compression"}), expert_type="linear layer", expert_count="m",
        construction="local prior + kernelisation", topology="m x (N/m)-to-one", conditions="K, V, position",
        prefix="one additional block",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    samples = ("MHLA(m=4)", 'MHLA(m=(1, 3), normalize="none", norm=True, dwc=5)')

    def __post_init__(self) -> None:
        super().__post_init__()
        landmark_count(self.m)  # refuses numbers below 1
        if self.eps < 0:
            raise ConfigError(f"eps is at least 0, not {self.eps}")
        if self.normalize == "none":
            refuse_unused(self, ["eps"], 'normalize="correct", which alone divides')

    @property
    def number(self) -> int:
        """The number of tiles."""
        return landmark_count(self.m)

    def build(self, site: Site, shared: nn.Module | None = None) -> HeadMixer:
        return NormedMixer(self, site, shared) if self.norm else super().build(site, shared)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        return super().cost(site, accounting) + Cost(2 * site.dim if self.norm else 0)

    def operator(self, site: Site) -> "MHLAOperator":
        return MHLAOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Every tile counts as the largest, and normalisers are mixed too; the paper does not count these."""
        counts = landmark_windows(site.grid, self.m)
        blocks = self.number + bool(site.grid.extra)
        tokens, mixed = site.grid.tokens, site.width
        if accounting == "executed":
            area = math.prod(parts_of(site.grid.sides, counts))
            tokens = self.number * area + site.grid.extra
            mixed += self.normalize == "correct"
        return Cost(blocks**2, (2 * tokens * site.width + blocks**2 * mixed) * site.inner)


class NormedMixer(HeadMixer):
    """A layer whose projections get LayerNorm(x)."""

    def __init__(self, config: MHLA, site: Site, shared: nn.Module | None = None) -> None:
        super().__init__(config, site, shared)
        self.input_norm = nn.LayerNorm(site.dim)

    def project_heads(self, x: Tensor, grid: Grid, rope: Tensor | None = None) -> dict[str, Tensor | None]:
        return super().project_heads(self.input_norm(x).to(x.dtype), grid, rope)


class MHLAOperator(Operator):
    """mixing (X, X): tiles, then the block of prefix and suffix tokens if the build grid has any. execution: see
    `linear`.
    """

    def __init__(self, config: MHLA, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.grid, self.execution = config, site.grid, execution
        landmark_windows(site.grid, config.m)
        number = config.number + bool(site.grid.extra)
        self.mixing = nn.Parameter(torch.empty(number, number))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """M by `config.init`."""
        device = torch.device("cpu") if self.mixing.is_meta else self.mixing.device
        start = _closeness(self.grid, self.config.m, self.config.init, device)
        if self.grid.extra:
            start = F.pad(start, (0, 1, 0, 1), value=start.mean().item())
        self.mixing.copy_(start / start.sum(0, keepdim=True))

    def no_weight_decay(self) -> set[str]:
        """The mixing matrix."""
        return {"mixing"}

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        """Raises: GridError for a grid with prefix or suffix tokens where the build grid has none, or the reverse."""
        form, config, grid = (
            mhla_reference if plain else partial(mhla, execution=self.execution),
            self.config,
            inputs.grid,
        )
        if bool(grid.extra) != bool(self.grid.extra):
            raise GridError(f"the blocks were built for {self.grid}, not {grid}: prefix and suffix tokens are a block")
        mixing = self.mixing.clamp_min(0) if config.normalize == "correct" else self.mixing
        arguments = (inputs.q, inputs.k, inputs.v, mixing, grid, config.m)
        return form(*arguments, normalize=config.normalize, eps=config.eps, mask=inputs.mask)


def _closeness(grid: Grid, m: Windows, init: str, device: torch.device | None) -> Float[Tensor, "m m"]:
    """Initial weights by the distance of the tiles, 1 on the diagonal."""
    centres = []
    for size, parts in zip(grid.sides, landmark_windows(grid, m), strict=True):
        index = torch.arange(parts, device=device)
        centres.append((index * size // parts + (index + 1) * size // parts - 1).float() / 2)
    points = torch.cartesian_prod(*centres)
    distance = (points[:, None] - points).norm(dim=-1)
    r = distance / distance.max().clamp_min(1.0)
    if init == "local":
        return torch.eye(len(r), device=device)
    return {"cos": (r * math.pi / 4).cos(), "linear": 1 - r, "exp": (-r).exp(), "gaussian": (-r * r / 2).exp()}[init]
