"""The output of `regard study`: progress while it runs, and its table."""

import sys
from pathlib import Path
from typing import Any

from regard.lab.progress import STATES, Event

from .tables import show


def print_table(results: Path, name: str, scale: str, as_json: bool) -> None:
    """Print the table of a study with its claims. Raises: ConfigError without results."""
    from regard.lab.export import json_text
    from regard.lab.table import Table

    table = Table.load(results, name, scale)
    if as_json:
        sys.stdout.write(json_text(table))
        return
    lines = []
    for line in table.rows:
        difference = line.difference
        lines.append({
            "row": line.label, "n": line.n, table.metric: _short(line.mean), "interval": _span(line.low, line.high),
            f"minus {table.baseline}": "" if difference is None else _short(difference.mean, "+"),
            "paired interval": "" if difference is None else _span(difference.low, difference.high, "+"),
            "seconds": None if line.seconds is None else round(line.seconds, 1), "parameters": line.parameters,
        })  # fmt: skip
    notes = [table.gate.sentence, table.headline, *(claim.sentence for claim in table.claims), *table.warnings]
    show(lines, False, f"{table.title} ({table.caption})", notes)


def _short(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.1f}"


def _span(low: float | None, high: float | None, sign: str = "") -> str:
    return "" if low is None or high is None else f"[{low:{sign}.1f}, {high:{sign}.1f}]"


class Display:
    """Progress on standard error: a bar on a terminal, elsewhere a line for each run."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> "Display":
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def print_line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def show_event(self, event: Event) -> None:
        """Show one event of the study."""
        counts = event.counts
        ended = sum(counts[state] for state in STATES)
        total = ended + counts["running"] + counts["waiting"]
        left = "" if event.seconds_left is None else f", about {_duration(event.seconds_left)} left"
        if event.kind in STATES:
            metrics = (event.outcome or {}).get("metrics") or {}
            result = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if value is not None)
            text = "; ".join(part for part in (result, event.text) if part)
            self.print_line(f"[{ended}/{total}] {event.row} seed {event.seed}: {event.kind} {text}{left}")
        if self.bar is not None:
            states = f"{counts['done']} done, {counts['running']} running, {counts['waiting']} waiting{left}"
            text = f"{states}; {event.text}" if event.kind == "tick" and event.text else states
            self.bar.update(self.task, total=max(total, 1), completed=ended, description=text)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
