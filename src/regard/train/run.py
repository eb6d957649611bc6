"""Run: one training run as data, with a key, and how it is carried out in a store."""

import base64
import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from regard.core import ConfigError, MixerConfig, StoreError
from regard.core.eval_mode import resting
from regard.mixers.spelling import parse, spell
from regard.models.saving import describe
from regard.store.files import read_json, write_json
from regard.store.results import UNSAID, Busy, Results, check_held, check_version
from regard.swapping.count import count_macs
from regard.tasks import TASKS
from regard.tasks.base import Score, Task

from . import checkpoint
from .distributed import check_devices, in_ranks
from .environment import PeakMemory, code_version, environment, hush, resolved, steps_by
from .initial_weights import Saved, copy_weights
from .load import load
from .loop import Diverged, Interrupted, Loop, Progress, Watch
from .recipe import Recipe

__all__ = [
    "Diverged", "Interrupted", "Progress", "Recipe", "Run", "Saved", "Watch", "copy_weights", "read_run", "trained",
]  # fmt: skip

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
        return hashlib.sha256(canonical(self._identity()).encode()).hexdigest()[:12]

    def _identity(self) -> "Run":
        start = self.start._identity() if isinstance(self.start, Run) else self.start and self.start.identity()
        teacher = self.teacher._identity() if isinstance(self.teacher, Run) else self.teacher
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
        check_devices(devices, self.recipe.batch, device)
        key = self.key
        if store.status(key) in ("done", "failed"):
            return store.outcome(key) or {}
        watch = watch or Watch()
        watch = dataclasses.replace(watch, report=report) if report is not None else watch
        for other in self.needs():
            self._first(other, store, device, devices, dataclasses.replace(watch, loggers=()))
        with store.lock(key) as folder:
            finished = store.outcome(key)  # another process may have finished it since we looked
            if finished is not None:
                return finished
            outcome = self._in_folder(folder, store, device, devices, watch)
            check_held(folder)
            store.finish(key, {"key": key, **outcome})
            for name in (checkpoint.PREVIOUS, "next.ckpt"):
                (folder / name).unlink(missing_ok=True)
        return store.outcome(key) or {}

    def _first(self, start: "Run", store: Results, device: str, devices: int, watch: Watch) -> None:
        """Carry out a run that this one needs, or wait for the process that does."""
        while True:
            try:
                outcome = start.execute(store, devices, device=device, watch=watch)
                break
            except Busy:
                time.sleep(1.0)
        if outcome.get("status") != "done":
            raise StoreError(f"run {start.key}, which this one needs, failed: {outcome.get('error')}")

    def _teacher(self, store: Results, student: nn.Module) -> nn.Module | None:
        """The network that labels images. Raises: ConfigError if it does not know the task's classes."""
        if self.teacher is None:
            return None
        if isinstance(self.teacher, Run):
            teacher = trained(self.teacher, store)
        else:
            from regard.swapping.swap import create_model

            teacher = create_model(self.teacher, None).eval()
        with resting(student), resting(teacher):
            known, wanted = (network(self.task.example())[0].numel() for network in (teacher, student))
        if known != wanted:
            raise ConfigError(f"the teacher tells {known} classes apart, the task has {wanted}: train it on this task")
        return teacher

    def _in_folder(self, folder: Path, store: Results, device: str, devices: int, watch: Watch) -> dict[str, Any]:
        from lightning.fabric import Fabric

        if self.recipe.precision == "16-mixed" and resolved(device) == "cpu":  # Fabric would take bf16 in its place
            raise ConfigError("16-mixed needs a GPU; a CPU computes in bf16-mixed or 32-true")
        hush()
        self._remember(folder, device, devices, watch.compile)
        if devices > 1:
            return in_ranks(self, folder, store, device, devices, watch)
        fabric = Fabric(accelerator=device, devices=1, precision=self.recipe.precision, loggers=list(watch.loggers))  # type: ignore[arg-type]
        return self.train(folder, store, fabric, watch)

    def train(self, folder: Path, store: Results, fabric: Any, watch: Watch) -> dict[str, Any]:
        """Train on the devices of a launched Fabric, and return the outcome; of several processes, the first's counts.

        `execute` is the way in: it locks the folder and writes the outcome.
        """
        peak = PeakMemory(fabric.device)
        model = self.task.model(self.mixer, self.seed, self.removed)
        if self.start is not None:
            copy_weights(trained(self.start, store) if isinstance(self.start, Run) else load(self.start.folder), model)
        loop = Loop(self.task, self.recipe, self.seed, model, fabric, folder, watch, self._teacher(store, model))
        loop.resume()
        common: dict[str, Any] = {
            "error": None,
            "study": None,
            "scale": None,
            "row": spell(self.mixer) if not self.removed else "w/o",
            "seed": self.seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "environment": environment(fabric.device, self.recipe.precision, fabric.world_size, watch.compile),
            "code": code_version(),
            "data": self.task.record(),
            "spelling": spell(self),
            "model": describe(model) if "regard_host" in model.__dict__ else None,
            "probes": {},
        }
        try:
            score = loop.train()
            for name, value in score.metrics.items() if score else ():
                if not math.isfinite(value):
                    raise Diverged(loop.step - 1, value, f"the test {name}")
        except Diverged as error:
            return common | {
                "status": "failed",
                "error": str(error),
                "diverged": True,
                "step": error.step,
                "metrics": {},
                **_finished(loop, common["data"]["train"]),
            }
        measured = self._measured(loop, score, peak) if score else {}
        return common | {"status": "done", **measured, **_finished(loop, common["data"]["train"])}

    def _measured(self, loop: Loop, score: Score, peak: PeakMemory) -> dict[str, Any]:
        chance = self.task.chance
        diverged = score.metrics[self.task.metric] <= chance * 1.05
        notes = [f"at chance: {self.task.metric} {score.metrics[self.task.metric]:.4f} is chance ({chance:.4f})"]
        bits = None if score.right is None else base64.b64encode(np.packbits(score.right).tobytes()).decode()
        most = peak.bytes()  # before the network is moved and counted
        macs = count_macs(loop.trained.cpu().float(), self.task.example())
        return {
            "metrics": score.metrics,
            "best": None if loop.best is None else {"step": loop.best[0], self.task.metric: loop.best[1]},
            "diverged": diverged,
            "notes": notes if diverged else [],
            "bits": bits,
            "peak_memory_bytes": most,
            "macs": macs,
        }

    def _remember(self, folder: Path, device: str, devices: int, compiled: bool = False) -> None:
        """Write run.json at the first start; later starts take the number of threads from it, for equal bits."""
        path = folder / "run.json"
        how = {"device": resolved(device), "devices": devices, **steps_by(compiled)}
        if path.exists():
            known = _run_file(path)
            if known.get("threads") and known["threads"] != torch.get_num_threads():
                torch.set_num_threads(known["threads"])
            for name, value in how.items():
                if (before := known.get(name, UNSAID.get(name, value))) not in (value, "auto"):  # "auto" says nothing
                    text = "run %s began with %s %s and goes on with %s: bits will differ"
                    log.warning(text, self.key, name, before, value)
            return
        own = {"version": 1, "key": self.key, "spelling": spell(self), "canonical": canonical(self._identity())}
        begun = {"code": code_version(), "started": datetime.now(UTC).isoformat(timespec="seconds")}
        write_json(path, {**own, "seed": self.seed, "threads": torch.get_num_threads(), **how, **begun})


