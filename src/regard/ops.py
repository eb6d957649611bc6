"""The operator functions of all mechanisms and their plain references."""

from regard.mixers.softmax import softmax, softmax_reference

__all__ = ["softmax", "softmax_reference"]
