"""Ports of timm's vision transformers: ViT, DeiT, DINOv2 and 3, EVA, and models that use their attention classes."""

from dataclasses import replace
from typing import Any, ClassVar

from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Mixer, MixerConfig, Site
from regard.swapping.host_parameters import fused_refusal, normalisation
from regard.swapping.layer import Port, library_mask
from regard.swapping.rotary import interleaved, rotate_halves
from regard.swapping.separate_qkv import SEPARATE_BIASES, SEPARATE_MATRICES


class TimmViT(Port):
    """timm.layers.Attention: ViT, DeiT, DINOv2, PiT and other models that use this class."""

    replaces: ClassVar[tuple[type, ...]] = (Attention,)
    watch: ClassVar[str] = "patch_embed.proj|pool.conv|patch_embed.conv"

    @classmethod
    def refusal(cls, module: nn.Module) -> str:
        return fused_refusal(module)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, self.grid(), library_mask(attn_mask, is_causal, x))


class TimmRope(TimmViT):
    """timm's attention with rotary embedding: vit_*_rope, EVA, EVA-02, DINOv3, Perception Encoder."""

    replaces: ClassVar[tuple[type, ...]] = (AttentionRope, EvaAttention)
    parameter_names: ClassVar[dict[str, str]] = {**SEPARATE_BIASES, **SEPARATE_MATRICES}

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        if getattr(module, "rotate_half", False) and normalisation(module, "it"):
            return "it rotates halves of normalised channels, not neighbours"
        return fused_refusal(module)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        if grid.prefix != module.num_prefix_tokens:
            raise ConfigError(
                f"{name} does not rotate {module.num_prefix_tokens} tokens, but has {grid.prefix} prefix tokens"
            )
        return replace(super().site(module, grid, name, layer), rotary=True)

    @property
    def halves(self) -> bool:
        """Whether the host rotates the two halves of a head's channels together, not neighbouring channels."""
        return bool(getattr(self.host, "rotate_half", False))

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if self.halves:
            rotate_halves(mixer)
        return mixer

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if self.halves and rope is not None:
            rope = interleaved(rope.unflatten(-1, (2, -1))).flatten(-2)
        return self.mixer(x, self.grid(), library_mask(attn_mask, is_causal, x), rope)
