"""Agent attention: a few landmark queries collect the values, and the queries read from them (Han et al. 2024, Eq. 5).

o = softmax(q a^T scale + B2) softmax(a k^T scale + B1) v, a = m queries averaged over windows of the grid.
Without the biases B1 and B2 it is MiTA's branches="compress". Extra tokens are queries and keys like any other, but are
not pooled into landmarks.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core import (
    Card,
    ConfigError,
    Contract,
    Cost,
    Grid,
    Mask,
    Operator,
    ShapeError,
    Site,
    UnsupportedError,
    attend,
    hide,
    softmax_rows,
)
from regard.mixers.mita.routing import key_bias, without
from regard.mixers.shared.heads import CrossMixer, HeadMixerConfig, check_heads, check_qkv
from regard.mixers.shared.kernel_features import check_extra
from regard.mixers.shared.landmarks import number_of, pool_landmarks, seen, windows_of
from regard.mixers.shared.low_rank import read
from regard.mixers.shared.precision import exact_products

__all__ = ["Agent", "agent", "agent_reference"]

TABLE = 7
"""Sides of the learned tables of the biases, which are resized to the grid."""


def agent_reference(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    landmarks: Float[Tensor, "B H m d"],
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None,
    collect_bias: Float[Tensor, "H m M"] | None = None,
    read_bias: Float[Tensor, "H N m"] | None = None,
) -> Float[Tensor, "B H N e"]:
    """softmax(scale q a^T + read_bias) softmax(scale a k^T + collect_bias) v."""
    k, v = hide(k, mask), hide(v, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    collect, reading = landmarks @ k.mT * scale, q @ landmarks.mT * scale
    bias = key_bias("agent", mask, collect)
    for added in (bias, collect_bias):
        collect = collect if added is None else collect + added
    reading = without(reading if read_bias is None else reading + read_bias, landmark_keep)
    return softmax_rows(reading) @ (softmax_rows(collect) @ v)


def agent(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    landmarks: Float[Tensor, "B H m d"],
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None,
    collect_bias: Float[Tensor, "H m M"] | None = None,
    read_bias: Float[Tensor, "H N m"] | None = None,
) -> Float[Tensor, "B H N e"]:
    """The same in two fused attentions: of the landmarks to the keys, of the queries to the landmarks.

    scale: None = d^-0.5. mask: padding, and a bias with one row. landmark_keep: False for landmarks that must not be
    used. collect_bias, read_bias: added to the logits of landmarks with keys and of queries with landmarks (B1, B2).
    A query without a landmark and a landmark without a key get zeros. What a key hidden by padding holds, even a NaN,
    does not matter.
    Raises: ShapeError for tensors that do not fit, UnsupportedError for a causal mask or one bias row per query.
    """
    check_qkv("agent", q, k, v)
    check_heads("agent", q=q, landmarks=landmarks)
    if landmarks.shape[-1] != q.shape[-1]:
        raise ShapeError(f"agent: landmarks have width {landmarks.shape[-1]}, q has {q.shape[-1]}; they must be equal")
    number = landmarks.shape[-2]
    for label, bias, shape in (
        ("collect_bias", collect_bias, (q.shape[1], number, k.shape[-2])),
        ("read_bias", read_bias, (q.shape[1], q.shape[-2], number)),
    ):
        if bias is not None and tuple(bias.shape) != shape:
            raise ShapeError(f"agent: {label} has shape {tuple(bias.shape)}; expected {shape}")
    with exact_products(q.device):
        added = key_bias("agent", mask, k[..., 0])
        k, v = hide(k, mask), hide(v, mask)
        if added is None:
            added = None if collect_bias is None else collect_bias[None]
        elif collect_bias is not None:
            added = added + collect_bias
        values = read(landmarks, k, v, scale=scale, bias=added)
        reading = None if read_bias is None else read_bias[None]
        if landmark_keep is not None:
            zero = q.new_zeros(()) if reading is None else reading
            reading = torch.where(landmark_keep[:, None, None, :], zero, -torch.inf)
        return read(q, landmarks, values, scale=scale, bias=reading)


@dataclass(frozen=True, kw_only=True)
class Agent(HeadMixerConfig):
    """m: landmarks, a number or (rows, columns) of windows; the paper has 7x7 for 14x14 cells.

    bias: whether the two position biases of the paper's full layer are there; they are learned in tables of 7x7 and
    along rows and columns, and are resized for another grid. The full layer is Agent(bias=True, dwc=3).
    landmarks: "avg2d" averages windows of the grid, "avg1d" stretches of its cells in order.
    preset: "paper" pools cells alone; "official" is the layer without biases of MiTA's published comparison, whose
    pooling takes the first token for the first pixel.
    Raises: ConfigError for numbers below 1, unknown words, or "official" with biases, which that code has only where it
    pools cells alone. Building raises GridError, with the nearest possible number, if the site's grid cannot give m
    windows.
    """

    m: int | tuple[int, int] = 49
    bias: bool = False
    landmarks: Literal["avg2d", "avg1d"] = "avg2d"
    preset: Literal["paper", "official"] = "paper"

    card: ClassVar[Card] = Card(
        title="Agent attention",
        source="Han et al. 2024 (Agent Attention), Eq. 5",
        formula="softmax(q a^T / sqrt(d)) softmax(a k^T / sqrt(d)) v,  a = pool(q)",
        complexity="O(N m C)",
        query_content=True,
        key_content=True,
        dynamic="two-step",
        scaling=frozenset({"compression"}),
        expert_type="MLP of width m",
        expert_count="1",
        construction="landmark probing",
        topology="all-to-one",
        conditions="Q, K, V",
        prefix="queries and keys like any other token; not pooled into landmarks",
    )
    masks: ClassVar[frozenset[str]] = frozenset({"padding", "bias"})
    cross: ClassVar[bool] = True
    samples: ClassVar[tuple[str, ...]] = (
        "Agent(m=4)",
        'Agent(m=(1, 3), landmarks="avg1d", dwc=3, gate=True)',
        'Agent(m=4, preset="official")',
        "Agent(m=4, bias=True)",
    )

    @property
    def contract(self) -> Contract:
        return Contract(skip={"cross": "the biases belong to places"} if self.bias else {})

    def __post_init__(self) -> None:
        super().__post_init__()
        number_of(self.m)  # refuses what is below 1
        if self.bias and self.preset == "official":
            raise ConfigError('the published layer with biases pools cells alone: bias=True needs preset="paper"')

    @property
    def number(self) -> int:
        """How many landmarks."""
        return number_of(self.m)

    def build_cross(self, site: Site, shared: nn.Module | None = None) -> CrossMixer:
        if self.bias:
            raise UnsupportedError("Agent with bias=True has places in its biases: cross-attention needs bias=False")
        return super().build_cross(site, shared)

    def operator(self, site: Site) -> "AgentOperator":
        operator = AgentOperator(self, site)
        windows_of(operator.surface(site.grid), self.m)
        return operator

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Resizing the tables to the grid is a product too; the paper leaves it out."""
        n, keys, m = site.grid.tokens, (site.memory or site.grid).tokens, self.number
        total = attend(m, keys, site.inner) + attend(n, m, site.inner)
        if self.bias:
            h, w = site.grid.height, site.grid.width
            total += Cost(2 * site.heads * m * (TABLE**2 + h + w + site.grid.extra))
            if accounting == "executed":
                total += Cost(0, 2 * site.heads * m * h * TABLE * (TABLE + w))
        return total


