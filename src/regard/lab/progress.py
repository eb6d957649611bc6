"""How far a study is: counts by state, and the time left, told to whoever watches. Needs no torch."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.core import StoreError
from regard.store.metrics import FIXED, Metrics
from regard.store.results import Results

STATES = ("done", "failed", "stopped", "died", "busy")
"""How a run can end here. stopped: something around it was wrong, such as a full disk; died: its worker was killed."""


@dataclass(frozen=True)
class Event:
    """What happens while a study runs. kind: plan, tick, start or one of `STATES`; plan and tick have no row.

    counts: runs by state (`STATES`, running, waiting). left: seconds, as far as can be told.
    """

    kind: str
    counts: Mapping[str, int]
    row: str = ""
    seed: int = 0
    outcome: Mapping[str, Any] | None = None
    text: str = ""
    left: float | None = None


class Progress:
    """Counts what happens to the runs of a study, and estimates the time left from the runs that are finished."""

    def __init__(self, watch: Callable[[Event], None]) -> None:
        self.watch = watch
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        self.running: dict[tuple[str, int], tuple[str, int, float]] = {}
        self.workers = 1
        self.waiting: Counter[str] = Counter()

    def found(self, state: str, row: str, outcome: Mapping[str, Any] | None) -> None:
        """A run that needs nothing: it is finished, or failed earlier."""
        self.counts[state] += 1
        self._learn(row, outcome)

    def plan(self, rows: Iterable[str], workers: int) -> None:
        """Runs to come, by row."""
        self.waiting.update(rows)
        self.workers = workers
        self._tell("plan")

    def start(self, row: str, seed: int, key: str, epochs: int) -> None:
        """A worker has taken a run."""
        self.waiting[row] -= 1
        self.running[row, seed] = (key, epochs, time.monotonic())
        self._tell("start", row, seed)

    def again(self, row: str, seed: int) -> None:
        """A run goes back to those to come."""
        self.running.pop((row, seed), None)
        self.waiting[row] += 1

    def end(self, state: str, row: str, seed: int, outcome: Mapping[str, Any] | None, text: str = "") -> None:
        """A run is over, in one of `STATES`."""
        self.running.pop((row, seed), None)
        self.counts[state] += 1
        self._learn(row, outcome)
        self._tell(state, row, seed, outcome, text)

    def tick(self, store: Results) -> None:
        """Time has passed: tell how far the running runs are, from their metrics files."""
        texts = [
            f"{row} seed {seed}: {_so_far(store.folder(key) / 'metrics.csv', epochs)}"
            for (row, seed), (key, epochs, _) in self.running.items()
        ]
        self._tell("tick", text="; ".join(texts))

    def left(self) -> float | None:
        """Seconds until the end, None as long as no run is finished."""
        every = [value for values in self.seconds.values() for value in values]
        if not every:
            return None
        total = sum(max(number, 0) * self._typical(row, every) for row, number in self.waiting.items())
        now = time.monotonic()
        for (row, _), (_, _, begun) in self.running.items():
            total += max(self._typical(row, every) - (now - begun), 0.0)
        return total / self.workers

    def _typical(self, row: str, every: list[float]) -> float:
        own = self.seconds.get(row) or every
        return sum(own) / len(own)

    def _learn(self, row: str, outcome: Mapping[str, Any] | None) -> None:
        value = (outcome or {}).get("seconds")
        if isinstance(value, int | float):
            self.seconds.setdefault(row, []).append(float(value))

    def _tell(
        self, kind: str, row: str = "", seed: int = 0, outcome: Mapping[str, Any] | None = None, text: str = ""
    ) -> None:
        counts = {name: self.counts[name] for name in STATES}
        counts |= {"running": len(self.running), "waiting": sum(max(n, 0) for n in self.waiting.values())}
        self.watch(Event(kind, counts, row, seed, outcome, text, self.left()))


def _so_far(path: Path, epochs: int) -> str:
    """Epoch, loss and last test score of a run, from its metrics file."""
    lines = list[dict[str, str]]()
    with suppress(StoreError):
        lines = Metrics(path).read()
    parts = [f"epoch {len(lines)}/{epochs}"]
    if lines:
        parts.append(f"loss {float(lines[-1]['train_loss']):.3g}")
        score = list(lines[0])[len(FIXED)]  # the main metric stands first
        parts += [f"{score} {float(line[score]):.4g}" for line in lines if line[score]][-1:]
    return ", ".join(parts)
