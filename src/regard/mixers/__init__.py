"""Mechanisms: one file or folder each, with its operator, its reference, its configuration.

Generated from mixers/table.py: run `make generated`, do not edit.
"""

from .agent import Agent as Agent
from .axial import Axial as Axial
from .bra import BRA as BRA
from .convolutions.conv import Conv as Conv
from .convolutions.deformable import DeformableConv as DeformableConv
from .convolutions.dynamic import DynamicConv as DynamicConv
from .cswin import CSWin as CSWin
from .dat.dat import DAT as DAT
from .deformable_detr import DeformableDETR as DeformableDETR
from .differential import Differential as Differential
from .factors.factors import Factors as Factors
from .flatten import FLatten as FLatten
from .inline import InLine as InLine
from .linear import Linear as Linear
from .linformer import Linformer as Linformer
from .mhla import MHLA as MHLA
from .mita.mita import MiTA as MiTA
from .moba import MoBA as MoBA
from .neighbourhood import Neighbourhood as Neighbourhood
from .nsa import NSA as NSA
from .nystrom import Nystrom as Nystrom
from .performer import Performer as Performer
from .polaformer import PolaFormer as PolaFormer
from .pvt import PVT as PVT
from .reformer import Reformer as Reformer
from .routing import Routing as Routing
from .softmax import Softmax as Softmax
from .sparsifiner import Sparsifiner as Sparsifiner
from .static_keys.cska import CSKA as CSKA
from .static_keys.ska import SKA as SKA
from .topk.topk import TopK as TopK
from .vit3 import ViT3 as ViT3
from .window import Window as Window
from .xca import XCA as XCA

MIXERS = (
    Softmax,
    Differential,
    Factors,
    SKA,
    CSKA,
    XCA,
    Linear,
    FLatten,
    PolaFormer,
    MHLA,
    InLine,
    Performer,
    ViT3,
    Agent,
    Linformer,
    Nystrom,
    PVT,
    TopK,
    Sparsifiner,
    BRA,
    MoBA,
    Reformer,
    Routing,
    DAT,
    DeformableDETR,
    Window,
    Neighbourhood,
    Axial,
    CSWin,
    MiTA,
    NSA,
    Conv,
    DeformableConv,
    DynamicConv,
)
