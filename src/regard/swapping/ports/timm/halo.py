"""Ports of timm's attention on maps inside of convolutional blocks: HaloNet and bottleneck transformers."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from torch import Tensor

from regard.core import Grid, GridError, Inputs, Mask, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.host_mixer import HostMixer, MapPort, host_parts
from regard.swapping.layer import Port
from regard.swapping.maps import heads_of_map, map_of, map_of_heads, tokens_of


class BottleneckMixer(HostMixer):
    """Queries, keys and values of a map; biases that depend on the queries; the output may be pooled."""

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.roles = (host.dim_out_qk, host.dim_out_qk, host.dim_out_v)
        self.bias_scale = host.scale if host.scale_pos_embed else 1.0

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        roles = self.around.qkv(map_of(x, grid)).split(self.roles, 1)
        q, k, v = (heads_of_map(role, self.site.heads) for role in roles)
        bias = self.around.pos_embed(q.flatten(0, 1)).unflatten(0, q.shape[:2])
        return Inputs(q, k, v, grid, mask=Mask(bias=self.bias_scale * bias))

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        return tokens_of(self.around.pool(map_of_heads(y, grid)))


class TimmBottleneck(MapPort):
    """Attention of bottleneck transformers (BoTNet): a map of fixed size, biases that depend on the queries."""

    replaces: ClassVar[tuple[type, ...]] = (BottleneckAttn,)
    mask_kinds = frozenset({"bias"})
    parameter_names = host_parts("qkv", "pos_embed", "pool")
    mixer_class: ClassVar[type[HostMixer]] = BottleneckMixer
    wide = "dim_head_v"

    @classmethod
    def output_stride(cls, module: Any) -> int:
        """Cells of the input for each cell of the output, in each direction."""
        return int(getattr(module, "block_stride", 1)) * int(getattr(module.pool, "stride", 1))

    @classmethod
    def resizes(cls, module: Any) -> bool:
        return cls.output_stride(module) > 1 or module.dim_out_v != next(module.parameters()).shape[1]

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        dim, count, width = module.qkv.in_channels, module.num_heads, module.dim_head_qk
        return Site(dim=dim, heads=count, grid=grid, width=width, layer=layer, name=name)

    def output_grid(self, grid: Grid) -> Grid:
        stride = self.output_stride(self.host)
        return Grid(grid.height // stride, grid.width // stride)


def blocks_of(x: Float[Tensor, "B C h w"], side: int, stride: int) -> Float[Tensor, "Bn C s s"]:
    """The windows of a map, row by row: `side` cells high and wide, one at every `stride`-th cell."""
    return x.unfold(2, side, stride).unfold(3, side, stride).movedim(1, 3).flatten(0, 2)


class HaloMixer(HostMixer):
    """Queries of blocks of a map attend to their block and a border around it; biases depend on the queries.

    block: side of a block of the input. halo: cells of its border on each side, zeros beyond the map.
    """

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.block, self.halo, self.stride = host.block_size, host.halo_size, host.block_stride
        self.bias_scale = host.scale if host.scale_pos_embed else 1.0

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        if grid.height % self.block or grid.width % self.block:
            raise GridError(
                f"{self.site.name} has blocks of {self.block}x{self.block} cells, which a map of "
                f"{grid.height}x{grid.width} does not divide into; pass images of another size"
            )
        cells, count, queries = map_of(x, grid), self.site.heads, self.block // self.stride
        q = heads_of_map(blocks_of(self.around.q(cells), queries, queries), count)
        side = self.block + 2 * self.halo
        padded = F.pad(self.around.kv(cells), (self.halo,) * 4)
        kv = heads_of_map(blocks_of(padded, side, self.block), count)
        k, v = kv.split([self.site.width, self.value_width], -1)
        mask = Mask(bias=self.bias_scale * self.around.pos_embed(q))
        return Inputs(q, k, v, Grid(queries, queries), Grid(side, side), mask)

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        rows, columns = grid.height // self.block, grid.width // self.block
        blocks = map_of_heads(y, made.grid).unflatten(0, (-1, rows, columns))
        return tokens_of(self.around.pool(blocks.movedim(3, 1).transpose(3, 4).flatten(4).flatten(2, 3)))


class TimmHalo(TimmBottleneck):
    """HaloNet: blocks attend to themselves and a border, biases depend on queries; for mechanisms between two grids."""

    replaces: ClassVar[tuple[type, ...]] = (HaloAttn,)
    parameter_names = host_parts("q", "kv", "pos_embed", "pool")
    mixer_class: ClassVar[type[HostMixer]] = HaloMixer

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        queries, keys = (Grid(side, side) for side in (module.block_size_ds, module.win_size))
        dim, count, width = module.q.in_channels, module.num_heads, module.dim_head_qk
        return Site(dim=dim, heads=count, grid=queries, width=width, memory=keys, layer=layer, name=name)


PORTS: tuple[type[Port], ...] = (TimmBottleneck, TimmHalo)
