"""Projections: how queries, keys and values are computed from tokens."""

from .identity import IdentityQuery as IdentityQuery
from .linear import LinearQKV as LinearQKV
from .sne import FSNE as FSNE
from .sne import PSNE as PSNE
from .sne import SNE as SNE

PROJECTIONS = (LinearQKV, SNE, PSNE, FSNE, IdentityQuery)
