"""Words that every layer of Regard speaks; imports torch and jaxtyping only, and these when a name first needs them.

Errors, cards and costs are plain Python: the command line and the reports use them without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .card import Card
from .contract import Contract
from .cost import Cost, attend, check_accounting, linear
from .errors import (
    ConfigError,
    DataError,
    DeviceError,
    GridError,
    MissingExtra,
    RegardError,
    ShapeError,
    StoreError,
    SwapError,
    UnsupportedError,
    nearest,
)

if TYPE_CHECKING:
    from .grid import Grid
    from .mask import NOTHING, Mask, hide, only_kept, softmax_rows
    from .mixer import Inputs, Mixer, MixerConfig, Operator, refuse_masks
    from .projection import Projection, ProjectionConfig, heads, merge
    from .site import Site

# name -> the module that has it, for names that need torch
_HOMES = {
    "Grid": "grid",
    **dict.fromkeys(("NOTHING", "Mask", "hide", "only_kept", "softmax_rows"), "mask"),
    **dict.fromkeys(("Inputs", "Mixer", "MixerConfig", "Operator", "refuse_masks"), "mixer"),
    **dict.fromkeys(("Projection", "ProjectionConfig", "heads", "merge"), "projection"),
    "Site": "site",
}

__all__ = [
    "NOTHING",
    "Card",
    "ConfigError",
    "Contract",
    "Cost",
    "DataError",
    "DeviceError",
    "Grid",
    "GridError",
    "Inputs",
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
    "check_accounting",
    "heads",
    "hide",
    "linear",
    "merge",
    "nearest",
    "only_kept",
    "refuse_masks",
    "softmax_rows",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'regard.core' has no attribute {name!r}")
    value = getattr(import_module(f"regard.core.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
