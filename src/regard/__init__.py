"""Regard: attention in vision, every mechanism in every model, compared fairly.

Names are imported when they are first used, so that `import regard` and the command line's help do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from regard import ops as ops
    from regard import testing as testing
    from regard.lab.study import Claim as Claim
    from regard.lab.study import Row as Row
    from regard.lab.study import Study as Study
    from regard.mixers.shared.heads import HeadMixerConfig as HeadMixerConfig
    from regard.mixers.spelling import parse as parse
    from regard.mixers.spelling import spell as spell
    from regard.mixers.static_keys.keys import calibrate as calibrate
    from regard.mixers.static_keys.keys import freeze_keys as freeze_keys
    from regard.models.catalog import list_models as list_models
    from regard.models.resnet import attend as attend
    from regard.models.saving import save as save
    from regard.store.results import Results as Results
    from regard.swapping.capture import capture as capture
    from regard.swapping.swap import create_model as create_model
    from regard.swapping.swap import plan_swap as plan_swap
    from regard.swapping.swap import remove as remove
    from regard.swapping.swap import restore as restore
    from regard.swapping.swap import retune as retune
    from regard.swapping.swap import swap as swap
    from regard.train.load import load as load
    from regard.train.optimizer import param_groups as param_groups
    from regard.train.recipe import Recipe as Recipe
    from regard.train.run import Run as Run

    from .core import Card as Card
    from .core import ConfigError as ConfigError
    from .core import Cost as Cost
    from .core import Grid as Grid
    from .core import Mask as Mask
    from .core import Mixer as Mixer
    from .core import MixerConfig as MixerConfig
    from .core import Operator as Operator
    from .core import RegardError as RegardError
    from .core import Site as Site
    from .mixers import *  # noqa: F403
    from .projections import *  # noqa: F403
    from .studies import STUDIES as STUDIES

# name -> the module that has it
_HOMES: dict[str, str] = {
    **dict.fromkeys(
        ("Card", "ConfigError", "Cost", "Grid", "Mask", "Mixer", "MixerConfig", "Operator", "RegardError", "Site"),
        "regard.core",
    ),
    **dict.fromkeys(("calibrate", "freeze_keys"), "regard.mixers.static_keys.keys"),
    **dict.fromkeys(("create_model", "plan_swap", "remove", "restore", "retune", "swap"), "regard.swapping.swap"),
    "load": "regard.train.load",
    "param_groups": "regard.train.optimizer",
    "Recipe": "regard.train.recipe",
    "Results": "regard.store.results",
    "Run": "regard.train.run",
    **dict.fromkeys(("Claim", "Row", "Study"), "regard.lab.study"),
    "STUDIES": "regard.studies",
    "attend": "regard.models.resnet",
    "save": "regard.models.saving",
    "capture": "regard.swapping.capture",
    "list_models": "regard.hosts",
    "MIXERS": "regard.mixers",
    "HeadMixerConfig": "regard.mixers.shared.heads",
    "parse": "regard.mixers.spelling",
    "spell": "regard.mixers.spelling",
    "PROJECTIONS": "regard.projections",
}
# Packages whose public names are also names of the root: adding a mechanism does not touch this file.
_PACKAGES = ("regard.mixers", "regard.projections")
_MODULES = ("ops", "testing")

__all__ = ["__version__", *_HOMES, *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"regard.{name}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name.startswith("_"):
        raise AttributeError(name)
    else:
        for package in _PACKAGES:
            value = getattr(import_module(package), name, None)
            if isinstance(value, type):
                break
        else:
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
