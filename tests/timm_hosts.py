"""Small models of timm, one for each class and each set of options of an attention; images of 64 x 96 pixels."""

import copy
from collections.abc import Callable

import torch
from timm.layers import RmsNorm2d
from timm.layers.attention import Attention
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.diff_attention import DiffAttention
from timm.layers.halo_attn import HaloAttn
from timm.models._efficientnet_blocks import MobileAttention
from timm.models.cpubone import ConvAttention as CPUBoneAttention
from timm.models.gcvit import GlobalContextVit
from timm.models.lowformer import ConvAttention as LowFormerAttention
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.nest import Nest
from timm.models.nextvit import NextTransformerBlock
from timm.models.volo import VOLO
from torch import nn

from regard.models.create import create_model
from small_hosts import HostAndInput, pvt, rectangular, two_layers, vit

SQUARE = {"img_size": 64, "depth": 2}


def sizeless(name: str, height: int = 64, width: int = 96, **options: object) -> HostAndInput:
    """A small form of a model of timm that takes any image size, and images of height x width pixels."""
    return create_model(name, None, num_classes=7, **options), torch.randn(3, 3, height, width)


def swin_v2(name: str) -> HostAndInput:
    return rectangular(name, window_size=4, depths=(2, 2), embed_dim=8, num_heads=(2, 4))


def maxvit(name: str) -> HostAndInput:
    """Two stages with windows of 2 x 3."""
    return rectangular(name, embed_dim=(32, 32), depths=(1, 1), stem_width=16)


def coatnet(name: str) -> HostAndInput:
    """Its last stage changes the number of channels."""
    return rectangular(name, embed_dim=(32, 32, 32, 64), depths=(1, 1, 1, 1), stem_width=16)


def replaced_attention(attention: nn.Module) -> HostAndInput:
    """A ViT whose blocks all have copies of one attention of 32 channels."""
    model, x = vit()
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn = copy.deepcopy(attention)
    return model, x


def naflexvit(**options: object) -> HostAndInput:
    return sizeless("naflexvit_base_patch16_gap", embed_dim=32, depth=2, num_heads=2, **options)


def levit(name: str) -> HostAndInput:
    """Grids of 4 x 6 and 2 x 3; values are wider than keys."""
    return rectangular(name, embed_dim=(16, 32), key_dim=4, depth=(1, 1), num_heads=(2, 3))


def davit(kinds: tuple[str, ...] = ("spatial",), **options: object) -> HostAndInput:
    """Windows of 4 x 4, padded; by default, of its two kinds of blocks only those with windows."""
    options = {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (1, 2), "window_size": 4, **options}
    return sizeless("davit_tiny", attn_types=kinds, **options)


def twins(name: str) -> HostAndInput:
    """Windows of 4 x 4, padded, and keys on maps that a convolution reduces by 2; the last stage has no reduction."""
    options = {"embed_dims": (8, 16, 16), "num_heads": (1, 2, 2), "depths": (2, 2, 1), "sr_ratios": (2, 2, 1)}
    windows = {"wss": (4, 4, 4)} if "svt" in name else {}
    return rectangular(name, mlp_ratios=(2, 2, 2), **options, **windows)


def nest() -> HostAndInput:
    """A square image, as the model needs; blocks of 4 x 4 and 2 x 2 patches."""
    options = {"num_levels": 2, "embed_dims": (8, 16), "num_heads": (2, 4), "depths": (1, 1), "num_classes": 7}
    return sized(Nest(img_size=64, patch_size=8, **options), (64, 64)), torch.randn(3, 3, 64, 64)


def mvitv2(**options: object) -> HostAndInput:
    """Queries are pooled between stages, keys in each."""
    cfg = MultiScaleVitCfg(depths=(1, 2), embed_dim=8, stride_q=((1, 1), (2, 2)), stride_kv_adaptive=(2, 2), **options)
    model = MultiScaleVit(cfg, img_size=(64, 64), num_classes=7)
    return sized(model, (64, 64)), torch.randn(3, 3, 64, 64)


