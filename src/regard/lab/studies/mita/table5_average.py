"""Mixture-of-Top-k Attention, Table 5: averages over the tasks of the Long Range Arena, which its claims are about."""

from collections.abc import Sequence
from statistics import fmean

from regard.core import ConfigError, StoreError
from regard.lab.engine.analysis import Analysis, Source, trained_runs
from regard.lab.engine.claims import metric_of
from regard.lab.studies.papers import MITA_SOURCE
from regard.measure.intervals import paired_interval
from regard.pages.sheets import Cell, Picture, Sheet

from .table5 import PRINTED, TASKS

_STUDIES = tuple(f"mita_table5_{task.lower()}" for task in TASKS)


def _accuracies(source: Source, study: str) -> dict[str, dict[int, float]]:
    """Top-1 by row and seed of the finished runs of a study, {} if it has none."""
    found: dict[str, dict[int, float]] = {}
    try:
        runs = trained_runs(source, study)
    except (ConfigError, StoreError):
        return {}
    for label, seed, key in runs:
        if (value := metric_of(source.outcome(key), "top1")) is not None:
            found.setdefault(label, {})[seed] = value
    return found


def _averages(of_tasks: Sequence[dict[str, dict[int, float]]], label: str) -> dict[int, float]:
    """By seed, the mean over the tasks, of the seeds that every task has."""
    values = [task.get(label, {}) for task in of_tasks]
    seeds = set.intersection(*map(set, values)) if values else set()
    return {seed: fmean(task[seed] for task in values) for seed in sorted(seeds)}


def sheets(source: Source) -> Sequence[Sheet | Picture]:
    """A row for each mechanism: its mean on each task, the average, MiTA minus it with an interval over seeds."""
    found = {study: values for study in _STUDIES if (values := _accuracies(source, study))}
    if not found:
        trained_runs(source, _STUDIES[0])  # says what is missing
    of_tasks = list(found.values())
    averages = {label: _averages(of_tasks, label) for label in PRINTED}
    rows: list[tuple[Cell, ...]] = []
    for label, (printed, _, hours) in PRINTED.items():
        means = [fmean(task[label].values()) if task.get(label) else None for task in of_tasks]
        gain = paired_interval(averages["MiTA"], averages[label]) if label != "MiTA" else None
        average = fmean(averages[label].values()) if averages[label] else None
        difference = (None, None, None) if gain is None else (gain.mean, gain.low, gain.high)
        rows.append((label, *means, average, *difference, round(fmean(printed), 2), hours))
    tasks = [TASKS[_STUDIES.index(study)] for study in found]
    columns = ("row", *tasks, "average", "MiTA minus it", "from", "to", "printed average", "printed hours")
    return [Sheet(title="Accuracy on long sequences", columns=columns, rows=tuple(rows))]


ANALYSIS = Analysis(
    name="mita_table5_average", title="Efficient attention on long sequences, on average", compute=sheets,
    source=f"{MITA_SOURCE}, Table 5", of="mita_table5_listops",
    question="Is a mixture of top-k experts as good as softmax attention over all tasks, and better than its rivals?",
    notes=("The average is of the tasks that have runs; its interval is over the seeds that all of them have.",),
)  # fmt: skip
