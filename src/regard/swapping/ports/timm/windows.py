"""Ports of timm's attention in windows without biases: DaViT, Twins and NesT."""

import math
from typing import Any, ClassVar

from timm.models.davit import WindowAttention
from timm.models.nest import Attention as NestAttention
from timm.models.twins import LocallyGroupedAttn
from torch import Tensor, nn

from regard.core import Grid, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadLayer
from regard.swapping.layer import Port
from regard.swapping.map_windows import MapWindows


class TimmDaViT(Port):
    """DaViT's attention in windows; its channel attention, which has no tokens as keys, has a port of its own."""

    replaces: ClassVar[tuple[type, ...]] = (WindowAttention,)
    windows = "window_size"


class TimmTwinsLocal(TimmDaViT):
    """The attention of Twins in windows, which pads the map to whole windows."""

    replaces: ClassVar[tuple[type, ...]] = (LocallyGroupedAttn,)
    windows = "ws"

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        grid = self.grid()
        windows = MapWindows(sides=tuple(size), size=grid.sides, shift=(0, 0))
        return windows.join(self.mixer(windows.cut(x.unflatten(1, windows.sides)), grid)).flatten(1, 2)


class TimmNesT(Port):
    """NesT: an image in blocks (B, blocks, N, C); its output projection takes heads in another order."""

    replaces: ClassVar[tuple[type, ...]] = (NestAttention,)

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        side = math.isqrt(inputs[0].shape[2])  # blocks are square
        return Grid(side, side)

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if isinstance(mixer, HeadLayer):
            mixer.proj = WidthFirst(mixer.proj, mixer.site.heads)
        return mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x.flatten(0, 1), self.grid(x)).unflatten(0, x.shape[:2])


class WidthFirst(nn.Linear):
    """A linear map of joined heads (..., heads * width) that orders them (..., width * heads) first."""

    def __init__(self, linear: nn.Linear, heads: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(-1, (self.heads, -1)).mT.flatten(-2))


PORTS: tuple[type[Port], ...] = (TimmTwinsLocal, TimmDaViT, TimmNesT)
