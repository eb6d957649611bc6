"""Ports of transformers' attention to a reduced map of keys: SegFormer and PVTv2."""

from typing import Any, ClassVar

from torch import Tensor, nn

from regard.core import Grid, Mixer, MixerConfig, Site
from regard.swapping.separate_qkv import SHORT_MATRICES

from .base import HuggingPort, refuse_weights
from .vit import HuggingViT


class HuggingSegformer(HuggingViT):
    """SegFormer, each stage with its own grid. `PVT` of the same ratio keeps the convolution that reduces keys."""

    class_paths: ClassVar[frozenset[str]] = frozenset({"segformer.modeling_segformer.SegformerAttention"})
    watch: ClassVar[str] = "patch_embeddings.proj"
    parameter_names: ClassVar[dict[str, str]] = {
        **HuggingViT.parameter_names,
        "sequence_reduction.sequence_reduction": "operator.reduce",
        "sequence_reduction.layer_norm": "operator.norm",
    }

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, height: int, width: int, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        return super().forward(hidden_states, attention_mask, **kwargs)


class HuggingPVT(HuggingPort):
    """PVTv2, each stage with its own grid. `PVT` of the same ratio keeps the convolution that reduces keys."""

    class_paths: ClassVar[frozenset[str]] = frozenset({"pvt_v2.modeling_pvt_v2.PvtV2SelfAttention"})
    watch: ClassVar[str] = "patch_embedding.proj"
    routed: ClassVar[bool] = False
    parameter_names: ClassVar[dict[str, str]] = {
        **SHORT_MATRICES,
        "spatial_reduction": "operator.reduce",
        "layer_norm": "operator.norm",
    }

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        norm, own = getattr(getattr(mixer, "operator", None), "norm", None), getattr(self.host, "layer_norm", None)
        if isinstance(norm, nn.LayerNorm) and isinstance(own, nn.LayerNorm):
            norm.eps = own.eps
        return mixer

    def forward(self, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False) -> tuple[Tensor]:
        """Raises: UnsupportedError for output_attentions."""
        refuse_weights(output_attentions)
        return (self.mixer(hidden_states, Grid(height, width)),)
