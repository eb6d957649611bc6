"""The operator functions of all mechanisms and their plain references."""

from regard.mixers.factors import factor_logits, factors, factors_reference
from regard.mixers.landmarks import pool_landmarks
from regard.mixers.mita import mita, mita_reference
from regard.mixers.mita_plan import mita_plan
from regard.mixers.ska import ska, ska_reference
from regard.mixers.softmax import softmax, softmax_reference
from regard.mixers.xca import xca, xca_reference

__all__ = [
    "factor_logits",
    "factors",
    "factors_reference",
    "mita",
    "mita_plan",
    "mita_reference",
    "pool_landmarks",
    "softmax",
    "softmax_reference",
    "ska",
    "ska_reference",
    "xca",
    "xca_reference",
]
