"""Ports of timm's attention on maps: MaxViT, MaxxViT, CoAtNet, FastViT, Visformer and others with their layout."""

from typing import Any, ClassVar, cast

from timm.layers.attention2d import Attention2d as MobileAttention
from timm.layers.helpers import to_2tuple
from timm.models.fastvit import Attention as FastViTAttention
from timm.models.hieradet_sam2 import MultiScaleAttention
from timm.models.maxxvit import Attention2d, AttentionCl
from timm.models.visformer import Attention as VisformerAttention
from timm.models.volo import Attention as VoloAttention
from torch import Tensor, nn

from regard.core import Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.biases import keep_biases, mix_biased
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import TokenConv, keep_fused
from regard.swapping.special_mixers import output_sides, pooled_mixer

from .extended import extended_mixer


class TimmMaxViT(Port):
    """Attention on maps with channels last, maybe in windows: MaxViT, MaxxViT, VOLO, Hiera of SAM 2; keeps biases.

    Layers of Hiera that pool their queries take mechanisms that have cross-attention.
    """

    replaces: ClassVar[tuple[type, ...]] = (AttentionCl, MultiScaleAttention, VoloAttention)
    map_axes = slice(1, 3)

    @classmethod
    def host_masks(cls, module: Any) -> frozenset[str]:
        return frozenset({"bias"} if getattr(module, "rel_pos", None) is not None else ())

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        host = cast(Any, self.host)
        mixer, pool = super().build_mixer(config, site, shared), getattr(host, "q_pool", None)
        if pool is not None:
            return pooled_mixer(mixer, len(host.proj.weight), to_2tuple(pool.stride), shared)
        mixer = extended_mixer(mixer, host, shared)
        if isinstance(mixer, HeadMixer):
            keep_biases(mixer, host, "rel_pos")
            mixer.qkv_by_head = getattr(host, "head_first", False)
            if isinstance(mixer.qkv, nn.Linear) and mixer.site.heads == site.heads:
                keep_fused(mixer, host)
            if isinstance(host.proj, nn.Conv2d):
                mixer.add_module("proj", TokenConv(mixer.site.inner, len(host.proj.weight), 1, bias=site.out_bias))
        return mixer

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        y = mix_biased(self.mixer, x.flatten(1, 2), self.grid(x), shared_rel_pos)
        return y.unflatten(1, output_sides(self.mixer, x.shape[1:3]))


class TimmCoAtNet(TimmMaxViT):
    """Attention on maps with channels first, of 1x1 convolutions: CoAtNet, Visformer, MobileNetV4; keeps biases."""

    replaces: ClassVar[tuple[type, ...]] = (Attention2d, VisformerAttention, MobileAttention)
    map_axes = slice(2, 4)

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        return mix_biased(self.mixer, x.flatten(2).mT, self.grid(x), shared_rel_pos).mT.unflatten(2, x.shape[2:])


class TimmFastViT(TimmCoAtNet):
    """FastViT's attention: linear layers on maps with channels first."""

    replaces: ClassVar[tuple[type, ...]] = (FastViTAttention,)


PORTS: tuple[type[Port], ...] = (TimmMaxViT, TimmCoAtNet, TimmFastViT)
