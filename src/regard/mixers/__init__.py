"""Mechanisms: one file each, with its reference, fast operator, configuration and card."""

from .agent import Agent
from .bra import BRA
from .conv import Conv
from .cska import CSKA
from .dat import DAT
from .deform import DeformableConv
from .dynamic import DynamicConv
from .factors import Factors
from .flatten import FLatten
from .inline import InLine
from .linear import Linear
from .linformer import Linformer
from .mhla import MHLA
from .mita import MiTA
from .moba import MoBA
from .nsa import NSA
from .nystrom import Nystrom
from .performer import Performer
from .polaformer import PolaFormer
from .pvt import PVT
from .reformer import Reformer
from .ska import SKA
from .softmax import Softmax
from .topk import TopK
from .vit3 import ViT3
from .window import Window
from .xca import XCA

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