def sized(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """A model that names its image size."""
    model.img_size = size
    return model


def in_stem(*blocks: nn.Module) -> HostAndInput:
    """Blocks on maps of 16 channels, of 4 x 6 at first, between a convolution and a classifier."""
    stem = nn.Conv2d(3, 16, 16, 16)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(7))
    model, x = nn.Sequential(stem, *blocks, head), torch.randn(3, 3, 64, 96)
    model(x)
    return sized(model, (64, 96)), x


def nextvit() -> HostAndInput:
    """Keys and values of runs of 4 tokens, then of single tokens."""
    blocks = [NextTransformerBlock(128, 128, drop_path=0.0, head_dim=8, sr_ratio=ratio) for ratio in (2, 1)]
    return in_stem(nn.Conv2d(16, 128, 1), *blocks)


def mobilenetv4(**options: object) -> HostAndInput:
    """Heads that share keys on a coarser map, heads that share keys, and heads with keys of their own."""
    shared = {"num_heads": 4, "key_dim": 4, "value_dim": 4, "use_multi_query": True, **options}
    return in_stem(
        MobileAttention(16, 16, kv_stride=2, **shared),
        MobileAttention(16, 16, **shared),
        MobileAttention(16, 16, num_heads=4),
    )


def conv_attention(kind: type[nn.Module], strides: tuple[int, ...] = (2, 1), **options: object) -> HostAndInput:
    """Attention on coarser maps, from one of 4 x 6."""
    shared = {"head_dim_mul": 1.0, "att_kernel": 3, "fuse_out_proj": True, **options}
    return in_stem(nn.Conv2d(16, 64, 1), *(kind(64, att_stride=stride, **shared) for stride in strides))


def gcvit() -> HostAndInput:
    """Windows of 2 x 3 and 4 x 6; every second layer has queries of the whole image."""
    model = GlobalContextVit(img_size=(64, 96), embed_dim=8, depths=(2, 2, 2, 2), num_heads=(1, 2, 2, 2), num_classes=7)
    return sized(model, (64, 96)), torch.randn(3, 3, 64, 96)


def cascade() -> HostAndInput:
    """Windows of 3 x 3 on maps of 8 x 12, padded, then of 2 x 2; values are wider than keys."""
    options = {"embed_dim": (12, 16, 24), "key_dim": (4, 2, 4), "depth": (1, 1, 1), "num_heads": (2, 4, 3)}
    host = create_model("efficientvit_m0", None, img_size=128, window_size=(3, 2, 2), num_classes=7, **options)
    return sized(host, (128, 192)), torch.randn(3, 3, 128, 192)


def halonet(**options: object) -> HostAndInput:
    """Blocks of 2 x 2 with a border of one cell, on a map of 4 x 6: all queries, every second one, and their means."""
    shared = {"num_heads": 2, "dim_head": 4, "halo_size": 1, **options}
    return in_stem(
        HaloAttn(16, block_size=2, **shared),
        nn.Upsample(scale_factor=2),
        HaloAttn(16, block_size=4, stride=2, **shared),
        nn.Upsample(scale_factor=2),
        HaloAttn(16, 32, block_size=4, stride=2, avg_down=True, **shared),
    )


def botnet() -> HostAndInput:
    """A map of 4 x 6, whose output is pooled in the second layer."""
    shared = {"feat_size": (4, 6), "num_heads": 2, "dim_head": 4}
    return in_stem(BottleneckAttn(16, **shared), BottleneckAttn(16, 32, stride=2, **shared))


def gemma(name: str, **options: object) -> HostAndInput:
    """A map of 3 x 6 patches."""
    shared = {"embed_dim": 16, "depth": 2, "num_heads": 2, "head_dim": 8, "intermediate_size": 32}
    shared |= {"position_embedding_size": 16, "img_size": (48, 96)}
    return create_model(name, None, **shared, **options), torch.randn(3, 3, 48, 96)


def volo() -> HostAndInput:
    """Outlook attention on a map of 8 x 12, then attention on maps of 4 x 6."""
    options = {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (2, 4, 4, 4), "stem_hidden_dim": 8}
    return sized(VOLO(img_size=(64, 96), num_classes=7, **options), (64, 96)), torch.randn(3, 3, 64, 96)


