"""Image classification."""

from .task import Classification as Classification
