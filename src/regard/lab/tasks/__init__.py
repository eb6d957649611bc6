"""Tasks: a problem with its data and its score. A new task needs its own folder and a line in `TASKS`."""

from .base import Score, Task, Trial
from .cells import Cells
from .classification import Classification
from .detection import Detection, Instances
from .segmentation import Segmentation
from .sequences import Sequences
from .translation import Translation
from .video import Video

TASKS: tuple[type[Task], ...] = (
    Classification, Detection, Instances, Segmentation, Translation, Sequences, Cells, Video,
)  # fmt: skip

__all__ = [
    "TASKS",
    "Cells",
    "Classification",
    "Detection",
    "Instances",
    "Score",
    "Segmentation",
    "Sequences",
    "Task",
    "Translation",
    "Trial",
    "Video",
]
