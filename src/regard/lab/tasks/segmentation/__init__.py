"""Semantic segmentation."""

from .task import Segmentation

__all__ = ["Segmentation"]
