"""Ports of timm's attention between the pixels at one place of all 2 x 2 patches: MobileViT, MobileViTv2."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from timm.layers.attention import Attention
from timm.models.mobilevit import LinearSelfAttention, MobileVitBlock
from torch import Tensor, nn

from regard.core import Grid, Inputs, Site, heads, merge
from regard.swapping.grid_source import modules_around
from regard.swapping.host_mixer import HostMixer, HostPort, host_parts
from regard.swapping.layer import Port, library_mask

from .vit import TimmViT


def merged_grid(grid: Grid, tokens: int) -> Grid:
    """The grid with this number of tokens after 2 x 2 patches were merged, maybe repeatedly; else `grid` itself."""
    if grid.tokens == tokens:
        return grid
    small = grid
    while small.tokens > tokens and small.cells > 1:
        small = replace(small, height=(small.height + 1) // 2, width=(small.width + 1) // 2)
    return small if small.tokens == tokens else grid


class TimmMobileViT(TimmViT):
    """MobileViT: softmax attention between the pixels at one place of all patches."""

    replaces: ClassVar[tuple[type, ...]] = (Attention,)
    watch = "conv_1x1"

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        return any(type(module) is MobileVitBlock for module in modules_around(model, name))

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        return merged_grid(cast(Grid, watched), inputs[0].shape[1])

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, merged_grid(self.grid(), x.shape[1]), library_mask(attn_mask, is_causal, x))


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedInputs(Inputs):
    """gate: (B, N, C), factors of the operator's output."""

    gate: Tensor


class SeparableMixer(HostMixer):
    """One head with the same query for all tokens, whose product with a key is the key's score; gates for its output.

    In the host's words, the score is the query, the value is the key, and the gate is the value.
    """

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        dim = self.site.dim
        channels = self.around.qkv_proj(x.mT.unsqueeze(-1)).squeeze(-1).mT
        score, value, gate = channels.split([1, dim, dim], -1)
        k = heads(score, 1)
        return GatedInputs(q=torch.ones_like(k), k=k, v=heads(value, 1), grid=grid, gate=gate.relu())

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        gated = cast(GatedInputs, made).gate * merge(y)
        out = self.around.out_proj(gated.mT.unsqueeze(-1)).squeeze(-1).mT
        return cast(Tensor, self.around.out_drop(out) if hasattr(self.around, "out_drop") else out)


class TimmSeparable(HostPort):
    """MobileViTv2: scores of tokens, which depend on no query; between the pixels at one place of all patches."""

    replaces: ClassVar[tuple[type, ...]] = (LinearSelfAttention,)
    watch = "conv_1x1"
    parameter_names = host_parts("qkv_proj", "out_proj", "out_drop")
    mixer_class: ClassVar[type[HostMixer]] = SeparableMixer

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        return merged_grid(cast(Grid, watched), inputs[0].shape[-1])

    @classmethod
    def value_width(cls, module: Any, site: Site) -> int:
        return site.dim

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return Site(dim=module.embed_dim, heads=1, grid=grid, width=1, layer=layer, name=name)

    def forward(self, x: Tensor) -> Tensor:
        grid = merged_grid(self.grid(), x.shape[-1])
        tokens = x.permute(0, 2, 3, 1)  # of images, places in a patch, patches
        return self.mixer(tokens.flatten(0, 1), grid).unflatten(0, tokens.shape[:2]).permute(0, 3, 1, 2)


PORTS: tuple[type[Port], ...] = (TimmMobileViT, TimmSeparable)
