"""Port of the encoder of DETR and models like it; object queries of the decoder lie on no grid and are left as is."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.core import Mask, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.grid_source import watched_module
from regard.swapping.separate_qkv import SEPARATE_MATRICES
from regard.swapping.special_mixers import PositionedMixer, rebuilt

from .base import HuggingPort, refuse_weights


class HuggingDETR(HuggingPort):
    """Self-attention in the encoders of DETR and Conditional DETR; positions are added to queries and keys only."""

    class_paths: ClassVar[frozenset[str]] = frozenset(
        {
            "detr.modeling_detr.DetrSelfAttention",
            "conditional_detr.modeling_conditional_detr.ConditionalDetrSelfAttention",
        }
    )
    watch: ClassVar[str] = "input_projection"
    parameter_names: ClassVar[dict[str, str]] = {**SEPARATE_MATRICES, "o_proj": "proj"}

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        """The decoder has layers of the same class, whose tokens are object queries."""
        return "decoder" not in name.split(".") and watched_module(model, name, cls.watch) is not None

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if not isinstance(mixer, HeadMixer):  # a convolution has no queries and keys
            return mixer
        qkv, mixer = mixer.qkv, rebuilt(mixer, PositionedMixer, "adds positions to queries and keys", shared)
        mixer.qkv = qkv  # type: ignore[assignment]
        return mixer

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """attention_mask: the same for all queries, True or 0 for keys of the image. Raises: UnsupportedError."""
        refuse_weights(kwargs.get("output_attentions"))
        mask = None
        if attention_mask is not None:
            keys = attention_mask[:, 0, 0]
            mask = Mask(keep=keys if keys.dtype == torch.bool else keys == 0)
        positions = position_embeddings if isinstance(self.mixer, PositionedMixer) else None
        return self.mixer(hidden_states, self.grid(), mask, positions), None
