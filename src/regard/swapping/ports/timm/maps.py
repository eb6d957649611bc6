"""Ports of timm's attention on maps: MaxViT, MaxxViT, CoAtNet, FastViT, Visformer and others with their layout."""

from typing import Any, ClassVar, cast

import torch
from timm.layers.attention2d import Attention2d as MobileAttention
from timm.models.fastvit import Attention as FastViTAttention
from timm.models.hieradet_sam2 import MultiScaleAttention
from timm.models.maxxvit import Attention2d, AttentionCl
from timm.models.visformer import Attention as VisformerAttention
from timm.models.volo import Attention as VoloAttention
from torch import Tensor, nn

from regard.core import Grid, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.biases import keep_biases, mix_biased
from regard.swapping.host_parameters import output_dropout
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import TokenConv, keep_fused

from .extended import extended


class TimmMaxViT(Port):
    """Attention on maps with channels last, maybe in windows: MaxViT, MaxxViT, Hiera of SAM 2, VOLO; keeps biases."""

    replaces: ClassVar[tuple[type, ...]] = (AttentionCl, MultiScaleAttention, VoloAttention)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return super().matches(module) and getattr(module, "q_pool", None) is None

    @classmethod
    def host_masks(cls, module: Any) -> frozenset[str]:
        return frozenset({"bias"} if getattr(module, "rel_pos", None) is not None else ())

    @classmethod
    def input_grid(cls, module: Any, shape: torch.Size) -> Grid:
        return Grid(shape[1], shape[2])

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        rows, channels = module.qkv.weight.shape[:2]
        return Site(
            dim=channels,
            heads=module.num_heads,
            grid=grid,
            width=rows // (3 * module.num_heads),
            qkv_bias=module.qkv.bias is not None,
            out_bias=module.proj.bias is not None,
            drop=output_dropout(module),
            layer=layer,
            name=name,
        )

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        host = cast(Any, self.host)
        mixer = extended(super().build_mixer(config, site, shared), host, shared)
        if isinstance(mixer, HeadMixer):
            keep_biases(mixer, host, "rel_pos", site.name)
            mixer.qkv_by_head = getattr(host, "head_first", False)
            if isinstance(mixer.qkv, nn.Linear) and mixer.site.heads == site.heads:
                keep_fused(mixer, host)
            if isinstance(host.proj, nn.Conv2d):
                mixer.add_module("proj", TokenConv(mixer.site.inner, len(host.proj.weight), 1, bias=site.out_bias))
        return mixer

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        height, width = x.shape[1:3]
        return mix_biased(self.mixer, x.flatten(1, 2), Grid(height, width), shared_rel_pos).unflatten(
            1, (height, width)
        )


class TimmCoAtNet(TimmMaxViT):
    """Attention on maps with channels first, of 1x1 convolutions: CoAtNet, Visformer, MobileNetV4; keeps biases."""

    replaces: ClassVar[tuple[type, ...]] = (Attention2d, VisformerAttention, MobileAttention)

    @classmethod
    def input_grid(cls, module: Any, shape: torch.Size) -> Grid:
        return Grid(shape[2], shape[3])

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        grid = Grid(x.shape[2], x.shape[3])
        return mix_biased(self.mixer, x.flatten(2).mT, grid, shared_rel_pos).mT.unflatten(2, x.shape[2:])


class TimmFastViT(TimmCoAtNet):
    """FastViT's attention: linear layers on maps with channels first."""

    replaces: ClassVar[tuple[type, ...]] = (FastViTAttention,)
