"""Ports of the encoders of DETR, Table Transformer and RT-DETR; the decoders' object queries, on no grid, are left."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.core import Mask, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.grid_source import watched_module
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import SEPARATE_MATRICES
from regard.swapping.special_mixers import PositionedMixer, special_mixer

from .base import HuggingPort, refuse_weights


class HuggingDETR(HuggingPort):
    """Self-attention in the encoders of DETR and Conditional DETR; positions are added to queries and keys only."""

    class_paths = frozenset({
        "detr.modeling_detr.DetrSelfAttention",
        "conditional_detr.modeling_conditional_detr.ConditionalDetrSelfAttention",
    })  # fmt: skip
    watch = "input_projection"
    parameter_names = {**SEPARATE_MATRICES, "o_proj": "proj"}

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        """The decoder has layers of the same class, whose tokens are object queries."""
        return "decoder" not in name.split(".") and watched_module(model, name, cls.watch) is not None

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if not isinstance(mixer, HeadMixer):  # a convolution has no queries and keys
            return mixer
        qkv, mixer = mixer.qkv, special_mixer(mixer, PositionedMixer, "adds positions to queries and keys", shared)
        mixer.qkv = qkv  # type: ignore[assignment]
        return mixer

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """attention_mask: the same for all queries, True or 0 for keys of the image. Raises: UnsupportedError."""
        refuse_weights(kwargs.get("output_attentions"))
        mask = None
        if attention_mask is not None:
            keys = attention_mask[:, 0, 0]
            mask = Mask(keep=keys if keys.dtype == torch.bool else keys == 0)
        positions = position_embeddings if isinstance(self.mixer, PositionedMixer) else None
        return self.mixer(hidden_states, self.grid(), mask, positions), None


class HuggingTableTransformer(HuggingDETR):
    """DETR's attention as Table Transformer has it: `object_queries` are the positions."""

    class_paths = frozenset({"table_transformer.modeling_table_transformer.TableTransformerAttention"})
    routed = False
    parameter_names = {**SEPARATE_MATRICES, "out_proj": "proj"}

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        object_queries: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None]:
        """attention_mask: 0 for keys of the image. Raises: UnsupportedError for output_attentions."""
        return super().forward(hidden_states, attention_mask, object_queries, output_attentions=output_attentions)


class HuggingRTDETR(HuggingDETR):
    """The hybrid encoders of RT-DETR, RT-DETRv2, D-FINE, DEIMv2 and PP-DocLayoutV3, on the coarsest map."""

    class_paths = frozenset({
        "rt_detr.modeling_rt_detr.RTDetrSelfAttention", "rt_detr_v2.modeling_rt_detr_v2.RTDetrV2SelfAttention",
        "d_fine.modeling_d_fine.DFineSelfAttention", "deimv2.modeling_deimv2.Deimv2SelfAttention",
        "pp_doclayout_v3.modeling_pp_doclayout_v3.PPDocLayoutV3SelfAttention",
    })  # fmt: skip
    watch = "|".join(
        f"{maps}.{level}"
        for maps in ("encoder_input_proj", "conv_encoder.encoder_input_proj", "conv_encoder.fusion_proj")
        for level in (3, 2, 1, 0)
    )
    """The last map that there is, where each of these models makes it."""

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        """Configurations whose encoder attends on other maps, which no published model has, are left as they are."""
        if not super().belongs(model, name):
            return False
        encoder: Any = model.get_submodule(name.partition(".aifi.")[0])
        return list(encoder.encode_proj_layers) == [len(encoder.in_channels) - 1]


PORTS: tuple[type[Port], ...] = (HuggingDETR, HuggingTableTransformer, HuggingRTDETR)
