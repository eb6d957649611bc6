"""What a page shows, read from the store: plain data, no figures and no HTML. Needs no torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from regard.lab.table import load_snapshot, said
from regard.store.files import read_json
from regard.store.metrics import FIXED, Metrics
from regard.store.results import Results

from . import phrasing
from .figures import Curve

AXES = ("images_per_second", "macs", "parameters", "seconds", "peak_memory_bytes")


@dataclass(frozen=True)
class Finished:
    """One run of the study that has an outcome, and its folder."""

    row: int
    seed: int
    key: str
    folder: Path
    outcome: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that the run ended with; a metric that is not a number is left out."""
        found = self.outcome.get("metrics") or {}
        return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


@dataclass(frozen=True)
class Maps:
    """Attention maps of one row on the study's picture. image: base64 of a PNG; layers: name, mean and heads.

    credit: where the picture comes from.
    """

    row: int
    image: str
    grid: tuple[int, int]
    query: tuple[int, int] | None
    layers: list[dict[str, Any]]
    credit: str = ""


@dataclass(frozen=True)
class Material:
    """Everything that is drawn for one study at one scale. runs: with an outcome; missing: how many have none."""

    snapshot: dict[str, Any]
    runs: list[Finished]
    missing: int
    failed: list[Finished] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the snapshot."""
        return self.snapshot["rows"]

    def of(self, row: int) -> list[Finished]:
        """The finished runs of a row, by seed."""
        return [run for run in self.runs if run.row == row]

    def average(self, row: int, name: str) -> float | None:
        """The mean over a row's runs of a metric, or of a field of the outcome; else what the snapshot says."""
        found = [run.metrics.get(name, run.outcome.get(name)) for run in self.of(row)]
        numbers = [float(value) for value in found if isinstance(value, int | float)]
        if numbers:
            return fmean(numbers)
        known = self.rows[row].get(name)
        return float(known) if isinstance(known, int | float) else None


def gather(results: Path, name: str, scale: str) -> Material:
    """Read a study's snapshot and the outcomes of its runs.

    Raises: ConfigError if the store has nothing of this study and scale; StoreError if a file is damaged.
    """
    snapshot = load_snapshot(results, name, scale)
    store = Results(results)
    place = {row["label"]: index for index, row in enumerate(snapshot["rows"])}
    done: list[Finished] = []
    failed: list[Finished] = []
    missing = 0
    for entry in snapshot["runs"]:
        outcome = store.outcome(entry["key"])
        if outcome is None or entry["row"] not in place:
            missing += 1
            continue
        run = Finished(place[entry["row"]], int(entry["seed"]), entry["key"], store.folder(entry["key"]), outcome)
        (done if outcome.get("status") == "done" else failed).append(run)
    return Material(snapshot, sorted(done, key=lambda run: (run.row, run.seed)), missing, failed)


def learning(material: Material, name: str) -> list[Curve]:
    """A column of metrics.csv per row: mean, lowest and highest over the seeds that reached an epoch."""
    lines = []
    for row, description in enumerate(material.rows):
        seen: dict[float, list[float]] = {}
        for run in material.of(row):
            for epoch, value in _column(run.folder / "metrics.csv", name):
                seen.setdefault(epoch, []).append(value)
        if seen:
            epochs = sorted(seen)
            values = [seen[epoch] for epoch in epochs]
            several = max(map(len, values)) > 1
            low, high = ([min(v) for v in values], [max(v) for v in values]) if several else ([], [])
            lines.append(Curve(row, description["label"], epochs, [fmean(v) for v in values], low, high))
    return lines


def columns(material: Material) -> list[str]:
    """The measured columns of the learning curves: the main metric first, then training loss and what else there is."""
    names: dict[str, None] = {material.snapshot["metric"]: None, "train_loss": None, "loss": None}
    for run in material.runs[:1]:
        for line in Metrics(run.folder / "metrics.csv").read()[:1]:
            names.update(dict.fromkeys(name for name in line if name not in (*FIXED, "seconds")))
    return list(names)


def _column(path: Path, name: str) -> Iterable[tuple[float, float]]:
    """(epoch, value) pairs; lines cut off by a crash and values that are no numbers are left out."""
    for line in Metrics(path).read():
        try:
            epoch, value = float(line["epoch"]), float(line[name])
        except (KeyError, TypeError, ValueError):
            continue
        if value == value and abs(value) != float("inf"):
            yield epoch, value


def attention(material: Material) -> list[Maps]:
    """The maps of the first seed of each row that has any, in the order of the rows."""
    found = []
    for row in range(len(material.rows)):
        for run in material.of(row):
            path = run.folder / "probes" / "maps.json"
            if path.exists():
                read = read_json(path)
                query = tuple(read["query"]) if read.get("query") else None
                layers, credit = read.get("layers") or [], str(read.get("credit") or "")
                found.append(Maps(row, read["image"], tuple(read["grid"]), query, layers, credit))
                break
    return found


def environment(material: Material) -> list[tuple[str, list[str]]]:
    """Where the numbers come from: each fact with all values that occur among the runs, most frequent first."""
    everything = [*material.runs, *material.failed]
    surroundings = [found for run in everything if (found := run.outcome.get("environment"))]
    facts = {
        name.replace("_", " "): _values(one[name] if name in one else _unsaid(one, name) for one in surroundings)
        for name in dict.fromkeys(name for one in surroundings for name in one)
    }
    facts["code version"] = _values(run.outcome.get("code") for run in everything)
    data = [run.outcome.get("data") or {} for run in everything] or [material.snapshot.get("data") or {}]
    facts["data set"] = _values(one.get("name") for one in data)
    facts["data checksum"] = _values(one.get("checksum") for one in data)
    facts["images"] = _values(
        f"{one['train']:,} train, {one['test']:,} test"
        for one in data
        if isinstance(one.get("train"), int) and isinstance(one.get("test"), int)
    )
    facts["seeds"] = [", ".join(str(seed) for seed in sorted({run.seed for run in everything}))]
    return [(name, values) for name, values in facts.items() if values and values != [""]]


def _unsaid(surroundings: Mapping[str, Any], name: str) -> Any:
    """What holds where an outcome does not name a fact."""
    value = said(surroundings, name)
    return "not recorded" if value is None else value


def _values(found: Iterable[Any]) -> list[str]:
    """The different values as text, most frequent first, with how often where there are several."""
    counts: dict[str, int] = {}
    for value in found:
        if value not in (None, ""):
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            counts[text] = counts.get(text, 0) + 1
    ordered: Sequence[tuple[str, int]] = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"{text} ({phrasing.count(n, 'run')})" if len(ordered) > 1 else text for text, n in ordered]
