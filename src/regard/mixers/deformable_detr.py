"""Multi-scale deformable attention: each query samples a few points of every map (Deformable DETR, Zhu et al. 2021).

    y_q = sum over maps l and points k of A_{qlk} v_l(phi_l(p_q) + o_{qlk}),   sum over l and k of A_{qlk} = 1   (Eq. 3)

Offsets o, in cells of map l, and weights A (a softmax over maps and points) are linear in the query; it meets no key.
v_l is read bilinearly and is zero beyond the border. In a model the only map is that of the patch tokens (Eq. 2), p_q
is the centre of the query's own cell, and the query is the input itself.
Prefix and suffix tokens are never sampled; as queries they start at the centre of the map.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Grid, Inputs, Operator, ShapeError, Site, hide, operator_function
from regard.core.cost import Cost, linear_cost
from regard.core.projection import ProjectionConfig, merge
from regard.core.view import Samples
from regard.projections import IdentityQuery

from .convolutions.sampling import sample_maps
from .shared.heads import HeadMixerConfig
from .shared.precision import upcast, upcast_dtype, without_autocast

__all__ = ["DeformableDETR", "deformable_detr", "deformable_detr_reference"]


@operator_function
def deformable_detr_reference(
    maps: Sequence[Float[Tensor, "B H e _ _"]], points: Float[Tensor, "B H N L K 2"],
    weights: Float[Tensor, "B H N L K"],
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Every sample is a sum over a whole map with the weights max(0, 1 - |y - i|) max(0, 1 - |x - j|)."""
    _check_maps(maps, points, weights)
    total = torch.zeros((), dtype=maps[0].dtype, device=points.device)
    for x, place, weight in zip(maps, points.unbind(3), weights.unbind(3), strict=True):
        rows, columns = (
            F.relu(1 - (place[..., axis, None] - torch.arange(side, device=x.device)).abs()).to(x.dtype)
            for axis, side in enumerate(x.shape[3:])
        )
        total = total + torch.einsum("bheij,bhnki,bhnkj,bhnk->bhne", x, rows, columns, weight.to(x.dtype))
    return total


