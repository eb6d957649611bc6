"""The laboratory: tasks, runs, studies and their pages. The library never imports it.

Names are imported when they are first used: lists and help do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine.analysis import Analysis as Analysis
    from .engine.run_study import run_study as run_study
    from .engine.study import Claim as Claim
    from .engine.study import Row as Row
    from .engine.study import Setting as Setting
    from .engine.study import Study as Study
    from .results.results import Results as Results
    from .studies import STUDIES as STUDIES
    from .tasks import TASKS as TASKS
    from .tasks import Cells as Cells
    from .tasks import Classification as Classification
    from .tasks import Detection as Detection
    from .tasks import Instances as Instances
    from .tasks import Segmentation as Segmentation
    from .tasks import Sequences as Sequences
    from .tasks import Task as Task
    from .tasks import Translation as Translation
    from .tasks import Video as Video
    from .train.load import load_run as load_run
    from .train.optimizer import param_groups as param_groups
    from .train.recipe import Recipe as Recipe
    from .train.run import Run as Run

# name -> the module that has it
_MODULES: dict[str, str] = {
    "Analysis": "regard.lab.engine.analysis",
    "run_study": "regard.lab.engine.run_study",
    **dict.fromkeys(("Claim", "Row", "Setting", "Study"), "regard.lab.engine.study"),
    "Results": "regard.lab.results.results",
    "STUDIES": "regard.lab.studies",
    **dict.fromkeys(("TASKS", "Cells", "Classification", "Detection", "Instances"), "regard.lab.tasks"),
    **dict.fromkeys(("Segmentation", "Sequences", "Task", "Translation", "Video"), "regard.lab.tasks"),
    "load_run": "regard.lab.train.load",
    "param_groups": "regard.lab.train.optimizer",
    "Recipe": "regard.lab.train.recipe",
    "Run": "regard.lab.train.run",
}

__all__ = list(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'regard.lab' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
