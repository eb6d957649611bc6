"""Linformer: keys and values projected along the tokens to m rows (Wang et al. 2020, Eq. 7).

o = softmax(q (E k)^T scale) (F v), E and F (m, N) learned for one grid. For another grid their columns of patch tokens
are resampled; those of prefix and suffix tokens are separate parameters and do not change.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Grid, Inputs, Mask, Operator, ShapeError, Site, only_kept, operator_function
from regard.core.cost import Cost, attention_cost

from .shared.checks import check_prefix_suffix, check_site, padding_only
from .shared.heads import HeadMixerConfig
from .shared.landmarks import pool_matrix
from .shared.low_rank import low_rank_attention
from .static_keys.grids import resample, same_cells

__all__ = ["Linformer", "linformer", "linformer_reference"]


@operator_function
def linformer_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    project_k: Float[Tensor, "G m M"], project_v: Float[Tensor, "G m M"], *, scale: float | None = None,
    mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """(softmax(scale q (E k)^T) F) v; hidden keys and values are 0 before they are projected."""
    keep = padding_only("linformer", mask).keep
    project_k, project_v = _fitting_projections(q, k, project_k, project_v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    a = (q @ (project_k @ only_kept(k, keep)).mT * scale).softmax(-1)
    return a @ project_v @ only_kept(v, keep)


@operator_function
def linformer(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    project_k: Float[Tensor, "G m M"], project_v: Float[Tensor, "G m M"], *, scale: float | None = None,
    mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same, values projected first.

    project_k, project_v: E and F for each head, or one (G = 1) for all. scale: None = d^-0.5. mask: padding only;
    hidden keys and values count as 0.
    Raises: ShapeError for tensors that do not fit, UnsupportedError for other masks.
    """
    keep = padding_only("linformer", mask).keep
    project_k, project_v = _fitting_projections(q, k, project_k, project_v)
    keys, values = project_k @ only_kept(k, keep), project_v @ only_kept(v, keep)
    return low_rank_attention(q, keys, values, scale=scale)


def _fitting_projections(q: Tensor, k: Tensor, project_k: Tensor, project_v: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype of the keys: float32 ones may stand beside inputs of half precision. Raises: ShapeError."""
    for label, matrix in (("project_k", project_k), ("project_v", project_v)):
        if matrix.shape[0] not in (1, q.shape[1]) or matrix.shape != (*project_k.shape[:2], k.shape[-2]):
            expected = f"(1 or {q.shape[1]}, rows, keys = {k.shape[-2]}), both alike"
            raise ShapeError(f"linformer: {label} has shape {tuple(matrix.shape)}; expected {expected}")
    return project_k.to(k.dtype), project_v.to(k.dtype)


@dataclass(frozen=True, kw_only=True)
class Linformer(HeadMixerConfig):
    """m: rows of E and F. share: "kv" uses E also as F. per_head: whether every head has its own E and F.

    init: "uniform" within +-1/sqrt(m); "normal" with standard deviation 0.02; "pool" starts as averages over windows of
    the grid, so that a swapped layer starts near pooled attention (m must then fit the grid, as for landmarks; the
    columns of prefix and suffix tokens start at 0). scale: None = d^-0.5. The paper's variant with one E for all layers
    is not implemented.
    """

    m: int = 64
    share: Literal["", "kv"] = ""
    per_head: bool = False
    init: Literal["uniform", "normal", "pool"] = "uniform"
    scale: float | None = None

    card = Card(
        title="Linformer", source="Wang et al. 2020, Eq. 7",
        formula="softmax(q (E k)^T / sqrt(d)) (F v) with learned E, F", complexity="O(N m C)", query_content=True,
        key_content=True, scaling=frozenset({"compression"}), expert_type="MLP of width m", expert_count="1",
        construction="learned projection", topology="all-to-one", conditions="K, V",
        prefix="queries like all tokens; their columns of E and F are separate and are not resampled",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    cross = True
    samples = (
        "Linformer(m=4)", 'Linformer(m=3, share="kv", per_head=True, init="normal", dwc=3)',
        'Linformer(m=4, init="pool")',
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m < 1:
            raise ConfigError(f"Linformer has at least one row, not m={self.m}")

    def operator(self, site: Site) -> "LinformerOperator":
        check_site("m", self.m, site, site.tokens("k"), "keys")
        return LinformerOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        keys = site.tokens("k")
        params = self.m * keys * (1 if self.share else 2) * (site.heads if self.per_head else 1)
        return Cost(params, 2 * keys * self.m * site.inner) + attention_cost(site.grid.tokens, self.m, site.inner)


class LinformerOperator(Operator):
    """project_k and project_v; project_v is None where both are the same."""

    def __init__(self, config: Linformer, site: Site) -> None:
        super().__init__()
        self.config = config
        self.project_k = TokenProjection(config, site)
        self.project_v = None if config.share else TokenProjection(config, site)

    def matrices(self, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """E and F on a grid."""
        e = self.project_k(grid).to(dtype)
        return e, e if self.project_v is None else self.project_v(grid).to(dtype)

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form = linformer_reference if plain else linformer
        matrices = self.matrices(inputs.key_grid, inputs.q.dtype)
        return form(inputs.q, inputs.k, inputs.v, *matrices, scale=self.config.scale, mask=inputs.mask)


class TokenProjection(nn.Module):
    """A matrix over tokens: cells (G, m, cells) of the build grid; extra (G, m, prefix + suffix), or None."""

    def __init__(self, config: Linformer, site: Site) -> None:
        super().__init__()
        self.config, self.grid = config, site.memory or site.grid
        groups = site.heads if config.per_head else 1
        self.cells = nn.Parameter(torch.empty(groups, config.m, self.grid.cells))
        self.extra = nn.Parameter(torch.empty(groups, config.m, self.grid.extra)) if self.grid.extra else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """By `config.init`."""
        bound = 1 / math.sqrt(self.config.m)
        for parameter in self.parameters():
            if self.config.init == "uniform":
                nn.init.uniform_(parameter, -bound, bound)
            elif self.config.init == "normal":
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)
        if self.config.init == "pool":
            self.cells.copy_(pool_matrix(self.grid.patches, self.config.m))

    def forward(self, grid: Grid) -> Float[Tensor, "G m N"]:
        """The matrix in token order; for another grid resampled (bicubic) and scaled, so that sums do not change.

        Raises: GridError for other prefix or suffix tokens than at the build.
        """
        check_prefix_suffix("projections of tokens", self.grid, grid)
        cells: Tensor = self.cells
        if not same_cells(grid, self.grid):
            cells = resample(cells.mT, self.grid, grid).mT * (self.grid.cells / grid.cells)
        if self.extra is None:
            return cells
        first, last = self.extra.split([grid.prefix, grid.suffix], dim=-1)
        return torch.cat([first, cells, last], -1)
