"""Ports of timm's PVTv2, and of the global attention of Twins."""

from typing import Any, ClassVar

from timm.models.pvt_v2 import Attention as PVTAttention
from timm.models.twins import GlobalSubSampleAttn
from torch import Tensor

from regard.core import Grid
from regard.swapping.layer import Port


class TimmPVT(Port):
    """PVTv2, each stage with its own grid. `PVT` of the same ratio keeps the convolutions that reduce the keys."""

    replaces: ClassVar[tuple[type, ...]] = (PVTAttention,)
    watch = "downsample.proj|patch_embed.proj"
    parameter_names = {"q": "qkv.q", "kv": "qkv.kv", "sr": "operator.reduce", "norm": "operator.norm"}

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        height, width = feat_size
        return self.mixer(x, Grid(height, width))


class TimmTwins(TimmPVT):
    """The global attention of Twins. `PVT` of the same ratio keeps the convolutions that reduce the keys."""

    replaces: ClassVar[tuple[type, ...]] = (GlobalSubSampleAttn,)
    watch = ""

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        return Grid(*inputs[1])


PORTS: tuple[type[Port], ...] = (TimmPVT, TimmTwins)
