"""The estimated duration of a study on this machine, from a few training steps of each row on random inputs.

Measured times are stored by machine in estimates.json of the results folder. Times of finished runs are preferred.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from regard.core import RegardError
from regard.files.cache import read_entries, write_entries
from regard.lab.results.results import Results
from regard.lab.train.autocast import autocast
from regard.lab.train.environment import resolved_device
from regard.lab.train.loop import EVALUATIONS
from regard.lab.train.optimizer import make_optimizer
from regard.measure.turns import now, threads
from regard.mixers.shared.native import native_enabled, processor_name

from .executors.local import threads_of_a_run, usable_cores
from .run_jobs import needs

if TYPE_CHECKING:
    from regard.lab.tasks.base import Trial
    from regard.lab.train.run import Run

    from .study import Row, Study

Part = tuple[str, int]
"""The label of a row, and 0 for its own runs, or the number of a run that these need first, such as their start."""
SECONDS, STEPS = 2.0, 5
"""A row is timed until one of these limits is reached, after one step that is not counted."""


class Speed(NamedTuple):
    """Seconds of one training step, and of the evaluation of one sample."""

    step: float
    image: float


def estimate(
    study: "Study", scale: str, store: Results, workers: int, report: Callable[[str], None] = lambda label: None,
    rows: "Sequence[Row] | None" = None,
) -> dict[Part, float]:  # fmt: skip
    """Estimated seconds of one run of each row, and of each run that it needs first, on this machine.

    Runs that cannot be built or timed are left out. workers: runs at the same time, which divide the cores. report:
    called with the label of each row that is timed. rows: these, None for all.
    """
    path, name = store.root / "estimates.json", machine(workers)
    machines = read_entries(path)
    speeds: dict[str, dict[str, float]] = dict(machines.get(name, {}))
    estimates: dict[Part, float] = {}
    seed = study.setting(scale).numbers[0]
    for row in study.rows(scale) if rows is None else rows:
        own = study.run(scale, row, seed)
        for number, run in enumerate((own, *needs(own))):
            try:
                counts = run.task.sample_counts()
                if run.key not in speeds:
                    report(row.label if not number else f"what {row.label} needs first")
                    with threads(threads_of_a_run(workers)):
                        speeds[run.key] = measure(run)._asdict()
            except (RegardError, RuntimeError):
                continue
            estimates[row.label, number] = run_seconds(run, Speed(**speeds[run.key]), *counts)
    if speeds != machines.get(name, {}):
        write_entries(path, {**machines, name: speeds})
    return estimates


def baseline_hours(study: "Study", scale: str, store: Results, workers: int) -> tuple[float, float] | None:
    """As `hours`, with all rows as long as the baseline, which alone is timed; None if it cannot be timed here."""
    rows = study.setting(scale).rows
    one = next((row for row in rows if row.label == study.baseline), rows[0])
    timed = estimate(study, scale, store, workers, rows=(one,))
    return hours(study, scale, store, timed, workers) if timed else None


def machine(workers: int) -> str:
    """What times depend on besides the run: processor, cores, threads of a run, torch, kernels, and the GPU, if any."""
    kernels = ", compiled kernels" if native_enabled() else ""
    device = resolved_device("auto")
    gpu = "" if device == "cpu" else f", {torch.cuda.get_device_name() if device == 'cuda' else device}"
    cores = f"{usable_cores()} cores, {threads_of_a_run(workers)} a run"
    return f"{processor_name('model name')}, {cores}, torch {torch.__version__}{kernels}{gpu}"


def measure(run: "Run") -> Speed:
    """Time training steps and the evaluation of a run's model on random inputs; no data are read.

    The model is where training would put it: on a GPU if there is one.
    Raises: ConfigError if the host cannot be built.
    """
    device = torch.device(resolved_device("auto"))
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
        torch.manual_seed(0)
        trial = run.task.trial(run.mixer, run.removed, augment=run.recipe.augment)
        put_on(trial.model, device)
        step = _steps(run, trial, device)
        number = min(run.recipe.batch, 64)
        with torch.inference_mode(), autocast(device.type, run.recipe.precision):
            trial.model.eval()
            trial.forward(1)  # not counted: kernels are loaded
            start = now(device)
            trial.forward(number)
            return Speed(step, (now(device) - start) / number)


def put_on(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device, and from then on its inputs too; its outputs come back to the CPU."""
    if device.type == "cpu":
        return

    def move(values: Any, to: torch.device) -> Any:
        return tree_map(lambda value: value.to(to) if isinstance(value, Tensor) else value, values)

    model.to(device)
    model.register_forward_pre_hook(lambda _, args, kwargs: move((args, kwargs), device), with_kwargs=True)
    model.register_forward_hook(lambda _, args, output: move(output, torch.device("cpu")))


def _steps(run: "Run", trial: "Trial", device: torch.device) -> float:
    """The median seconds of a few optimizer steps, with augmentation."""
    trial.model.train()
    optimizer = make_optimizer(trial.model, run.recipe)
    seconds: list[float] = []
    while len(seconds) <= STEPS and sum(seconds) < SECONDS or len(seconds) < 2:
        start = now(device)
        for _ in range(run.recipe.accumulate):
            with autocast(device.type, run.recipe.precision):
                loss = trial.loss(run.recipe.batch)
            loss.backward()
        if run.recipe.clip:
            nn.utils.clip_grad_norm_(trial.model.parameters(), run.recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(now(device) - start)
    return float(np.median(seconds[1:]))


def run_seconds(run: "Run", speed: Speed, train: int, test: int) -> float:
    """Seconds of a run on so many training and test samples, with its evaluations."""
    recipe = run.recipe
    steps = recipe.trained_epochs * max(max(train // recipe.batch, 1) // recipe.accumulate, 1)
    return steps * speed.step + (min(EVALUATIONS, recipe.trained_epochs) + 1) * test * speed.image


def hours(
    study: "Study", scale: str, store: Results, estimates: Mapping[Part, float], workers: int
) -> tuple[float, float]:
    """(hours of the whole study, hours of its missing runs), from finished runs, else from `estimates`.

    Runs that rows start or learn from are counted, once each. estimates: as `estimate` returns them. What has neither
    counts as the mean of the same part of other rows, or of all.
    """
    parts: dict[str, Part] = {}
    for row, run in study.runs(scale):
        for number, needed in enumerate((run, *needs(run))):
            if needed.key not in parts or number == 0:
                parts[needed.key] = (row.label, number)
    outcomes = {key: store.outcome(key) for key in parts}
    finished: dict[Part, list[float]] = {}
    for key, outcome in outcomes.items():
        if outcome is not None and isinstance(seconds := outcome.get("seconds"), int | float):
            finished.setdefault(parts[key], []).append(float(seconds))
    known = {**estimates, **{part: fmean(times) for part, times in finished.items()}}
    per_hour = max(workers, 1) * 3600

    def estimate_of(part: Part) -> float:
        alike = [value for (_, number), value in known.items() if number == part[1]]
        return known[part] if part in known else fmean(alike or known.values() or [0.0])

    total = sum(estimate_of(part) for part in parts.values())
    left = sum(estimate_of(part) for key, part in parts.items() if outcomes[key] is None)
    return total / per_hour, left / per_hour