@operator_function
def deformable_detr(
    maps: Sequence[Float[Tensor, "B H e _ _"]], points: Float[Tensor, "B H N L K 2"],
    weights: Float[Tensor, "B H N L K"],
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same by `grid_sample`, in float32 at least; memory B H N K e.

    maps: the values of the L maps, (batch, heads, channels, height, width), of any sizes. points: (y, x) in cells of
    their map; 0 is the centre of the first cell, where published code has (x, y) from 0 to 1. weights: usually a
    softmax over maps and points together.
    Raises: ShapeError for tensors that do not fit.
    """
    _check_maps(maps, points, weights)
    with without_autocast(points.device):
        total = torch.zeros((), dtype=upcast_dtype(maps[0]), device=points.device)
        for x, place, weight in zip(maps, upcast(points).unbind(3), upcast(weights).unbind(3), strict=True):
            wide = upcast(x)
            place, factors = place.transpose(2, 3)[:, :, :, :, None], weight.mT[..., None]  # (B, H, K, N, 1, 2)
            total = total + sample_maps(wide.flatten(1, 2), place.to(wide.dtype), factors).sum(2)  # (B, H e, N)
        return total.unflatten(1, maps[0].shape[1:3]).mT.to(maps[0].dtype)


def _check_maps(maps: Sequence[Tensor], points: Tensor, weights: Tensor) -> None:
    if points.shape[-1] != 2 or points.shape[:-1] != weights.shape or points.shape[3] != len(maps):
        shapes = f"{len(maps)} maps, points {tuple(points.shape)} and weights {tuple(weights.shape)}"
        raise ShapeError(
            f"deformable_detr: {shapes}; expected points (batch, heads, tokens, maps, points, 2), and weights without 2"
        )
    for x in maps:
        if x.ndim != 5 or x.shape[:2] != points.shape[:2] or x.shape[2] != maps[0].shape[2]:
            raise ShapeError(
                f"deformable_detr: a map has shape {tuple(x.shape)}; expected ({points.shape[0]}, {points.shape[1]}, "
                "channels, height, width) with the same channels in every map"
            )


@dataclass(frozen=True, kw_only=True)
class DeformableDETR(HeadMixerConfig):
    """points: samples of each query and head.

    The start is the published one: weights are equal, and offsets point in one direction for each head, point k at k
    cells. Offsets learn at a tenth of the rate (`lr_scale`). The query is the input (projection=IdentityQuery()): the
    offsets and weights are linear in it. In cross-attention the map is that of the memory.
    Raises: ConfigError for points below 1; building, where heads times width is not the number of channels (then give
    projection=LinearQKV()).
    """

    projection: ProjectionConfig = IdentityQuery()
    points: int = 4

    card = Card(
        title="Multi-scale deformable attention", source="Zhu et al. 2021 (Deformable DETR), Eq. 2-3",
        formula="sum_k A_qk v(p_q + o_qk),  A = softmax_k(W x_q),  o = W' x_q", complexity="O(N C^2 + N K C)",
        query_content=True, key_content=False, relative_position=True, dynamic="one-step",
        scaling=frozenset({"routing"}), expert_type="MLP of width K", expert_count="N",
        construction="offset prediction", topology="N x one-to-one", conditions="Q",
        prefix="queries at the centre of the map; never sampled",
    )  # fmt: skip
    masks = frozenset({"padding"})
    cross = True
    samples = ("DeformableDETR()", "DeformableDETR(points=2, projection=LinearQKV(), dwc=3)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.points < 1:
            raise ConfigError(f"DeformableDETR: points is at least 1, not {self.points}")

    @property
    def uses(self) -> str:
        return "qv"

    def operator(self, site: Site) -> "DeformableDETROperator":
        return DeformableDETROperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """The prediction; the paper also counts 5 products for a sample (App. A.1), which are no matrix products."""
        n = site.tokens("q")
        samples = 5 * n * self.points * site.inner if accounting == "paper" else 0
        return linear_cost(n, site.inner, 3 * site.heads * self.points) + Cost(0, samples)


class DeformableDETROperator(Operator):
    """offset (2 H K, H d), for head, point and (y, x); weight (H K, H d)."""

    def __init__(self, config: DeformableDETR, site: Site) -> None:
        super().__init__()
        self.config, self.heads = config, site.heads
        directions = torch.arange(site.heads) * (2 * math.pi / site.heads)
        directions = torch.stack([directions.sin(), directions.cos()], -1)
        directions = directions / directions.abs().amax(-1, keepdim=True)  # on a square around the query
        start = directions[:, None] * torch.arange(1, config.points + 1)[:, None]  # (H, K, 2)
        self.offset = Prediction(site.inner, start.flatten())
        self.weight = Prediction(site.inner, torch.zeros(site.heads * config.points))

    def lr_scale(self) -> dict[str, float]:
        """Local names of parameters -> factor of the learning rate: 0.1 for the offsets."""
        return {f"offset.{name}": 0.1 for name, _ in self.offset.named_parameters()}

    def points(self, q: Float[Tensor, "B H N d"], grid: Grid, memory: Grid) -> Float[Tensor, "B H N K 2"]:
        """Where each head samples, (y, x) in cells of the memory, in float32 at least."""
        offsets = upcast(self.offset(merge(q))).unflatten(-1, (self.heads, -1, 2)).transpose(1, 2)
        return offsets + _centres(grid, memory, offsets)[:, None]

    def shares(self, q: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N K"]:
        """The weight of each point of a query, in float32 at least."""
        return upcast(self.weight(merge(q))).unflatten(-1, (self.heads, -1)).transpose(1, 2).softmax(-1)

    def samples(self, inputs: Inputs) -> Samples:
        return Samples(self.points(inputs.q, inputs.grid, inputs.key_grid)[0], self.shares(inputs.q)[0])

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        points = self.points(inputs.q, inputs.grid, inputs.key_grid)
        form = deformable_detr_reference if plain else deformable_detr
        _, values = inputs.key_grid.to_map(hide(inputs.v, inputs.mask))
        return form([values], points[:, :, :, None], self.shares(inputs.q)[:, :, :, None])


def _centres(grid: Grid, memory: Grid, like: Tensor) -> Float[Tensor, "N 2"]:
    """The centres of the queries' cells in cells of the memory; that of the map for prefix and suffix tokens."""
    sides = zip((grid.height, grid.width), (memory.height, memory.width), strict=True)
    axes = [(torch.arange(own, device=like.device).to(like) + 0.5) * (other / own) - 0.5 for own, other in sides]
    cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 1)
    middle = like.new_tensor([(memory.height - 1) / 2, (memory.width - 1) / 2])
    return torch.cat([middle.expand(grid.prefix, 2), cells, middle.expand(grid.suffix, 2)])


class Prediction(nn.Linear):
    """A linear map whose weight starts at zero and whose bias at `start`."""

    def __init__(self, width: int, start: Float[Tensor, " outputs"]) -> None:
        self.start = start
        super().__init__(width, len(start))

    def reset_parameters(self) -> None:
        """Weight to zero, bias to the start."""
        nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias.copy_(self.start)
