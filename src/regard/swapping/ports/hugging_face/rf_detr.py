"""Port of the DINOv2 of RF-DETR, whose tokens stay in windows, each with a class token of its own."""

import math
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import Grid, GridError, UnsupportedError
from regard.swapping.layer import library_mask
from regard.swapping.map_windows import MapWindows

from .base import refuse_weights
from .vit import HuggingViT


class HuggingRFDETR(HuggingViT):
    """The DINOv2 of RF-DETR: in a window, or in all of them, whose tokens are brought into the order of the map."""

    class_paths: ClassVar[frozenset[str]] = frozenset({"rf_detr.modeling_rf_detr.RfDetrDinov2Attention"})

    @classmethod
    def token_grid(cls, module: Any, patches: Grid, shape: torch.Size, name: str) -> Grid:
        windows = module.config.num_windows
        if windows == 1:
            return super().token_grid(module, patches, shape, name)
        in_window = shape[1] == patches.cells // windows**2 + 1
        return _of_tokens(patches, shape[1], 1 if in_window else windows**2)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As in `HuggingViT`, without masks. Raises: GridError for images that are not square."""
        if self.host.config.num_windows == 1:  # type: ignore[union-attr]
            return super().forward(hidden_states, attention_mask, **kwargs)
        refuse_weights(kwargs.get("output_attentions"))
        if library_mask(attention_mask, bool(kwargs.get("is_causal", False)), hidden_states) is not None:
            raise UnsupportedError("a swapped RF-DETR takes no attention mask: leave it out")
        grid = _of_tokens(self.grid(), hidden_states.shape[1], self.prefix)
        if self.prefix == 1:
            return self.mixer(hidden_states, grid), None
        return by_window(self.mixer(row_by_row(hidden_states, grid), grid), grid), None


def _of_tokens(patches: Grid, tokens: int, prefix: int) -> Grid:
    """The square grid of these tokens, of which `prefix` are class tokens. Raises: GridError if the image is none."""
    side = math.isqrt(tokens - prefix)
    if patches.height != patches.width or side**2 != tokens - prefix:
        raise GridError(
            "transformers puts the windows of RF-DETR right for square images only, and these have "
            f"{patches.height}x{patches.width} patches: resize or pad them"
        )
    return Grid(side, side, prefix)


def row_by_row(x: Float[Tensor, "B N C"], grid: Grid) -> Float[Tensor, "B N C"]:
    """Class tokens of all windows, then patches row by row, from windows that each have a class token first."""
    parts = x.unflatten(1, (grid.prefix, -1))
    patches = _windows(grid).join(parts[:, :, 1:].flatten(0, 1))
    return torch.cat([parts[:, :, 0], patches.flatten(1, 2)], dim=1)


def by_window(x: Float[Tensor, "B N C"], grid: Grid) -> Float[Tensor, "B N C"]:
    """The inverse of `row_by_row`."""
    classes, patches = x.split([grid.prefix, grid.cells], dim=1)
    cut = _windows(grid).cut(patches.unflatten(1, (grid.height, grid.width)))
    return torch.cat([classes[:, :, None], cut.unflatten(0, (-1, grid.prefix))], dim=2).flatten(1, 2)


def _windows(grid: Grid) -> MapWindows:
    """As many windows as the grid has class tokens."""
    side = grid.height // math.isqrt(grid.prefix)
    return MapWindows(height=grid.height, width=grid.width, size=(side, side), shift=(0, 0))
