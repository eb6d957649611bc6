"""Executing a run: the runs that it needs, devices, training, evaluation, and the outcome in the store."""

import base64
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial, singledispatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from regard.core import ConfigError, DataError, DeviceError, RegardError, require
from regard.core.validation import short_repr
from regard.files.records import write_record
from regard.images.normalise import Renormalised, Statistics, is_pretrained, pretrained_statistics
from regard.lab.results.lock import Busy, check_held
from regard.lab.results.results import Results
from regard.lab.tasks.base import Score
from regard.lab.tasks.image_task import ImageTask
from regard.measure.cost import count_macs
from regard.measure.memory import PeakMemory
from regard.measure.turns import threads
from regard.mixers.spelling import spell
from regard.models.create import create_model
from regard.models.recipe import model_recipe
from regard.models.saving import load, read_description

from . import checkpoint
from .announcement import announcement
from .class_rows import class_rows
from .distributed import check_devices, in_processes
from .environment import (
    code_version,
    environment,
    is_environment_error,
    make_fabric,
    quiet_lightning,
    resolved_device,
    step_execution,
)
from .inference_speed import inference_speed
from .initial_weights import Saved, copy_weights
from .load import load_trained
from .loop import Diverged, Loop
from .run import Run, canonical, run_file
from .sharding import check_shared, sharding_strategy
from .sources import own_sources, warn_of_edits
from .torchrun import FirstFailed, Group, check_launch, fabric_of, join_group, launch
from .watch import Watch

log = logging.getLogger("regard.lab.engine")


class NeededRunFailed(RegardError):
    """The start or the teacher of a run failed, so the run fails too."""

    def __init__(self, key: str, reason: object) -> None:
        super().__init__(f"run {key}, which this run needs, failed: {reason}")


@singledispatch
def execute(
    run: Run, store: Results, devices: int = 1, *, device: str = "auto", watch: Watch | None = None
) -> dict[str, Any]:
    """Train, evaluate and write the outcome, which is returned; a finished run returns its outcome at once.

    Training continues from the last checkpoint, bit for bit on the same machine. device: "auto", "cpu", "cuda" or
    "mps". devices: GPUs (or processes on the CPU) of this machine that divide each batch; they are not part of the key.
    If the loss or a final score is not finite, the outcome has the status "failed". Other kinds of work than a `Run`
    may register a function of their own.
    Raises: Interrupted after Ctrl-C, with a checkpoint; Busy if another process executes the run; NeededRunFailed
    if its start or teacher failed; StoreError; DataError; DeviceError if the machine has fewer devices or a batch
    cannot be divided among them; ConfigError.
    """
    watch = watch or Watch()
    launched = launch()
    with launched.environment():
        require("lightning_fabric")
    check_launch(launched, devices, 1)
    if watch.shard:
        check_shared(run.recipe, launched.processes, watch.compile)
    if launched.processes == 1:
        check_devices(devices, run.recipe.batch, device)
    if launched.first:
        warn_of_edits([run], store)
    else:
        watch = dataclasses.replace(watch, report=None, say=None, loggers=())
    with launched.environment(), join_group(launched, device, run.recipe.batch) as group:
        return _execute(run, store, devices, device, watch, group)


def _execute(run: Run, store: Results, devices: int, device: str, watch: Watch, group: Group) -> dict[str, Any]:
    key = run.key
    if dataclasses.replace(run).key != key:
        raise DataError(f"the data of run {key} have changed since the run was made: make it again")
    group.check_key(key)
    finished = group.agree(lambda: store.outcome(key) if store.status(key) in ("done", "failed") else None)
    if finished is not None:
        return finished
    for needed in run.needs():
        _execute_needed(needed, store, device, devices, dataclasses.replace(watch, loggers=()), group)
    with ExitStack() as stack:
        folder = group.agree(lambda: stack.enter_context(store.lock(key)))
        finished = group.agree(lambda: store.outcome(key))  # another process may have finished it meanwhile
        if finished is not None:
            return finished
        outcome = _in_folder(run, folder, store, device, devices, watch, group)
        return group.agree(lambda: _finish(store, key, folder, outcome))


def _finish(store: Results, key: str, folder: Path, outcome: dict[str, Any]) -> dict[str, Any]:
    check_held(folder)
    checkpoint.keep_only_last(folder)
    store.finish(key, {"key": key, **outcome})
    return store.outcome(key) or {}


