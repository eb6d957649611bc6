"""Types that every layer uses: Grid, Mask, Site, Cost, Card, Mixer, Operator, Projection, and the errors.

Errors, cards and costs are plain Python, so that the command line and the reports use them without torch; a name that
needs torch or jaxtyping imports it when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .card import Card
from .contract import Contract
from .cost import Cost, attention_cost, check_accounting, linear_cost
from .errors import (
    ConfigError,
    DataError,
    DataProblems,
    DeviceError,
    GridError,
    MissingExtra,
    NetworkError,
    Problems,
    RegardError,
    ShapeError,
    StoreError,
    SwapError,
    UnsupportedError,
    check_known,
    nearest,
    require,
)
from .extra import Extra

if TYPE_CHECKING:
    from .grid import Grid
    from .mask import NO_MASK, Mask, hide, only_kept, softmax_rows
    from .mixer import Inputs, Mixer, MixerConfig, Operator, refuse_masks
    from .projection import Projection, ProjectionConfig, heads, merge
    from .site import Site
    from .tensors import operator_function

# name -> its module, for names that need torch
_MODULES = {
    "Grid": "grid", **dict.fromkeys(("NO_MASK", "Mask", "hide", "only_kept", "softmax_rows"), "mask"),
    **dict.fromkeys(("Inputs", "Mixer", "MixerConfig", "Operator", "refuse_masks"), "mixer"),
    **dict.fromkeys(("Projection", "ProjectionConfig", "heads", "merge"), "projection"), "Site": "site",
    "operator_function": "tensors",
}  # fmt: skip

__all__ = [
    "NO_MASK", "Card", "ConfigError", "Contract", "Cost", "DataError", "DataProblems", "DeviceError", "Extra", "Grid",
    "GridError", "Inputs", "Mask", "MissingExtra", "Mixer", "MixerConfig", "NetworkError", "Operator", "Problems",
    "Projection", "ProjectionConfig", "RegardError", "ShapeError", "Site", "StoreError", "SwapError",
    "UnsupportedError", "attention_cost", "check_accounting", "check_known", "heads", "hide", "linear_cost", "merge",
    "nearest", "only_kept", "operator_function", "refuse_masks", "require", "softmax_rows",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'regard.core' has no attribute {name!r}")
    value = getattr(import_module(f"regard.core.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
