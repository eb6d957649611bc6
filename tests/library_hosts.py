"""Small random models of transformers, torchvision, open_clip, diffusers and MONAI, with their inputs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from small_hosts import perturb


class LibraryHost(NamedTuple):
    """A model, the arguments of a forward pass (or its one input), and how many layers a swap replaces (0: unknown)."""

    model: nn.Module
    inputs: Any
    layers: int


def images(height: int = 64, width: int = 96) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, height, width)}


def hugging(
    kind: str, layers: int, inputs: Mapping[str, Any] | tuple[int, int] = (64, 96), **options: Any
) -> LibraryHost:
    """A model of transformers by the name of its class, made from a configuration of its own kind, and its inputs.

    inputs: all of them, or height and width of images.
    """
    import transformers

    architecture = getattr(transformers, kind)
    config = architecture.config_class(**options)
    inputs = images(*inputs) if isinstance(inputs, tuple) else dict(inputs)
    return LibraryHost(architecture(config), inputs, layers)


VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 16}
SQUARE = {**VIT, "image_size": 64}
DINOV2 = {**{name: value for name, value in SQUARE.items() if name != "intermediate_size"}, "mlp_ratio": 1}
YOLOS = {**VIT, "image_size": [64, 96], "num_detection_tokens": 5}
SWIN = {"image_size": (64, 96), "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}


def beit(kind: str = "BeitModel", **options: Any) -> LibraryHost:
    return hugging(kind, 2, (64, 64), **SQUARE, vocab_size=16, **options)


def owlvit(kind: str) -> LibraryHost:
    text = {**VIT, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
    del text["patch_size"]
    inputs = {"input_ids": torch.tensor([[1, 5, 2], [1, 7, 2]]), **images(64, 64)}
    return hugging(kind, 2, inputs, text_config=text, vision_config=SQUARE, projection_dim=32)


def eomt(kind: str, masked: float) -> LibraryHost:
    """Its last layer has tokens of queries before the others. masked: the share of them that see their mask only."""
    sizes = {"num_queries": 5, "num_blocks": 1, "num_register_tokens": 2, "num_upscale_blocks": 1, "mlp_ratio": 1}
    host = hugging(kind, 2, (64, 64), **SQUARE, **sizes)
    host.model.attn_mask_probs.fill_(masked)
    return host


def mask2former() -> LibraryHost:
    import transformers

    swin = transformers.SwinConfig(
        **{**SWIN, "depths": [1, 1, 1, 2], "num_heads": [1, 2, 2, 4]}, out_indices=[1, 2, 3, 4]
    )
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_attention_heads": 2, "num_queries": 5}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_feedforward_dim": 16, "dim_feedforward": 16}
    return hugging("Mask2FormerModel", 5, (128, 128), backbone_config=swin, num_labels=3, **sizes, **layers)


def depth_anything() -> LibraryHost:
    import transformers

    backbone = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, mlp_ratio=1, image_size=56, patch_size=14,
        out_indices=[1, 2, 3, 4], reshape_hidden_states=False,
    )  # fmt: skip
    sizes = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "reassemble_hidden_size": 32, "patch_size": 14}
    return hugging("DepthAnythingForDepthEstimation", 4, (56, 84), backbone_config=backbone, **sizes)


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


def rt_detr(kind: str, stages: tuple[str, ...] = ("stage2", "stage3", "stage4"), **options: Any) -> LibraryHost:
    """Attention on 4 x 6 cells of the coarsest of three maps."""
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=list(stages),
    )  # fmt: skip
    widths = {"encoder_hidden_dim": 32, "encoder_in_channels": [8, 16, 16], "decoder_in_channels": [32, 32, 32]}
    sizes = {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 5}
    layers = {"encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    more = {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone, "num_denoising": 0, **options}
    return hugging(kind, 2, (128, 192), **widths, **sizes, **layers, **more)


def rf_detr() -> LibraryHost:
    """Two layers in windows of 4 x 4 cells and two on the whole map of 8 x 8."""
    import transformers

    backbone = transformers.RfDetrDinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=64, patch_size=8, num_windows=2,
        window_block_indexes=[0, 2], out_features=["stage2", "stage4"],
    )  # fmt: skip
    heads = {"decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2}
    sizes = {"d_model": 32, "decoder_layers": 1, "num_queries": 5, "group_detr": 1}
    return hugging("RfDetrModel", 4, (64, 64), backbone_config=backbone, **heads, **sizes)


def sam(implementation: str) -> LibraryHost:
    sizes = {**VIT, "image_size": 96, "mlp_dim": 32, "output_channels": 16, "window_size": 4, "num_hidden_layers": 3}
    options = {"global_attn_indexes": [1], "attn_implementation": implementation}
    return hugging("SamVisionModel", 3, (96, 96), **sizes, **options)


def mobilevit(kind: str, **options: Any) -> LibraryHost:
    """Its many layers are drawn such that they do not shrink what they are given."""
    host = hugging(kind, 9, (128, 192), **options)
    for module in host.model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight).data.mul_(1.5)  # SiLU halves what is small
    return host


class HuggingFaceLogits(nn.Module):
    """A model of transformers whose output is the logits, as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, interpolate_pos_encoding=True).logits


