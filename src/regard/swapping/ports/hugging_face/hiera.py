"""Port of transformers' Hiera, whose tokens are ordered by offset inside of mask units, not row by row."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, GridError, Mixer, MixerConfig, Site
from regard.swapping.special_mixers import PooledMixer, pooled_mixer

from .base import HuggingPort, refuse_weights

STRIDE = 2
"""Cells along a side that one level joins to a larger cell."""


class HuggingHiera(HuggingPort):
    """Hiera, in mask units and global; layers that pool their queries take mechanisms that have cross-attention."""

    class_paths: ClassVar[frozenset[str]] = frozenset({"hiera.modeling_hiera.HieraMaskUnitAttention"})
    watch: ClassVar[str] = "embeddings.patch_embeddings.projection"
    routed: ClassVar[bool] = False

    @classmethod
    def refusal(cls, module: Any) -> str:
        if module.query_stride not in (1, STRIDE**2) or STRIDE ** (2 * _levels(module)) != _unit(module):
            return "its mask units are not squares of 2, 4, 8, ... cells, pooled by 2 x 2"
        return ""

    @classmethod
    def host_grid(cls, module: Any) -> Grid | None:
        side = STRIDE ** _levels(module)
        return Grid(side, side) if module.use_mask_unit_attn else None

    @classmethod
    def token_grid(cls, module: Any, patches: Grid, shape: torch.Size, name: str) -> Grid:
        height, width = _units(patches, shape[1], _unit(module))
        side = STRIDE ** _levels(module)
        return Grid(height * side, width * side)

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        host: Any = self.host
        mixer, side = super().build_mixer(config, site, shared), STRIDE if host.query_stride > 1 else 1
        return pooled_mixer(mixer, host.hidden_size_output, (side, side), shared)

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, None]:
        """Raises: UnsupportedError for output_attentions; GridError for tokens that were dropped in a global layer."""
        refuse_weights(output_attentions)
        levels, unit = _levels(self.host), _unit(self.host)
        units = hidden_states.shape[1] // unit
        if self.host.use_mask_unit_attn:
            x = hidden_states.unflatten(1, (unit, units)).transpose(1, 2).flatten(0, 1)
            return self._mix(x, levels, (1, 1)).unflatten(0, (-1, units)).transpose(1, 2).flatten(1, 2), None
        return self._mix(hidden_states, levels, _units(self.source.grid(0), hidden_states.shape[1], unit)), None

    def _mix(self, x: Float[Tensor, "B N C"], levels: int, units: tuple[int, int]) -> Float[Tensor, "B n D"]:
        side = STRIDE**levels
        out = self.mixer(row_by_row(x, levels, units), Grid(units[0] * side, units[1] * side))
        return by_offset(out, levels - (isinstance(self.mixer, PooledMixer) and self.mixer.stride != (1, 1)), units)


def _unit(module: Any) -> int:
    """Tokens of a mask unit at a layer, before its pooling."""
    return module.query_stride * module.window_size


def _units(patches: Grid, tokens: int, unit: int) -> tuple[int, int]:
    """Mask units down and across. Raises: GridError if some were dropped."""
    height, width = patches.height, patches.width
    while height * width * unit > tokens:
        height, width = height // STRIDE, width // STRIDE
    if height * width * unit != tokens:
        raise GridError(f"{tokens} tokens are not all cells of {patches}: a global layer needs whole images")
    return height, width


def _levels(module: Any) -> int:
    """How many times a mask unit of the layer can be pooled."""
    return (_unit(module).bit_length() - 1) // 2


def row_by_row(x: Float[Tensor, "B N C"], levels: int, units: tuple[int, int]) -> Float[Tensor, "B N C"]:
    """Tokens in the order of offsets (2, 2) of each level, the finest first, then units -> row by row."""
    offsets = [STRIDE] * (2 * levels)
    rows = [2 * levels + 1, *range(2 * levels - 1, 0, -2)]  # the unit, then offsets from the coarsest to the finest
    columns = [2 * levels + 2, *range(2 * levels, 0, -2)]
    return x.unflatten(1, (*offsets, *units)).permute(0, *rows, *columns, 2 * levels + 3).flatten(1, -2)


def by_offset(x: Float[Tensor, "B N C"], levels: int, units: tuple[int, int]) -> Float[Tensor, "B N C"]:
    """The inverse of `row_by_row`."""
    offsets = [STRIDE] * levels
    x = x.unflatten(1, (units[0], *offsets, units[1], *offsets))
    rows, columns = range(levels + 1, 1, -1), range(2 * levels + 2, levels + 2, -1)
    pairs = [axis for pair in zip(rows, columns, strict=True) for axis in pair]
    return x.permute(0, *pairs, 1, levels + 2, 2 * levels + 3).flatten(1, -2)
