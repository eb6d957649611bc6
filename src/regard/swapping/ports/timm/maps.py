"""Ports of timm's attention on maps: MaxViT, MaxxViT, CoAtNet, FastViT and Visformer."""

from typing import Any, ClassVar, cast

import torch
from timm.models.fastvit import Attention as FastViTAttention
from timm.models.maxxvit import Attention2d, AttentionCl
from timm.models.visformer import Attention as VisformerAttention
from torch import Tensor, nn

from regard.core import Grid, Mask, Mixer, MixerConfig, Site, UnsupportedError
from regard.mixers.shared.heads import HeadMixer
from regard.projections.linear import LinearProjection
from regard.swapping.biases import keep_biases, mix_biased
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import HostMap, TokenConv


class WideningMixer(HeadMixer):
    """A mixer whose output projection gives another number of channels than the input has."""

    def forward(self, x: Tensor, grid: Grid, mask: Mask | None = None, rope: Tensor | None = None) -> Tensor:
        return self._apply_operator(x, grid, mask, rope, plain=False)

    def reference(self, x: Tensor, grid: Grid, mask: Mask | None = None, rope: Tensor | None = None) -> Tensor:
        return self._apply_operator(x, grid, mask, rope, plain=True)


class TimmMaxViT(Port):
    """Attention on maps with channels last, in windows and grids, of MaxViT and MaxxViT; its biases are kept."""

    replaces: ClassVar[tuple[type, ...]] = (AttentionCl,)
    parameter_names: ClassVar[dict[str, str]] = {"qkv": "qkv.map"}

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
            drop=module.proj_drop.p,
            layer=layer,
            name=name,
        )

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer, host = super().build_mixer(config, site, shared), cast(Any, self.host)
        out = len(host.proj.weight)
        if out != site.dim:
            if type(mixer) is not HeadMixer:
                raise UnsupportedError(
                    f"{site.name} makes {out} channels of {site.dim}, which {type(config).__name__} cannot; leave the "
                    "layer out with where="
                )
            mixer = WideningMixer(mixer.config, mixer.site, shared)
            mixer.proj = nn.Linear(mixer.site.inner, out, bias=site.out_bias)
        if isinstance(mixer, HeadMixer):
            keep_biases(mixer, host, "rel_pos", site.name)
            if isinstance(mixer.qkv, LinearProjection) and mixer.site.heads == site.heads:
                mixer.qkv = HostMap(host.qkv, site.heads, getattr(host, "head_first", False))
            if isinstance(host.proj, nn.Conv2d):
                mixer.add_module("proj", TokenConv(mixer.site.inner, out, 1, bias=site.out_bias))
        return mixer

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        height, width = x.shape[1:3]
        return mix_biased(self.mixer, x.flatten(1, 2), Grid(height, width), shared_rel_pos).unflatten(
            1, (height, width)
        )


class TimmCoAtNet(TimmMaxViT):
    """Attention on maps with channels first, from 1x1 convolutions: CoAtNet and Visformer; its biases are kept."""

    replaces: ClassVar[tuple[type, ...]] = (Attention2d, VisformerAttention)

    @classmethod
    def input_grid(cls, module: Any, shape: torch.Size) -> Grid:
        return Grid(shape[2], shape[3])

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        grid = Grid(x.shape[2], x.shape[3])
        return mix_biased(self.mixer, x.flatten(2).mT, grid, shared_rel_pos).mT.unflatten(2, x.shape[2:])


class TimmFastViT(TimmCoAtNet):
    """FastViT's attention: linear layers on maps with channels first."""

    replaces: ClassVar[tuple[type, ...]] = (FastViTAttention,)
