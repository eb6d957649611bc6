"""Mechanisms: one file each, with its reference, fast operator, configuration and card."""

from .factors import Factors
from .mita import MiTA
from .ska import SKA
from .softmax import Softmax
from .xca import XCA

MIXERS = (
    Softmax,
    SKA,
    XCA,
    MiTA,
    Factors,
)