def hugging_face_logits() -> tuple[nn.Module, Tensor]:
    """A ViT of transformers for images of 32 x 32 pixels, or other sizes."""
    pytest.importorskip("transformers")
    sizes = {**VIT, "image_size": 32, "patch_size": 8, "num_labels": 7}
    return HuggingFaceLogits(hugging("ViTForImageClassification", 2, **sizes).model), torch.randn(3, 3, 32, 32)


SAM2 = {
    "hidden_size": 16, "num_attention_heads": 1, "image_size": [64, 64], "blocks_per_stage": [1, 2, 2],
    "embed_dim_per_stage": [16, 32, 64], "num_attention_heads_per_stage": [1, 2, 4], "window_size_per_stage": [4, 2, 3],
    "global_attention_blocks": [4], "num_query_pool_stages": 2, "window_positional_embedding_background_size": [7, 7],
}  # fmt: skip
HIERA = {
    "image_size": [128, 128], "embed_dim": 16, "depths": [1, 2, 2], "num_heads": [1, 2, 4], "num_query_pool": 1,
    "masked_unit_size": [4, 4], "masked_unit_attention": [True, False, False],
}  # fmt: skip
HUGGING_PVT = {
    "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
}  # fmt: skip
MOBILEVIT = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "image_size": 64}
HUGGING_PVT1 = {**HUGGING_PVT, "patch_sizes": [4, 2]}


CLIP = torch.Size((2, 4, 3, 64, 96))
"""Two clips of four frames."""


def video(kind: str, layers: int = 2, **options: Any) -> LibraryHost:
    """A model of transformers for clips of four frames of 64 x 96 pixels, which are two frames of tokens."""
    sizes = {**VIT, "image_size": [64, 96], "num_frames": 4}
    return hugging(kind, layers, {"pixel_values": torch.randn(CLIP)}, **sizes, **options)


