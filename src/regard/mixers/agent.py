"""Agent attention: landmarks attend to all keys, and all queries attend to the landmarks (Han et al. 2024, Eq. 5).

o = softmax(q a^T scale + B2) softmax(a k^T scale + B1) v, where a are m averages of queries over windows of the grid.
Without the biases B1 and B2 it is MiTA's branches="compress". Prefix and suffix tokens are queries and keys like all
others, but are not pooled into landmarks.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core import (
    Card,
    ConfigError,
    Grid,
    Inputs,
    Operator,
    ShapeError,
    Site,
    UnsupportedError,
    operator_function,
)
from regard.core.cost import Cost, attention_cost
from regard.core.mask import Mask, hide, softmax_rows
from regard.core.view import View

from .mita.routing import add_key_bias, key_bias, without
from .shared.checks import check_prefix_suffix
from .shared.heads import HeadMixerConfig
from .shared.landmarks import landmark_count, landmark_windows, nonempty_landmarks, pool_landmarks
from .shared.low_rank import low_rank_attention
from .shared.precision import finest, without_autocast

__all__ = ["Agent", "agent", "agent_reference"]

TABLE = 7
"""Side of the learned tables of the biases, which are resized to the grid."""


@operator_function
def agent_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    landmarks: Float[Tensor, "B H m d"], *, scale: float | None = None, mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None, collect_bias: Float[Tensor, "H m M"] | None = None,
    read_bias: Float[Tensor, "H N m"] | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax(scale q a^T + read_bias) softmax(scale a k^T + collect_bias) v."""
    to_landmarks, to_keys = _maps(q, k, landmarks, scale, mask, landmark_keep, collect_bias, read_bias)
    return softmax_rows(to_landmarks) @ (softmax_rows(to_keys) @ hide(v, mask))


def _maps(
    q: Tensor, k: Tensor, landmarks: Tensor, scale: float | None, mask: Mask | None, landmark_keep: Tensor | None,
    collect_bias: Tensor | None, read_bias: Tensor | None,
) -> tuple[Float[Tensor, "B H N m"], Float[Tensor, "B H m M"]]:  # fmt: skip
    """The logits of queries with landmarks and of landmarks with keys."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    to_keys = add_key_bias("agent", mask, landmarks @ hide(k, mask).mT * scale)
    to_keys = to_keys if collect_bias is None else to_keys + collect_bias
    to_landmarks = q @ landmarks.mT * scale
    return without(to_landmarks if read_bias is None else to_landmarks + read_bias, landmark_keep), to_keys


@operator_function
def agent(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    landmarks: Float[Tensor, "B H m d"], *, scale: float | None = None, mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None, collect_bias: Float[Tensor, "H m M"] | None = None,
    read_bias: Float[Tensor, "H N m"] | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same as two fused attentions: of the landmarks to the keys, and of the queries to the landmarks.

    scale: None = d^-0.5. mask: padding, and a bias with one row. landmark_keep: False for landmarks that must not be
    used. collect_bias, read_bias: added to the logits of landmarks with keys and of queries with landmarks (B1, B2).
    A query without a landmark and a landmark without a key give zeros. Keys hidden by padding may hold any value, even
    NaN.
    Raises: ShapeError for tensors that do not fit, UnsupportedError for a causal mask or one bias row per query.
    """
    if landmarks.shape[-1] != q.shape[-1]:
        raise ShapeError(f"agent: landmarks have width {landmarks.shape[-1]}, q has {q.shape[-1]}; they must be equal")
    number = landmarks.shape[-2]
    for label, bias, shape in (
        ("collect_bias", collect_bias, (q.shape[1], number, k.shape[-2])),
        ("read_bias", read_bias, (q.shape[1], q.shape[-2], number)),
    ):
        if bias is not None and tuple(bias.shape) != shape:
            raise ShapeError(f"agent: {label} has shape {tuple(bias.shape)}; expected {shape}")
    with without_autocast(q.device):
        bias = key_bias("agent", mask, k[..., 0])
        k, v = hide(k, mask), hide(v, mask)
        if collect_bias is not None:
            bias = collect_bias[None] if bias is None else bias + collect_bias
        values = low_rank_attention(landmarks, k, v, scale=scale, bias=bias)
        bias = None if read_bias is None else read_bias[None]
        if landmark_keep is not None:
            bias = torch.where(landmark_keep[:, None, None, :], q.new_zeros(()) if bias is None else bias, -torch.inf)
        return low_rank_attention(q, landmarks, values, scale=scale, bias=bias)


