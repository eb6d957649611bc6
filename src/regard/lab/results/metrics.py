"""metrics.csv: the table of a run's epochs, cut to the step of the checkpoint when a run continues. Needs no torch.

The last column of each line is a checksum of the line, of all lines before it and of the run's key, so that lines can
be added; a line that a killed process left incomplete has no end, and is left out.
"""

import csv
import hashlib
import io
import logging
import re
from pathlib import Path
from typing import Any

from regard.core import StoreError
from regard.files.atomic import append, read_if_present, write_atomically

log = logging.getLogger("regard.lab.engine")

FIXED = ("epoch", "step", "train_loss", "lr")
"""The columns before the test metrics."""
CHECKSUM = "checksum"
DIGITS = 16
"""Of a checksum in hexadecimal."""


class Metrics:
    """A metrics.csv: one line for each epoch, with the columns `FIXED`, the task's metrics, seconds and checksum.

    names: of the task's metrics, the main one first; needed for writing only.
    """

    def __init__(self, path: Path, names: tuple[str, ...] = ()) -> None:
        self.path = path
        self.columns = (*FIXED, *names, "seconds")

    def cut(self, step: int, epochs: int = 0) -> None:
        """Remove the lines after `step`, and an incomplete last line.

        epochs: that have been trained until `step`; if the last of them has no line, the file has lost it.
        Raises: StoreError if the file is damaged; it then stays as it is.
        """
        lines = [",".join((*self.columns, CHECKSUM))]
        last = _digest(self.path.parent.name, lines[0])
        rows = [row for row in self.read() if int(row["step"]) <= step]
        if rows and int(rows[-1]["epoch"]) < epochs:
            raise self._damage_error(f"it ends with epoch {rows[-1]['epoch']}, but {epochs} were trained")
        if len(rows) < epochs:
            log.warning("%s has only %d of the %d trained epochs", self.path, len(rows), epochs)
        for row in rows:
            lines.append(self._line(row, last))
            last = lines[-1][-DIGITS:]
        write_atomically(self.path, "\n".join(lines) + "\n")

    def read(self) -> list[dict[str, str]]:
        """The complete lines of the file, as text by column, without checksums; [] if there is no file.

        Raises: StoreError if the file is damaged.
        """
        return self._read_checked()[0]

    def append(self, row: dict[str, Any]) -> None:
        """Add a line and sync it. Raises: StoreError, also if the file is damaged."""
        append(self.path, self._line(row, self._read_checked()[1]) + "\n")

    def _line(self, row: dict[str, Any], last: str) -> str:
        """A line without its end. last: the checksum of the line before."""
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", extrasaction="ignore", lineterminator=",").writerow(row)
        return text.getvalue() + _digest(last, text.getvalue())

    def _read_checked(self) -> tuple[list[dict[str, str]], str]:
        """(rows, checksum of the last line). Raises: StoreError."""
        data = read_if_present(self.path)
        if data is None:
            return [], _digest(self.path.parent.name, ",".join((*self.columns, CHECKSUM)))
        try:
            header, *lines = data.decode().split("\n")
        except ValueError as error:
            raise self._damage_error(f"it is not text: {error}") from error
        columns = header.split(",")
        if columns[: len(FIXED)] != list(FIXED) or columns[-2:] != ["seconds", CHECKSUM] or not lines:
            raise self._damage_error("its first line does not have the columns of metrics")
        rows, last = list[dict[str, str]](), _digest(self.path.parent.name, header)
        for number, line in enumerate(lines[:-1], 2):
            if _digest(last, line[:-DIGITS]) != line[-DIGITS:]:
                raise self._damage_error(f"line {number} does not fit its checksum")
            row = self._row(columns, line, number)
            last = line[-DIGITS:]
            rows.append({name: value for name, value in row.items() if name != CHECKSUM})
        if len(lines[-1]) > DIGITS and _digest(last, lines[-1][:-1][:-DIGITS]) == lines[-1][:-1][-DIGITS:]:
            raise self._damage_error("the end of its last line was changed")
        if not re.fullmatch(r"[\w.,+-]*", lines[-1], re.ASCII):
            raise self._damage_error("its end is not text of metrics")
        return rows, last

    def _row(self, columns: list[str], line: str, number: int) -> dict[str, str]:
        values = next(csv.reader([line]), [])
        row = dict(zip(columns, values, strict=False))
        if len(values) != len(columns) or not all(row[name].isdecimal() for name in FIXED[:2]):
            raise self._damage_error(f"line {number} is not a line of metrics")
        return row

    def _damage_error(self, reason: str) -> StoreError:
        return StoreError(
            f"{self.path} is damaged ({reason}): restore it from a copy, move it away to go on without its epochs, or "
            "delete the run's folder to train again"
        )


def _digest(last: str, text: str) -> str:
    return hashlib.sha256(f"{last}\n{text}".encode()).hexdigest()[:DIGITS]