class AgentOperator(Operator):
    """Two sets of biases, or none: `collect` (B1, landmarks to keys) and `read` (B2, queries to landmarks)."""

    def __init__(self, config: Agent, site: Site) -> None:
        super().__init__()
        self.config = config
        self.collect = AgentBias(config.number, site) if config.bias else None
        self.read = AgentBias(config.number, site) if config.bias else None

    def surface(self, grid: Grid) -> Grid:
        """The grid on which landmarks are pooled."""
        return grid if self.config.landmarks == "avg2d" else Grid(1, grid.cells, grid.prefix, grid.suffix)

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
        return agent(cast(Tensor, q), cast(Tensor, k), cast(Tensor, v), **self._options(q, k, grid, memory, mask))

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
        options = self._options(q, k, grid, memory, mask)
        return agent_reference(cast(Tensor, q), cast(Tensor, k), cast(Tensor, v), **options)

    def _options(self, q: Tensor | None, k: Tensor | None, grid: Grid, memory: Grid | None, mask: Mask | None) -> dict:
        """What `agent` and its reference get. Padding is of keys: pooling heeds it if queries are the same tokens."""
        q = cast(Tensor, q)
        key_bias("Agent", mask, cast(Tensor, k)[..., 0])
        surface, m = self.surface(grid), self.config.m
        start = 0 if self.config.preset == "official" else None
        keep = mask.keep if mask is not None and memory is None else None
        return {
            "landmarks": pool_landmarks(q, surface, m, keep=keep, start=start),
            "mask": mask,
            "landmark_keep": None if keep is None else seen(surface, m, keep, start),
            "collect_bias": None if self.collect is None else self.collect(grid).to(q.dtype),
            "read_bias": None if self.read is None else self.read(grid).mT.to(q.dtype),
        }


