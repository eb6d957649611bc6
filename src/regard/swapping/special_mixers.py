"""Layers around a mechanism for attentions that differ from the ordinary: pooled queries, added positions, channels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, Inputs, Mask, Mixer, MixerConfig, Operator, UnsupportedError
from regard.mixers.shared.heads import HeadMixer

Kind = TypeVar("Kind", bound=HeadMixer)


def special_mixer(mixer: Mixer, kind: type[Kind], does: str, shared: nn.Module | None) -> Kind:
    """A mixer of this kind in the place of an ordinary one. does: what the layer does that others cannot.

    Raises: UnsupportedError if the mechanism has a layer of its own.
    """
    if type(mixer) is not HeadMixer:
        raise UnsupportedError(
            f"{mixer.site.name} {does}, which {type(mixer.config).__name__} cannot; leave the layer out with where="
        )
    return kind(mixer.config, mixer.site, shared)


class PositionedMixer(HeadMixer):
    """Self-attention whose queries and keys, but not values, see positions that are added to the tokens (DETR).

    rope is here the positions (B | 1, N, C).
    """

    def project_heads(self, x: Tensor, grid: Grid, rope: Tensor | None = None) -> dict[str, Tensor | None]:
        positioned = x if rope is None else x + rope
        return self.role_heads("qk", positioned, grid, None) | self.role_heads("v", x, grid, None)


class ResizingMixer(HeadMixer):
    """A mixer whose output may have other tokens and channels than its input."""

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask | None = None, rope: Any = None) -> Tensor:
        return self.compute(x, self.site.grid if grid is None else grid, mask, rope, plain=False)

    def reference(self, x: Tensor, grid: Grid | None = None, mask: Mask | None = None, rope: Any = None) -> Tensor:
        return self.compute(x, self.site.grid if grid is None else grid, mask, rope, plain=True)


class PooledMixer(ResizingMixer):
    """Self-attention with maxima of `stride` cells as queries: as many outputs, on a coarser grid (Hiera, SAM 2).

    The output projection may give another number of channels than the input has. stride (1, 1) pools nothing.
    """

    stride: tuple[int, int] = (1, 1)

    def project_heads(self, x: Tensor, grid: Grid, rope: Tensor | None = None) -> dict[str, Tensor | None]:
        heads = super().project_heads(x, grid, rope)
        if heads["q"] is not None:
            heads["q"] = self._maxima(heads["q"], grid)
        return heads

    def query_grid(self, grid: Grid) -> Grid:
        return Grid(grid.height // self.stride[0], grid.width // self.stride[1])

    def memory_grid(self, grid: Grid) -> Grid | None:
        return None if self.stride == (1, 1) else grid

    def _maxima(self, q: Float[Tensor, "B H N d"], grid: Grid) -> Float[Tensor, "B H n d"]:
        cells = q.mT.flatten(0, 1).unflatten(2, (grid.height, grid.width))
        return F.max_pool2d(cells, self.stride, self.stride).flatten(2).mT.unflatten(0, q.shape[:2])


def pooled_mixer(mixer: Mixer, out: int, stride: tuple[int, int], shared: nn.Module | None) -> Mixer:
    """The mixer of a layer with pooled queries and `out` channels of output; the mixer itself where it does.

    Raises: UnsupportedError if the mechanism cannot have other tokens as queries than as keys, or other channels.
    """
    site, config = mixer.site, mixer.config
    if out == site.dim and stride == (1, 1):
        return mixer
    does = f"makes {out} channels of {site.dim}" if stride == (1, 1) else "pools its queries"
    pooled = special_mixer(mixer, PooledMixer, does, shared)
    if stride != (1, 1):
        if not pooled.config.cross or pooled.config.refuses_cross or pooled.config.dwc or pooled.config.gate:
            raise UnsupportedError(
                f"{site.name} pools its queries, which {type(config).__name__} cannot: it needs as many queries as "
                "keys; leave the layer out with where="
            )
        pooled.stride = stride
        queries = replace(site, grid=pooled.query_grid(site.grid), memory=site.grid)
        pooled.operator = pooled.config.operator(queries)
    pooled.proj = nn.Linear(pooled.site.inner, out, bias=site.out_bias)
    return pooled


def output_sides(mixer: Mixer, sides: Sequence[int]) -> tuple[int, int]:
    """Height and width of a mixer's output for a map with these sides, which a `PooledMixer` makes smaller."""
    down, across = getattr(mixer, "stride", (1, 1))
    return sides[0] // down, sides[1] // across


class DecomposedPositions(Operator):
    """A mechanism whose logits get q . (row table + column table) by offset of query and key (SAM, ViTDet).

    rel_pos_h (2 h - 1, d) and rel_pos_w (2 w - 1, d) are stretched to other grids than the h x w that they are for.
    """

    def __init__(self, inner: Operator, config: MixerConfig, rel_pos_h: Tensor, rel_pos_w: Tensor) -> None:
        super().__init__()
        self.inner, self.config = inner, config
        self.rel_pos_h, self.rel_pos_w = (nn.Parameter(table.detach().clone()) for table in (rel_pos_h, rel_pos_w))

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        q, grid, form = inputs.q, inputs.grid, self.inner.reference if plain else self.inner
        if q is None:  # a mechanism without queries has no logits to add to
            return form(q, inputs.k, inputs.v, grid=grid, memory=inputs.memory, mask=inputs.mask)
        product = decomposed_positions(q, grid, self.rel_pos_h, self.rel_pos_w)
        mask = replace(inputs.mask or Mask(), product=product)
        mask = mask if "product" in self.config.masks else mask.with_bias()
        return form(q, inputs.k, inputs.v, grid=grid, memory=inputs.memory, mask=mask)


def decomposed_positions(
    q: Float[Tensor, "B H N d"], grid: Grid, rel_pos_h: Float[Tensor, "rows d"], rel_pos_w: Float[Tensor, "columns d"]
) -> tuple[Float[Tensor, "B H N r"], Float[Tensor, "N r"]]:
    """`Mask.product` of q . (row table + column table) by offset of query and key; r is a row and a column of keys."""
    cells = q.unflatten(2, (grid.height, grid.width))
    down = cells @ _offsets(rel_pos_h, grid.height).mT  # (B, H, h, w, h)
    across = (cells.unsqueeze(-2) @ _offsets(rel_pos_w, grid.width).mT).squeeze(-2)  # (B, H, h, w, w)
    row, column = (torch.eye(side, dtype=q.dtype, device=q.device) for side in (grid.height, grid.width))
    row, column = row[:, None].expand(-1, grid.width, -1), column.expand(grid.height, -1, -1)
    return torch.cat([down, across], -1).flatten(2, 3), torch.cat([row, column], -1).flatten(0, 1)


def _offsets(table: Float[Tensor, "R d"], size: int) -> Float[Tensor, "n n d"]:
    """The row of a table for each query and key along one side."""
    if len(table) != 2 * size - 1:
        table = F.interpolate(table.mT[None], 2 * size - 1, mode="linear")[0].mT
    place = torch.arange(size, device=table.device)
    return table[place[:, None] - place + size - 1]
