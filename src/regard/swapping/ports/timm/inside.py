"""Ports of timm's attention with further steps inside: convolutions, global queries, biases of queries, mixed heads."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.models.cpubone import ConvAttention as CPUBoneAttention
from timm.models.efficientformer_v2 import Attention2d, Attention2dDownsample
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.lowformer import ConvAttention as LowFormerAttention
from timm.models.tnt import Attention as TNTAttention
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch import Tensor, nn

from regard.core import Grid, GridError, Inputs, Mask, Mixer, MixerConfig, Site, heads
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.host_mixer import HostMixer, HostPort, MapPort, host_parts
from regard.swapping.layer import Port
from regard.swapping.maps import heads_of_map, map_of, map_of_heads, tokens_of
from regard.swapping.separate_qkv import TokenConv
from regard.swapping.special_mixers import decomposed_positions
from regard.swapping.talking_heads import TalkingHeads, logits_operator, no_logits_error

from .pooled import fused_heads
from .wide import BIASES, table_biases


class ConvAttentionMixer(HostMixer):
    """Queries, keys and values of a coarser map, from a strided convolution; the output is brought to full size.

    padded: whether the map is first padded to whole strides.
    """

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.stride, self.padded = host.att_stride, getattr(host, "small_kernels", False) and host.att_stride > 1

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        cells = whole_strides(map_of(x, grid), self.stride) if self.padded else map_of(x, grid)
        y = self.around.pwise(self.around.conv_proj(cells))
        q, k, v = heads_of_map(y, self.site.heads).chunk(3, -1)
        return Inputs(q, k, v, Grid(*y.shape[-2:]))

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        full = self.around.upsampling(self.around.o_proj(map_of_heads(y, made.grid)))
        return tokens_of(full[..., : grid.height, : grid.width])


def whole_strides(x: Tensor, stride: int) -> Tensor:
    """A map with zeros at its right and lower border up to the next multiple of the stride."""
    return F.pad(x, (0, -x.shape[-1] % stride, 0, -x.shape[-2] % stride))


class TimmConvAttention(MapPort):
    """LowFormer and CPUBone: attention on a coarser map, which convolutions make and bring to full size again."""

    replaces: ClassVar[tuple[type, ...]] = (LowFormerAttention, CPUBoneAttention)
    parameter_names = host_parts("conv_proj", "pwise", "o_proj", "upsampling")
    mixer_class: ClassVar[type[HostMixer]] = ConvAttentionMixer

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        weight = module.pwise.weight
        cells = weight.new_zeros(1, weight.shape[1], grid.height, grid.width)
        if getattr(module, "small_kernels", False) and module.att_stride > 1:
            cells = whole_strides(cells, module.att_stride)
        with torch.no_grad():
            coarse = Grid(*module.conv_proj.conv(cells).shape[-2:])
        width, count = module.head_dim, module.num_heads
        return Site(dim=weight.shape[1], heads=count, grid=coarse, width=width, layer=layer, name=name)


class GlobalQueryMixer(HostMixer):
    """Queries, keys and values of windows; or queries of the whole image, the same for each of its windows."""

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        mask = Mask(bias=self.around.rel_pos.get_bias())
        if extra is None:
            return Inputs(*fused_heads(self.around.qkv(x), self.site.heads), grid, mask=mask)
        k, v = (heads(part, self.site.heads) for part in self.around.qkv(x).chunk(2, -1))
        q = heads(extra.flatten(1, -2), self.site.heads).repeat_interleave(len(x) // len(extra), 0)
        return Inputs(q, k, v, grid, mask=mask)


class TimmGCViT(HostPort):
    """GCViT in windows, with biases; every second layer gets its queries from the whole image."""

    replaces: ClassVar[tuple[type, ...]] = (WindowAttentionGlobal,)
    mask_kinds = frozenset({"bias"})
    parameter_names = host_parts("qkv", "proj", "proj_drop", "rel_pos")
    mixer_class: ClassVar[type[HostMixer]] = GlobalQueryMixer
    gets_more = True
    windows = "window_size"

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        dim, count = module.qkv.in_features, module.num_heads
        return Site(dim=dim, heads=count, grid=grid, width=module.head_dim, layer=layer, name=name)

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        host: Any = self.host
        return self.mixer(x, self.grid(), None, q_global if host.use_global else None)


class SamMixer(HostMixer):
    """Biases from the product of queries with embeddings of relative rows and columns."""

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        q, k, v = fused_heads(self.around.qkv(x), self.site.heads)
        q, k = self.around.q_norm(q), self.around.k_norm(k)
        mask = Mask(product=decomposed_positions(q, grid, self.around.rel_pos_h, self.around.rel_pos_w))
        return Inputs(q, k, v, grid, mask=mask if "product" in self.config.masks else mask.with_bias())


class TimmSAM(HostPort):
    """SAM's image encoder, in windows and on the whole map: biases that depend on the queries."""

    replaces: ClassVar[tuple[type, ...]] = (SamAttention,)
    mask_kinds = frozenset({"product"})
    map_axes = slice(1, 3)
    parameter_names = host_parts("qkv", "q_norm", "k_norm", "proj", "proj_drop", "rel_pos_h", "rel_pos_w")
    mixer_class: ClassVar[type[HostMixer]] = SamMixer

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        return "" if module.use_rel_pos else "it has no biases of relative positions, but maybe rotary ones"

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return replace(super().site(module, grid, name, layer), qk_norm="")

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x.flatten(1, 2), self.grid(x)).unflatten(1, x.shape[1:3])