def vjepa2() -> LibraryHost:
    """Its positions are those of square images of crop_size, whatever it is given."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 1, "patch_size": 16}
    predictor = {"pred_hidden_size": 32, "pred_num_hidden_layers": 1, "pred_num_attention_heads": 2}
    inputs = {"pixel_values_videos": torch.randn(2, 4, 3, 64, 64), "skip_predictor": True}
    return hugging("VJEPA2Model", 2, inputs, **sizes, **predictor, crop_size=64, frames_per_clip=4)


HUGGING_HOSTS: dict[str, Callable[[], LibraryHost]] = {
    **{
        kind: partial(hugging, kind, 2, (64, 64), **SQUARE)
        for kind in (
            "ViTModel", "DeiTModel", "IJepaModel", "ViTMSNModel", "CLIPVisionModel", "MetaClip2VisionModel",
            "SiglipVisionModel", "Aimv2VisionModel", "PixioModel", "InternVLVisionModel", "CLIPSegVisionModel",
            "AltCLIPVisionModel", "ChineseCLIPVisionModel",
        )
    },
    **{kind: partial(hugging, kind, 2, (64, 64), **DINOV2) for kind in ("Dinov2Model", "Dinov2WithRegistersModel")},
    "DINOv3ViTModel": partial(hugging, "DINOv3ViTModel", 2, (64, 64), **SQUARE, num_register_tokens=2),
    **{
        kind: partial(hugging, kind, 2, **HUGGING_PVT, sr_ratios=[1, 1])
        for kind in ("SegformerModel", "PvtV2Model", "GLPNModel")
    },
    "PvtModel": partial(
        hugging, "PvtModel", 2, (64, 64), **HUGGING_PVT1, image_size=64, sequence_reduction_ratios=[1, 1]
    ),
    **{
        kind: partial(hugging, kind, 4, **SWIN)
        for kind in ("SwinModel", "Swinv2Model", "DonutSwinModel", "MaskFormerSwinBackbone")
    },
    "Swin2SRModel": partial(hugging, "Swin2SRModel", 4, (32, 48), **{**SWIN, "image_size": 32}),
    "BeitModel": partial(beit, use_relative_position_bias=True),
    "BeitModel, shared biases": partial(beit, use_shared_relative_position_bias=True),
    "BeitModel, no biases": beit,
    "Data2VecVisionModel": partial(beit, "Data2VecVisionModel", use_relative_position_bias=True),
    "Data2VecVisionModel, shared biases": partial(
        beit, "Data2VecVisionModel", use_shared_relative_position_bias=True, attn_implementation="eager"
    ),
    "MobileViTModel": partial(mobilevit, "MobileViTModel", **MOBILEVIT, num_attention_heads=2),
    "MobileViTV2Model": partial(mobilevit, "MobileViTV2Model", width_multiplier=0.5),
    "HieraModel": partial(hugging, "HieraModel", 5, (128, 128), **HIERA),
    "SamVisionModel": partial(sam, "sdpa"),
    "SamVisionModel, eager": partial(sam, "eager"),
    "Sam2HieraDetModel": partial(hugging, "Sam2HieraDetModel", 5, (64, 64), **SAM2),
    "Sam3ViTModel": partial(
        hugging, "Sam3ViTModel", 2, (96, 96), **{**VIT, "image_size": 96}, pretrain_image_size=64, window_size=4,
        global_attn_indexes=[1],
    ),
    "VitDetModel": partial(
        hugging, "VitDetModel", 2, (96, 96), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=96,
        window_block_indices=[0], window_size=4, use_relative_position_embeddings=True,
    ),
    **{kind: partial(owlvit, kind) for kind in ("OwlViTModel", "Owlv2ForObjectDetection")},
    "DepthAnythingForDepthEstimation": depth_anything,
    **{kind: partial(detr, kind) for kind in ("DetrModel", "TableTransformerModel", "ConditionalDetrModel")},
    **{kind: partial(rt_detr, kind) for kind in ("RTDetrModel", "RTDetrV2Model", "DFineModel", "Deimv2Model")},
    "PPDocLayoutV3Model": partial(
        rt_detr, "PPDocLayoutV3Model", ("stage1", "stage2", "stage3", "stage4"), x4_feat_dim=8
    ),
    "RfDetrModel": rf_detr,
    "LwDetrViTBackbone": partial(
        hugging, "LwDetrViTBackbone", 2, **{**VIT, "patch_size": 8}, image_size=64, pretrain_image_size=64,
        num_windows=4, window_block_indices=[0], out_features=["stage1", "stage2"],
    ),
    "Mask2FormerModel": mask2former,
    "YolosForObjectDetection": partial(hugging, "YolosForObjectDetection", 2, **YOLOS),
    "YolosModel, middle positions": partial(hugging, "YolosModel", 2, **YOLOS, use_mid_position_embeddings=True),
    "EomtForUniversalSegmentation": partial(eomt, "EomtForUniversalSegmentation", 0.0),
    "EomtDinov3ForUniversalSegmentation, masked": partial(eomt, "EomtDinov3ForUniversalSegmentation", 1.0),
    "DPTModel": partial(hugging, "DPTModel", 2, (64, 64), **SQUARE, backbone_out_indices=[0, 1]),
    "VideoMAEModel": partial(video, "VideoMAEModel", tubelet_size=2),
    "VivitModel": partial(video, "VivitModel", tubelet_size=[2, 16, 16]),
    "VJEPA2Model": vjepa2,
    "TimesformerModel": lambda: hugging(
        "TimesformerModel", 4, {"pixel_values": torch.randn(2, 3, 3, 64, 64)}, **SQUARE, num_frames=3
    ),
    "VitPoseBackbone": partial(
        hugging, "VitPoseBackbone", 2, **{**VIT, "patch_size": [16, 16]}, image_size=[64, 96]
    ),
}  # fmt: skip


def vision(name: str, height: int, width: int, layers: int, **options: Any) -> LibraryHost:
    """A model of torchvision by the name of its class."""
    import torchvision.models as models

    architecture = getattr(getattr(models, name.rpartition(".")[0]), name.rpartition(".")[2])
    return LibraryHost(architecture(num_classes=7, **options), {"x": torch.randn(2, 3, height, width)}, layers)


def torchvision_swin(version: str) -> LibraryHost:
    """Windows of 4 x 3 cells on 10 x 14 cells, so that maps are padded, then on 5 x 7."""
    from torchvision.models import swin_transformer

    options: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
    if version == "V2":
        options["block"] = swin_transformer.SwinTransformerBlockV2
        options["downsample_layer"] = swin_transformer.PatchMergingV2
    return vision("swin_transformer.SwinTransformer", 40, 56, 4, window_size=[4, 3], **options)


def swin3d(frames: int) -> LibraryHost:
    """Windows of 2 x 3 x 4 cells on 3 x 10 x 14 (or 1 x 10 x 14) cells, then on 5 x 7."""
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    options: dict[str, Any] = {"patch_size": [2, 4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
    model = SwinTransformer3d(window_size=[2, 3, 4], num_classes=7, stochastic_depth_prob=0.0, **options)
    return LibraryHost(model, {"x": torch.randn(2, 3, frames, 40, 56)}, 4)


def mvit(relative: bool) -> LibraryHost:
    """Two blocks that pool keys, and one that pools queries too; relative: MViTv2's biases and residual queries."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    sizes = [(16, 16, [1, 1, 1], [1, 4, 4]), (16, 32, [1, 2, 2], [1, 2, 2]), (32, 32, [1, 1, 1], [1, 2, 2])]
    blocks = [MSBlockConfig(2, before, after, [3] * 3, [3] * 3, q, kv) for before, after, q, kv in sizes]
    options = {"residual_pool": relative, "rel_pos_embed": relative, "proj_after_attn": relative}
    model = MViT((64, 64), 4, blocks, residual_with_cls_embed=False, dropout=0.0, num_classes=7, **options)
    return LibraryHost(model, {"x": torch.randn(2, 3, 4, 64, 64)}, 3)


