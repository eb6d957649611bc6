"""Ports of timm's attention that no mechanism computes: swaps leave them as they are by default."""

from typing import Any, ClassVar, cast

import torch.nn.functional as F
from timm.models.coat import FactorAttnConvRelPosEnc
from timm.models.davit import ChannelAttention, ChannelAttentionV2
from timm.models.swiftformer import EfficientAdditiveAttention
from timm.models.volo import OutlookAttention
from torch import Tensor, nn

from regard.core import Grid, Inputs, Mixer, MixerConfig, Site, heads, merge
from regard.swapping.host_mixer import HostMixer, HostPort, MapPort, host_parts
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import split_matrices

from .pooled import fused_heads


class TimmOutlook(Port):
    """VOLO's outlook attention, only with reinitialise=True: values and output stay, queries and keys are new."""

    loses = "outlook attention"
    replaces: ClassVar[tuple[type, ...]] = (OutlookAttention,)
    map_axes = slice(1, 3)
    parameter_names = {"v": "qkv.v"}

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer, v = super().build_mixer(config, site, shared), cast(Any, self.host).v
        split_matrices(mixer, v, v, v)
        for name, value in mixer.named_parameters():
            if name in ("qkv.q.weight", "qkv.k.weight"):
                nn.init.trunc_normal_(value, std=0.02)  # as VOLO draws its matrices
        return mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x.flatten(1, 2), self.grid(x)).unflatten(1, x.shape[1:3])


class TimmChannel(Port):
    """DaViT's channel attention, only with reinitialise=True: all weights stay, to attend between tokens."""

    loses = "attention between channels"
    replaces: ClassVar[tuple[type, ...]] = (ChannelAttention, ChannelAttentionV2)
    watch = "cpe1"


class FactorisedMixer(HostMixer):
    """A mechanism, plus the queries times a convolution of the values."""

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        return Inputs(*fused_heads(self.around.qkv(x), self.site.heads), grid)

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        near = self.around.crpe(made.q, made.v, size=(grid.height, grid.width))
        return super().finish(y + near, made, grid)


class TimmCoaT(HostPort):
    """CoaT, only with reinitialise=True: all weights stay, also the convolutions of relative positions."""

    loses = "attention by a softmax of the keys over all tokens"
    replaces: ClassVar[tuple[type, ...]] = (FactorAttnConvRelPosEnc,)
    parameter_names = host_parts("qkv", "crpe", "proj", "proj_drop")
    mixer_class: ClassVar[type[HostMixer]] = FactorisedMixer

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        x, (height, width) = inputs
        return Grid(height, width, x.shape[1] - height * width)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return Site(dim=module.qkv.in_features, heads=module.num_heads, grid=grid, layer=layer, name=name)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return self.mixer(x, self.grid(x, size))


class AdditiveMixer(HostMixer):
    """A mechanism between normalised queries and keys, whose values are the keys; the queries are added."""

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        q, k = (F.normalize(part(x), dim=-1) for part in (self.around.to_query, self.around.to_key))
        q, k = (heads(part, self.site.heads) for part in (q, k))
        return Inputs(q, k, k, grid)

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        q = merge(cast(Tensor, made.q))
        return self.around.final(self.around.proj(merge(y)) + q)  # type: ignore[no-any-return]


class TimmSwiftFormer(MapPort):
    """SwiftFormer, only with reinitialise=True: the matrices stay, the vector of the one query does not."""

    loses = "additive attention by one query for all tokens"
    replaces: ClassVar[tuple[type, ...]] = (EfficientAdditiveAttention,)
    parameter_names = host_parts("to_query", "to_key", "proj", "final")
    mixer_class: ClassVar[type[HostMixer]] = AdditiveMixer

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        inner, dim = module.to_query.weight.shape
        return Site(dim=dim, heads=inner // module.final.out_features, grid=grid, layer=layer, name=name)


PORTS: tuple[type[Port], ...] = (TimmOutlook, TimmChannel, TimmCoaT, TimmSwiftFormer)
