"""Port of the DINOv2 of RF-DETR, whose tokens stay in windows, each with a class token of its own."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Grid, GridError, UnsupportedError
from regard.swapping.layer import library_mask

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
        windows = math.isqrt(self.prefix)
        return in_windows(self.mixer(as_map(hidden_states, windows), grid), windows), None


def _of_tokens(patches: Grid, tokens: int, prefix: int) -> Grid:
    """The square grid of these tokens, of which `prefix` are class tokens. Raises: GridError if the image is none."""
    side = math.isqrt(tokens - prefix)
    if patches.height != patches.width or side**2 != tokens - prefix:
        raise GridError(
            "transformers puts the windows of RF-DETR right for square images only, and these have "
            f"{patches.height}x{patches.width} patches: resize or pad them"
        )
    return Grid(side, side, prefix)


def as_map(x: Tensor, windows: int) -> Tensor:
    """Class tokens of all windows, then patches row by row, from (B, windows^2 (1 + cells), C), window by window."""
    x = x.unflatten(1, (windows, windows, -1))
    side = math.isqrt(x.shape[3] - 1)
    patches = x[..., 1:, :].unflatten(3, (side, side)).transpose(2, 3)
    return torch.cat([x[..., 0, :].flatten(1, 2), patches.flatten(1, 4)], dim=1)


def in_windows(x: Tensor, windows: int) -> Tensor:
    """The reverse of `as_map`."""
    classes, patches = x.split([windows**2, x.shape[1] - windows**2], dim=1)
    side = math.isqrt(patches.shape[1]) // windows
    patches = patches.unflatten(1, (windows, side, windows, side)).transpose(2, 3).flatten(3, 4)
    return torch.cat([classes.unflatten(1, (windows, windows)).unsqueeze(3), patches], dim=3).flatten(1, 3)