class Encoder(nn.Module):
    """A model around nn.TransformerEncoder, which has a class token and ignores padding."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=batch_first, dropout=0.0)
        self.patch_embed, self.batch_first = nn.Conv2d(3, 32, 16, 16), batch_first
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), self.patch_embed(x).flatten(2).mT], 1)
        tokens = tokens if self.batch_first else tokens.transpose(0, 1)
        return self.encoder(tokens, src_key_padding_mask=padding)


def encoder(batch_first: bool, padding: bool) -> LibraryHost:
    keys = torch.zeros(2, 25, dtype=torch.bool)
    keys[1, 19:] = True
    inputs = {"x": torch.randn(2, 3, 64, 96)} | ({"padding": keys} if padding else {})
    return LibraryHost(Encoder(batch_first), inputs, 2)


TORCH_HOSTS: dict[str, Callable[[], LibraryHost]] = {
    "VisionTransformer": lambda: vision(
        "vision_transformer.VisionTransformer", 64, 64, 2, image_size=64, patch_size=16, num_layers=2, num_heads=2,
        hidden_dim=32, mlp_dim=32,
    ),
    "SwinTransformer": lambda: torchvision_swin("V1"),
    "SwinTransformer V2": lambda: torchvision_swin("V2"),
    "SwinTransformer3d": lambda: swin3d(6),
    "SwinTransformer3d, short clips": lambda: swin3d(2),
    "MViT": lambda: mvit(False),
    "MViT, relative positions": lambda: mvit(True),
    "MaxVit": lambda: vision(
        "maxvit.MaxVit", 64, 64, 4, input_size=(64, 64), stem_channels=8, partition_size=4, block_channels=[16, 32],
        block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0,
    ),
    "nn.TransformerEncoder": lambda: encoder(True, False),
    "nn.TransformerEncoder, padding": lambda: encoder(True, True),
    "nn.TransformerEncoder, batch second": lambda: encoder(False, True),
}  # fmt: skip


def clip(layers: int, **vision_options: Any) -> LibraryHost:
    """A CLIP of open_clip, of which only the image tower runs and is swapped."""
    import open_clip

    sizes = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 16, "image_size": [64, 96]}
    text = {"context_length": 8, "vocab_size": 99, "width": 32, "heads": 2, "layers": 1}
    model = open_clip.CLIP(16, {**sizes, **vision_options}, text)
    return LibraryHost(model, {"image": torch.randn(2, 3, *model.visual.image_size)}, layers)


OPEN_CLIP_HOSTS: dict[str, Callable[[], LibraryHost]] = {
    "VisionTransformer": lambda: clip(2),
    "VisionTransformer, attention pool": lambda: clip(2, attentional_pool=True, attn_pooler_queries=4),
    "VisionTransformer, custom blocks": lambda: clip(2, block_type="custom"),
    "VisionTransformer, normalised queries": lambda: clip(2, qk_norm=True),
    "TimmModel": lambda: clip(
        6, image_size=160, timm_model_name="test_vit", timm_model_pretrained=False, timm_pool="avg", timm_proj="linear"
    ),
}  # fmt: skip


def diffusion(kind: str, layers: int, inputs: Mapping[str, Any], **options: Any) -> LibraryHost:
    """A model of diffusers by the name of its class."""
    import diffusers

    return LibraryHost(getattr(diffusers, kind)(**options), dict(inputs), layers)


STEPS = torch.tensor([3, 7])
UNET = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}


def unet_2d_condition(**options: Any) -> LibraryHost:
    inputs = {"sample": torch.randn(2, 4, 16, 24), "timestep": STEPS, "encoder_hidden_states": torch.randn(2, 5, 8)}
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return diffusion("UNet2DConditionModel", 4, inputs, **UNET, **blocks, cross_attention_dim=8, attention_head_dim=4)


def unet_2d() -> LibraryHost:
    inputs = {"sample": torch.randn(2, 3, 16, 24), "timestep": STEPS}
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return diffusion("UNet2DModel", 4, inputs, **UNET, **blocks, attention_head_dim=4)


def dit() -> LibraryHost:
    inputs = {"hidden_states": torch.randn(2, 4, 16, 16), "timestep": STEPS, "class_labels": torch.tensor([1, 2])}
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 16}
    return diffusion("DiTTransformer2DModel", 2, inputs, **sizes, num_embeds_ada_norm=8, norm_num_groups=4)


def pixart() -> LibraryHost:
    """Its text is cross-attention, which stays."""
    inputs = {
        "hidden_states": torch.randn(2, 4, 16, 16), "timestep": STEPS, "encoder_hidden_states": torch.randn(2, 5, 8),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 16}
    return diffusion(
        "PixArtTransformer2DModel", 2, inputs, **sizes, cross_attention_dim=16, caption_channels=8, norm_num_groups=4,
        use_additional_conditions=False,
    )  # fmt: skip


def autoencoder() -> LibraryHost:
    inputs = {"sample": torch.randn(2, 3, 16, 24)}
    return diffusion(
        "AutoencoderKL", 2, inputs, block_out_channels=(8, 16), norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


DIFFUSERS_HOSTS: dict[str, Callable[[], LibraryHost]] = {
    "DiTTransformer2DModel": dit,
    "PixArtTransformer2DModel": pixart,
    "UNet2DConditionModel": unet_2d_condition,
    "UNet2DModel": unet_2d,
    "AutoencoderKL": autoencoder,
}


def monai_vit(*size: int, **options: Any) -> LibraryHost:
    """MONAI's ViT of two blocks on images or volumes of a size."""
    from monai.networks.nets import ViT

    sizes = {"hidden_size": 32, "mlp_dim": 48, "num_layers": 2, "num_heads": 4, "spatial_dims": len(size)}
    return LibraryHost(ViT(1, size, (8,) * len(size), **sizes, **options), torch.randn(2, 1, *size), 2)


