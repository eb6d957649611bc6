"""Small models of timm, one for each class and each set of options of an attention; images of 64 x 96 pixels."""

from collections.abc import Callable

import torch
from timm.layers.attention import Attention
from timm.models.pvt_v2 import PyramidVisionTransformerV2

from regard.models.create import create_model
from small_hosts import HostAndInput, vit


def small_timm(name: str, **options: object) -> HostAndInput:
    """A small form of a model of timm, for images of 64 x 96 pixels."""
    return create_model(name, None, img_size=(64, 96), num_classes=7, **options), torch.randn(3, 3, 64, 96)


def relpos(name: str, **options: object) -> HostAndInput:
    return small_timm(name, depth=2, embed_dim=32, num_heads=2, **options)


def swin_v2(name: str) -> HostAndInput:
    return small_timm(name, window_size=4, depths=(2, 2), embed_dim=8, num_heads=(2, 4))


def maxvit(name: str) -> HostAndInput:
    """Two stages with windows of 2 x 3."""
    return small_timm(name, embed_dim=(32, 32), depths=(1, 1), stem_width=16)


def coatnet(name: str) -> HostAndInput:
    """Its last stage changes the number of channels."""
    return small_timm(name, embed_dim=(32, 32, 32, 64), depths=(1, 1, 1, 1), stem_width=16)


def fastvit() -> HostAndInput:
    model = create_model("fastvit_sa12", None, layers=(1, 1, 1, 1), embed_dims=(16, 16, 16, 32), num_classes=7)
    return model, torch.randn(3, 3, 64, 96)


def pit() -> HostAndInput:
    """Each stage has its own grid, and a class token."""
    options = {"base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (2, 4, 8), "img_size": (64, 96), "num_classes": 7}
    return create_model("pit_ti_224", None, **options), torch.randn(3, 3, 64, 96)


def unreduced_pvt() -> HostAndInput:
    model = PyramidVisionTransformerV2(
        depths=(1, 2), embed_dims=(16, 32), num_heads=(1, 2), sr_ratios=(1, 1), mlp_ratios=(2, 2), num_classes=7
    )
    model.pretrained_cfg = {"input_size": (3, 64, 96)}
    return model, torch.randn(3, 3, 64, 96)


def gated_vit() -> HostAndInput:
    model, x = vit()
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn = Attention(32, 2, qkv_bias=True, gated=True)
    return model, x


def mobilevit() -> HostAndInput:
    """It attends between the pixels at one place of all patches of 2 x 2; the last map has an odd side."""
    return create_model("mobilevit_xxs", None, num_classes=7), torch.randn(3, 3, 64, 96)


def csatv2() -> HostAndInput:
    """Attention in the last stage of convolutions, with heads of their own width."""
    options = {"dims": (8, 16, 16, 16), "depths": (1, 1, 1, 1), "transformer_depths": (0, 0, 1, 1)}
    return create_model("csatv2", None, num_classes=7, **options), torch.randn(3, 3, 128, 192)


def crossvit() -> HostAndInput:
    """Two branches with patches of 12 and 16 pixels."""
    options = {"embed_dim": (16, 32), "depth": ((1, 2, 1),), "num_heads": (2, 2), "img_size": (120, 240)}
    return create_model("crossvit_9_240", None, num_classes=7, **options), torch.randn(3, 3, 120, 240)


def naflexvit(**options: object) -> HostAndInput:
    host = create_model(
        "naflexvit_base_patch16_gap", None, num_classes=7, embed_dim=32, depth=2, num_heads=2, **options
    )
    return host, torch.randn(3, 3, 64, 96)


def levit(name: str) -> HostAndInput:
    """Grids of 4 x 6 and 2 x 3; values are wider than keys."""
    return small_timm(name, embed_dim=(16, 32), key_dim=4, depth=(1, 1), num_heads=(2, 3))


def tiny_vit() -> HostAndInput:
    """Windows of 4 x 4, then of 3 x 3."""
    options = {"embed_dims": (8, 16, 32), "depths": (1, 1, 1), "num_heads": (1, 2, 4), "window_sizes": (4, 4, 3)}
    return create_model("tiny_vit_5m_224", None, num_classes=7, **options), torch.randn(3, 3, 64, 96)


def efficientformer() -> HostAndInput:
    options = {"depths": (1, 1, 1, 2), "embed_dims": (8, 8, 16, 16), "num_vit": 1, "num_classes": 7}
    return create_model("efficientformer_l1", None, **options), torch.randn(3, 3, 224, 224)


TIMM_HOSTS: dict[str, Callable[[], HostAndInput]] = {
    "vit without bias of qkv": lambda: vit(1, qkv_bias=False),
    "vit without biases": lambda: vit(1, qkv_bias=False, proj_bias=False),
    "cait": lambda: relpos("cait_xxs24_224"),
    "dinov3 with biases": lambda: relpos("vit_small_patch16_dinov3_qkvb"),
    "pvt without reduction": unreduced_pvt,
    "relpos": lambda: relpos("vit_relpos_small_patch16_224"),
    "relpos with shared MLP": lambda: relpos("vit_srelpos_small_patch16_224"),
    "relpos with MLP": lambda: relpos("vit_relpos_base_patch32_plus_rpn_256", patch_size=16),
    "relpos with class token": lambda: relpos("vit_relpos_base_patch16_clsgap_224"),
    "swinv2": lambda: swin_v2("swinv2_tiny_window8_256"),
    "swinv2 cr": lambda: swin_v2("swinv2_cr_tiny_ns_224"),
    "maxvit": lambda: maxvit("maxvit_tiny_tf_224"),
    "maxvit with bias": lambda: maxvit("maxvit_nano_rw_256"),
    "maxvit with MLP": lambda: maxvit("maxvit_rmlp_nano_rw_256"),
    "coatnet": lambda: coatnet("coatnet_0_224"),
    "coatnet with bias": lambda: coatnet("coatnet_bn_0_rw_224"),
    "coatnet with MLP": lambda: coatnet("coatnet_rmlp_nano_rw_224"),
    "fastvit": fastvit,
    "visformer": lambda: small_timm("visformer_tiny", embed_dim=32, init_channels=8, num_heads=2, depth=(1, 1, 1)),
    "pit": pit,
    "rope without bias of qkv": lambda: relpos("vit_mediumd_patch16_rope_reg1_gap_256"),
    "rope with halves": lambda: relpos("qwen3_vit_88m"),
    "rope with halves and norm": lambda: relpos("vit_base_patch16_sapiens2", num_kv_heads=2),
    "rope with halves, norm and groups": lambda: relpos("vit_base_patch16_sapiens2", num_kv_heads=1),
    "eva with norm": lambda: relpos("eva02_base_patch16_clip_224"),
    "vit with norm": lambda: relpos("beit3_base_patch16_224"),
    "vit with gate": gated_vit,
    "mobilevit": mobilevit,
    "csatv2": csatv2,
    "crossvit": crossvit,
    "naflexvit": naflexvit,
    "levit": lambda: levit("levit_128s"),
    "levit with convolutions": lambda: levit("levit_conv_128s"),
    "tiny_vit": tiny_vit,
    "efficientformer": efficientformer,
    "naflexvit with rope": lambda: naflexvit(rope_type="axial"),
}
"""Further families of timm, each option of their attention once; images of 64 x 96 pixels."""