class EfficientFormerV2Mixer(HostMixer):
    """Queries, keys, values and a depth-wise convolution of the values, on maps; values are wider than keys."""

    role_parts = {"q": ("q",), "k": ("k",)}

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.halved = isinstance(host, Attention2dDownsample)

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        cells = map_of(x, grid)
        cells = cells if self.around.stride_conv is None else self.around.stride_conv(cells)
        q, k, v = (self.heads_of(role, cells) for role in "qkv")
        keys = Grid(*cells.shape[-2:])
        bias = table_biases(self.around)
        if isinstance(self.operator, TalkingHeads):  # the host mixes the sum of logits and biases
            bias = F.conv2d(bias, self.operator.proj_l.weight)
        mask = Mask(bias=bias)
        return Inputs(q, k, v, keys.every(2), keys, mask) if self.halved else Inputs(q, k, v, keys, mask=mask)

    def heads_of(self, role: str, cells: Tensor) -> Tensor | None:
        module = getattr(self.around, role)
        return None if module is None else heads_of_map(module(cells), self.site.heads)

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        local = self.around.v_local(map_of_heads(made.v, made.key_grid))
        full = map_of_heads(y, made.grid) + local
        full = full if self.around.upsample is None else self.around.upsample(full)
        return tokens_of(self.around.proj(self.around.act(full)))


PARTS_V2 = host_parts("stride_conv", "q", "k", "v", "v_local", "upsample", "act", "proj", *BIASES)
"""What a layer keeps of EfficientFormerV2's attention, as far as the host has it."""


class TimmEfficientFormerV2(MapPort):
    """EfficientFormerV2: mechanisms with logits over all keys keep its talking heads; others are refused."""

    replaces: ClassVar[tuple[type, ...]] = (Attention2d,)
    mask_kinds = frozenset({"bias"})
    parameter_names = {**PARTS_V2, "talking_head1": "operator.proj_l", "talking_head2": "operator.proj_w"}
    mixer_class: ClassVar[type[HostMixer]] = EfficientFormerV2Mixer
    wide = "d"

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        dim, count, width = module.q.conv.in_channels, module.num_heads, module.key_dim
        return Site(dim=dim, heads=count, grid=Grid(*module.resolution), width=width, layer=layer, name=name)

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if isinstance(mixer, HostMixer):
            mixer.operator = TalkingHeads(logits_operator(mixer.config, site), site.heads, True)
            for name in ("proj_l", "proj_w"):
                mixer.operator.add_module(name, TokenConv(site.heads, site.heads, 1))
        elif config.uses:
            raise no_logits_error(config)
        return mixer


class TimmEfficientFormerV2Downsample(MapPort):
    """EfficientFormerV2's attention between two stages, with fewer queries: only for mechanisms between two grids."""

    replaces: ClassVar[tuple[type, ...]] = (Attention2dDownsample,)
    mask_kinds = frozenset({"bias"})
    parameter_names = PARTS_V2
    mixer_class: ClassVar[type[HostMixer]] = EfficientFormerV2Mixer
    wide = "d"

    @classmethod
    def resizes(cls, module: Any) -> bool:
        return True

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        queries, keys = Grid(*module.resolution2), Grid(*module.resolution)
        dim, count, width = module.k.conv.in_channels, module.num_heads, module.key_dim
        return Site(dim=dim, heads=count, grid=queries, width=width, memory=keys, layer=layer, name=name)

    def output_grid(self, grid: Grid) -> Grid:
        return grid.every(2)


class PairMixer(HostMixer):
    """One map makes queries and keys, another the values, whose width may differ."""

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        q, k = self.around.qk(x).unflatten(-1, (2, self.site.heads, -1)).permute(2, 0, 3, 1, 4)
        return Inputs(q, k, heads(self.around.v(x), self.site.heads), grid)


class TimmTNT(HostPort):
    """TNT: attention between patches, and between the pixels of each patch; for square images and patches."""

    replaces: ClassVar[tuple[type, ...]] = (TNTAttention,)
    parameter_names = host_parts("qk", "v", "proj", "proj_drop")
    mixer_class: ClassVar[type[HostMixer]] = PairMixer

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        tokens = inputs[0].shape[1]
        for prefix in (0, 1):
            side = math.isqrt(tokens - prefix)
            if side * side == tokens - prefix:
                return Grid(side, side, prefix)
        raise GridError(f"{tokens} tokens of TNT are no square of patches or pixels; pass square images")

    @classmethod
    def value_width(cls, module: Any, site: Site) -> int:
        return int(module.v.out_features) // site.heads

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        dim, count = module.qk.in_features, module.num_heads
        return Site(dim=dim, heads=count, grid=grid, width=module.head_dim, layer=layer, name=name)


PORTS: tuple[type[Port], ...] = (
    TimmConvAttention, TimmGCViT, TimmSAM, TimmEfficientFormerV2, TimmEfficientFormerV2Downsample, TimmTNT,
)  # fmt: skip
