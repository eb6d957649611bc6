"""Mechanisms, models and tasks that a user adds to those of Regard; they are passed as arguments, never registered."""

from collections.abc import Callable, Sequence
from typing import Any

Extra = Sequence[type | Callable[..., Any]]
"""The user's own mechanisms (configuration classes), ports (subclasses of `Port`), models (functions or classes that
return a module, known by their `__name__`) and tasks. Each function picks the kinds that it needs."""
