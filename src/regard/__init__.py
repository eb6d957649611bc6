"""Regard: attention in vision, every mechanism in every model, compared fairly.

Names are imported when they are first used, so that `import regard` and the command line's help do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import ops as ops
    from . import testing as testing
    from .core import Card as Card
    from .core import ConfigError as ConfigError
    from .core import Contract as Contract
    from .core import Cost as Cost
    from .core import Grid as Grid
    from .core import Mask as Mask
    from .core import Mixer as Mixer
    from .core import MixerConfig as MixerConfig
    from .core import Operator as Operator
    from .core import RegardError as RegardError
    from .core import Site as Site
    from .lab.engine.run_study import run_study as run_study
    from .lab.engine.study import Claim as Claim
    from .lab.engine.study import Row as Row
    from .lab.engine.study import Setting as Setting
    from .lab.engine.study import Study as Study
    from .lab.results.results import Results as Results
    from .lab.studies import STUDIES as STUDIES
    from .lab.tasks import TASKS as TASKS
    from .lab.tasks import Classification as Classification
    from .lab.train.load import load as load
    from .lab.train.optimizer import param_groups as param_groups
    from .lab.train.recipe import Recipe as Recipe
    from .lab.train.run import Run as Run
    from .mixers import MIXERS as MIXERS
    from .mixers.shared.heads import HeadMixerConfig as HeadMixerConfig
    from .mixers.spelling import parse as parse
    from .mixers.spelling import spell as spell
    from .mixers.static_keys.keys import calibrate as calibrate
    from .mixers.static_keys.keys import freeze_keys as freeze_keys
    from .models.catalog import list_models as list_models
    from .models.create import create_model as create_model
    from .models.hugging_face import from_pretrained as from_pretrained
    from .models.hugging_face import save_pretrained as save_pretrained
    from .models.resnet import attend as attend
    from .models.saving import save as save
    from .models.timm_registry import register_timm as register_timm
    from .projections import FSNE as FSNE
    from .projections import PROJECTIONS as PROJECTIONS
    from .projections import PSNE as PSNE
    from .projections import SNE as SNE
    from .projections import IdentityQuery as IdentityQuery
    from .projections import LinearQKV as LinearQKV
    from .swapping.capture import capture as capture
    from .swapping.layer import Port as Port
    from .swapping.swap import plan_swap as plan_swap
    from .swapping.swap import remove as remove
    from .swapping.swap import restore as restore
    from .swapping.swap import retune as retune
    from .swapping.swap import swap as swap

# generated: imports
if TYPE_CHECKING:
    from .mixers.agent import Agent as Agent
    from .mixers.bra import BRA as BRA
    from .mixers.convolutions.conv import Conv as Conv
    from .mixers.convolutions.deformable import DeformableConv as DeformableConv
    from .mixers.convolutions.dynamic import DynamicConv as DynamicConv
    from .mixers.dat.dat import DAT as DAT
    from .mixers.factors.factors import Factors as Factors
    from .mixers.flatten import FLatten as FLatten
    from .mixers.inline import InLine as InLine
    from .mixers.linear import Linear as Linear
    from .mixers.linformer import Linformer as Linformer
    from .mixers.mhla import MHLA as MHLA
    from .mixers.mita.mita import MiTA as MiTA
    from .mixers.moba import MoBA as MoBA
    from .mixers.nsa import NSA as NSA
    from .mixers.nystrom import Nystrom as Nystrom
    from .mixers.performer import Performer as Performer
    from .mixers.polaformer import PolaFormer as PolaFormer
    from .mixers.pvt import PVT as PVT
    from .mixers.reformer import Reformer as Reformer
    from .mixers.softmax import Softmax as Softmax
    from .mixers.static_keys.cska import CSKA as CSKA
    from .mixers.static_keys.ska import SKA as SKA
    from .mixers.topk.topk import TopK as TopK
    from .mixers.vit3 import ViT3 as ViT3
    from .mixers.window import Window as Window
    from .mixers.xca import XCA as XCA
# end of generated: imports

# name -> the module that has it
_MODULES: dict[str, str] = {
    **dict.fromkeys(("Card", "ConfigError", "Contract", "Cost", "Grid", "Mask", "Mixer"), "regard.core"),
    **dict.fromkeys(("MixerConfig", "Operator", "RegardError", "Site"), "regard.core"),
    "run_study": "regard.lab.engine.run_study",
    **dict.fromkeys(("Claim", "Row", "Setting", "Study"), "regard.lab.engine.study"),
    "MIXERS": "regard.mixers",
    # generated: names
    "Softmax": "regard.mixers.softmax",
    "Factors": "regard.mixers.factors.factors",
    "SKA": "regard.mixers.static_keys.ska",
    "CSKA": "regard.mixers.static_keys.cska",
    "XCA": "regard.mixers.xca",
    "Linear": "regard.mixers.linear",
    "FLatten": "regard.mixers.flatten",
    "PolaFormer": "regard.mixers.polaformer",
    "MHLA": "regard.mixers.mhla",
    "InLine": "regard.mixers.inline",
    "Performer": "regard.mixers.performer",
    "ViT3": "regard.mixers.vit3",
    "Agent": "regard.mixers.agent",
    "Linformer": "regard.mixers.linformer",
    "Nystrom": "regard.mixers.nystrom",
    "PVT": "regard.mixers.pvt",
    "TopK": "regard.mixers.topk.topk",
    "BRA": "regard.mixers.bra",
    "MoBA": "regard.mixers.moba",
    "Reformer": "regard.mixers.reformer",
    "DAT": "regard.mixers.dat.dat",
    "Window": "regard.mixers.window",
    "MiTA": "regard.mixers.mita.mita",
    "NSA": "regard.mixers.nsa",
    "Conv": "regard.mixers.convolutions.conv",
    "DeformableConv": "regard.mixers.convolutions.deformable",
    "DynamicConv": "regard.mixers.convolutions.dynamic",
    # end of generated: names
    "HeadMixerConfig": "regard.mixers.shared.heads",
    **dict.fromkeys(("parse", "spell"), "regard.mixers.spelling"),
    **dict.fromkeys(("calibrate", "freeze_keys"), "regard.mixers.static_keys.keys"),
    "list_models": "regard.models.catalog",
    "create_model": "regard.models.create",
    **dict.fromkeys(("from_pretrained", "save_pretrained"), "regard.models.hugging_face"),
    "attend": "regard.models.resnet",
    "save": "regard.models.saving",
    "register_timm": "regard.models.timm_registry",
    **dict.fromkeys(("FSNE", "PROJECTIONS", "PSNE", "SNE", "IdentityQuery", "LinearQKV"), "regard.projections"),
    "Results": "regard.lab.results.results",
    "STUDIES": "regard.lab.studies",
    "capture": "regard.swapping.capture",
    "Port": "regard.swapping.layer",
    **dict.fromkeys(("plan_swap", "remove", "restore", "retune", "swap"), "regard.swapping.swap"),
    **dict.fromkeys(("TASKS", "Classification"), "regard.lab.tasks"),
    "load": "regard.lab.train.load",
    "param_groups": "regard.lab.train.optimizer",
    "Recipe": "regard.lab.train.recipe",
    "Run": "regard.lab.train.run",
}

__all__ = ["__version__", *_MODULES, "ops", "testing"]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in ("ops", "testing"):
        return import_module(f"regard.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
