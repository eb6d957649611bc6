"""Regard: attention in vision, every mechanism in every model, compared fairly.

Names are imported when they are first used, so that `import regard` and the command line's help do not load torch.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # as of typing, which is not imported: `python -m regard` would take it from the current folder
if TYPE_CHECKING:
    from regard import ops as ops
    from regard import testing as testing
    from regard.advice.own_model import distill as distill
    from regard.advice.own_model import recommend as recommend
    from regard.core import Card as Card
    from regard.core import ConfigError as ConfigError
    from regard.core import Contract as Contract
    from regard.core import Cost as Cost
    from regard.core import DataError as DataError
    from regard.core import Grid as Grid
    from regard.core import GridError as GridError
    from regard.core import Mask as Mask
    from regard.core import Mixer as Mixer
    from regard.core import MixerConfig as MixerConfig
    from regard.core import Operator as Operator
    from regard.core import RegardError as RegardError
    from regard.core import Site as Site
    from regard.core import SwapError as SwapError
    from regard.core import UnsupportedError as UnsupportedError
    from regard.explorer.explore import explore as explore
    from regard.measure.bench import bench as bench
    from regard.measure.cost import count_macs as count_macs
    from regard.mixers import MIXERS as MIXERS
    from regard.mixers.shared.heads import HeadMixerConfig as HeadMixerConfig
    from regard.mixers.spelling import parse as parse
    from regard.mixers.spelling import spell as spell
    from regard.mixers.static_keys.keys import calibrate as calibrate
    from regard.mixers.static_keys.keys import freeze_keys as freeze_keys
    from regard.models.catalog import list_models as list_models
    from regard.models.create import create_model as create_model
    from regard.models.resnet import attend as attend
    from regard.models.saving import load as load
    from regard.models.saving import save as save
    from regard.models.timm_registry import register_timm as register_timm
    from regard.projections import FSNE as FSNE
    from regard.projections import PROJECTIONS as PROJECTIONS
    from regard.projections import PSNE as PSNE
    from regard.projections import SNE as SNE
    from regard.projections import IdentityQuery as IdentityQuery
    from regard.projections import LinearQKV as LinearQKV
    from regard.swapping.capture import capture as capture
    from regard.swapping.layer import Port as Port
    from regard.swapping.swap import plan_swap as plan_swap
    from regard.swapping.swap import remove as remove
    from regard.swapping.swap import restore as restore
    from regard.swapping.swap import retune as retune
    from regard.swapping.swap import swap as swap

# generated: imports
if TYPE_CHECKING:
    from regard.mixers.agent import Agent as Agent
    from regard.mixers.axial import Axial as Axial
    from regard.mixers.bra import BRA as BRA
    from regard.mixers.convolutions.conv import Conv as Conv
    from regard.mixers.convolutions.deformable import DeformableConv as DeformableConv
    from regard.mixers.convolutions.dynamic import DynamicConv as DynamicConv
    from regard.mixers.cswin import CSWin as CSWin
    from regard.mixers.dat.dat import DAT as DAT
    from regard.mixers.deformable_detr import DeformableDETR as DeformableDETR
    from regard.mixers.differential import Differential as Differential
    from regard.mixers.factors.factors import Factors as Factors
    from regard.mixers.flatten import FLatten as FLatten
    from regard.mixers.inline import InLine as InLine
    from regard.mixers.linear import Linear as Linear
    from regard.mixers.linformer import Linformer as Linformer
    from regard.mixers.mhla import MHLA as MHLA
    from regard.mixers.mita.mita import MiTA as MiTA
    from regard.mixers.moba import MoBA as MoBA
    from regard.mixers.neighbourhood import Neighbourhood as Neighbourhood
    from regard.mixers.nsa import NSA as NSA
    from regard.mixers.nystrom import Nystrom as Nystrom
    from regard.mixers.performer import Performer as Performer
    from regard.mixers.polaformer import PolaFormer as PolaFormer
    from regard.mixers.pvt import PVT as PVT
    from regard.mixers.reformer import Reformer as Reformer
    from regard.mixers.routing import Routing as Routing
    from regard.mixers.softmax import Softmax as Softmax
    from regard.mixers.sparsifiner import Sparsifiner as Sparsifiner
    from regard.mixers.static_keys.cska import CSKA as CSKA
    from regard.mixers.static_keys.ska import SKA as SKA
    from regard.mixers.topk.topk import TopK as TopK
    from regard.mixers.vit3 import ViT3 as ViT3
    from regard.mixers.window import Window as Window
    from regard.mixers.xca import XCA as XCA
# end of generated: imports

# name -> the module that has it
_MODULES: dict[str, str] = {
    **dict.fromkeys(("distill", "recommend"), "regard.advice.own_model"),
    **dict.fromkeys(("Card", "ConfigError", "Contract", "Cost", "Grid", "Mask", "Mixer"), "regard.core"),
    **dict.fromkeys(
        ("MixerConfig", "Operator", "RegardError", "Site", "DataError", "GridError", "SwapError"), "regard.core"
    ),
    "UnsupportedError": "regard.core",
    "explore": "regard.explorer.explore",
    "bench": "regard.measure.bench",
    "MIXERS": "regard.mixers",
    # generated: names
    "Softmax": "regard.mixers.softmax",
    "Differential": "regard.mixers.differential",
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
    "Sparsifiner": "regard.mixers.sparsifiner",
    "BRA": "regard.mixers.bra",
    "MoBA": "regard.mixers.moba",
    "Reformer": "regard.mixers.reformer",
    "Routing": "regard.mixers.routing",
    "DAT": "regard.mixers.dat.dat",
    "DeformableDETR": "regard.mixers.deformable_detr",
    "Window": "regard.mixers.window",
    "Neighbourhood": "regard.mixers.neighbourhood",
    "Axial": "regard.mixers.axial",
    "CSWin": "regard.mixers.cswin",
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
    "attend": "regard.models.resnet",
    **dict.fromkeys(("load", "save"), "regard.models.saving"),
    "register_timm": "regard.models.timm_registry",
    **dict.fromkeys(("FSNE", "PROJECTIONS", "PSNE", "SNE", "IdentityQuery", "LinearQKV"), "regard.projections"),
    "capture": "regard.swapping.capture",
    "count_macs": "regard.measure.cost",
    "Port": "regard.swapping.layer",
    **dict.fromkeys(("plan_swap", "remove", "restore", "retune", "swap"), "regard.swapping.swap"),
}

__all__ = ["__version__", *_MODULES, "ops", "testing"]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in ("ops", "testing"):
        return import_module(f"regard.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
