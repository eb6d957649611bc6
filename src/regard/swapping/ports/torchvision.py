"""Ports of torchvision's Swin, SwinV2 and MaxViT; its ViT has PyTorch's attention (`TorchAttention`)."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

from regard.core import Grid, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.biases import ContinuousBiases, Scaled, TableBiases, add_biases, mix_windows, use_cosine
from regard.swapping.layer import Port
from regard.swapping.map_windows import MapWindows


class TorchvisionSwin(Port):
    """Swin on maps (B, h, w, C), which the layer cuts into windows; position biases and shift masks are kept."""

    replaces: ClassVar[tuple[type, ...]] = (ShiftedWindowAttention,)
    mask_kinds = frozenset({"bias"})
    parameter_names = {"relative_position_bias_table": "biases.table", "relative_position_index": "biases.index"}
    windows = "window_size"
    dropouts = ("attention_dropout",)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return replace(super().site(module, grid, name, layer), drop=getattr(module, "dropout", 0.0))

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        add_biases(mixer, self.biases(), site.heads)
        return mixer

    def biases(self) -> nn.Module:
        """A module that computes the biases of the host, with copies of its parameters."""
        host: Any = self.host
        return TableBiases(host.relative_position_bias_table, host.relative_position_index, persistent=True)

    def forward(self, x: Float[Tensor, "B h w C"]) -> Float[Tensor, "B h w C"]:
        host: Any = self.host
        windows = MapWindows(sides=tuple(x.shape[1:3]), size=tuple(host.window_size), shift=tuple(host.shift_size))
        tokens = windows.cut(x)
        return windows.join(mix_windows(self.mixer, tokens, Grid(*windows.size), windows.mask(x)))


class TorchvisionSwinV2(TorchvisionSwin):
    """SwinV2: cosine attention with learned scales, biases of an MLP, and keys whose bias is not used."""

    replaces: ClassVar[tuple[type, ...]] = (ShiftedWindowAttentionV2,)
    parameter_names = {
        "logit_scale": "q_norm.logit_scale", "cpb_mlp": "biases.mlp", "relative_coords_table": "biases.coordinates",
        "relative_position_index": "biases.index",
    }  # fmt: skip

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        host: Any = self.host
        mixer = super().build_mixer(config, site, shared)
        if isinstance(mixer, HeadMixer):
            use_cosine(mixer, host.logit_scale)
            if type(mixer.qkv) is nn.Linear and mixer.site.heads == site.heads:
                mixer.qkv = UnbiasedKeys(site.dim, len(host.qkv.weight), host.qkv.bias is not None)
                mixer.qkv_roles = "qkv"
        return mixer

    def biases(self) -> nn.Module:
        host: Any = self.host
        coordinates, index = host.relative_coords_table, host.relative_position_index
        return ContinuousBiases(host.cpb_mlp, coordinates, index, persistent=True)


class UnbiasedKeys(nn.Linear):
    """A fused map of queries, keys and values whose bias is not used for keys."""

    def forward(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B N R_inner"]:
        if self.bias is None:
            return super().forward(x)
        q, k, v = self.bias.chunk(3)
        return F.linear(x, self.weight, torch.cat([q, torch.zeros_like(k), v]))


class TorchvisionMaxViT(TorchvisionSwin):
    """MaxViT in windows and grids; logits are divided by the root of all channels, and biases are kept."""

    replaces: ClassVar[tuple[type, ...]] = (RelativePositionalMultiHeadAttention,)
    parameter_names = {
        "to_qkv": "qkv", "merge": "proj", "relative_position_bias_table": "biases.table",
        "relative_position_index": "biases.index",
    }  # fmt: skip
    windows = "size"

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if isinstance(mixer, HeadMixer) and "q" in config.uses:
            mixer.q_norm = Scaled((site.width / site.dim) ** 0.5)
        return mixer

    def forward(self, x: Float[Tensor, "B W N C"]) -> Float[Tensor, "B W N C"]:
        return mix_windows(self.mixer, x.flatten(0, 1), self.grid(), None).unflatten(0, x.shape[:2])


PORTS: tuple[type[Port], ...] = (TorchvisionSwin, TorchvisionSwinV2, TorchvisionMaxViT)
