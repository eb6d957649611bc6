"""Projections: how queries, keys and values are made from tokens."""

from .identity import IdentityQuery
from .linear import LinearQKV
from .sne import FSNE, PSNE, SNE

PROJECTIONS = (
    LinearQKV,
    SNE,
    PSNE,
    FSNE,
    IdentityQuery,
)
