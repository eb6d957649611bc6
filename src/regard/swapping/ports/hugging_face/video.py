"""Ports of video models of transformers that need more than a grid of several frames: V-JEPA 2 and TimeSformer."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import Grid, Site, SwapError, UnsupportedError
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import SHORT_MATRICES

from .base import Answer, HuggingPort, refuse_weights


class HuggingVJEPA2(HuggingPort):
    """The encoder of V-JEPA 2, with its rotary positions over frames, rows and columns; the predictor stays."""

    class_paths = frozenset({"vjepa2.modeling_vjepa2.VJEPA2RopeAttention"})
    watch = "embeddings.patch_embeddings.proj"
    only_watched = True  # the predictor's tokens are chosen ones
    rotary = True
    parameter_names = SHORT_MATRICES

    def forward(self, hidden_states: Tensor, position_mask: Tensor | None = None) -> Answer:
        """Raises: UnsupportedError for chosen tokens, which lie on no grid."""
        if position_mask is not None:
            raise UnsupportedError("a swapped V-JEPA 2 takes all tokens of its clips: leave position_mask out")
        return self.mix(hidden_states, None, self.rope(hidden_states), {})

    def rope(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "N d2"]:
        """Sines and cosines of the host's angles: a third of the channels for each axis, the rest is not turned."""
        host = cast(Any, self.host)
        sines = tokens.new_zeros(tokens.shape[1], host.attention_head_size)
        cosines, start = torch.ones_like(sines), 0
        for place, size in zip(host.get_position_ids(tokens), (host.d_dim, host.h_dim, host.w_dim), strict=True):
            exponents = torch.arange(size // 2, dtype=tokens.dtype, device=tokens.device) / (size / 2)
            angles = (place[:, None] * (1.0 / 10000**exponents)).repeat(1, 2)
            sines[:, start : start + size], cosines[:, start : start + size] = angles.sin(), angles.cos()
            start += size
        return torch.cat([sines, cosines], -1)


class HuggingTimeSformer(HuggingPort):
    """TimeSformer, whose layers attend in time (to the frames of a place) or in space (to the places of a frame)."""

    class_paths = frozenset({"timesformer.modeling_timesformer.TimeSformerAttention"})
    routed = False
    watch = "embeddings.patch_embeddings.projection"
    parameter_names = {"attention.qkv": "qkv", "output.dense": "proj"}

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        """Raises: SwapError for attention to all places of all frames together."""
        tokens = inputs[0].shape[1]
        if watched is not None and tokens > watched.cells + 1 and (tokens - 1) % watched.cells == 0:
            raise SwapError(
                "its tokens are sorted by place, then by frame; take a model with attention_type='divided_space_time'"
            )
        if watched is None or tokens < watched.cells:
            return Grid.sequence(tokens)
        return super().call_grid(module, inputs, watched)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        grid = Grid.sequence(grid.tokens) if _in_time(name) else grid
        return super().site(module, grid, name, layer)

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor]:
        """Raises: UnsupportedError for output_attentions."""
        refuse_weights(output_attentions)
        in_time = _in_time(self.mixer.site.name)
        return (self.mixer(hidden_states, Grid.sequence(hidden_states.shape[1]) if in_time else self.grid()),)


def _in_time(name: str) -> bool:
    return name.endswith("temporal_attention")


PORTS: tuple[type[Port], ...] = (HuggingVJEPA2, HuggingTimeSformer)
