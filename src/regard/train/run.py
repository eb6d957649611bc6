"""Run: one training run as data, with a key, and how it is carried out in a store."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from regard.core import ConfigError, MixerConfig, StoreError
from regard.mixers.spelling import parse, spell
from regard.store.files import read_json
from regard.store.results import Results, check_version
from regard.tasks import TASKS
from regard.tasks.base import Task

from .initial_weights import Saved
from .loop import Progress, Watch
from .recipe import Recipe

log = logging.getLogger("regard.lab")


def canonical(value: Any) -> str:
    """The text whose digest is the key: like the spelling, with fields sorted by name and class revisions above 1.

    Fields at their defaults are left out, so that a new field keeps the keys of old runs.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if not _default(field, value)
        }
        revision = getattr(type(value), "revision", 1)
        name = type(value).__name__ + (f"@{revision}" if revision != 1 else "")
        return f"{name}({', '.join(f'{key}={canonical(item)}' for key, item in sorted(fields.items()))})"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(canonical, value))})"
    return repr(value)


def _default(field: dataclasses.Field, value: Any) -> bool:
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return made is not dataclasses.MISSING and made == getattr(value, field.name)


@dataclass(frozen=True, kw_only=True)
class Run:
    """mixer None: the host's own attention; with removed=True the control "w/o", attention taken out.

    start: a run whose trained weights this one begins with (it is carried out first), or a saved model. teacher: a run
    whose trained network labels the images too (hard distillation, carried out first), or the spelling of a pretrained
    host such as "regnety_160(pretrained=True)".
    Raises: ConfigError.
    """

    revision: ClassVar[int] = 1

    task: Task
    mixer: MixerConfig | None = None
    recipe: Recipe = Recipe()
    seed: int = 0
    start: "Run | Saved | None" = None
    removed: bool = False
    teacher: "Run | str | None" = None

    def __post_init__(self) -> None:
        if self.removed and self.mixer is not None:
            raise ConfigError(
                f"removed=True takes attention out; it goes with mixer=None, not with {spell(self.mixer)}"
            )
        if self.seed < 0:
            raise ConfigError(f"seed is 0 or more, not {self.seed}")

    @property
    def key(self) -> str:
        """12 hex digits of sha256 over the canonical form; where data lie and the version of the code do not enter."""
        return hashlib.sha256(canonical(self.identity()).encode()).hexdigest()[:12]

    def identity(self) -> "Run":
        start = self.start.identity() if isinstance(self.start, Run) else self.start and self.start.identity()
        teacher = self.teacher.identity() if isinstance(self.teacher, Run) else self.teacher
        return dataclasses.replace(self, task=self.task.identity(), start=start, teacher=teacher)

    def needs(self) -> "list[Run]":
        """The runs that are carried out before this one: its start, its teacher."""
        return [other for other in (self.start, self.teacher) if isinstance(other, Run)]

    def execute(
        self,
        store: Results,
        devices: int = 1,
        report: Callable[[Progress], None] | None = None,
        *,
        device: str = "auto",
        watch: Watch | None = None,
    ) -> dict[str, Any]:
        """Train, evaluate and write the outcome, which is returned; what is finished returns at once.

        Goes on from the last checkpoint, bit for bit on the same machine. report: called with `Progress`. device:
        "auto", "cpu", "cuda" or "mps". devices: GPUs (or processes on the CPU) of this machine that share each batch;
        they do not enter the key. A loss or a final score that is not finite makes an outcome with status "failed".
        Raises: Interrupted after Ctrl-C, with a checkpoint; Busy if another process has the run; StoreError; DataError;
        ConfigError for more devices than there are, or a batch that they cannot share.
        """
        from .execute import execute

        watch = watch or Watch()
        watch = dataclasses.replace(watch, report=report) if report is not None else watch
        return execute(self, store, devices, device, watch)


def run_file(path: Path) -> dict[str, Any]:
    known = read_json(path)
    if not isinstance(known, dict) or not isinstance(known.get("spelling"), str):
        raise StoreError(f"{path} does not describe a run; delete its folder and run again")
    check_version(path, known)
    return known


def read_run(store: Results, key: str) -> Run:
    """The run in a store's folder, from its spelling. Raises: StoreError, ConfigError."""
    path = store.folder(key) / "run.json"
    if not path.exists():
        raise StoreError(f"{store.root} has no run {key!r}; `regard study status` lists what is there")
    run = parse(run_file(path)["spelling"], extra=(*TASKS, Recipe, Run, Saved))
    if not isinstance(run, Run):
        raise StoreError(f"{path} does not hold a run")
    return run