def coat() -> HostAndInput:
    """Stages one after the other, then three at once; the convolutions of relative positions are shared by layers."""
    options = {"embed_dims": (16,) * 4, "serial_depths": (1,) * 4, "num_heads": 4, "crpe_window": {3: 2, 5: 1, 7: 1}}
    return rectangular("coat_tiny", parallel_depth=1, **options)


REINITIALISED_HOSTS: dict[str, Callable[[], HostAndInput]] = {
    "volo": volo,
    "coat": coat,
    "davit": lambda: davit(("spatial", "channel")),
    "davit of florence": lambda: davit(("spatial", "channel"), channel_attn_v2=True),
    "swiftformer": lambda: sizeless("swiftformer_xs", layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16)),
}
"""Families whose own attention no mechanism computes."""
TIMM_HOSTS: dict[str, Callable[[], HostAndInput]] = {
    "vit without bias of qkv": lambda: vit(1, qkv_bias=False),
    "vit without biases": lambda: vit(1, qkv_bias=False, proj_bias=False),
    "cait": lambda: two_layers("cait_xxs24_224"),
    "dinov3 with biases": lambda: two_layers("vit_small_patch16_dinov3_qkvb"),
    "pvt without reduction": lambda: pvt(1),
    "relpos": lambda: two_layers("vit_relpos_small_patch16_224"),
    "relpos with shared MLP": lambda: two_layers("vit_srelpos_small_patch16_224"),
    "relpos with MLP": lambda: two_layers("vit_relpos_base_patch32_plus_rpn_256", patch_size=16),
    "relpos with class token": lambda: two_layers("vit_relpos_base_patch16_clsgap_224"),
    "swinv2": lambda: swin_v2("swinv2_tiny_window8_256"),
    "swinv2 cr": lambda: swin_v2("swinv2_cr_tiny_ns_224"),
    "maxvit": lambda: maxvit("maxvit_tiny_tf_224"),
    "maxvit with bias": lambda: maxvit("maxvit_nano_rw_256"),
    "maxvit with MLP": lambda: maxvit("maxvit_rmlp_nano_rw_256"),
    "coatnet": lambda: coatnet("coatnet_0_224"),
    "coatnet with bias": lambda: coatnet("coatnet_bn_0_rw_224"),
    "coatnet with MLP": lambda: coatnet("coatnet_rmlp_nano_rw_224"),
    "fastvit": lambda: sizeless("fastvit_sa12", layers=(1, 1, 1, 1), embed_dims=(16, 16, 16, 32)),
    "visformer": lambda: rectangular("visformer_tiny", embed_dim=32, init_channels=8, num_heads=2, depth=(1, 1, 1)),
    # each stage has its own grid, and a class token
    "pit": lambda: rectangular("pit_ti_224", base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(2, 4, 8)),
    "rope without bias of qkv": lambda: two_layers("vit_mediumd_patch16_rope_reg1_gap_256"),
    "rope with halves": lambda: two_layers("qwen3_vit_88m"),
    "rope with halves and norm": lambda: two_layers("vit_base_patch16_sapiens2", num_kv_heads=2),
    "rope with halves, norm and groups": lambda: two_layers("vit_base_patch16_sapiens2", num_kv_heads=1),
    "eva with norm": lambda: two_layers("eva02_base_patch16_clip_224"),
    "vit with norm": lambda: two_layers("beit3_base_patch16_224"),
    "vit with gate": lambda: replaced_attention(Attention(32, 2, qkv_bias=True, gated=True)),
    # between the pixels at one place of all patches of 2 x 2; the last map of the first has an odd side
    "mobilevit": lambda: sizeless("mobilevit_xxs"),
    "mobilevitv2": lambda: sizeless("mobilevitv2_050", 64, 128),
    # in the last stage of convolutions, with heads of their own width
    "csatv2": lambda: sizeless(
        "csatv2", 128, 192, dims=(8, 16, 16, 16), depths=(1, 1, 1, 1), transformer_depths=(0, 0, 1, 1)
    ),
    # two branches with patches of 12 and 16 pixels
    "crossvit": lambda: sizeless(
        "crossvit_9_240", 120, 240, img_size=(120, 240), embed_dim=(16, 32), depth=((1, 2, 1),), num_heads=(2, 2)
    ),
    "naflexvit": naflexvit,
    "lowformer": lambda: conv_attention(LowFormerAttention),
    "cpubone": lambda: conv_attention(CPUBoneAttention, upsample_mode="nearest"),
    "cpubone with small kernels": lambda: conv_attention(
        CPUBoneAttention, (4, 1), upsample_mode="nearest", small_kernels=True
    ),
    "gcvit": gcvit,
    # windows of 3 x 3, padded, then global attention
    "sam": lambda: two_layers("samvit_base_patch16", window_size=3, global_attn_indexes=(1,)),
    # attention on a halved map in stage 3, on the map in stage 4, and with fewer queries between them
    "efficientformer_v2": lambda: rectangular(
        "efficientformerv2_s0", depths=(1, 1, 2, 2), embed_dims=(8, 8, 8, 16), num_vit=1, mlp_ratios=(2.0,) * 4
    ),
    # square images, as the pixels of a patch have no other shape
    "tnt": lambda: sizeless(
        "tnt_s_patch16_224", 64, 64, **SQUARE, embed_dim=32, inner_dim=8, num_heads_inner=2, num_heads_outer=2
    ),
    # one layer with gates, one without and with the class token; square images, as positions need
    "convit": lambda: sizeless("convit_tiny", 64, 64, **SQUARE, embed_dim=16, num_heads=2, local_up_to_layer=1),
    "efficientvit_msra": cascade,
    "differential": lambda: two_layers("vit_dlittle_patch16_reg1_gap_256"),
    "differential with two factors": lambda: replaced_attention(DiffAttention(32, 2, qkv_bias=True, dual_lambda=True)),
    "edgenext": lambda: sizeless(
        "edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), heads=(2, 2, 2, 2), ls_init_value=0.1
    ),
    "halonet": halonet,
    "halonet with scaled biases": lambda: halonet(scale_pos_embed=True, qkv_bias=True),
    "botnet": botnet,
    "gemma": lambda: gemma("gemma4_vit_167m", num_classes=7),
    "gemma with soft tokens and groups": lambda: gemma("gemma4_vit_570m_enc", num_kv_heads=1),
    "davit": davit,
    "twins": lambda: twins("twins_pcpvt_small"),
    "twins with windows": lambda: twins("twins_svt_small"),
    "nest": nest,
    # units, or windows, of two sizes, then global attention; queries are pooled between stages
    "hiera": lambda: rectangular(
        "hiera_tiny_224",
        embed_dim=8,
        stages=(1, 2, 2),
        q_pool=2,
        mask_unit_size=(4, 4),
        mask_unit_attn=(True, True, False),
    ),
    "hieradet": lambda: sizeless(
        "hieradet_small", embed_dim=8, stages=(1, 1, 2), q_pool=2, window_spec=(4, 2, 3), global_att_blocks=(3,)
    ),
    "mvitv2": mvitv2,
    "mvitv2 with class token": lambda: mvitv2(use_cls_token=True),
    "nextvit": nextvit,
    "mobilenetv4": mobilenetv4,
    "mobilenetv5": lambda: mobilenetv4(norm_layer=RmsNorm2d),
    "levit": lambda: levit("levit_128s"),
    "levit with convolutions": lambda: levit("levit_conv_128s"),
    # windows of 4 x 4, then of 3 x 3
    "tiny_vit": lambda: sizeless(
        "tiny_vit_5m_224", embed_dims=(8, 16, 32), depths=(1, 1, 1), num_heads=(1, 2, 4), window_sizes=(4, 4, 3)
    ),
    "efficientformer": lambda: sizeless(
        "efficientformer_l1", 224, 224, depths=(1, 1, 1, 2), embed_dims=(8, 8, 16, 16), num_vit=1
    ),
    "naflexvit with rope": lambda: naflexvit(rope_type="axial"),
}
"""Further families of timm, each option of their attention once; images of 64 x 96 pixels."""
