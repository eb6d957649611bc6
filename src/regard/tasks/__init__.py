"""Tasks: a problem with its data and its score. A new task needs its own file and a line in `TASKS`."""

from .base import Score, Task
from .classification import Classification

TASKS: tuple[type[Task], ...] = (Classification,)

__all__ = ["TASKS", "Classification", "Score", "Task"]
