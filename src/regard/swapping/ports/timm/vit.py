"""Ports of timm's vision transformers: ViT, DeiT, DINOv2 and 3, EVA, and all that is built from their attention."""

from dataclasses import replace
from typing import Any, ClassVar

from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Mixer, MixerConfig, Site
from regard.swapping.host_parameters import fused_refuses, normalisation
from regard.swapping.layer import Port, additive
from regard.swapping.rotary import interleaved, turn_halves
from regard.swapping.separate_qkv import BIASES_APART, MATRICES_APART


class TimmViT(Port):
    """timm.layers.Attention: ViT, DeiT, DINOv2 and all that is built from them."""

    library: ClassVar[tuple[type, ...]] = (Attention,)
    watch: ClassVar[str] = "patch_embed.proj"

    @classmethod
    def refuses(cls, module: nn.Module) -> str:
        return fused_refuses(module)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, self.grid(), additive(attn_mask, is_causal, x))


class TimmRope(TimmViT):
    """timm's attention with rotary embedding: vit_*_rope, EVA, EVA-02, DINOv3, Perception Encoder."""

    library: ClassVar[tuple[type, ...]] = (AttentionRope, EvaAttention)
    names: ClassVar[dict[str, str]] = {**BIASES_APART, **MATRICES_APART}

    @classmethod
    def refuses(cls, module: Any) -> str:  # type: ignore[override]
        if getattr(module, "rotate_half", False) and normalisation(module, "it"):
            return "it rotates halves of normalised channels, not neighbours"
        return fused_refuses(module)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        if grid.prefix != module.num_prefix_tokens:
            raise ConfigError(
                f"{name} leaves {module.num_prefix_tokens} tokens unrotated, {grid.prefix} are before the grid"
            )
        return replace(super().site(module, grid, name, layer), rotary=True)

    @property
    def halves(self) -> bool:
        """Whether the host rotates the halves of a head's channels, not neighbours."""
        return bool(getattr(self.host, "rotate_half", False))

    def built(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().built(config, site, shared)
        if self.halves:
            turn_halves(mixer)
        return mixer

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if self.halves and rope is not None:
            rope = interleaved(rope.unflatten(-1, (2, -1))).flatten(-2)
        return self.mixer(x, self.grid(), additive(attn_mask, is_causal, x), rope)
