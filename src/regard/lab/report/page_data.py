"""The data of a study's page, read from the store. Needs no torch."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from regard.core import StoreError
from regard.core.validation import is_whole
from regard.files.records import read_record
from regard.lab.engine.table import Table, ended_runs, load_snapshot, make_table
from regard.lab.results.metrics import FIXED, Metrics
from regard.lab.results.results import Results
from regard.pages import phrasing
from regard.pages.figures import Curve

AXES = ("images_per_second", "inference_per_second", "macs", "parameters", "seconds", "memory_bytes")
TIMES = ("images_per_second", "inference_per_second", "seconds")
ALONE = 0.05
"""Share of the machine's processors that others may use for a run to have had it to itself."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended, with its outcome and its folder. row: the index of its row."""

    row: int
    seed: int
    key: str
    folder: Path
    outcome: dict[str, Any]

    @property
    def others(self) -> float | None:
        """The share of the machine's processors that others used while the run trained; None if it was not measured."""
        value = self.outcome.get("others")
        return float(value) if isinstance(value, int | float) else None

    @property
    def alone(self) -> bool:
        """Whether the run had the machine to itself, so that its time says something of its mechanism."""
        return self.others is not None and self.others <= ALONE

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics; values that are not numbers are left out."""
        metrics = self.outcome.get("metrics") or {}
        return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


@dataclass(frozen=True)
class AttentionMaps:
    """Attention maps of one row on the study's picture. image: base64 of a PNG; layers: name, mean and heads.

    query: (row, column) of the query's cell on the grid, None for the mean over all queries. credit: of the picture.
    """

    row: int
    image: str
    grid: tuple[int, int]
    query: tuple[int, int] | None
    layers: list[dict[str, Any]]
    credit: str = ""


@dataclass(frozen=True)
class StudyData:
    """A study at one scale. runs: those of the table, by row and seed. failed: those that ended without a result."""

    snapshot: dict[str, Any]
    table: Table
    runs: list[FinishedRun]
    failed: list[FinishedRun]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the snapshot."""
        return self.snapshot["rows"]

    def of(self, row: int) -> list[FinishedRun]:
        """The finished runs of a row, by seed."""
        return [run for run in self.runs if run.row == row]

    def average(self, row: int, name: str) -> float | None:
        """The mean over a row's runs of a metric or a field of the outcome; else the snapshot's value.

        `TIMES` are those of runs that had the machine to themselves. Memory is the least of the runs: the first run of
        a process also loads what libraries load at their first step.
        """
        runs = [run for run in self.of(row) if run.alone or name not in TIMES]
        values = [run.metrics.get(name, run.outcome.get(name)) for run in runs]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if numbers:
            return min(numbers) if name == "memory_bytes" else fmean(numbers)
        value = self.rows[row].get(name)
        return float(value) if isinstance(value, int | float) else None


def read_study(results: Path, name: str, scale: str) -> StudyData:
    """Read a study's snapshot and the outcomes of its runs.

    Raises: ConfigError if the store has nothing of this study and scale; StoreError if a file is damaged.
    """
    snapshot, store = load_snapshot(results, name, scale), Results(results)
    ended = ended_runs(store, snapshot)
    table = make_table(snapshot, ended)
    indices = {row["label"]: index for index, row in enumerate(snapshot["rows"])}

    def of_page(run: Mapping[str, Any]) -> FinishedRun:
        key = run["key"]
        return FinishedRun(indices[run["row"]], int(run["seed"]), key, store.folder(key), run["outcome"])

    done = sorted(map(of_page, table.runs), key=lambda run: (run.row, run.seed))
    return StudyData(snapshot, table, done, [of_page(run) for run in ended if run["outcome"].get("status") != "done"])


def learning_curves(study_data: StudyData, name: str) -> list[Curve]:
    """The curve of a column of metrics.csv for each row: mean, lowest and highest over the seeds with that epoch."""
    lines = []
    for row, description in enumerate(study_data.rows):
        by_epoch: dict[float, list[float]] = {}
        for run in study_data.of(row):
            for epoch, value in _column(run.folder / "metrics.csv", name):
                by_epoch.setdefault(epoch, []).append(value)
        if by_epoch:
            epochs = sorted(by_epoch)
            values = [by_epoch[epoch] for epoch in epochs]
            several = max(map(len, values)) > 1
            low, high = ([min(v) for v in values], [max(v) for v in values]) if several else ([], [])
            lines.append(Curve(row, description["label"], epochs, [fmean(v) for v in values], low, high))
    return lines


