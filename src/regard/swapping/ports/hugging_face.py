"""Ports of Hugging Face vision transformers: ViT, DeiT, DINOv2 and 3, CLIP, SigLIP and others of transformers >= 5.9.

The mixer replaces the whole attention module, so it does not depend on the model's attention implementation.
transformers saves neither the mechanism nor its code. The saved configuration of a swapped model therefore has
attn_implementation="regard": loading it by transformers alone fails at once, or, where Regard is imported, at the first
forward pass, instead of computing softmax without notice.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from regard.core import Grid, Mixer, MixerConfig, Site, SwapError, UnsupportedError
from regard.swapping.grid_source import watched_module
from regard.swapping.layer import Port, library_mask
from regard.swapping.rotary import interleaved, rotate_halves
from regard.swapping.separate_qkv import SEPARATE_MATRICES

NAME = "regard"
MASKED = "vit_mae.modeling_vit_mae.ViTMAEAttention"


class HuggingViT(Port):
    """Attention with children q_proj, k_proj, v_proj and o_proj: ViT, DeiT, DINOv2, I-JEPA, MSN."""

    class_paths: ClassVar[frozenset[str]] = frozenset(
        {
            "vit.modeling_vit.ViTAttention",
            "deit.modeling_deit.DeiTAttention",
            "dinov2.modeling_dinov2.Dinov2Attention",
            "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersAttention",
            "ijepa.modeling_ijepa.IJepaAttention",
            "vit_msn.modeling_vit_msn.ViTMSNAttention",
            MASKED,
        }
    )
    watch: ClassVar[str] = "embeddings.patch_embeddings.projection"
    parameter_names: ClassVar[dict[str, str]] = {**SEPARATE_MATRICES, "o_proj": "proj"}

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """By the path of the class, so that transformers need not be imported."""
        return _path(module) in cls.class_paths

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        if _path(module) == MASKED:
            return (
                "ViT-MAE drops and shuffles its tokens, so they lie on no grid; load its weights as a ViT, "
                "transformers.ViTModel.from_pretrained(...)"
            )
        used = module.config._attn_implementation
        if used not in (None, "eager", "sdpa", NAME):
            return f"masks for {used!r} have another form; call model.set_attn_implementation('sdpa') first"
        return ""

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        out = getattr(module, next(theirs for theirs, ours in cls.parameter_names.items() if ours == "proj"))
        return Site(
            dim=module.q_proj.in_features,
            heads=module.q_proj.out_features // module.head_dim,
            grid=grid,
            width=module.head_dim,
            qkv_bias=module.q_proj.bias is not None,
            out_bias=out.bias is not None,
            layer=layer,
            name=name,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The weights are always None; kwargs: of transformers. Raises: UnsupportedError for output_attentions."""
        return self.mix(hidden_states, attention_mask, None, kwargs)

    def mix(
        self, x: Tensor, attention_mask: Tensor | None, rope: Tensor | None, kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` with rotary angles: sines, then cosines, (N, 2 d)."""
        if kwargs.get("output_attentions"):
            raise UnsupportedError(
                "a swapped model returns no attentions: leave output_attentions out; "
                "`with regard.capture(model) as maps:` collects the maps of a forward pass"
            )
        mask = library_mask(attention_mask, bool(kwargs.get("is_causal", False)), x)
        return self.mixer(x, self.grid(), mask, rope), None


def _path(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("transformers.models.")


class HuggingDINOv3(HuggingViT):
    """DINOv3: rotary positions of the patch tokens, no bias of keys."""

    class_paths: ClassVar[frozenset[str]] = frozenset({"dinov3_vit.modeling_dinov3_vit.DINOv3ViTAttention"})
    watch: ClassVar[str] = "embeddings.patch_embeddings"

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return replace(super().site(module, grid, name, layer), rotary=True)

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
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
        rope = torch.cat([interleaved(sines), interleaved(cosines)], -1)
        return self.mix(hidden_states, attention_mask, rope, kwargs)


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


class HuggingCLIP(HuggingViT):
    """The vision towers of CLIP, MetaCLIP 2, SigLIP and AIMv2; text towers and pooling heads are left unchanged."""

    class_paths: ClassVar[frozenset[str]] = frozenset(
        {
            "clip.modeling_clip.CLIPAttention",
            "metaclip_2.modeling_metaclip_2.MetaClip2Attention",
            "siglip.modeling_siglip.SiglipAttention",
            "aimv2.modeling_aimv2.Aimv2Attention",
        }
    )
    watch: ClassVar[str] = "embeddings.patch_embedding|embeddings.patch_embed"
    parameter_names: ClassVar[dict[str, str]] = {**SEPARATE_MATRICES, "out_proj": "proj"}

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        return watched_module(model, name, cls.watch) is not None


# the mark in the configuration of a swapped model


def missing_mechanism(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function "regard" of transformers, called where the mechanism is missing. Raises: SwapError."""
    raise SwapError(
        f"{type(module).__name__} was saved with a mechanism of Regard and loaded without it; "
        "load the folder by regard.from_pretrained, or make the model with attn_implementation='sdpa'"
    )


def mark_configuration(model: nn.Module) -> None:
    """Set or remove attn_implementation="regard" in the transformers configurations of a model, in place."""
    swapped = any(isinstance(module, HuggingViT) for module in model.modules())
    for config in {id(c): c for m in model.modules() if (c := config_of(m)) is not None}.values():
        if swapped:
            _register()
            config.attn_implementation = NAME
        elif config.__dict__.get("attn_implementation") == NAME:
            del config.attn_implementation


def config_of(module: nn.Module) -> Any:
    """The configuration that transformers gave a module, or None."""
    config = getattr(module, "config", None)
    return config if type(config).__module__.startswith("transformers.") else None


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, missing_mechanism)
    AttentionMaskInterface.register(NAME, sdpa_mask)
