"""The learning rate of every row, chosen from the same three values on a validation part of the training data.

One tuning seed, half the epochs; a tuning run is a run of the store like others, so each is trained once. The test
samples are not read: a tuning run is scored on its validation part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regard.lab.results.layout import TUNING_SEED
from regard.lab.results.results import Results
from regard.lab.tasks.validation import ValidationPart
from regard.lab.train.run import Run

from .claims import metric_of
from .jobs import ENDED
from .study import Row, Study

FACTORS = (0.5, 1.0, 2.0)
"""Of the setting's learning rate."""
SHARE = 0.1
"""Of the training samples, for validation."""


@dataclass(frozen=True)
class Tuned:
    """The rates of one row with their scores on the validation part, None for a run that failed, and the chosen one."""

    scores: Mapping[float, float | None]
    rate: float

    @property
    def note(self) -> str:
        """What a page says of it."""
        tried = ", ".join(f"{rate:g}: {'failed' if s is None else f'{s:.1f}'}" for rate, s in self.scores.items())
        learned = any(score is not None for score in self.scores.values())
        why = "the best of three on a validation part" if learned else "the setting's own"
        return f"Learning rate {self.rate:g}, {why} ({tried})."


def tuning_runs(study: Study, scale: str) -> list[tuple[Row, Run]]:
    """The runs that choose rates, rate by rate over all rows; none where a task has no validation part."""
    setting = study.setting(scale)
    if setting.recipe is None or not isinstance(setting.task, ValidationPart):
        return []
    rows = [(row, study.run(scale, replace(row, rate=None), TUNING_SEED)) for row in study.rows(scale)]
    return [(row, _tuning_run(run, factor)) for factor in FACTORS for row, run in rows]


def _tuning_run(run: Run, factor: float) -> Run:
    recipe = run.recipe
    epochs = max(1, round(recipe.trained_epochs / 2))
    shorter = replace(recipe, lr=recipe.lr * factor, epochs=epochs, stop_after=0, average=min(recipe.average, epochs))
    start, teacher = (_without_validation_part(needed, run.task.data) for needed in (run.start, run.teacher))
    task: Any = _without(run.task).validation()
    return replace(run, task=task, recipe=shorter, start=start, teacher=teacher)


def _without(task: Any) -> Any:
    """A task that does not train on the validation part."""
    return replace(task, val=SHARE, val_seed=TUNING_SEED)


def _without_validation_part(needed: Any, data: str) -> Any:
    """What a run starts or learns from, trained without the part that judges the rates where it is of the same data."""
    if not isinstance(needed, Run) or needed.task.data != data or not isinstance(needed.task, ValidationPart):
        return needed
    start, teacher = (_without_validation_part(other, data) for other in (needed.start, needed.teacher))
    return replace(needed, task=_without(needed.task), start=start, teacher=teacher)


def choose_rates(runs: Sequence[tuple[Row, Run]], store: Results, metric: str) -> dict[str, Tuned]:
    """The rates of each row whose tuning runs have ended; the setting's own where all of them failed."""
    scores: dict[str, dict[float, float | None]] = {}
    waiting = {row.label for row, run in runs if store.status(run.key) not in ENDED}
    for row, run in runs:
        if row.label not in waiting:
            scores.setdefault(row.label, {})[run.recipe.lr] = metric_of(store.outcome(run.key), metric)
    return {label: _choose(values) for label, values in scores.items()}


def _choose(scores: Mapping[float, float | None]) -> Tuned:
    valid = {rate: score for rate, score in scores.items() if score is not None}
    middle = sorted(scores)[len(scores) // 2]
    return Tuned(scores, max(valid, key=lambda rate: (valid[rate], rate == middle)) if valid else middle)


def with_rates(study: Study, scale: str, tuned: Mapping[str, Tuned]) -> Study:
    """The study whose rows have their chosen learning rates at a scale, each with a note that says how."""
    setting = study.setting(scale)
    rows = []
    for row in setting.rows:
        found = tuned.get(row.label)
        rows.append(row if found is None else replace(row, rate=found.rate, notes=(*row.notes, found.note)))
    return replace(study, settings={**study.settings, scale: replace(setting, rows=tuple(rows))})