def columns(study_data: StudyData) -> list[str]:
    """The metrics with learning curves: the main metric, the training loss, then the others."""
    names: dict[str, None] = {study_data.snapshot["metric"]: None, "train_loss": None, "loss": None}
    for run in study_data.runs[:1]:
        for line in Metrics(run.folder / "metrics.csv").read()[:1]:
            names.update(dict.fromkeys(name for name in line if name not in (*FIXED, "seconds")))
    return list(names)


def _column(path: Path, name: str) -> Iterable[tuple[float, float]]:
    """(epoch, value) pairs; incomplete lines and values that are not finite numbers are left out."""
    for line in Metrics(path).read():
        try:
            epoch, value = float(line["epoch"]), float(line[name])
        except (KeyError, TypeError, ValueError):
            continue
        if math.isfinite(value):
            yield epoch, value


def read_maps(study_data: StudyData) -> list[AttentionMaps]:
    """The maps of the first seed of each row that has maps, in the order of the rows."""
    maps = []
    for row in range(len(study_data.rows)):
        paths = [run.folder / "probes" / "maps.json" for run in study_data.of(row)]
        maps += [_attention_maps(path, row) for path in paths if path.exists()][:1]
    return maps


def _attention_maps(path: Path, row: int) -> AttentionMaps:
    """The maps of a file, which may come from another machine. Raises: StoreError if they are none."""
    value = read_record(path)
    try:
        (height, width), layers = value["grid"], value.get("layers") or []
        y, x = (0, 0) if (query := value.get("query")) is None else query
        shapes = {np.asarray(one, float).shape for layer in layers for one in (layer["mean"], *layer["heads"])}
        picture = re.fullmatch("[A-Za-z0-9+/]*=*", value["image"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} has no attention maps of Regard ({error!r}); delete it and run again") from error
    inside = all(map(is_whole, (height, width, y, x))) and 0 <= y < height and 0 <= x < width
    if not picture or not inside or shapes - {(height * width,)}:
        raise StoreError(f"{path} has no attention maps of Regard; delete it and run again")
    cell = None if query is None else (y, x)
    return AttentionMaps(row, value["image"], (height, width), cell, layers, str(value.get("credit") or ""))


def environment(study_data: StudyData) -> list[tuple[str, list[str]]]:
    """Machine, versions, data and seeds: each with its values among the runs, the most frequent first."""
    runs = [*study_data.runs, *study_data.failed]
    environments = [value for run in runs if (value := run.outcome.get("environment"))]
    records = [run.outcome.get("data") or {} for run in runs] or [study_data.snapshot.get("data") or {}]
    sizes = [(record.get("train"), record.get("test")) for record in records]
    facts = {
        name.replace("_", " "): _values(environment.get(name, "not recorded") for environment in environments)
        for name in dict.fromkeys(name for environment in environments for name in environment)
    } | {
        "code version": _values(run.outcome.get("code") for run in runs),
        "data set": _values(record.get("name") for record in records),
        "data checksum": _values(record.get("checksum") for record in records),
        "images": _values(f"{train:,} train, {test:,} test" for train, test in sizes
                          if isinstance(train, int) and isinstance(test, int)),
        "seeds": [", ".join(map(str, sorted({run.seed for run in runs})))],
    }  # fmt: skip
    return [(name, values) for name, values in facts.items() if values and values != [""]]


def _values(values: Iterable[Any]) -> list[str]:
    """The different values as text, most frequent first; several values have their numbers of runs."""
    known = [value for value in values if value not in (None, "")]
    counts = Counter(value if isinstance(value, str) else json.dumps(value, sort_keys=True) for value in known)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"{text} ({phrasing.count(n, 'run')})" if len(ordered) > 1 else text for text, n in ordered]
