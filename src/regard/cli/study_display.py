"""The output of `regard study`: progress while it runs, and its table."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.files.paths import printable_lines
from regard.lab.engine.progress import STATES, Event
from regard.measure.intervals import FEWEST, deviation_bounds
from regard.pages.phrasing import count

from .tables import show

if TYPE_CHECKING:
    from regard.lab.engine.power import Prospect
    from regard.lab.engine.study import Study


def print_table(results: Path, name: str, scale: str, as_json: bool) -> None:
    """Print the table of a study with its claims. Raises: ConfigError without results."""
    from regard.lab.engine.export import json_text, statistics_cells
    from regard.lab.engine.table import Table

    table = Table.load(results, name, scale)
    if as_json:
        sys.stdout.write(json_text(table))
        return
    names = (table.metric, "interval", f"minus {table.baseline}", "paired interval")
    lines = [
        {
            "row": line.label, "n": line.n, **dict(zip(names, statistics_cells(line, 1), strict=True)),
            "seconds": None if line.seconds is None else round(line.seconds, 1), "parameters": line.parameters,
        }
        for line in table.rows
    ]  # fmt: skip
    notes = [table.gate.sentence, table.headline, *(claim.sentence for claim in table.claims), *table.warnings]
    show(lines, False, f"{table.title} ({table.caption})", notes)


def too_few_seeds(study: "Study", scale: str, seeds: int | None = None) -> list[str]:
    """A sentence if a study's seeds are too few for its claims. seeds: their number instead of the setting's."""
    setting = study.setting(scale)
    number = len(setting.numbers) if seeds is None else seeds
    if scale == "smoke" or not study.claims or setting.recipe is None or number >= FEWEST:
        return []
    needed = f"{FEWEST} are needed (Setting(seeds={FEWEST}), --seeds)"
    return [f"no claim is judged at {scale} scale on {count(number, 'seed')}: {needed}"]


def show_prospects(
    found: Sequence["Prospect"], seeds: Sequence[int], hours: float | None, workers: int, as_json: bool
) -> None:
    """Print what a study can decide; with `hours`, in that time."""
    from regard.lab.engine.export import number_text

    if as_json:
        sys.stdout.write(json.dumps([asdict(prospect) for prospect in found], indent=1) + "\n")
        return
    lines = []
    for prospect in found:
        needed = prospect.seeds or ("unknown" if prospect.sd == 0 else f"> {prospect.most}")
        line: dict[str, Any] = {
            "claim": prospect.text, "pilot": prospect.pilot, "difference": number_text(prospect.mean, 1, "+"),
            "deviation": f"{prospect.sd:.2f} [{prospect.low:.2f}, {prospect.high:.1f}]",
            **{f"{n} seeds decide": number_text(prospect.decides.get(n), 1) for n in seeds},
            "seeds for it": "decided" if prospect.decided else needed,
            "hours": "" if prospect.decided else number_text(prospect.hours, 1),
        }  # fmt: skip
        if hours is not None:
            chance = "" if prospect.chance is None else f"{100 * prospect.chance:.0f} %"
            line |= {f"seeds in {hours:g} h": "" if prospect.decided else prospect.reachable, "chance": chance}
        lines.append(line)
    fewest = min(prospect.pilot for prospect in found)
    low, high = deviation_bounds(1.0, fewest)
    notes = [
        f"deviation: of the paired differences, with its 95 % interval; from {fewest} seeds the true one is {low:.2f} "
        f"to {high:.1f} times the estimate, so all that follows from it is as uncertain",
        "n seeds decide: the true difference that n seeds find with 80 % probability, after correction over the claims",
        "seeds for it: that find the observed difference with 80 % (an equivalence: its distance to the margin)",
        f"hours: to train what is missing of these seeds, {workers} runs at a time",
    ]
    if any(prospect.sd == 0 for prospect in found):
        notes.append("unknown: all differences of the pilot are equal, so no deviation follows from it")
    if hours is not None:
        can = [prospect.text for prospect in found if (prospect.chance or 0) >= 0.8]
        left = sum(not prospect.decided for prospect in found)
        notes.append(f"in {hours:g} hours, as many seeds for all rows of what is not decided, {len(can)} of {left} can "
                     f"be decided: {'; '.join(can) or 'none'}")  # fmt: skip
    show(lines, False, "", notes)


class Display:
    """Progress on standard error: a bar on a terminal, elsewhere a line for each run.

    stopped: what follows "stopped; finished work is kept" after Ctrl-C.
    """

    def __init__(self, stopped: str = "") -> None:
        self.stopped = stopped
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> "Display":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("starting", total=None)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.print_line(f"stopped; finished work is kept{self.stopped}")
        if self.bar is not None:
            self.bar.stop()

    def print_line(self, text: str) -> None:
        """Print a line, above the bar if there is one; names of imported studies and errors are texts from outside."""
        text = printable_lines(text)
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
            self.bar.update(self.task, total=max(total, 1), completed=ended, description=printable_lines(text))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