class AgentBias(nn.Module):
    """A bias for every landmark and token: table (H, m, 7, 7) resized to the grid + rows + columns; extra apart.

    rows (H, m, h, 1), columns (H, m, 1, w), extra (H, m, prefix + suffix) or None; all trunc_normal of 0.02. Resizing
    is bilinear with half-pixel centres, for another grid also of rows and columns.
    """

    def __init__(self, number: int, site: Site) -> None:
        super().__init__()
        self.grid = grid = site.grid
        self.table = nn.Parameter(torch.empty(site.heads, number, TABLE, TABLE))
        self.rows = nn.Parameter(torch.empty(site.heads, number, grid.height, 1))
        self.columns = nn.Parameter(torch.empty(site.heads, number, 1, grid.width))
        self.extra = nn.Parameter(torch.empty(site.heads, number, grid.extra)) if grid.extra else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """trunc_normal of standard deviation 0.02."""
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """All of them, as for position embeddings."""
        return {name for name, _ in self.named_parameters()}

    def forward(self, grid: Grid) -> Float[Tensor, "H m N"]:
        """The bias in token order. Raises: GridError for other numbers of extra tokens than at the build."""
        check_extra("agent biases", self.grid, grid)
        vertical, horizontal = (bilinear(TABLE, size, self.table) for size in (grid.height, grid.width))
        rows: Tensor = self.rows
        columns: Tensor = self.columns
        if grid.height != self.grid.height:
            rows = bilinear(self.grid.height, grid.height, rows) @ rows
        if grid.width != self.grid.width:
            columns = columns @ bilinear(self.grid.width, grid.width, columns).mT
        cells = (vertical @ self.table @ horizontal.mT + rows + columns).flatten(-2)
        if self.extra is None:
            return cells
        first, last = self.extra.split([grid.prefix, grid.suffix], dim=-1)
        return torch.cat([first, cells, last], -1)


def bilinear(old: int, new: int, like: Tensor) -> Float[Tensor, "new old"]:
    """Linear interpolation with half-pixel centres (align_corners=False) as a matrix, in the dtype of `like`."""
    centres = (torch.arange(new, device=like.device, dtype=torch.float64) + 0.5) * (old / new) - 0.5
    places = torch.arange(old, device=like.device, dtype=torch.float64)
    return (1 - (centres.clamp(0, old - 1)[:, None] - places).abs()).clamp_min(0).to(like.dtype)
