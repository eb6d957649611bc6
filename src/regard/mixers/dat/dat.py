"""Deformable attention: keys and values are sampled at learned offsets (DAT, Xia et al. 2022, Eq. 7-11).

A small network of the queries moves a coarse grid of points; x is sampled there bilinearly, and k and v are projected
from the samples. All queries share the points of each of the `groups` groups of channels. A table of biases by relative
position is sampled too.
Points start at the centres of their patches in half-pixel coordinates: without offsets, stride 1 gives the patch tokens
unchanged (softmax attention) and stride 2 means of 2x2. The published code starts half a cell off, the last point
outside the map.
Prefix and suffix tokens are queries, and are appended to the sampled keys unchanged and without a position bias.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Grid, Inputs, Operator, ShapeError, Site, merge, operator_function
from regard.core.cost import Cost, attention_cost
from regard.core.view import Samples
from regard.mixers.shared.memory import MemoryMixerConfig
from regard.mixers.shared.native import runs_native
from regard.mixers.shared.precision import upcast, upcast_dtype, without_autocast
from regard.mixers.shared.sdpa import sdpa
from regard.mixers.softmax import softmax_reference

from .native import position_bias_native

__all__ = ["DAT", "sample_points", "sample_points_reference"]


class DATPlan(NamedTuple):
    """points (B, G, s, 2): where each group samples, (y, x) in cells: 0 is the centre of the first cell."""

    points: Float[Tensor, "B G s 2"]


@operator_function
def sample_points_reference(x: Float[Tensor, "B c h w"], points: Float[Tensor, "B s 2"]) -> Float[Tensor, "B c s"]:
    """sum over cells of x with weights max(0, 1 - |y - i|) max(0, 1 - |x - j|); outside the map, its border values."""
    weights = []
    for axis, side in enumerate(x.shape[-2:]):
        position = points[..., axis].clamp(0, side - 1)
        weights.append(F.relu(1 - (position[..., None] - torch.arange(side, device=x.device)).abs()))  # (B, s, side)
    wide = upcast(x)
    return torch.einsum("bchw,bsh,bsw->bcs", wide, *(weight.to(wide.dtype) for weight in weights)).to(x.dtype)


@operator_function
def sample_points(x: Float[Tensor, "B c h w"], points: Float[Tensor, "B s 2"]) -> Float[Tensor, "B c s"]:
    """Bilinear samples of maps at points (y, x) in cells, in float32 at least; outside the map, its border values.

    A point that is NaN gives NaN. Raises: ShapeError unless x has four axes and points are (B, s, 2).
    """
    if x.ndim != 4 or points.ndim != 3 or points.shape[0] != x.shape[0] or points.shape[2] != 2:
        shapes = f"x {tuple(x.shape)} and points {tuple(points.shape)}"
        raise ShapeError(f"sample_points: {shapes}; expected (batch, channels, height, width) and (batch, points, 2)")
    invalid = points.isnan().any(-1)  # (B, s); on the CPU grid_sample would read and write outside the map
    points = points.masked_fill(invalid[..., None], 0.0)
    sides = torch.tensor(x.shape[-2:], dtype=points.dtype, device=points.device)
    positions = ((2 * points + 1) / sides - 1).flip(-1)[:, :, None]  # (B, s, 1, 2) as (x, y), half-pixel centres
    with without_autocast(x.device):
        out = F.grid_sample(upcast(x), positions.to(upcast_dtype(x)), padding_mode="border", align_corners=False)
    return out[..., 0].masked_fill(invalid[:, None], torch.nan).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class DAT(MemoryMixerConfig):
    """stride: cells between points. groups: groups of channels and heads, each with its own points.

    kernel: of the offset network's depth-wise convolution (odd). reach: the published offset range factor, which
    bounds an offset by tanh, in halves of the distance between points (with 2 a point can reach its neighbour); 0 = no
    bound but the map, as in all published models. table: whether to add the bias by relative position. init: "paper"
    draws the network and the table at random; "zero" starts without offsets and bias. dwc must be 0.
    Raises: ConfigError for impossible numbers; building, if groups do not divide heads and channels; UnsupportedError
    for a host with rotary positions.
    """

    stride: int = 1
    groups: int = 1
    kernel: int = 5
    reach: float = 0.0
    table: bool = True
    init: Literal["paper", "zero"] = "paper"

    card = Card(
        title="Deformable attention", source="Xia et al. 2022 (DAT), Eq. 7-11",
        formula="softmax(q k~^T / sqrt(d) + B) v~,  k~, v~ of x sampled at p + offset(q)", complexity="O(N N_s C)",
        query_content=True, key_content=True, relative_position=True, dynamic="two-step",
        scaling=frozenset({"routing"}), expert_type="MLP of width N_s", expert_count="1",
        construction="offset prediction", topology="N-to-one", conditions="Q",
        prefix="queries, and keys appended to the sampled ones", row_maps=False,  # its columns are not the tokens
    )  # fmt: skip
    samples = ("DAT(stride=2, kernel=3)", "DAT(groups=2, reach=2.0)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.stride, self.groups, self.kernel) < 1 or self.kernel % 2 == 0 or self.reach < 0:
            raise ConfigError(
                "stride, groups and the odd kernel are at least 1, reach at least 0, "
                f"not stride={self.stride}, groups={self.groups}, kernel={self.kernel}, reach={self.reach}"
            )

    def operator(self, site: Site) -> "DATOperator":
        if site.heads % self.groups or site.dim % self.groups:
            raise ConfigError(f"groups={self.groups} does not divide {site.heads} heads and {site.dim} channels")
        return DATOperator(self, site)

    def sides(self, grid: Grid) -> tuple[int, int]:
        """Rows and columns of points."""
        return -(-grid.height // self.stride), -(-grid.width // self.stride)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """The offset network and the attention; sampling has no matrix products."""
        rows, columns = self.sides(site.grid)
        number, each = rows * columns, site.inner // self.groups
        table = site.heads * (2 * site.grid.height - 1) * (2 * site.grid.width - 1) if self.table else 0
        network = Cost(each * (self.kernel**2 + 5), number * site.inner * (self.kernel**2 + 2))
        return network + Cost(table, 0) + attention_cost(site.grid.tokens, number + site.grid.extra, site.inner)


class DATOperator(Operator):
    """conv, norm, offset: the network, shared by all groups. table (H, 2h - 1, 2w - 1), or None."""

    def __init__(self, config: DAT, site: Site) -> None:
        super().__init__()
        self.config = config
        each, kernel = site.inner // config.groups, config.kernel
        self.conv = nn.Conv2d(each, each, kernel, stride=config.stride, padding=kernel // 2, groups=each)
        self.norm = nn.LayerNorm(each)
        self.offset = Offset(each, config.init == "zero")
        shape = (site.heads, 2 * site.grid.height - 1, 2 * site.grid.width - 1)
        self.table = nn.Parameter(torch.empty(shape)) if config.table else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The table to a truncated normal of standard deviation 0.01, or to zero."""
        if self.table is not None and self.config.init == "zero":
            nn.init.zeros_(self.table)
        elif self.table is not None:
            nn.init.trunc_normal_(self.table, std=0.01)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to keep out of weight decay: the table."""
        return {"table"} if self.table is not None else set()

    def plan(self, q: Float[Tensor, "B H N d"], grid: Grid) -> DATPlan:
        """The points of every group, with gradients."""
        _, cells = grid.to_map(merge(q))
        groups = cells.unflatten(1, (self.config.groups, -1)).flatten(0, 1)  # (B*G, c, h, w)
        hidden = self.conv(groups).permute(0, 2, 3, 1)
        offsets = upcast(self.offset(F.gelu(self.norm(hidden).to(q.dtype))))  # (B*G, rows, columns, 2)
        rows, columns = offsets.shape[1:3]
        counts, sides = offsets.new_tensor([rows, columns]), offsets.new_tensor([grid.height, grid.width])
        ranges = (torch.arange(side, device=q.device) for side in (rows, columns))
        start = torch.stack(torch.meshgrid(*ranges, indexing="ij"), -1)
        start = (2 * start + 1) / counts - 1  # centres of the patches; the map is -1 to 1
        offsets = offsets.tanh() * self.config.reach / counts if self.config.reach else offsets
        position = (start + offsets).clamp(-1, 1)
        return DATPlan((((position + 1) * sides - 1) / 2).flatten(1, 2).unflatten(0, (q.shape[0], self.config.groups)))

    def memory(
        self, x: Float[Tensor, "B N C"], q: Float[Tensor, "B H N d"], grid: Grid, plain: bool,
        plan: DATPlan | None = None,
    ) -> tuple[Float[Tensor, "B M C"], Float[Tensor, "B H N M"] | None]:  # fmt: skip
        """The sampled tokens, then prefix and suffix tokens; and the position bias. plan: points to use instead."""
        points = (self.plan(q, grid) if plan is None else plan).points
        extra, cells = grid.to_map(x)
        groups = cells.unflatten(1, (self.config.groups, -1)).flatten(0, 1)  # (B*G, C/G, h, w)
        sample = sample_points_reference if plain else sample_points
        tokens = sample(groups, points.flatten(0, 1).to(groups.dtype if plain else points.dtype))
        tokens = tokens.unflatten(0, (x.shape[0], self.config.groups)).flatten(1, 2).mT  # (B, s, C)
        bias = None if self.table is None else self._bias(points, grid, q.dtype, plain)
        return (tokens if not grid.extra else torch.cat([tokens, extra], 1)), bias

    def _bias(self, points: Tensor, grid: Grid, dtype: torch.dtype, plain: bool) -> Tensor:
        """The table at (query - point), (B, H, N, M); 0 for prefix and suffix tokens. Stretched for another grid."""
        own = cast(Tensor, self.table)
        fits = own.shape[-2:] == (2 * grid.height - 1, 2 * grid.width - 1)
        if not plain and fits and runs_native("DAT", "auto", own):
            return position_bias_native(own, points, grid).to(dtype)
        batch, groups, number = points.shape[:3]
        table = upcast(own).unflatten(0, (groups, -1))  # (G, H/G, ...)
        table = table.expand(batch, -1, -1, -1, -1).flatten(0, 1)
        cell = torch.arange(grid.cells, device=points.device)
        cell = torch.stack([cell // grid.width, cell % grid.width], -1)
        offset = cell[:, None] - points.flatten(0, 1)[:, None]  # (B*G, cells, s, 2)
        half = offset.new_tensor([side // 2 for side in table.shape[-2:]])
        reach = offset.new_tensor([max(grid.height - 1, 1), max(grid.width - 1, 1)])
        position = (offset * half / reach + half).flatten(1, 2)
        sample = sample_points_reference if plain else sample_points
        bias = sample(table, position.to(table.dtype)).unflatten(-1, (grid.cells, number))
        bias = bias.unflatten(0, (batch, groups)).flatten(1, 2).to(dtype)  # (B, H, cells, s)
        return F.pad(bias, (0, grid.extra, grid.prefix, grid.suffix))

    def samples(self, inputs: Inputs) -> Samples:
        """The points of all groups, as every head reads all channels: a key's share in equal parts for its points.

        Points half a cell beyond the border read its cell.
        """
        weights = self.weights(inputs.q, inputs.k, inputs.v, grid=inputs.grid, mask=inputs.mask)[0]
        points = self.plan(inputs.q, inputs.grid).points[0]  # (G, s, 2)
        last = points.new_tensor([inputs.grid.height - 1, inputs.grid.width - 1])
        places = points.flatten(0, 1).clamp_min(0).minimum(last).expand(len(weights), 1, -1, -1)
        shares, further = weights.tensor_split((points.shape[1],), -1)
        return Samples(places, shares.repeat(1, 1, len(points)) / len(points), further)

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        if plain:
            return softmax_reference(inputs.q, inputs.k, inputs.v, mask=inputs.mask)
        return sdpa(inputs.q, inputs.k, inputs.v, attn_mask=None if inputs.mask is None else inputs.mask.bias)


class Offset(nn.Linear):
    """The last layer of the offset network: (y, x) of every point."""

    def __init__(self, width: int, zero: bool) -> None:
        self.zero = zero
        super().__init__(width, 2, bias=False)

    def reset_parameters(self) -> None:
        """As every linear layer, or to zero."""
        if self.zero:
            nn.init.zeros_(self.weight)
        else:
            super().reset_parameters()
