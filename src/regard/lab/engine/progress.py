"""Progress of a study: runs by state and the estimated time left, reported as events. Needs no torch."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from regard.core import StoreError
from regard.lab.results.metrics import FIXED, Metrics
from regard.lab.results.results import Results

STATES = ("done", "failed", "stopped", "died", "busy")
"""How a job can end. stopped: by an error of the environment, such as a full disk; died: its worker was killed; busy:
another process executes the run."""


@dataclass(frozen=True)
class Event:
    """One event of a study. kind: waiting, tick, start or one of `STATES`; waiting and tick have no row.

    counts: runs by state (`STATES`, running, waiting). seconds_left: estimated, None before a run has finished.
    """

    kind: str
    counts: Mapping[str, int]
    row: str = ""
    seed: int = 0
    outcome: Mapping[str, Any] | None = None
    text: str = ""
    seconds_left: float | None = None


class Progress:
    """Counts the runs of a study by state, and estimates the time left; calls `watch` with each event."""

    def __init__(self, watch: Callable[[Event], None]) -> None:
        self.watch = watch
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        self.running: dict[str, tuple[str, int, int, float]] = {}  # key -> row, seed, epochs, time of the start
        self.workers = 1
        self.waiting: Counter[str] = Counter()

    def add_finished(self, state: str, row: str, outcome: Mapping[str, Any] | None) -> None:
        """Count a run that finished or failed earlier."""
        self.counts[state] += 1
        self._add_seconds(row, outcome)

    def add_waiting(self, rows: Iterable[str], workers: int) -> None:
        """Add runs that will be executed: the row of each, and how many run at the same time."""
        self.waiting.update(rows)
        self.workers = workers
        self._report("waiting")

    def start(self, row: str, seed: int, key: str, epochs: int) -> None:
        """A run has started."""
        self.waiting[row] -= 1
        self.running[key] = (row, seed, epochs, time.monotonic())
        self._report("start", row, seed)

    def requeue(self, row: str, key: str) -> None:
        """A run has to wait again."""
        self.running.pop(key, None)
        self.waiting[row] += 1

    def end(self, state: str, row: str, seed: int, key: str, outcome: Mapping[str, Any] | None, text: str = "") -> None:
        """A run has ended, in one of `STATES`."""
        self.running.pop(key, None)
        self.counts[state] += 1
        self._add_seconds(row, outcome)
        self._report(state, row, seed, outcome, text)

    def tick(self, store: Results) -> None:
        """Report how far the running runs are, from their metrics files."""
        texts = [
            f"{row} seed {seed}: {_run_progress(store.folder(key) / 'metrics.csv', epochs)}"
            for key, (row, seed, epochs, _) in self.running.items()
        ]
        self._report("tick", text="; ".join(texts))

    def seconds_left(self) -> float | None:
        """Estimated seconds until the end, None as long as no run has finished."""
        durations = [value for values in self.seconds.values() for value in values]
        if not durations:
            return None
        total = sum(max(number, 0) * fmean(self.seconds.get(row) or durations) for row, number in self.waiting.items())
        now = time.monotonic()
        for row, _, _, started in self.running.values():
            total += max(fmean(self.seconds.get(row) or durations) - (now - started), 0.0)
        return total / self.workers

    def _add_seconds(self, row: str, outcome: Mapping[str, Any] | None) -> None:
        value = (outcome or {}).get("seconds")
        if isinstance(value, int | float):
            self.seconds.setdefault(row, []).append(float(value))

    def _report(
        self, kind: str, row: str = "", seed: int = 0, outcome: Mapping[str, Any] | None = None, text: str = ""
    ) -> None:
        counts = {name: self.counts[name] for name in STATES}
        counts |= {"running": len(self.running), "waiting": sum(max(n, 0) for n in self.waiting.values())}
        self.watch(Event(kind, counts, row, seed, outcome, text, self.seconds_left()))


def _run_progress(path: Path, epochs: int) -> str:
    """Epoch, loss and last score of a run, from its metrics file."""
    lines = list[dict[str, str]]()
    with suppress(StoreError):
        lines = Metrics(path).read()
    parts = [f"epoch {len(lines)}/{epochs}"]
    if lines:
        parts.append(f"loss {float(lines[-1]['train_loss']):.3g}")
        score = list(lines[0])[len(FIXED)]  # the main metric is first
        parts += [f"{score} {float(line[score]):.4g}" for line in lines if line[score]][-1:]
    return ", ".join(parts)
