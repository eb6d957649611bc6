"""Ports of timm's attention in windows without biases: DaViT, Twins and NesT."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from timm.models.davit import WindowAttention
from timm.models.nest import Attention as NestAttention
from timm.models.twins import LocallyGroupedAttn
from torch import Tensor, nn

from regard.core import Grid, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadLayer
from regard.swapping.layer import Port


class TimmDaViT(Port):
    """DaViT's attention in windows; its channel attention, which has no tokens as keys, has a port of its own."""

    replaces: ClassVar[tuple[type, ...]] = (WindowAttention,)
    windows = "window_size"


class TimmTwinsLocal(TimmDaViT):
    """The attention of Twins in windows, which pads the map to whole windows."""

    replaces: ClassVar[tuple[type, ...]] = (LocallyGroupedAttn,)

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        return Grid(module.ws, module.ws)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        grid = self.grid()
        return in_windows(x.unflatten(1, tuple(size)), grid.height, lambda cells: self.mixer(cells, grid)).flatten(1, 2)


def in_windows(x: Tensor, side: int, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of tokens (B, side^2, C) in each window of a map (B, h, w, C), which is padded by zeros."""
    height, width = x.shape[1:3]
    padded = F.pad(x, (0, 0, 0, -width % side, 0, -height % side))
    rows, columns = padded.shape[1] // side, padded.shape[2] // side
    windows = padded.unflatten(2, (columns, side)).unflatten(1, (rows, side)).transpose(2, 3)
    y = apply(windows.flatten(3, 4).flatten(0, 2)).unflatten(0, (-1, rows, columns)).unflatten(3, (side, side))
    return y.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :height, :width]


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
