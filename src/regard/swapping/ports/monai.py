"""Ports of MONAI's attention in volumes and images: ViT and UNETR, and the windows of SwinUNETR.

They match by the paths of the classes, so that MONAI need not be imported.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, Mask, Site, SwapError
from regard.swapping.biases import mix_windows
from regard.swapping.grid_source import watched_module
from regard.swapping.layer import Port

from .torchvision import TorchvisionSwin


def _is(module: nn.Module, path: str) -> bool:
    return f"{type(module).__module__}.{type(module).__qualname__}" == f"monai.networks.{path}"


class MonaiAttention(Port):
    """SABlock: MONAI's ViT, ViTAutoEnc and UNETR, on images and volumes that a convolution cuts into patches."""

    watch = "patch_embedding.patch_embeddings"
    parameter_names = {"out_proj": "proj"}

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _is(module, "blocks.selfattention.SABlock")

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
    def weights_dropout(cls, module: Any) -> float:
        return float(module.drop_weights.p)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return replace(super().site(module, grid, name, layer), drop=module.drop_output.p)

    def forward(self, x: Float[Tensor, "B N C"], attn_mask: Tensor | None = None) -> Float[Tensor, "B N C"]:
        """attn_mask: (B, N), 0 for keys that are hidden."""
        return self.mixer(x, self.grid(), None if attn_mask is None else Mask(keep=attn_mask != 0))


class MonaiSwin(TorchvisionSwin):
    """SwinUNETR's attention in windows, in two or three dimensions; position biases and shift masks are kept."""

    replaces: ClassVar[tuple[type, ...]] = ()

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _is(module, "nets.swin_unetr.WindowAttention")

    @classmethod
    def weights_dropout(cls, module: Any) -> float:
        return float(module.attn_drop.p)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return replace(super().site(module, grid, name, layer), drop=module.proj_drop.p)

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        """Raises: SwapError where a map is smaller than the windows along some sides only, which tokens do not tell."""
        sides, tokens = tuple(module.window_size), inputs[0].shape[1]
        if tokens != math.prod(sides):
            side = round(tokens ** (1 / len(sides)))
            if side ** len(sides) != tokens:
                raise SwapError(
                    f"windows of {'x'.join(map(str, sides))} are cut to {tokens} tokens by a small map: give an input "
                    "that is as large along all sides, or larger"
                )
            sides = (side,) * len(sides)
        depth = sides[0] if len(sides) == 3 else 1
        return Grid(*sides[-2:], depth=depth)

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "B N C"], mask: Float[Tensor, "W N N"] | None = None
    ) -> Float[Tensor, "B N C"]:
        return mix_windows(self.mixer, x, self.call_grid(self.host, (x,), None), mask)


PORTS: tuple[type[Port], ...] = (MonaiAttention, MonaiSwin)