def unetr() -> LibraryHost:
    from monai.networks.nets import UNETR

    sizes = {"feature_size": 8, "hidden_size": 48, "mlp_dim": 64, "num_heads": 4}
    return LibraryHost(UNETR(1, 2, (32, 32, 48), **sizes), torch.randn(1, 1, 32, 32, 48), 12)


def swin_unetr(window: int) -> LibraryHost:
    """The deepest attention has maps of 4 cells a side, which windows of 5 are cut to."""
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(1, 2, depths=(2, 2, 1, 1), num_heads=(2, 2, 4, 4), feature_size=12, window_size=window)
    return LibraryHost(model, torch.randn(1, 1, 64, 64, 64), 6)


MONAI_HOSTS: dict[str, Callable[[], LibraryHost]] = {
    "ViT, volumes": lambda: monai_vit(16, 16, 24, classification=True, qkv_bias=True),
    "ViT, images": lambda: monai_vit(32, 48),
    "UNETR": unetr,
    "SwinUNETR": lambda: swin_unetr(4),
    "SwinUNETR, maps smaller than windows": lambda: swin_unetr(5),
}


HOSTS: dict[str, dict[str, Callable[[], LibraryHost]]] = {
    "transformers": HUGGING_HOSTS,
    "torchvision": TORCH_HOSTS,
    "open_clip": OPEN_CLIP_HOSTS,
    "diffusers": DIFFUSERS_HOSTS,
    "monai": MONAI_HOSTS,
}
"""Hosts by the package that they need."""


def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """All floating-point tensors that a model returns for its named arguments, or for its one input."""
    return list(_tensors(model(**inputs) if isinstance(inputs, Mapping) else model(inputs)))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def prepared(host: LibraryHost, dtype: torch.dtype = torch.float64) -> LibraryHost:
    """The host in evaluation mode, all of whose parameters are drawn anew, tables that start at 0 too."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    inputs = {name: cast(x) for name, x in host.inputs.items()} if isinstance(host.inputs, Mapping) else host.inputs
    return LibraryHost(perturb(host.model, 0.15).to(dtype).eval(), cast(inputs), host.layers)


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference of two lists of outputs, relative to the largest value of each."""
    assert len(a) == len(b) > 0
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(a, b, strict=True))
