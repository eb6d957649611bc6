"""Projections: how queries, keys and values are made from tokens."""

from .linear import LinearQKV

PROJECTIONS = (LinearQKV,)
