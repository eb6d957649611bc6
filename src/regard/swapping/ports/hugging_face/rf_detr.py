"""Ports of the backbones of RF-DETR and LW-DETR, whose tokens stay in windows in all layers."""

import math
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import Grid, GridError, UnsupportedError
from regard.swapping.layer import Port, library_mask
from regard.swapping.map_windows import MapWindows

from .base import Answer, refuse_weights
from .vit import HuggingViT


class HuggingRFDETR(HuggingViT):
    """The DINOv2 of RF-DETR, each window with a class token; in layers over all windows, tokens in the map's order."""

    class_paths = frozenset({"rf_detr.modeling_rf_detr.RfDetrDinov2Attention"})

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        windows, tokens, patches = module.config.num_windows, inputs[0].shape[1], cast(Grid, watched)
        if windows == 1:
            return super().call_grid(module, inputs, watched)
        in_window = tokens == patches.cells // windows**2 + 1
        return _of_tokens(patches, tokens, 1 if in_window else windows**2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Answer:
        """As in `HuggingViT`, without masks. Raises: GridError for images that are not square."""
        if self.host.config.num_windows == 1:  # type: ignore[union-attr]
            return super().forward(hidden_states, attention_mask, **kwargs)
        refuse_weights(kwargs.get("output_attentions"))
        _refuse_mask(attention_mask, kwargs, hidden_states)
        grid = _of_tokens(self.grid(), hidden_states.shape[1], self.prefix)
        if self.prefix == 1:
            return self.mixer(hidden_states, grid), None
        windows = windows_of(grid, math.isqrt(grid.prefix))
        return by_window(self.mixer(row_by_row(hidden_states, windows, 1), grid), windows, 1), None


class HuggingLWDETR(HuggingViT):
    """The ViT of LW-DETR, without class tokens; in layers over all windows, tokens in the map's order."""

    class_paths = frozenset({"lw_detr.modeling_lw_detr.LwDetrViTAttention"})
    watch = "embeddings.projection"

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        patches = cast(Grid, watched)
        if inputs[0].shape[1] == patches.cells:
            return patches
        return Grid(*windows_of(patches, module.config.num_windows_side).size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Answer:
        """As in `HuggingViT`, without masks."""
        refuse_weights(kwargs.get("output_attentions"))
        _refuse_mask(attention_mask, kwargs, hidden_states)
        grid = self.grid()
        host: Any = self.host
        windows = windows_of(grid, host.config.num_windows_side)
        if hidden_states.shape[1] != grid.cells:
            return self.mixer(hidden_states, Grid(*windows.size)), None
        return by_window(self.mixer(row_by_row(hidden_states, windows, 0), grid), windows, 0), None


def _refuse_mask(attention_mask: Tensor | None, kwargs: dict[str, Any], x: Tensor) -> None:
    """Raises: UnsupportedError for a mask."""
    if library_mask(attention_mask, bool(kwargs.get("is_causal", False)), x) is not None:
        raise UnsupportedError("a swapped RF-DETR or LW-DETR takes no attention mask: leave it out")


def _of_tokens(patches: Grid, tokens: int, prefix: int) -> Grid:
    """The square grid of these tokens, of which `prefix` are class tokens. Raises: GridError if the image is none."""
    side = math.isqrt(tokens - prefix)
    if patches.height != patches.width or side**2 != tokens - prefix:
        raise GridError(
            "transformers puts the windows of RF-DETR right for square images only, and these have "
            f"{patches.height}x{patches.width} patches: resize or pad them"
        )
    return Grid(side, side, prefix)


def windows_of(grid: Grid, side: int) -> MapWindows:
    """`side` x `side` windows of a grid."""
    size = (grid.height // side, grid.width // side)
    return MapWindows(sides=grid.sides, size=size, shift=(0, 0))


def row_by_row(x: Float[Tensor, "B N C"], windows: MapWindows, classes: int) -> Float[Tensor, "B N C"]:
    """Class tokens of all windows, then patches row by row, from windows with `classes` class tokens before theirs."""
    parts = x.unflatten(1, (-1, classes + math.prod(windows.size)))
    patches = windows.join(parts[:, :, classes:].flatten(0, 1))
    return torch.cat([parts[:, :, :classes].flatten(1, 2), patches.flatten(1, 2)], dim=1)


def by_window(x: Float[Tensor, "B N C"], windows: MapWindows, classes: int) -> Float[Tensor, "B N C"]:
    """The inverse of `row_by_row`."""
    cells = math.prod(windows.sides)
    first, patches = x.split([x.shape[1] - cells, cells], dim=1)
    cut = windows.cut(patches.unflatten(1, windows.sides))
    cut = cut.unflatten(0, (x.shape[0], -1))
    return torch.cat([first.unflatten(1, (cut.shape[1], classes)), cut], dim=2).flatten(1, 2)


PORTS: tuple[type[Port], ...] = (HuggingLWDETR, HuggingRFDETR)
