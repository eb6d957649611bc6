"""Run: one training run as data, with a key, and how it is carried out in a store."""

import base64
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from regard.core import ConfigError, MixerConfig, StoreError, UnsupportedError
from regard.mixers.spell import parse, spell
from regard.tasks import TASKS
from regard.tasks.base import Score, Task

from . import checkpoint
from .environment import code_version, count_macs, environment, peak_memory
from .files import read_json, write_json
from .loop import Diverged, Interrupted, Loop, Progress, Watch
from .recipe import Recipe
from .results import Results

__all__ = ["Diverged", "Interrupted", "Progress", "Recipe", "Run", "Watch", "read_run", "trained"]

log = logging.getLogger("regard.lab")


def canonical(value: Any) -> str:
    """The text whose digest is the key: like the spelling, with fields sorted by name and class versions above 1.

    Fields at their defaults are left out, so that a new field keeps the keys of old runs.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if not _default(field, value)
        }
        version = getattr(type(value), "version", 1)
        name = type(value).__name__ + (f"@{version}" if version != 1 else "")
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

    start: a run whose trained weights this one begins with (it is carried out first).
    Raises: ConfigError.
    """

    version: ClassVar[int] = 1

    task: Task
    mixer: MixerConfig | None = None
    recipe: Recipe = Recipe()
    seed: int = 0
    start: "Run | None" = None
    removed: bool = False

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
        start = self.start._identity() if self.start is not None else None
        return dataclasses.replace(self, task=self.task.identity(), start=start)

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
        "auto", "cpu", "cuda" or "mps". A loss that is not finite makes an outcome with status "failed".
        Raises: Interrupted after Ctrl-C, with a checkpoint; Busy if another process has the run; StoreError; DataError;
        UnsupportedError for more than one device.
        """
        if devices != 1:
            raise UnsupportedError(f"a run uses one device, not {devices}; studies spread over devices run by run")
        key = self.key
        if store.status(key) in ("done", "failed"):
            return store.outcome(key) or {}
        watch = watch or Watch()
        watch = dataclasses.replace(watch, report=report) if report is not None else watch
        if self.start is not None:
            self._first(self.start, store, device, watch)
        with store.lock(key) as folder:
            finished = store.outcome(key)  # another process may have finished it since we looked
            if finished is not None:
                return finished
            outcome = self._in_folder(folder, store, device, watch)
            store.finish(key, {"key": key, **outcome})
            for name in (checkpoint.PREVIOUS, "next.ckpt"):
                (folder / name).unlink(missing_ok=True)
        return store.outcome(key) or {}

    def _first(self, start: "Run", store: Results, device: str, watch: Watch) -> None:
        outcome = start.execute(store, device=device, watch=watch)
        if outcome.get("status") != "done":
            raise StoreError(f"run {start.key}, which this one starts from, failed: {outcome.get('error')}")

    def _in_folder(self, folder: Path, store: Results, device: str, watch: Watch) -> dict[str, Any]:
        from lightning.fabric import Fabric

        self._remember(folder, device)
        fabric = Fabric(accelerator=device, devices=1, precision=self.recipe.precision, loggers=list(watch.loggers))  # type: ignore[arg-type]
        model = self.task.model(self.mixer, self.seed, self.removed)
        if self.start is not None:
            copy_weights(trained(self.start, store), model)
        loop = Loop(self.task, self.recipe, self.seed, model, fabric, folder, watch)
        loop.resume()
        common = {
            "error": None,
            "study": None,
            "scale": None,
            "row": spell(self.mixer) if not self.removed else "w/o",
            "seed": self.seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "environment": environment(fabric.device, self.recipe.precision),
            "code": code_version(),
            "data": self.task.record(),
            "spelling": spell(self),
            "probes": {},
        }
        try:
            score = loop.train()
        except Diverged as error:
            return common | {
                "status": "failed",
                "error": str(error),
                "step": error.step,
                "metrics": {},
                **_finished(loop),
            }
        return common | {"status": "done", **self._measured(loop, score), **_finished(loop)}

    def _measured(self, loop: Loop, score: Score) -> dict[str, Any]:
        chance = self.task.chance
        diverged = score.metrics[self.task.metric] <= chance * 1.05
        notes = [f"diverged: {self.task.metric} {score.metrics[self.task.metric]:.4f} is chance ({chance:.4f})"]
        bits = None if score.right is None else base64.b64encode(np.packbits(score.right).tobytes()).decode()
        peak = peak_memory(loop.device)
        macs = count_macs(loop.trained.cpu(), self.task.example())
        return {
            "metrics": score.metrics,
            "diverged": diverged,
            "notes": notes if diverged else [],
            "bits": bits,
            "peak_memory_bytes": peak,
            "macs": macs,
        }

    def _remember(self, folder: Path, device: str) -> None:
        """Write run.json at the first start; later starts take the number of threads from it, for equal bits."""
        path = folder / "run.json"
        if path.exists():
            known = read_json(path)
            if known.get("threads") and known["threads"] != torch.get_num_threads():
                torch.set_num_threads(known["threads"])
            if known.get("device") != device:
                log.warning(
                    "run %s began on %s and goes on on %s: bits will differ", self.key, known.get("device"), device
                )
            return
        write_json(
            path,
            {
                "version": 1,
                "key": self.key,
                "spelling": spell(self),
                "canonical": canonical(self._identity()),
                "seed": self.seed,
                "threads": torch.get_num_threads(),
                "device": device,
                "code": code_version(),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )


def _finished(loop: Loop) -> dict[str, Any]:
    images = loop.step * loop.recipe.batch * loop.recipe.accumulate
    return {
        "seconds": round(loop.seconds, 3),
        "images_per_second": round(images / loop.seconds, 1) if loop.seconds else None,
        "finished": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
    }


def trained(run: Run, store: Results) -> nn.Module:
    """The network of a finished run with its trained weights (the average where the recipe has one), for evaluation.

    Raises: StoreError if the run has no checkpoint.
    """
    state = checkpoint.load(store.folder(run.key))
    if state is None:
        raise StoreError(f"run {run.key} has no checkpoint in {store.folder(run.key)}; carry it out first")
    model = run.task.model(run.mixer, run.seed, run.removed)
    model.load_state_dict(state["ema"] if state["ema"] is not None else state["model"])
    return model.eval()


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy what has the same name and shape; the rest of the target (a new head, a mechanism's own part) stays.

    Raises: ConfigError if nothing fits.
    """
    have, want = source.state_dict(), target.state_dict()
    fitting = {name: value for name, value in have.items() if name in want and want[name].shape == value.shape}
    if not fitting:
        raise ConfigError(f"no weight of the start fits {type(target).__name__}; both runs need the same host")
    log.info("%d of %d weights are taken from the start", len(fitting), len(want))
    target.load_state_dict(fitting, strict=False)


def read_run(store: Results, key: str) -> Run:
    """The run in a store's folder, from its spelling. Raises: StoreError, ConfigError."""
    path = store.folder(key) / "run.json"
    if not path.exists():
        raise StoreError(f"{store.root} has no run {key!r}; `regard study status` lists what is there")
    run = parse(read_json(path)["spelling"], extra=(*TASKS, Recipe, Run))
    if not isinstance(run, Run):
        raise StoreError(f"{path} does not hold a run")
    return run
