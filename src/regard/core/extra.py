"""What a user adds to the mechanisms, models and tasks of Regard, handed on by name; nothing is registered."""

from collections.abc import Callable, Sequence
from typing import Any

Extra = Sequence[type | Callable[..., Any]]
"""The user's own mechanisms (configuration classes), ports (subclasses of `Port`), models (functions or classes that
return a module, known by their `__name__`) and tasks. Each function picks the kinds that it needs."""
