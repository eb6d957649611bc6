"""How long a study will take on this machine: a few training steps of each different row, on random images.

What was timed is kept in estimates.json of the results folder, by machine; runs that are finished know better.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from regard.core import RegardError, UnsupportedError
from regard.mixers.shared.native_build import native_wanted, processor
from regard.store.files import read_json, write_json
from regard.store.results import Results
from regard.tasks.classification import Classification
from regard.tasks.data.augment import by_image
from regard.tasks.data.catalog import PARQUET
from regard.tasks.data.feed import Batches, to_tensor
from regard.tasks.data.images import Images
from regard.train.autocast import mixed
from regard.train.loop import EVALUATIONS
from regard.train.optimizer import make_optimizer

from .dry_run import outputs_and_channels

if TYPE_CHECKING:
    from regard.train.run import Run

    from .study import Study

SECONDS, STEPS = 2.0, 5
"""A row is timed for so many seconds, but not for more steps, after one step that is not counted."""
_SIZES = {"digits": (898, 899), "digits-canvas": (898, 1798), "imagenet": (1_281_167, 50_000)}


@dataclass(frozen=True)
class Speed:
    """Seconds of one training step, and of evaluating one image."""

    step: float
    image: float


def estimate(
    study: "Study", scale: str, store: Results, workers: int, tell: Callable[[str], None] | None = None
) -> dict[str, float]:
    """Seconds of one run of each row, as this machine suggests; rows that cannot be built or counted are left out.

    workers: runs side by side, which share the cores. tell: called with the label of each row that is timed.
    """
    path, here = store.root / "estimates.json", machine(workers)
    kept = read_json(path) if path.exists() else {}
    known: dict[str, dict[str, float]] = dict(kept.get(here) or {})
    before = len(known)
    found = {}
    seed = study.setting(scale).numbers[0]
    for row in study.rows(scale):
        run = study.run(scale, row, seed)
        try:
            images = _images(run)
            if run.key not in known:
                if tell is not None:
                    tell(row.label)
                with threads(workers):
                    speed = measure(run)
                known[run.key] = {"step": speed.step, "image": speed.image}
        except (RegardError, RuntimeError):
            continue
        found[row.label] = _seconds(run, Speed(**known[run.key]), *images)
    if len(known) > before:
        write_json(path, {**kept, here: known})
    return found


def machine(workers: int) -> str:
    """What times depend on besides the run: processor, cores, threads of a run, torch, and our compiled kernels."""
    kernels = ", compiled kernels" if native_wanted() else ""
    return f"{processor('model name')}, {_cores()} cores, {_share(workers)} a run, torch {torch.__version__}{kernels}"


def measure(run: "Run") -> Speed:
    """Time training steps and an evaluation of a run's network on random images; no data are read.

    Raises: UnsupportedError for another task than classification; ConfigError if the host cannot be built.
    """
    if not isinstance(run.task, Classification):
        raise UnsupportedError(f"only classification can be timed on random images, not {type(run.task).__name__}")
    outputs, channels = outputs_and_channels(run.task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = run.task.built(run.mixer, outputs, channels, run.removed, pretrained=False)
        batches = _random(run, channels, outputs)
        step = _steps(run, model, batches)
        with torch.inference_mode(), mixed("cpu", run.recipe.precision):
            images, _ = next(batches)
            model.eval()
            begun = time.perf_counter()
            model(images)
            return Speed(step, (time.perf_counter() - begun) / len(images))


def _steps(run: "Run", model: nn.Module, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The median of a few optimiser steps, with augmentation."""
    model.train()
    optimizer = make_optimizer(model, run.recipe)
    taken: list[float] = []
    while len(taken) <= STEPS and sum(taken) < SECONDS or len(taken) < 2:
        begun = time.perf_counter()
        for _ in range(run.recipe.accumulate):
            images, labels = next(batches)
            with mixed("cpu", run.recipe.precision):
                loss = F.cross_entropy(model(images).float(), labels)
            loss.backward()
        if run.recipe.clip:
            nn.utils.clip_grad_norm_(model.parameters(), run.recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken[1:]))


def _random(run: "Run", channels: int, outputs: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of noise, augmented as the recipe says (what works image by image is left out)."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (run.recipe.batch, *run.task.size, channels), dtype=np.uint8)
    images = Images(pixels, rng.integers(0, outputs, run.recipe.batch))
    if by_image(run.recipe.augment):
        while True:
            yield to_tensor(pixels).float() / 255, torch.from_numpy(images.labels)
    feed = Batches(images, run.task.size, run.recipe.batch, run.recipe.augment, 0)
    step = 0
    while True:
        made, labels = feed[step]
        yield made.float() / 255, labels
        step += 1


def _images(run: "Run") -> tuple[int, int]:
    """(training, test) images, from what is known of named sets, else from the data. Raises: DataError."""
    task: Any = run.task
    if task.data in PARQUET:
        train, test = PARQUET[task.data].used, PARQUET[task.data].rows[1]
    elif task.data in _SIZES:
        train, test = _SIZES[task.data]
    else:
        about = task.record()
        return about["train"], about["test"]
    limit = getattr(task, "limit", 0) or max(train, test)
    return min(train, limit), min(test, limit)


def _seconds(run: "Run", speed: Speed, train: int, test: int) -> float:
    recipe = run.recipe
    steps = recipe.trained_epochs * max(max(train // recipe.batch, 1) // recipe.accumulate, 1)
    return steps * speed.step + (min(EVALUATIONS, recipe.trained_epochs) + 1) * test * speed.image


def _cores() -> int:
    from .workers import usable_cores

    return usable_cores()


def _share(workers: int) -> int:
    return max(1, _cores() // max(workers, 1))


@contextmanager
def threads(workers: int) -> Iterator[None]:
    """As many threads as a run has beside its neighbours."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(_share(workers), int(os.environ.get("OMP_NUM_THREADS") or _share(workers))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def hours(study: "Study", scale: str, store: Results, guess: dict[str, float], workers: int) -> tuple[float, float]:
    """(hours of the whole study, hours to go), from finished runs where there are any, else from `guess` by row.

    A row without either is taken as the mean of the others.
    """
    known = {label: list[float]() for label in (row.label for row in study.rows(scale))}
    left = dict.fromkeys(known, 0)
    number = dict.fromkeys(known, 0)
    for row, run in study.runs(scale):
        number[row.label] += 1
        outcome = store.outcome(run.key)
        if outcome is None:
            left[row.label] += 1
        elif isinstance(outcome.get("seconds"), int | float):
            known[row.label].append(float(outcome["seconds"]))
    typical = {label: sum(own) / len(own) if own else guess.get(label) for label, own in known.items()}
    values = [value for value in typical.values() if value is not None]
    mean = sum(values) / len(values) if values else 0.0
    per_hour = max(workers, 1) * 3600
    whole, to_go = (
        sum(count[label] * (mean if typical[label] is None else typical[label] or 0.0) for label in known) / per_hour
        for count in (number, left)
    )
    return whole, to_go
