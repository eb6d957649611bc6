"""Small random models of transformers, torchvision, open_clip and diffusers, with their inputs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class LibraryHost(NamedTuple):
    """A model, the arguments of a forward pass (a batch of two), and the number of layers that a swap replaces."""

    model: nn.Module
    inputs: dict[str, Any]
    layers: int


def images(height: int = 64, width: int = 96) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, height, width)}


def hugging(kind: str, layers: int, inputs: Mapping[str, Any] | None = None, **options: Any) -> LibraryHost:
    """A model of transformers by the name of its class, made from a configuration of its own kind."""
    import transformers

    architecture = getattr(transformers, kind)
    config = architecture.config_class(**options)
    return LibraryHost(architecture(config), dict(inputs or images()), layers)


VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 16}
SQUARE = {**VIT, "image_size": 64}
BEIT = {**SQUARE, "vocab_size": 16}
SWIN = {"image_size": (64, 96), "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}


def beit(**options: Any) -> LibraryHost:
    return hugging("BeitModel", 2, images(64, 64), **BEIT, **options)


def data2vec(implementation: str, **options: Any) -> LibraryHost:
    return hugging("Data2VecVisionModel", 2, images(64, 64), **BEIT, attn_implementation=implementation, **options)


def owlvit(kind: str) -> LibraryHost:
    text = {**VIT, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
    del text["patch_size"]
    inputs = {"input_ids": torch.tensor([[1, 5, 2], [1, 7, 2]]), **images(64, 64)}
    return hugging(kind, 2, inputs, text_config=text, vision_config=SQUARE, projection_dim=32)


def mask2former() -> LibraryHost:
    import transformers

    swin = transformers.SwinConfig(
        **{**SWIN, "depths": [1, 1, 1, 2], "num_heads": [1, 2, 2, 4]}, out_indices=[1, 2, 3, 4]
    )
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_attention_heads": 2, "num_queries": 5}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_feedforward_dim": 16, "dim_feedforward": 16}
    return hugging("Mask2FormerModel", 5, images(128, 128), backbone_config=swin, num_labels=3, **sizes, **layers)


def maskformer_swin() -> LibraryHost:
    return hugging("MaskFormerSwinBackbone", 4, **SWIN)


def depth_anything() -> LibraryHost:
    import transformers

    backbone = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, mlp_ratio=1, image_size=56, patch_size=14,
        out_indices=[1, 2, 3, 4], reshape_hidden_states=False,
    )  # fmt: skip
    sizes = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "reassemble_hidden_size": 32, "patch_size": 14}
    return hugging("DepthAnythingForDepthEstimation", 4, images(56, 84), backbone_config=backbone, **sizes)


def detr(kind: str) -> LibraryHost:
    """The second image is smaller than its canvas."""
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    inputs = images()
    inputs["pixel_mask"] = torch.ones(2, 64, 96, dtype=torch.long)
    inputs["pixel_mask"][1, 40:] = 0
    sizes = {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 5}
    layers = {"encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return hugging(kind, 2, inputs, use_timm_backbone=False, backbone_config=backbone, **sizes, **layers)


def sam(implementation: str) -> LibraryHost:
    sizes = {**VIT, "image_size": 96, "mlp_dim": 32, "output_channels": 16, "window_size": 4, "num_hidden_layers": 3}
    return hugging(
        "SamVisionModel", 3, images(96, 96), global_attn_indexes=[1], attn_implementation=implementation, **sizes
    )


SAM2 = {
    "hidden_size": 16, "num_attention_heads": 1, "image_size": [64, 64], "blocks_per_stage": [1, 2, 2],
    "embed_dim_per_stage": [16, 32, 64], "num_attention_heads_per_stage": [1, 2, 4], "window_size_per_stage": [4, 2, 3],
    "global_attention_blocks": [4], "num_query_pool_stages": 2, "window_positional_embedding_background_size": [7, 7],
}  # fmt: skip
HIERA = {
    "image_size": [128, 128], "embed_dim": 16, "depths": [1, 2, 2], "num_heads": [1, 2, 4], "num_query_pool": 1,
    "masked_unit_size": [4, 4], "masked_unit_attention": [True, False, False],
}  # fmt: skip
PVT = {
    "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
}  # fmt: skip


HUGGING_HOSTS: dict[str, Callable[[], LibraryHost]] = {
    "SwinModel": lambda: hugging("SwinModel", 4, **SWIN),
    "Swinv2Model": lambda: hugging("Swinv2Model", 4, **SWIN),
    "BeitModel": lambda: beit(use_relative_position_bias=True),
    "BeitModel, shared biases": lambda: beit(use_shared_relative_position_bias=True),
    "BeitModel, no biases": beit,
    "Data2VecVisionModel": lambda: data2vec("sdpa", use_relative_position_bias=True),
    "Data2VecVisionModel, shared biases": lambda: data2vec("eager", use_shared_relative_position_bias=True),
    "PvtV2Model": lambda: hugging("PvtV2Model", 2, **PVT, sr_ratios=[1, 1]),
    "HieraModel": lambda: hugging("HieraModel", 5, images(128, 128), **HIERA),
    "SamVisionModel": lambda: sam("sdpa"),
    "SamVisionModel, eager": lambda: sam("eager"),
    "Sam2HieraDetModel": lambda: hugging("Sam2HieraDetModel", 5, images(64, 64), **SAM2),
    "VitDetModel": lambda: hugging(
        "VitDetModel", 2, images(96, 96), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=96,
        window_block_indices=[0], window_size=4, use_relative_position_embeddings=True,
    ),
    "OwlViTModel": lambda: owlvit("OwlViTModel"),
    "Owlv2ForObjectDetection": lambda: owlvit("Owlv2ForObjectDetection"),
    "DepthAnythingForDepthEstimation": depth_anything,
    "DetrModel": lambda: detr("DetrModel"),
    "ConditionalDetrModel": lambda: detr("ConditionalDetrModel"),
    "Mask2FormerModel": mask2former,
    "MaskFormerSwinBackbone": maskformer_swin,
    "DPTModel": lambda: hugging("DPTModel", 2, images(64, 64), **SQUARE, backbone_out_indices=[0, 1]),
    "VitPoseBackbone": lambda: hugging("VitPoseBackbone", 2, **{**VIT, "patch_size": [16, 16]}, image_size=[64, 96]),
}  # fmt: skip


def outputs(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """All floating-point tensors that a model returns."""
    return list(_tensors(model(**inputs)))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