def _execute_needed(run: Run, store: Results, device: str, devices: int, watch: Watch, group: Group) -> None:
    """Execute a run that another one needs, or wait for the process that does.

    Raises: NeededRunFailed, except for errors of the environment, which are raised as they are.
    """
    while True:
        try:
            outcome = _execute(run, store, devices, device, watch, group)
            break
        except Busy:
            time.sleep(1.0)
        except (NeededRunFailed, FirstFailed):  # they name the run further up
            raise
        except Exception as error:
            if is_environment_error(error):
                raise
            raise NeededRunFailed(run.key, f"{type(error).__name__}: {error}") from error
    if outcome.get("status") != "done":
        raise NeededRunFailed(run.key, outcome.get("error"))


def _teacher(run: Run, store: Results, student: nn.Module) -> nn.Module | None:
    """The model whose predictions are learned too. Raises: ConfigError if the task cannot use it."""
    if run.teacher is None:
        return None
    if isinstance(run.teacher, Run):
        teacher = load_trained(run.teacher, store)
        names = _class_names(run, run.teacher, store)
        if names and names[0] != names[1]:
            theirs, ours = (short_repr(each, 60) for each in names)
            raise ConfigError(f"the teacher's classes are {theirs}, the task's {ours}: train the teacher on this task")
    elif is_pretrained(run.teacher) or run.task.extra:  # the user's own host may load its weights by itself
        teacher = create_model(run.teacher, None, extra=run.task.extra).eval()
    else:
        raise ConfigError(f"the teacher {run.teacher!r} has random weights: write pretrained=True into its spelling")
    run.task.check_teacher(teacher, student)
    if not isinstance(run.task, ImageTask):
        return teacher
    given, own = run.task.statistics(), _statistics(run, run.task, store)
    return teacher if own == given else Renormalised(teacher, given, own)


def _class_names(run: Run, needed: Run | Saved, store: Results) -> tuple[list[str], list[str]] | None:
    """The classes of the run that this one needs, and its own; None where either has none, or they are not known."""
    data: Mapping[str, Any]
    data = read_description(needed.folder).get("data") or {} if isinstance(needed, Saved) else store.data(needed.key)
    old, new = data.get("class_names"), run.task.record().get("class_names")
    return (old, new) if old and new else None


def _statistics(run: Run, task: ImageTask, store: Results) -> Statistics:
    """Mean and deviation of the images that the teacher was trained on."""
    teacher = run.teacher
    if not isinstance(teacher, Run):
        if teacher is None or not is_pretrained(teacher):
            return task.statistics()
        return pretrained_statistics(teacher, task.channels, tuple(task.extra))
    taught: Any = teacher.task
    return taught.statistics(store.data(teacher.key) or None)


def _in_folder(
    run: Run, folder: Path, store: Results, device: str, devices: int, watch: Watch, group: Group
) -> dict[str, Any]:
    if run.recipe.precision == "16-mixed" and resolved_device(device) == "cpu":  # Fabric would use bf16 instead
        raise DeviceError("16-mixed needs a GPU; on a CPU use bf16-mixed or 32-true")
    quiet_lightning()
    launched = group.launched
    count = launched.processes if launched.processes > 1 else devices
    number = group.agree(lambda: write_run_file(run, folder, device, count, watch.compile))
    with threads(number):  # the next run of this process has its own
        if launched.processes > 1:
            group.one_after_another(run.task.record)
            strategy = sharding_strategy(launched.processes) if watch.shard else None
            precision, loggers = run.recipe.precision, watch.loggers
            return train(run, folder, store, watch, fabric_of(launched, device, precision, strategy, loggers))
        if devices > 1:
            return in_processes(partial(train, run, folder, store), run.recipe.precision, device, devices, watch)
        return train(run, folder, store, watch, make_fabric(device, 1, run.recipe.precision, watch.loggers))


