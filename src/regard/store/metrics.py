"""metrics.csv: the table of a run's epochs, cut to the step of the checkpoint when a run continues. Needs no torch."""

import csv
import io
import os
from pathlib import Path
from typing import Any

from .files import store_errors, write_atomically

FIXED = ("epoch", "step", "train_loss", "lr")
"""The columns before the test metrics."""


class Metrics:
    """A metrics.csv: one line for each epoch, with the columns `FIXED`, the task's metrics, and seconds.

    names: of the task's metrics, the main one first; needed for writing only.
    """

    def __init__(self, path: Path, names: tuple[str, ...] = ()) -> None:
        self.path = path
        self.columns = (*FIXED, *names, "seconds")

    def cut(self, step: int) -> None:
        """Remove the lines after `step`, and an incomplete last line. Raises: StoreError."""
        rows = [row for row in self.read() if int(row["step"]) <= step]
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path, text.getvalue())

    def read(self) -> list[dict[str, str]]:
        """The complete lines of the file, as text by column; [] if there is no file. Raises: StoreError."""
        with store_errors(self.path, "read"):
            text = self.path.read_text(errors="replace") if self.path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        rows = csv.DictReader(io.StringIO(complete))
        return [row for row in rows if (row.get("step") or "").isdecimal() and None not in row.values()]

    def append(self, row: dict[str, Any]) -> None:
        """Add a line and sync it. Raises: StoreError."""
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", lineterminator="\n").writerow(row)
        with store_errors(self.path), self.path.open("a") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())
