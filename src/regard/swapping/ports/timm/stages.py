"""Ports of timm's XCiT, EdgeNeXt and CAFormer, which need no code of their own."""

from typing import ClassVar

from timm.models.edgenext import CrossCovarianceAttn
from timm.models.metaformer import Attention as MetaFormerAttention
from timm.models.xcit import XCA as XCiTAttention

from regard.swapping.layer import Port


class TimmXCiT(Port):
    """The cross-covariance blocks of XCiT and EdgeNeXt; XCiT's two class-attention blocks are left unchanged."""

    replaces: ClassVar[tuple[type, ...]] = (XCiTAttention, CrossCovarianceAttn)
    watch = "patch_embed.proj|convs.0"
    parameter_names = {"temperature": "operator.temperature"}


class TimmMetaFormer(Port):
    """The attention of CAFormer; each stage has its own grid."""

    replaces: ClassVar[tuple[type, ...]] = (MetaFormerAttention,)
    watch = "downsample"


PORTS: tuple[type[Port], ...] = (TimmXCiT, TimmMetaFormer)