def train(run: Run, folder: Path, store: Results, watch: Watch, fabric: Any) -> dict[str, Any]:
    """Train on the devices of a launched Fabric, and return the outcome; with several processes, that of the first.

    `execute` calls this with the folder locked, and writes the outcome.
    """
    run.task.record()  # data stay in the process from run to run: no run has them counted
    peak = PeakMemory(fabric.device)
    model = run.model()
    if run.start is not None:
        start = run.start
        source = load_trained(start, store) if isinstance(start, Run) else load(start.folder, run.task.extra)
        size = run.task.size if isinstance(run.task, ImageTask) else None
        names, rows = _class_names(run, start, store), None
        if names is not None and names[0] != names[1]:
            rows = class_rows(lambda number: run.task.trial(run.mixer, run.removed, outputs=number).model)
        copy_weights(source, model, names, size, rows)
    loop = Loop(run.task, run.recipe, run.seed, model, fabric, folder, watch, peak, _teacher(run, store, model))
    loop.resume()
    if watch.say is not None and fabric.is_global_zero:
        watch.say(announcement(run, model))
    common: dict[str, Any] = {
        "error": None,
        "study": None,
        "scale": None,
        "row": run.label,
        "seed": run.seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "environment": environment(fabric.device, run.recipe.precision, fabric.world_size, watch.compile),
        "code": code_version(),
        "sources": own_sources(run),
        "data": {**run.task.record(), "unit": run.task.unit},
        "spelling": spell(run),
        "model": model_recipe(model) if "regard_host" in model.__dict__ else None,
        "probes": {},
    }
    try:
        with _open_loggers(fabric):
            score = loop.train()
        for name, value in score.metrics.items() if score else ():
            if not math.isfinite(value):
                raise Diverged(loop.step - 1, value, f"the test {name}")
    except Diverged as error:
        results = {"status": "failed", "error": str(error), "diverged": True, "step": error.step, "metrics": {}}
    else:
        results = {"status": "done", "step": loop.step, **(_results(run, loop, score, peak) if score else {})}
    return common | results | _time_and_speed(loop, common["data"]["train"])


@contextmanager
def _open_loggers(fabric: Any) -> Iterator[None]:
    """Start the loggers in the first process, and close them. Raises: ConfigError if a tool refuses to start."""
    loggers = fabric.loggers if fabric.is_global_zero else ()
    for logger in loggers:
        _ = logger.experiment
    status = "failed"
    try:
        yield
        status = "success"
    finally:
        for logger in loggers:
            logger.finalize(status)


def _results(run: Run, loop: Loop, score: Score, peak: PeakMemory) -> dict[str, Any]:
    chance = run.task.chance
    diverged = score.metrics[run.task.metric] <= chance * 1.05
    reached = f"{run.task.metric} {score.metrics[run.task.metric]:.2f}"
    notes = [f"no better than a trivial answer: {reached}; {run.task.trivial} has {chance:.2f} (of 100)"]
    memory = peak.bytes()  # before the model is moved and its operations are counted
    speed = inference_speed(loop.trained, run.task.example(), run.recipe.precision)
    macs = count_macs(loop.trained.cpu().float(), run.task.example())
    return {
        "metrics": score.metrics,
        "best": None if loop.best is None else {"step": loop.best[0], run.task.metric: loop.best[1]},
        "diverged": diverged,
        "notes": notes if diverged else [],
        "details": score.details,
        **_encode(score.samples),
        "sampled": run.task.metric,
        "chance": chance,
        "memory_bytes": memory,
        "macs": macs,
        "inference_per_second": speed,
    }


def _encode(samples: np.ndarray | None) -> dict[str, str | None]:
    """What each test sample contributes, in base64: "bits" of right or wrong, or "samples" in float32."""
    if samples is None:
        return {"bits": None}
    if samples.dtype == np.bool_:
        return {"bits": base64.b64encode(np.packbits(samples).tobytes()).decode()}
    return {"bits": None, "samples": base64.b64encode(samples.astype("<f4").tobytes()).decode()}


def write_run_file(run: Run, folder: Path, device: str, devices: int, compiled: bool = False) -> int:
    """Write run.json at the first start, and return the number of threads at it: later starts take the same, for
    bitwise equality."""
    path = folder / "run.json"
    execution = {"device": resolved_device(device), "devices": devices, **step_execution(compiled)}
    if path.exists():
        written = run_file(path)
        for field, value in execution.items():
            before = written.get(field, value)
            if before != value:
                text = "run %s started with %s %s and continues with %s: the results will not be equal bit for bit"
                log.warning(text, run.key, field, before, value)
        return written.get("threads") or torch.get_num_threads()
    identity = {"key": run.key, "spelling": spell(run), "canonical": canonical(run.identity())}
    origin = {"code": code_version(), "started": datetime.now(UTC).isoformat(timespec="seconds")}
    number = torch.get_num_threads()
    write_record(path, {**identity, "seed": run.seed, "threads": number, **execution, **origin})
    return number


def _time_and_speed(loop: Loop, train: int) -> dict[str, Any]:
    """Time and training speed; train: number of training samples, which may be fewer than a batch."""
    images = loop.step * min(loop.recipe.batch, train) * loop.recipe.accumulate
    return {
        "seconds": round(loop.seconds, 3),
        "images_per_second": round(images / loop.seconds, 1) if loop.seconds else None,
        "others": loop.use.share(loop.seconds),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
