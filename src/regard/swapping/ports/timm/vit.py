"""Ports of timm's vision transformers: ViT, DeiT, DINOv2 and 3, EVA, and models that use their attention classes."""

from typing import Any, ClassVar

from timm.layers.attention import Attention, AttentionRope
from timm.models.convit import MHSA
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Mixer, MixerConfig, Site
from regard.swapping.layer import Port, library_mask
from regard.swapping.rotary import interleave, rotate_halves
from regard.swapping.separate_qkv import SEPARATE_BIASES, SEPARATE_MATRICES

from .extended import extended_mixer


class TimmViT(Port):
    """timm.layers.Attention: ViT, DeiT, DINOv2, PiT, NaFlexViT, CrossViT, CSATv2, ConViT's last layers."""

    replaces: ClassVar[tuple[type, ...]] = (Attention, MHSA)
    watch = "patch_embed.{-3}.proj|patch_embed.proj|pool.conv|patch_embed.conv|embeds|pos_embed.proj"
    """The first path is that of a branch of CrossViT, `blocks.I.blocks.BRANCH.J.attn`."""
    parameter_names = {"gate": "host_gate"}

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        return extended_mixer(super().build_mixer(config, site, shared), self.host, shared)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, self.grid(), library_mask(attn_mask, is_causal, x))


class TimmRope(TimmViT):
    """timm's attention with rotary embedding: vit_*_rope, EVA, EVA-02, Perception Encoder."""

    replaces: ClassVar[tuple[type, ...]] = (AttentionRope, EvaAttention)
    rotary = True
    parameter_names = {**TimmViT.parameter_names, **SEPARATE_BIASES, **SEPARATE_MATRICES}

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return super().matches(module) and not getattr(module, "rotate_half", False)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        if grid.prefix != module.num_prefix_tokens:
            raise ConfigError(
                f"{name} does not rotate {module.num_prefix_tokens} tokens, but has {grid.prefix} prefix tokens"
            )
        return super().site(module, grid, name, layer)

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self.mixer(x, self.grid(), library_mask(attn_mask, is_causal, x), rope)


class TimmRopeHalves(TimmRope):
    """The same where the two halves of a head's channels are rotated together: DINOv3, Qwen3-ViT, DeepSeek-ViT."""

    parameter_names = {**TimmRope.parameter_names, "q_norm": "q_norm.norm", "k_norm": "k_norm.norm"}

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return type(module) in cls.replaces and bool(getattr(module, "rotate_half", False))

    def new_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().new_mixer(config, site, shared)
        rotate_halves(mixer)
        return mixer

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if rope is not None:
            rope = interleave(rope.unflatten(-1, (2, -1))).flatten(-2)
        return super().forward(x, rope, attn_mask, is_causal)


PORTS: tuple[type[Port], ...] = (TimmViT, TimmRope, TimmRopeHalves)
