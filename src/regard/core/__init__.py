"""Words that every layer of Regard speaks; imports torch and jaxtyping only."""

from .card import Card
from .cost import Cost, attend, linear
from .errors import (
    ConfigError,
    DataError,
    GridError,
    MissingExtra,
    RegardError,
    ShapeError,
    StoreError,
    SwapError,
    UnsupportedError,
    nearest,
)
from .grid import Grid
from .mask import NOTHING, Mask, softmax_rows
from .mixer import Mixer, MixerConfig, Operator, refuse_masks
from .projection import Projection, ProjectionConfig, heads, merge
from .site import Site

__all__ = [
    "NOTHING",
    "Card",
    "ConfigError",
    "Cost",
    "DataError",
    "Grid",
    "GridError",
    "Mask",
    "MissingExtra",
    "Mixer",
    "MixerConfig",
    "Operator",
    "Projection",
    "ProjectionConfig",
    "RegardError",
    "ShapeError",
    "Site",
    "StoreError",
    "SwapError",
    "UnsupportedError",
    "attend",
    "heads",
    "linear",
    "merge",
    "nearest",
    "refuse_masks",
    "softmax_rows",
]
