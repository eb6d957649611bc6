"""Translation of sentences between two languages, from two parallel text files."""

from .task import Translation

__all__ = ["Translation"]
