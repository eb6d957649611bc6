"""How far a study is: counts by state, and the time left, told to whoever watches. Needs no torch."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .results import Results


@dataclass(frozen=True)
class Event:
    """What happens while a study runs. kind: plan, tick, start, done, failed, died or busy; plan and tick have no row.

    counts: runs by state (done, failed, died, busy, running, waiting). left: seconds, as far as can be told.
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
        """A run is over: done, failed, died or busy."""
        self.running.pop((row, seed), None)
        self.counts[state] += 1
        self._learn(row, outcome)
        self._tell(state, row, seed, outcome, text)

    def tick(self, store: Results) -> None:
        """Time has passed: tell how far the running runs are, from their metrics files."""
        texts = []
        for (row, seed), (key, epochs, _) in self.running.items():
            try:
                lines = (store.folder(key) / "metrics.csv").read_bytes().count(b"\n") - 1
            except OSError:
                lines = 0
            texts.append(f"{row} seed {seed}: epoch {max(lines, 0)}/{epochs}")
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
        counts = {name: self.counts[name] for name in ("done", "failed", "died", "busy")}
        counts |= {"running": len(self.running), "waiting": sum(max(n, 0) for n in self.waiting.values())}
        self.watch(Event(kind, counts, row, seed, outcome, text, self.left()))
