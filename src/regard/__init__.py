"""Regard: attention in vision, every mechanism in every model, compared fairly.

Names are imported when they are first used, so that `import regard` and the command line's help do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from regard import ops as ops
    from regard import testing as testing
    from regard.core import Card as Card
    from regard.core import ConfigError as ConfigError
    from regard.core import Cost as Cost
    from regard.core import Grid as Grid
    from regard.core import Mask as Mask
    from regard.core import Mixer as Mixer
    from regard.core import MixerConfig as MixerConfig
    from regard.core import Operator as Operator
    from regard.core import RegardError as RegardError
    from regard.core import Site as Site
    from regard.hosts import list_models as list_models
    from regard.hosts.maps import capture as capture
    from regard.hosts.resnet import attend as attend
    from regard.hosts.saving import save as save
    from regard.hosts.swap import create_model as create_model
    from regard.hosts.swap import plan_swap as plan_swap
    from regard.hosts.swap import remove as remove
    from regard.hosts.swap import restore as restore
    from regard.hosts.swap import retune as retune
    from regard.hosts.swap import swap as swap
    from regard.lab.loading import load as load
    from regard.lab.optimizer import param_groups as param_groups
    from regard.lab.recipe import Recipe as Recipe
    from regard.lab.results import Results as Results
    from regard.lab.run import Run as Run
    from regard.lab.study import Claim as Claim
    from regard.lab.study import Row as Row
    from regard.lab.study import Study as Study
    from regard.mixers import *  # noqa: F403
    from regard.mixers.heads import HeadMixerConfig as HeadMixerConfig
    from regard.mixers.spell import parse as parse
    from regard.mixers.spell import spell as spell
    from regard.mixers.static import calibrate as calibrate
    from regard.mixers.static import freeze_keys as freeze_keys
    from regard.projections import *  # noqa: F403
    from regard.studies import STUDIES as STUDIES

# name -> the module that has it
_HOMES: dict[str, str] = {
    **dict.fromkeys(
        ("Card", "ConfigError", "Cost", "Grid", "Mask", "Mixer", "MixerConfig", "Operator", "RegardError", "Site"),
        "regard.core",
    ),
    **dict.fromkeys(("calibrate", "freeze_keys"), "regard.mixers.static"),
    **dict.fromkeys(("create_model", "plan_swap", "remove", "restore", "retune", "swap"), "regard.hosts.swap"),
    "load": "regard.lab.loading",
    "param_groups": "regard.lab.optimizer",
    "Recipe": "regard.lab.recipe",
    "Results": "regard.lab.results",
    "Run": "regard.lab.run",
    **dict.fromkeys(("Claim", "Row", "Study"), "regard.lab.study"),
    "STUDIES": "regard.studies",
    "attend": "regard.hosts.resnet",
    "save": "regard.hosts.saving",
    "capture": "regard.hosts.maps",
    "list_models": "regard.hosts",
    "MIXERS": "regard.mixers",
    "HeadMixerConfig": "regard.mixers.heads",
    "parse": "regard.mixers.spell",
    "spell": "regard.mixers.spell",
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
