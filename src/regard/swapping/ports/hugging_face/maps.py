"""Ports of transformers' attention on maps (B, h, w, C): the image encoders of SAM, SAM 2 and SAM 3, and ViTDet."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.core import Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer, drops_bias
from regard.swapping.biases import check_heads
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import SEPARATE_MATRICES
from regard.swapping.special_mixers import DecomposedPositions, output_sides, pooled_mixer

from .base import HuggingPort, refuse_weights


class HuggingSAM(HuggingPort):
    """The image encoders of SAM and SAM-HQ, in windows and global; their decomposed position biases are kept."""

    class_paths = frozenset({
        "sam.modeling_sam.SamVisionAttention", "sam.modeling_sam.SamVisionSdpaAttention",
        "sam_hq.modeling_sam_hq.SamHQVisionAttention", "sam_hq.modeling_sam_hq.SamHQVisionSdpaAttention",
    })  # fmt: skip
    routed = False
    map_axes = slice(1, 3)
    parameter_names = {"rel_pos_h": "operator.rel_pos_h", "rel_pos_w": "operator.rel_pos_w"}

    @classmethod
    def host_masks(cls, module: Any) -> frozenset[str]:
        return frozenset({"product"} if hasattr(module, "rel_pos_h") else ())

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer, host = super().build_mixer(config, site, shared), self.host
        if isinstance(mixer, HeadMixer) and hasattr(host, "rel_pos_h") and not drops_bias(config):
            check_heads(mixer, site.heads)
            tables: Any = (host.rel_pos_h, host.rel_pos_w)
            mixer.operator = DecomposedPositions(mixer.operator, config, *tables)
        return mixer

    def forward(self, hidden_states: Tensor, output_attentions: bool | None = False) -> tuple[Tensor, None]:
        """Raises: UnsupportedError for output_attentions."""
        return self.mix_map(hidden_states, output_attentions), None

    def mix_map(self, x: Tensor, output_attentions: bool | None, rope: Tensor | None = None) -> Tensor:
        """The output (B, h', w', C') for a map (B, h, w, C). rope: sines, then cosines, (h w, 2 d)."""
        refuse_weights(output_attentions)
        y = self.mixer(x.flatten(1, 2), self.grid(x), None, rope)
        return y.unflatten(1, output_sides(self.mixer, x.shape[1:3]))


class HuggingViTDet(HuggingSAM):
    """ViTDet, in windows and global; its decomposed position biases are kept."""

    class_paths = frozenset({"vitdet.modeling_vitdet.VitDetAttention"})

    def forward(self, hidden_state: Tensor, output_attentions: bool | None = False) -> tuple[Tensor]:  # type: ignore
        return (self.mix_map(hidden_state, output_attentions),)


class HuggingSAM2(HuggingSAM):
    """The Hiera of SAM 2; layers that pool their queries take mechanisms that have cross-attention."""

    class_paths = frozenset({"sam2.modeling_sam2.Sam2MultiScaleAttention"})
    routed = True

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        host: Any = self.host
        mixer = super().build_mixer(config, site, shared)
        return pooled_mixer(mixer, host.dim_out, tuple(host.query_stride or (1, 1)), shared)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Raises: UnsupportedError for output_attentions."""
        return self.mix_map(hidden_states, kwargs.get("output_attentions"))


class HuggingSAM3(HuggingSAM):
    """The image encoder of SAM 3, in windows and global, with rotary positions."""

    class_paths = frozenset({"sam3.modeling_sam3.Sam3ViTRoPEAttention"})
    routed = True
    rotary = True
    parameter_names = {**SEPARATE_MATRICES, "o_proj": "proj"}

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Raises: UnsupportedError for output_attentions."""
        cosines, sines = position_embeddings
        rope = torch.cat([sines, cosines], -1).flatten(0, -2)
        return self.mix_map(hidden_states, kwargs.get("output_attentions"), rope), None


PORTS: tuple[type[Port], ...] = (HuggingSAM, HuggingSAM2, HuggingSAM3, HuggingViTDet)
