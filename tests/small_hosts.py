"""HostAndInput hosts: the real classes of timm with little depth and width."""

from collections.abc import Callable
from functools import partial

import torch
from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer

from regard.models.create import create_model

HostAndInput = tuple[nn.Module, Tensor]
VIT = "vit_tiny_patch16_224(depth=2, embed_dim=32, num_heads=2, patch_size=8, num_classes=7)"


def vit(prefix: int = 1, **options: object) -> HostAndInput:
    """4 x 6 patch tokens; prefix 1 is the class token, a larger prefix adds registers."""
    size = {"img_size": (32, 48), "reg_tokens": prefix - 1}
    return create_model(VIT, None, **{**size, **options}), torch.randn(3, 3, 32, 48)


def rectangular(name: str, **options: object) -> HostAndInput:
    """A small form of a model of timm or of Regard, for images of 64 x 96 pixels."""
    return create_model(name, None, img_size=(64, 96), num_classes=7, **options), torch.randn(3, 3, 64, 96)


def two_layers(name: str, **options: object) -> HostAndInput:
    return rectangular(name, depth=2, embed_dim=32, num_heads=2, **options)


def xcit() -> HostAndInput:
    return rectangular("xcit_nano_12_p16_224", depth=2, embed_dim=32)


def caformer() -> HostAndInput:
    mixers = [SepConv, SepConv, Attention, Attention]
    norms = [LayerNorm2dNoBias] * 2 + [LayerNormNoBias] * 2
    model = MetaFormer(depths=(1, 1, 2, 1), dims=(8, 16, 32, 64), token_mixers=mixers, norm_layers=norms, num_classes=7)
    model.pretrained_cfg = {"input_size": (3, 64, 96)}
    return model, torch.randn(3, 3, 64, 96)


def swin() -> HostAndInput:
    model = SwinTransformer(
        img_size=(48, 96), window_size=4, depths=(2, 2), embed_dim=8, num_heads=(2, 4), num_classes=7
    )
    return model, torch.randn(3, 3, 48, 96)


def eva(**options: object) -> HostAndInput:
    """Biases of queries and values only, separate from the fused matrix."""
    return two_layers("eva02_small_patch14_224", patch_size=16, **options)


def pvt(reduction: int = 2) -> HostAndInput:
    """Keys and values come from one matrix, on a reduced map."""
    sizes = {"depths": (1, 2), "embed_dims": (16, 32), "num_heads": (1, 2), "mlp_ratios": (2, 2)}
    model = PyramidVisionTransformerV2(sr_ratios=(reduction, reduction), num_classes=7, **sizes)
    model.pretrained_cfg = {"input_size": (3, 64, 96)}
    return model, torch.randn(3, 3, 64, 96)


def vit5() -> HostAndInput:
    """A class token before the patch tokens, four registers after them."""
    host = "vit5_small(img_size=(32, 48), patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=7)"
    return create_model(host, None), torch.randn(3, 3, 32, 48)


def torchvision() -> HostAndInput:
    model = TorchvisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=32, num_classes=7)
    return model, torch.randn(3, 3, 32, 32)


def regard_host(name: str) -> HostAndInput:
    return create_model(name, None, num_classes=7), torch.randn(2, 3, 32, 32)


HOSTS: dict[str, Callable[[], HostAndInput]] = {
    "vit": vit,
    "vit with registers": lambda: vit(5),
    "vit with q/k norm": lambda: vit(1, qk_norm=True),
    "xcit": xcit,
    "caformer": caformer,
    "swin": swin,
    "rope": lambda: two_layers("vit_small_patch16_rope_224"),
    # rotary positions rotate halves of the channels, not neighbours; four registers
    "dinov3": lambda: two_layers("vit_small_patch16_dinov3"),
    "eva": eva,
    "eva with three matrices": lambda: eva(qkv_fused=False),
    "beit": lambda: two_layers("beit_base_patch16_224"),
    "pvt": pvt,
    "torchvision": torchvision,
    "vit5": vit5,
}


REGARD_HOSTS: dict[str, Callable[[], HostAndInput]] = {
    name: partial(regard_host, name)
    for name in (
        "vit_s_32_spt(keep_lsa=True)", "cait_s_32(heads=2, width=24)", "cait_s_32", "swin_t_32(keys='window')",
        "cvt_13", "swin_t_32", "cvt_13_32", "cvt_13(kv_stride=1)",
    )
}  # fmt: skip
"""Regard's own hosts with an attention of their own; all but the first two are large."""


def draw_large_weights(model: nn.Module) -> None:
    """Draw weights so large that attention matters, also in layers that start at zero, in place."""
    for value in model.parameters():
        nn.init.normal_(value, std=0.3)


@torch.no_grad()
def perturb(model: nn.Module, std: float) -> nn.Module:
    """Move all weights, in place: some layers start at zero, which would hide what they multiply."""
    for value in model.parameters():
        value.add_(std * torch.randn_like(value))
    return model


def with_large_weights(make: Callable[[], HostAndInput]) -> HostAndInput:
    """A small host with weights so large that attention matters, in evaluation mode, float64, and its input."""
    torch.manual_seed(0)
    model, x = make()
    draw_large_weights(model)
    return model.double().eval(), x.double()
