"""Ports of plain vision transformers of transformers: ViT, DINOv2 and 3, CLIP, BEiT, DPT, YOLOS and others."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.core import Grid, Mixer, MixerConfig, Site
from regard.swapping.adapters import class_path
from regard.swapping.layer import Port
from regard.swapping.rotary import interleave, rotate_halves
from regard.swapping.separate_qkv import SEPARATE_MATRICES, SHORT_MATRICES

from .base import Answer, HuggingPort, refuse_weights

MASKED = "vit_mae.modeling_vit_mae.ViTMAEAttention"


class HuggingViT(HuggingPort):
    """Attention with children q_proj, k_proj, v_proj and o_proj: ViT, DeiT, DINOv2, I-JEPA, MSN, Pixio, ViViT."""

    class_paths = frozenset({
        "vit.modeling_vit.ViTAttention", "deit.modeling_deit.DeiTAttention", "dinov2.modeling_dinov2.Dinov2Attention",
        "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersAttention",
        "ijepa.modeling_ijepa.IJepaAttention", "vit_msn.modeling_vit_msn.ViTMSNAttention",
        "pixio.modeling_pixio.PixioAttention", "vivit.modeling_vivit.VivitAttention", MASKED,
    })  # fmt: skip
    watch = "embeddings.patch_embeddings.projection"
    parameter_names = {**SEPARATE_MATRICES, "o_proj": "proj"}

    @classmethod
    def refusal(cls, module: Any) -> str:
        if class_path(module) == MASKED:
            return (
                "ViT-MAE drops and shuffles its tokens, so they lie on no grid; load its weights as a ViT, "
                "transformers.ViTModel.from_pretrained(...)"
            )
        return super().refusal(module)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Answer:
        """The weights are always None; kwargs: of transformers. Raises: UnsupportedError for output_attentions."""
        return self.mix(hidden_states, attention_mask, None, kwargs)


class HuggingBeit(HuggingViT):
    """BEiT: the model passes its relative position biases as an attention mask."""

    class_paths = frozenset({"beit.modeling_beit.BeitAttention"})

    @classmethod
    def host_masks(cls, module: Any) -> frozenset[str]:
        config = module.config
        biased = config.use_relative_position_bias or config.use_shared_relative_position_bias
        return frozenset({"bias"} if biased else ())


class HuggingDINOv3(HuggingViT):
    """DINOv3, also in EoMT: rotary positions of the patch tokens, no bias of keys."""

    class_paths = frozenset({
        "dinov3_vit.modeling_dinov3_vit.DINOv3ViTAttention", "eomt_dinov3.modeling_eomt_dinov3.EomtDinov3Attention",
    })  # fmt: skip
    watch = "embeddings.patch_embeddings"
    rotary = True

    def build_mixer(self, config: MixerConfig, site: Site, shared: Any) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        rotate_halves(mixer)
        return mixer

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cosines, sines = cast(tuple[Tensor, Tensor], position_embeddings)
        rope = torch.cat([interleave(sines), interleave(cosines)], -1)
        return self.mix(hidden_states, attention_mask, rope, kwargs)


class HuggingCLIP(HuggingViT):
    """The vision towers of CLIP and models like it, and EoMT; text towers and pooling heads stay."""

    class_paths = frozenset({
        "clip.modeling_clip.CLIPAttention", "metaclip_2.modeling_metaclip_2.MetaClip2Attention",
        "siglip.modeling_siglip.SiglipAttention", "aimv2.modeling_aimv2.Aimv2Attention",
        "owlvit.modeling_owlvit.OwlViTAttention", "owlv2.modeling_owlv2.Owlv2Attention",
        "clipseg.modeling_clipseg.CLIPSegAttention", "altclip.modeling_altclip.AltCLIPAttention",
        "chinese_clip.modeling_chinese_clip.ChineseCLIPVisionAttention", "eomt.modeling_eomt.EomtAttention",
    })  # fmt: skip
    watch = f"embeddings.patch_embedding|embeddings.patch_embed|{HuggingViT.watch}"
    only_watched = True
    parameter_names = {**SEPARATE_MATRICES, "out_proj": "proj"}


class HuggingInternVL(HuggingViT):
    """The vision towers of InternVL, where they do not normalise queries and keys of all heads together."""

    class_paths = frozenset({"internvl.modeling_internvl.InternVLVisionAttention"})
    parameter_names = {**SEPARATE_MATRICES, "projection_layer": "proj"}

    @classmethod
    def refusal(cls, module: Any) -> str:
        if not isinstance(module.q_norm, nn.Identity):
            return "it normalises queries and keys over all heads together, which no mechanism does (use_qk_norm)"
        return super().refusal(module)


class HuggingDPT(HuggingPort):
    """DPT's and ViTPose's own ViT, and VideoMAE: attention in two parts, `attention` with queries, keys and values, and
    `output`."""

    class_paths = frozenset({
        "dpt.modeling_dpt.DPTViTAttention", "vitpose_backbone.modeling_vitpose_backbone.VitPoseBackboneAttention",
        "videomae.modeling_videomae.VideoMAEAttention",
    })  # fmt: skip
    watch = HuggingViT.watch
    only_watched = True  # VideoMAE's decoder gets tokens on no grid
    parameter_names = {
        **{f"attention.{theirs}": ours for theirs, ours in SHORT_MATRICES.items()}, "output.dense": "proj",
    }  # fmt: skip

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Raises: UnsupportedError for output_attentions."""
        refuse_weights(kwargs.get("output_attentions"))
        return self.mixer(hidden_states, self.grid())


class HuggingYOLOS(HuggingDPT):
    """YOLOS: DPT's form of attention, with the tokens of detections after the patch tokens."""

    class_paths = frozenset({"yolos.modeling_yolos.YolosAttention"})

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        grid, detections = super().call_grid(module, inputs, watched), module.attention.config.num_detection_tokens
        return replace(grid, prefix=grid.prefix - detections, suffix=detections)


PORTS: tuple[type[Port], ...] = (
    HuggingViT, HuggingDINOv3, HuggingCLIP, HuggingBeit, HuggingDPT, HuggingInternVL, HuggingYOLOS,
)  # fmt: skip
