"""Ports of transformers' attention to a reduced map of keys: SegFormer, GLPN, PVT and PVTv2."""

from typing import Any

from torch import Tensor, nn

from regard.core import Grid, Mixer, MixerConfig, Site
from regard.swapping.host_parameters import inner_attention
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import SHORT_MATRICES

from .base import HuggingPort, refuse_weights
from .vit import HuggingViT


class HuggingSegformer(HuggingViT):
    """SegFormer, each stage with its own grid. `PVT` of the same ratio keeps the convolution that reduces keys."""

    class_paths = frozenset({"segformer.modeling_segformer.SegformerAttention"})
    watch = "patch_embeddings.proj"
    parameter_names = {
        **HuggingViT.parameter_names, "sequence_reduction.sequence_reduction": "operator.reduce",
        "sequence_reduction.layer_norm": "operator.norm",
    }  # fmt: skip

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, height: int, width: int, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        return super().forward(hidden_states, attention_mask, **kwargs)


class HuggingPVT(HuggingPort):
    """PVTv2, each stage with its own grid. `PVT` of the same ratio keeps the convolution that reduces keys."""

    class_paths = frozenset({"pvt_v2.modeling_pvt_v2.PvtV2SelfAttention"})
    watch = "patch_embedding.proj"
    routed = False
    parameter_names = {**SHORT_MATRICES, "spatial_reduction": "operator.reduce", "layer_norm": "operator.norm"}

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        norm = getattr(getattr(mixer, "operator", None), "norm", None)
        own = getattr(inner_attention(self.host), "layer_norm", None)  # type: ignore[arg-type]
        if isinstance(norm, nn.LayerNorm) and isinstance(own, nn.LayerNorm):
            norm.eps = own.eps
        return mixer

    def forward(self, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False) -> tuple[Tensor]:
        """Raises: UnsupportedError for output_attentions."""
        refuse_weights(output_attentions)
        return (self.mixer(hidden_states, Grid(height, width, self.prefix)),)


class HuggingPVT1(HuggingPVT):
    """PVT, whose last stage has a class token, and GLPN; attention in two parts, `self` and `output`."""

    class_paths = frozenset({"pvt.modeling_pvt.PvtAttention", "glpn.modeling_glpn.GLPNAttention"})
    watch = "patch_embeddings.{-3}.projection|patch_embeddings.{-3}.proj"
    """The patches of the stage: `block.STAGE.LAYER.attention` follows `patch_embeddings.STAGE`."""
    parameter_names = {
        **{f"self.{theirs}": ours for theirs, ours in SHORT_MATRICES.items()},
        "self.sequence_reduction": "operator.reduce", "self.sr": "operator.reduce", "self.layer_norm": "operator.norm",
        "output.dense": "proj",
    }  # fmt: skip


PORTS: tuple[type[Port], ...] = (HuggingSegformer, HuggingPVT, HuggingPVT1)
