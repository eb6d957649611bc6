"""Mechanisms: one file each, with its reference, fast operator, configuration and card."""

from regard.mixers.convolutions.conv import Conv as Conv
from regard.mixers.convolutions.deformable import DeformableConv as DeformableConv
from regard.mixers.convolutions.dynamic import DynamicConv as DynamicConv
from regard.mixers.factors.factors import Factors as Factors
from regard.mixers.mita.mita import MiTA as MiTA
from regard.mixers.static_keys.cska import CSKA as CSKA
from regard.mixers.static_keys.ska import SKA as SKA

from .agent import Agent as Agent
from .bra import BRA as BRA
from .dat import DAT as DAT
from .flatten import FLatten as FLatten
from .inline import InLine as InLine
from .linear import Linear as Linear
from .linformer import Linformer as Linformer
from .mhla import MHLA as MHLA
from .moba import MoBA as MoBA
from .nsa import NSA as NSA
from .nystrom import Nystrom as Nystrom
from .performer import Performer as Performer
from .polaformer import PolaFormer as PolaFormer
from .pvt import PVT as PVT
from .reformer import Reformer as Reformer
from .softmax import Softmax as Softmax
from .topk import TopK as TopK
from .vit3 import ViT3 as ViT3
from .window import Window as Window
from .xca import XCA as XCA

MIXERS = (
    Softmax,
    SKA,
    CSKA,
    XCA,
    MiTA,
    Factors,
    Conv,
    DeformableConv,
    DynamicConv,
    Linear,
    FLatten,
    PolaFormer,
    MHLA,
    Agent,
    TopK,
    BRA,
    InLine,
    Linformer,
    Performer,
    Nystrom,
    Window,
    PVT,
    DAT,
    MoBA,
    NSA,
    Reformer,
    ViT3,
)
