"""Mechanisms: one file each, with its reference, fast operator, configuration and card."""

from .softmax import Softmax

MIXERS = (Softmax,)