@dataclass(frozen=True, kw_only=True)
class Agent(HeadMixerConfig):
    """m: landmarks, a number or (rows, columns) of windows; the paper has 7x7 for 14x14 cells.

    bias: whether to add the two position biases of the paper's full layer; they are learned in tables of 7x7 and along
    rows and columns, and are resized for another grid. The full layer is Agent(bias=True, dwc=3).
    landmarks: "avg2d" averages windows of the grid, "avg1d" runs of patch tokens in row-major order.
    preset: "paper" pools patch tokens only; "official" is the layer without biases of MiTA's published comparison,
    whose pooling takes the first token for the first patch token.
    Raises: ConfigError for numbers below 1, unknown values, or "official" with biases, which that code has only where
    it pools patch tokens only. Building raises GridError, with the nearest possible number, if the site's grid cannot
    be divided into m windows.
    """

    m: int | tuple[int, int] | tuple[int, int, int] = 49
    bias: bool = False
    landmarks: Literal["avg2d", "avg1d"] = "avg2d"
    preset: Literal["paper", "official"] = "paper"

    card = Card(
        title="Agent attention", source="Han et al. 2024 (Agent Attention), Eq. 5",
        formula="softmax(q a^T / sqrt(d)) softmax(a k^T / sqrt(d)) v,  a = pool(q)", complexity="O(N m C)",
        query_content=True, key_content=True, dynamic="two-step", scaling=frozenset({"compression"}),
        expert_type="MLP of width m", expert_count="1", construction="landmark probing", topology="all-to-one",
        conditions="Q, K, V", prefix="queries and keys like all tokens; not pooled into landmarks",
    )  # fmt: skip
    masks = frozenset({"padding", "key bias"})
    depth = True
    cross = True
    samples = (
        "Agent(m=4)", 'Agent(m=(1, 3), landmarks="avg1d", dwc=3, gate=True)', 'Agent(m=4, preset="official")',
        "Agent(m=4, bias=True)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        landmark_count(self.m)  # refuses numbers below 1
        if self.bias and self.preset == "official":
            raise ConfigError('the published layer with biases pools patch tokens only: bias=True needs preset="paper"')

    @property
    def number(self) -> int:
        """The number of landmarks."""
        return landmark_count(self.m)

    @property
    def refuses_cross(self) -> str:
        return "its biases belong to positions of one grid; give bias=False" if self.bias else ""

    def operator(self, site: Site) -> "AgentOperator":
        if self.bias and site.grid.depth > 1:
            raise UnsupportedError(f"the biases of Agent are of one image, not of {site.grid}; give bias=False")
        operator = AgentOperator(self, site)
        landmark_windows(operator.surface(site.grid), self.m)
        return operator

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Resizing the tables to the grid is a product too; the paper does not count it."""
        n, keys, m = site.tokens("q"), site.tokens("k"), self.number
        total = attention_cost(m, keys, site.inner) + attention_cost(n, m, site.inner)
        if self.bias:
            h, w = site.grid.height, site.grid.width
            total += Cost(2 * site.heads * m * (TABLE**2 + h + w + site.grid.extra))
            if accounting == "executed":
                total += Cost(0, 2 * site.heads * m * h * TABLE * (TABLE + w))
        return total


class AgentOperator(Operator):
    """Biases `collect` (B1, landmarks to keys) and `read` (B2, queries to landmarks), or None."""

    def __init__(self, config: Agent, site: Site) -> None:
        super().__init__()
        self.config = config
        self.collect = AgentBias(config.number, site) if config.bias else None
        self.read = AgentBias(config.number, site) if config.bias else None

    def surface(self, grid: Grid) -> Grid:
        """The grid on which landmarks are pooled."""
        return grid if self.config.landmarks == "avg2d" else grid.row_major()

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        key_bias("Agent", inputs.mask, inputs.k[..., 0])
        form = agent_reference if plain else agent
        return form(inputs.q, inputs.k, inputs.v, mask=inputs.mask, **self._options(inputs))

    def _options(self, inputs: Inputs) -> dict[str, Any]:
        """Landmarks, which of them have tokens, and the biases.

        A padding mask belongs to the keys: it applies to the landmarks of the queries only in self-attention.
        """
        q, grid, mask = inputs.q, inputs.grid, inputs.mask
        surface, m = self.surface(grid), self.config.m
        start = 0 if self.config.preset == "official" else None
        keep = mask.keep if mask is not None and inputs.memory is None else None
        return {
            "landmarks": pool_landmarks(q, surface, m, keep=keep, start=start),
            "landmark_keep": None if keep is None else nonempty_landmarks(surface, m, keep, start),
            "collect_bias": None if self.collect is None else self.collect(grid).to(q.dtype),
            "read_bias": None if self.read is None else self.read(grid).mT.to(q.dtype),
        }

    def views(self, inputs: Inputs) -> tuple[View, ...]:
        """Where the landmark looks from which each query reads most."""
        to_landmarks, to_keys = _maps(inputs.q, inputs.k, scale=None, mask=inputs.mask, **self._options(inputs))
        return (View("where its strongest landmark looks", softmax_rows(to_keys)[0], to_landmarks[0].argmax(-1)),)


class AgentBias(nn.Module):
    """A bias for every landmark and token: table (H, m, 7, 7) resized to the grid + rows + columns.

    rows (H, m, h, 1), columns (H, m, 1, w); extra (H, m, prefix + suffix), or None, for prefix and suffix tokens; all
    start at trunc_normal of 0.02. Resizing is bilinear with half-pixel centres, for another grid also of rows and
    columns.
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
        """All parameters: they are position embeddings."""
        return {name for name, _ in self.named_parameters()}

    def forward(self, grid: Grid) -> Float[Tensor, "H m N"]:
        """The bias in token order. Raises: GridError for other prefix or suffix tokens than at the build."""
        check_prefix_suffix("agent biases", self.grid, grid)
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
    dtype = finest(like.device)
    centres = (torch.arange(new, device=like.device, dtype=dtype) + 0.5) * (old / new) - 0.5
    positions = torch.arange(old, device=like.device, dtype=dtype)
    return (1 - (centres.clamp(0, old - 1)[:, None] - positions).abs()).clamp_min(0).to(like.dtype)
