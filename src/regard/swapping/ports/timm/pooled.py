"""Ports of timm's attention with pooled queries or keys: MViTv2, Next-ViT, MobileNetV4 and 5."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from timm.layers.attention2d import MultiQueryAttention2d
from timm.models.mvitv2 import MultiScaleAttention as MViTAttention
from timm.models.mvitv2 import cal_rel_pos_type, reshape_post_pool, reshape_pre_pool
from timm.models.nextvit import EfficientAttention
from torch import Tensor

from regard.core import Grid, Inputs, Mask, Site, merge
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.host_mixer import HostMixer, HostPort, MapPort, host_parts
from regard.swapping.layer import Port
from regard.swapping.maps import heads_of_map, map_of, map_of_heads, pooled_grid, tokens_of


def fused_heads(y: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, N, d) of channels in the order (3, heads, width)."""
    q, k, v = y.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


class MViTMixer(HostMixer):
    """Queries, keys and values pooled by convolutions; biases that depend on the queries; queries added at the end."""

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.relative, self.residual = host.rel_pos_type == "spatial", host.residual_pooling

    def pool(self, role: str, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """The pooled and normalised heads of a role, and their grid."""
        conv, norm = self.around.get_submodule(f"pool_{role}"), self.around.get_submodule(f"norm_{role}")
        cells, first = reshape_pre_pool(x, [grid.height, grid.width], grid.prefix > 0)
        y, sides = reshape_post_pool(conv(cells), self.site.heads, first)
        return norm(y), replace(grid, height=sides[0], width=sides[1])

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        made, grids = {}, {}
        for role, y in zip("qkv", fused_heads(self.around.qkv(x), self.site.heads), strict=True):
            kept = getattr(self.around, f"pool_{role}") is None
            made[role], grids[role] = (y, grid) if kept else self.pool(role, y, grid)
        q, queries, keys = made["q"], grids["q"], grids["k"]
        mask = None
        if self.relative:
            zeros = q.new_zeros(*q.shape[:3], keys.tokens)
            sides = [[side.height, side.width] for side in (queries, keys)]
            tables = self.around.rel_pos_h, self.around.rel_pos_w
            mask = Mask(bias=cal_rel_pos_type(zeros, q, grid.prefix > 0, *sides, *tables))
        return Inputs(**made, grid=queries, memory=None if queries == keys else keys, mask=mask)

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        return self.around.proj(merge(y + made.q if self.residual else y))  # type: ignore[no-any-return]


class TimmMViT(HostPort):
    """MViTv2: convolutions pool queries and keys, biases depend on queries; for mechanisms between two grids."""

    replaces: ClassVar[tuple[type, ...]] = (MViTAttention,)
    parameter_names = host_parts(
        "qkv", "proj", "rel_pos_h", "rel_pos_w", *(f"{part}_{role}" for part in ("pool", "norm") for role in "qkv")
    )
    mixer_class: ClassVar[type[HostMixer]] = MViTMixer

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        return "" if module.mode == "conv" else f"it pools in the mode {module.mode!r}, not by convolutions"

    @classmethod
    def host_masks(cls, module: Any) -> frozenset[str]:
        return frozenset({"bias"} if module.rel_pos_type == "spatial" else ())

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        height, width = inputs[1]
        return Grid(height, width, int(module.has_cls_token))

    @classmethod
    def resizes(cls, module: Any) -> bool:
        strides = () if module.pool_q is None else module.pool_q.stride
        return any(stride > 1 for stride in strides) or module.dim_out != module.qkv.in_features

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        queries, keys = (pooled_grid(grid, pool) for pool in (module.pool_q, module.pool_k))
        return replace(super().site(module, grid, name, layer), grid=queries, memory=None if queries == keys else keys)

    def forward(self, x: Tensor, feat_size: Sequence[int]) -> tuple[Tensor, list[int]]:
        grid = self.grid(x, feat_size)
        pool = self.mixer.around.pool_q if isinstance(self.mixer, HostMixer) else None
        queries = pooled_grid(grid, pool)
        return self.mixer(x, grid), [queries.height, queries.width]


class NextViTMixer(HostMixer):
    """Keys and values come from the means of runs of tokens, normalised."""

    role_parts = {"q": ("q",), "k": ("k",), "v": ("v",)}

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        reduced = x if self.around.sr is None else self.around.norm(self.around.sr(x.mT)).mT
        memory = None if reduced is x else Grid.sequence(reduced.shape[1])
        q, k, v = self.part_heads("q", x), self.part_heads("k", reduced), self.part_heads("v", reduced)
        return Inputs(q, k, v, grid, memory)


class TimmNextViT(HostPort):
    """Next-ViT: keys and values of runs of tokens in the order of rows, as one sequence."""

    replaces: ClassVar[tuple[type, ...]] = (EfficientAttention,)
    watch = "patch_embed"
    parameter_names = host_parts("q", "k", "v", "proj", "proj_drop", "sr", "norm")
    mixer_class: ClassVar[type[HostMixer]] = NextViTMixer

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        memory = Grid.sequence(grid.cells // module.N_ratio) if module.sr_ratio > 1 else None
        heads, width = module.num_heads, module.head_dim
        return Site(dim=module.dim, heads=heads, grid=grid, width=width, memory=memory, layer=layer, name=name)


class MultiQueryMixer(HostMixer):
    """All heads share keys and values, which come from a coarser map."""

    role_parts = {"q": ("query",), "k": ("key",), "v": ("value",)}

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.kv_stride = host.kv_stride

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        keys = grid.every(self.kv_stride)
        q, k, v = (self.heads_of(name, map_of(x, grid)) for name in ("query", "key", "value"))
        return Inputs(q, k, v, grid, None if keys == grid else keys)

    def heads_of(self, name: str, x: Tensor) -> Tensor | None:
        """The heads that a module makes of a map, keys and values the same for all; None if it was left out."""
        module = getattr(self.around, name)
        if module is None:
            return None
        heads = self.site.heads
        return heads_of_map(module(x), heads if name == "query" else 1).expand(-1, heads, -1, -1)

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        return tokens_of(self.around.output(map_of_heads(y, made.grid)))


class TimmMultiQuery(MapPort):
    """MobileNetV4 and 5: keys and values are shared by all heads, and may come from a coarser map."""

    replaces: ClassVar[tuple[type, ...]] = (MultiQueryAttention2d,)
    parameter_names = host_parts("query", "key", "value", "output")
    mixer_class: ClassVar[type[HostMixer]] = MultiQueryMixer
    wide = "value_dim"

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        return "its queries are on a coarser map" if module.has_query_strides else ""

    @classmethod
    def resizes(cls, module: Any) -> bool:
        return bool(module.output.proj.out_channels != module.query.proj.in_channels)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        keys = grid.every(module.kv_stride)
        return Site(
            dim=module.query.proj.in_channels, heads=module.num_heads, grid=grid, width=module.key_dim,
            memory=None if keys == grid else keys, layer=layer, name=name,
        )  # fmt: skip


PORTS: tuple[type[Port], ...] = (TimmMViT, TimmNextViT, TimmMultiQuery)