def _run_file(path: Path) -> dict[str, Any]:
    known = read_json(path)
    if not isinstance(known, dict) or not isinstance(known.get("spelling"), str):
        raise StoreError(f"{path} does not describe a run; delete its folder and run again")
    check_version(path, known)
    return known


def _finished(loop: Loop, train: int) -> dict[str, Any]:
    """Time, and images of a second; train: how many there are, of which a batch may be the whole."""
    images = loop.step * min(loop.recipe.batch, train) * loop.recipe.accumulate
    return {
        "seconds": round(loop.seconds, 3),
        "images_per_second": round(images / loop.seconds, 1) if loop.seconds else None,
        "finished": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
    }


def trained(run: Run, store: Results, best: bool = False) -> nn.Module:
    """The network of a finished run with its trained weights (the average where the recipe has one), for evaluation.

    best: those of its best evaluation instead of the last. Raises: StoreError if the run has no such checkpoint.
    """
    weights = checkpoint.trained_weights(store.folder(run.key), best)
    model = run.task.model(run.mixer, run.seed, run.removed)
    with checkpoint.fitting(store.folder(run.key)):
        model.load_state_dict(weights)
    return model.eval()


def read_run(store: Results, key: str) -> Run:
    """The run in a store's folder, from its spelling. Raises: StoreError, ConfigError."""
    path = store.folder(key) / "run.json"
    if not path.exists():
        raise StoreError(f"{store.root} has no run {key!r}; `regard study status` lists what is there")
    run = parse(_run_file(path)["spelling"], extra=(*TASKS, Recipe, Run, Saved))
    if not isinstance(run, Run):
        raise StoreError(f"{path} does not hold a run")
    return run
