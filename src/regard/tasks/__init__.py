"""Tasks: a problem, its data and its score. Adding one costs its file and one line in `TASKS`."""

from .base import Score, Task
from .classification import Classification

TASKS: tuple[type[Task], ...] = (Classification,)

__all__ = ["TASKS", "Classification", "Score", "Task"]
