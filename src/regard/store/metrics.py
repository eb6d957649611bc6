"""The table of a run's epochs, that goes with its checkpoints. Needs no torch."""

import csv
import io
import os
from pathlib import Path
from typing import Any

from .files import explained, write_atomically

FIXED = ("epoch", "step", "train_loss", "lr")
"""Columns before the test metrics."""


class Metrics:
    """metrics.csv: one line an epoch, appended; columns `FIXED`, the task's metrics, seconds.

    names: of the task's metrics, the main one first; who only reads need not know them.
    """

    def __init__(self, path: Path, names: tuple[str, ...] = ()) -> None:
        self.path = path
        self.columns = (*FIXED, *names, "seconds")

    def cut(self, step: int) -> None:
        """Drop the lines after `step`, and one that was cut short. Raises: StoreError."""
        kept = [row for row in self.read() if int(row["step"]) <= step]
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        write_atomically(self.path, text.getvalue())

    def read(self) -> list[dict[str, str]]:
        """The whole lines of the file, as text by column; [] if there is none. Raises: StoreError."""
        with explained(self.path, "read"):
            text = self.path.read_text(errors="replace") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        rows = csv.DictReader(io.StringIO(whole))
        return [row for row in rows if (row.get("step") or "").isdecimal() and None not in row.values()]

    def append(self, row: dict[str, Any]) -> None:
        """Add a line and sync it. Raises: StoreError."""
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", lineterminator="\n").writerow(row)
        with explained(self.path), self.path.open("a") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())
