"""Ports of MONAI's attention in volumes and images: ViT and UNETR, and the windows of SwinUNETR."""

import math
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, Mask, Site, SwapError
from regard.swapping.biases import mix_windows
from regard.swapping.grid_source import watched_module
from regard.swapping.layer import Port

from .torchvision import TorchvisionSwin

_STAGES = 6
"""Of a SwinUNETR, and some more."""


class MonaiAttention(Port):
    """SABlock: MONAI's ViT, ViTAutoEnc and UNETR, on images and volumes that a convolution cuts into patches."""

    class_paths = frozenset({"monai.networks.blocks.selfattention.SABlock"})
    watch = "patch_embedding.patch_embeddings"
    parameter_names = {"out_proj": "proj", "drop_output": "proj_drop"}
    dropouts = ("drop_weights",)

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        return isinstance(watched_module(model, name, cls.watch), nn.Conv2d | nn.Conv3d)

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        if module.causal or module.rel_positional_embedding is not None:
            return "it is causal, or adds position biases that depend on the queries"
        return (
            "" if module.include_fc and module.use_combined_linear else "it has separate maps of q, k, v, or no output"
        )

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return replace(super().site(module, grid, name, layer), drop=module.drop_output.p)

    def forward(self, x: Float[Tensor, "B N C"], attn_mask: Tensor | None = None) -> Float[Tensor, "B N C"]:
        """attn_mask: (B, N), 0 for keys that are hidden."""
        return self.mixer(x, self.grid(), None if attn_mask is None else Mask(keep=attn_mask != 0))


class MonaiSwin(TorchvisionSwin):
    """SwinUNETR's attention in windows, in two or three dimensions; position biases and shift masks are kept."""

    class_paths = frozenset({"monai.networks.nets.swin_unetr.WindowAttention"})
    watch = "patch_embed.proj"
    dropouts = ("attn_drop",)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return replace(super().site(module, grid, name, layer), drop=module.proj_drop.p)

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        """The window, which is not larger than its map: that of the patches, halved some times along each side.

        Raises: SwapError for tokens of no such map.
        """
        window, tokens = tuple(module.window_size), inputs[0].shape[1]
        first = (watched.depth, watched.height, watched.width)[-len(window) :] if watched is not None else window
        for halved in range(_STAGES):
            sides = tuple(min(full, -(-side // 2**halved)) for full, side in zip(window, first, strict=True))
            if math.prod(sides) == tokens:
                return Grid(*sides[-2:], depth=sides[0] if len(sides) == 3 else 1)
        raise SwapError(f"{tokens} tokens are no window of {'x'.join(map(str, window))} on a map of these patches")

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "B N C"], mask: Float[Tensor, "W N N"] | None = None
    ) -> Float[Tensor, "B N C"]:
        return mix_windows(self.mixer, x, self.call_grid(self.host, (x,), self.source.grid(0)), mask)


PORTS: tuple[type[Port], ...] = (MonaiAttention, MonaiSwin)
