"""Run: one training run as data, and its key in a store."""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, get_args

from torch import nn

from regard.core import ConfigError, DataError, Extra, MixerConfig, StoreError
from regard.core.validation import check_fields
from regard.files.atomic import store_errors
from regard.files.records import read_record
from regard.lab.results.import_checks import spelled_fields
from regard.lab.results.results import Results
from regard.lab.tasks import TASKS
from regard.lab.tasks.base import Task
from regard.lab.tasks.weights import check_removed, host_seed
from regard.mixers.spelling import parse, spell
from regard.models.catalog import user_ports
from regard.models.create import parse_host, spell_host
from regard.swapping.layer_plan import read_layer_plan
from regard.swapping.swap import swap

from .initial_weights import Saved
from .recipe import Recipe


def canonical(value: Any) -> str:
    """The text whose digest is the key: like the spelling, but with sorted fields and with revisions above 1.

    Fields with their default values are left out, so a new field does not change the keys of old runs.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _number(getattr(value, field.name), field.type)
            for field in dataclasses.fields(value)
            if not _is_default(field, value)
        }
        revision = getattr(value, "revision", 1)
        name = type(value).__name__ + (f"@{revision}" if revision != 1 else "")
        return f"{name}({', '.join(f'{key}={canonical(item)}' for key, item in sorted(fields.items()))})"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(canonical, value))})"
    return repr(value)


def _number(value: Any, kind: Any) -> Any:
    """5 as 5.0 where a field holds such numbers: the same run has one key."""
    kinds = get_args(kind) or (kind,)
    return float(value) if type(value) is int and float in kinds and int not in kinds else value


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return default is not dataclasses.MISSING and default == getattr(value, field.name)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: a task, a mechanism, a recipe and a seed.

    mixer None: the host's own attention; with removed=True the host without attention, the control "w/o".
    start: a run whose trained weights are this run's initial weights (it is executed first), or a saved model.
    teacher: a run whose trained model gives a second label to each image (hard distillation; it is executed first), or
    the spelling of a pretrained host such as "regnety_160(pretrained=True)".
    plan: with mixer None, a plan of layers as text, "blocks.0.attn=SKA(); blocks.1.attn=None"; layers that it does not
    name keep their attention. "" = none.
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
    plan: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        check_removed(self.mixer, self.removed)
        if self.plan and (self.mixer is not None or self.removed):
            raise ConfigError("a plan names the mechanism of each layer: leave mixer and removed out")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {'0 or more' if self.seed < 0 else 'below 2^63'}, not {self.seed}")
        if isinstance(self.teacher, str) and not parse_host(self.teacher)[0]:
            raise ConfigError("teacher is a run, or a pretrained host such as 'regnety_160(pretrained=True)', not ''")

    @cached_property
    def key(self) -> str:
        """12 hexadecimal digits of the SHA-256 of `canonical`; data paths and the code version are not part of it.

        It is that of the data when it is first asked for: a run that is executed after a change of them is refused.
        """
        return hashlib.sha256(canonical(self.identity()).encode()).hexdigest()[:12]

    def with_extra(self, extra: Extra) -> "Run":
        """The same run, and the runs that it needs, with the user's own models and ports."""
        start = self.start.with_extra(extra) if isinstance(self.start, Run) else self.start
        teacher = self.teacher.with_extra(extra) if isinstance(self.teacher, Run) else self.teacher
        task = dataclasses.replace(self.task, extra=tuple(extra))
        return dataclasses.replace(self, task=task, start=start, teacher=teacher)

    def identity(self) -> "Run":
        """The run without what does not change its result, such as paths and the spelling of the host's options; its
        canonical text gives the key."""
        start = self.start.identity() if isinstance(self.start, Run) else self.start and self.start.identity()
        teacher = self.teacher.identity() if isinstance(self.teacher, Run) else self.teacher
        task = dataclasses.replace(self.task, host=spell_host(*parse_host(self.task.host)))
        return dataclasses.replace(self, task=task.identity(), start=start, teacher=teacher)

    def model(self, record: Mapping[str, Any] | None = None) -> nn.Module:
        """The model with its initial weights, before those of `start`. record: as for `Task.model`.

        Raises: ConfigError, DataError; SwapError for a plan that does not fit the model.
        """
        model = self.task.model(self.mixer, self.seed, self.removed, record)
        if self.plan:
            with host_seed(self.seed):
                swap(model, read_layer_plan(self.plan, self.task.extra), ports=user_ports(self.task.extra))
        return model

    @property
    def label(self) -> str:
        """What the model attends with, as text."""
        return self.plan or ("w/o" if self.removed else spell(self.mixer))

    def needs(self) -> "list[Run]":
        """The runs that are executed before this one: its start and its teacher."""
        return [run for run in (self.start, self.teacher) if isinstance(run, Run)]


RUN_FIELDS = frozenset({
    "key", "spelling", "canonical", "seed", "threads", "device", "devices", "compiled kernels", "torch.compile",
    "calibration", "code", "started",
})  # fmt: skip
"""All that a run.json may have."""
MOST_THREADS = 4096
_KINDS: dict[str, Any] = {
    "spelling": str, "key": str | None, "canonical": str | None, "seed": int | None, "threads": int | None,
    "device": str | None, "devices": int | None,
}  # fmt: skip


def run_file(path: Path) -> dict[str, Any]:
    """The content of a run.json. Raises: StoreError if it is damaged, or does not describe the run of its folder."""
    content = read_record(path, RUN_FIELDS)
    threads = content.get("threads")
    kinds = all(isinstance(content.get(name), kind) for name, kind in _KINDS.items())
    if not kinds or (threads is not None and not 1 <= threads <= MOST_THREADS):
        raise StoreError(f"{path} does not describe a run; delete its folder and run again")
    canonical = content.get("canonical")
    described = hashlib.sha256(canonical.encode()).hexdigest()[:12] if isinstance(canonical, str) else path.parent.name
    for key in (content.get("key", described), described):
        if key != path.resolve().parent.name:
            raise StoreError(
                f"{path} describes run {key}, not the run of its folder: the folder was renamed, or its run.json is "
                "another run's; give the folder that name"
            )
    seed = spelled_fields(content["spelling"]).get("seed")
    if seed is not None and content.get("seed") is not None and repr(content["seed"]) != seed:
        raise StoreError(f"{path} has seed {content['seed']}, but spells seed={seed}; delete its folder and run again")
    return content


def changed_data(run: Run, key: str) -> str:
    """Why the data of a stored run are no longer those of its training, as a sentence; "" if they are.

    key: that under which the run is stored.
    """
    try:
        if run.key == key:
            return ""
    except DataError as error:
        return f"the data of run {key} cannot be read: {error}"
    return (
        f"the data of run {key}, or of a run that it started from, have changed since its training, or this version "
        "divides them otherwise into training and test"
    )


def read_run(store: Results, key: str, extra: Extra = ()) -> Run:
    """The run of a key in a store, from its spelling. extra: the user's own mechanisms, models and ports.

    Raises: StoreError, ConfigError.
    """
    path = store.folder(key) / "run.json"
    with store_errors(path, "read"):
        exists = path.exists()
    if not exists:
        raise StoreError(f"{store.root} has no run {key!r}; `regard study status` lists its runs")
    run = parse(run_file(path)["spelling"], (*TASKS, Recipe, Run, Saved, *extra))
    if not isinstance(run, Run):
        raise StoreError(f"{path} does not hold a run")
    return run.with_extra(extra) if extra else run
