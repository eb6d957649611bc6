"""Tasks: a problem with its data and its score. A new task needs its own folder and a line in `TASKS`."""

from .base import Score, Task, Trial
from .classification import Classification

TASKS: tuple[type[Task], ...] = (Classification,)

__all__ = ["TASKS", "Classification", "Score", "Task", "Trial"]
