"""Ports of window attention of transformers: Swin, SwinV2, the Swin of MaskFormer, and Data2Vec with one window."""

import copy
from typing import Any, cast

from torch import Tensor, nn

from regard.core import Mask, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.biases import ContinuousBiases, TableBiases, add_biases, mix_windows, use_cosine
from regard.swapping.host_parameters import inner_attention
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import SEPARATE_MATRICES, SHORT_MATRICES

from .base import Answer, HuggingPort, refuse_weights
from .vit import HuggingDPT, HuggingViT

NESTED = {f"self.{theirs}": ours for theirs, ours in SHORT_MATRICES.items()} | {"output.dense": "proj"}


class HuggingSwin(HuggingPort):
    """Swin, also as the backbone of Mask2Former, UperNet and others; its position biases and shift masks are kept."""

    class_paths = frozenset({"swin.modeling_swin.SwinAttention"})
    mask_kinds = frozenset({"bias"})
    windows = "relative_position_bias.window_size"
    parameter_names = {**SEPARATE_MATRICES, "o_proj": "proj", "relative_position_bias": "biases"}

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        add_biases(mixer, self.biases(), site.heads)
        return mixer

    def biases(self) -> nn.Module:
        """A module that computes the biases of the host, with copies of its parameters."""
        return copy.deepcopy(cast(nn.Module, self.host.relative_position_bias))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Answer:
        """attention_mask: of the windows of an image. Raises: UnsupportedError for output_attentions."""
        refuse_weights(kwargs.get("output_attentions"))
        return mix_windows(self.mixer, hidden_states, self.grid(), attention_mask), None


class HuggingMaskFormerSwin(HuggingSwin):
    """The Swin of MaskFormer and Donut: attention in two parts, `self` and `output`, with a stored index of biases."""

    class_paths = frozenset({
        "maskformer.modeling_maskformer_swin.MaskFormerSwinAttention", "donut.modeling_donut_swin.DonutSwinAttention",
    })  # fmt: skip
    windows = "self.window_size"
    routed = False
    parameter_names = {
        **NESTED, "self.relative_position_bias_table": "biases.table", "self.relative_position_index": "biases.index",
    }  # fmt: skip

    def biases(self) -> nn.Module:
        host: Any = inner_attention(self.host)
        stored = "self.relative_position_index" in self.host_shapes
        return TableBiases(host.relative_position_bias_table, host.relative_position_index, stored)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> tuple[Tensor]:
        refuse_weights(output_attentions)
        return (mix_windows(self.mixer, hidden_states, self.grid(), attention_mask),)


class HuggingSwinV2(HuggingMaskFormerSwin):
    """SwinV2, Swin2SR: cosine attention, learned scales, biases of an MLP; transformers adds the shift mask twice."""

    class_paths = frozenset({"swinv2.modeling_swinv2.Swinv2Attention", "swin2sr.modeling_swin2sr.Swin2SRAttention"})
    parameter_names = {
        **NESTED, "self.logit_scale": "q_norm.logit_scale", "self.continuous_position_bias_mlp": "biases.mlp",
    }  # fmt: skip

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if isinstance(mixer, HeadMixer):
            use_cosine(mixer, inner_attention(self.host).logit_scale)  # type: ignore[arg-type]
        return mixer

    def biases(self) -> nn.Module:
        host: Any = inner_attention(self.host)
        coordinates, index = host.relative_coords_table, host.relative_position_index
        return ContinuousBiases(host.continuous_position_bias_mlp, coordinates, index, persistent=False)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> tuple[Tensor]:
        return super().forward(hidden_states, None if attention_mask is None else 2 * attention_mask, output_attentions)


class HuggingData2Vec(HuggingPort):
    """Data2Vec's vision model: a BEiT whose layers compute their position biases themselves, for any image size."""

    class_paths = frozenset({"data2vec.modeling_data2vec_vision.Data2VecVisionAttention"})
    watch = HuggingViT.watch
    routed = False
    parameter_names = {**HuggingDPT.parameter_names, "attention.relative_position_bias": "biases"}

    @classmethod
    def host_masks(cls, module: Any) -> frozenset[str]:
        config = module.attention.config
        biased = config.use_relative_position_bias or config.use_shared_relative_position_bias
        return frozenset({"bias"} if biased else ())

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        biases = getattr(inner_attention(self.host), "relative_position_bias", None)
        if biases is not None:
            add_biases(mixer, copy.deepcopy(biases), site.heads)
        return mixer

    def forward(
        self, hidden_states: Tensor, output_attentions: bool = False, relative_position_bias: Tensor | None = None,
        interpolate_pos_encoding: bool = False, resolution: tuple[int, int] | None = None,
    ) -> tuple[Tensor]:  # fmt: skip
        """relative_position_bias: that all layers share. Raises: UnsupportedError for output_attentions."""
        refuse_weights(output_attentions)
        grid, own, bias = self.grid(), getattr(self.mixer, "biases", None), relative_position_bias
        if own is not None:
            added = own((grid.height, grid.width), interpolate_pos_encoding, dim_size=hidden_states.shape[1])
            bias = added if bias is None else added + bias
        mask = None if bias is None or not self.mixer.config.uses else Mask(bias=bias)
        return (self.mixer(hidden_states, grid, mask),)


PORTS: tuple[type[Port], ...] = (HuggingData2Vec, HuggingSwin, HuggingSwinV2, HuggingMaskFormerSwin)
