"""What a page shows, as data: tables with charts, and pictures. Needs no plotting package."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from regard.core import ConfigError, nearest
from regard.files.paths import printable

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """How a page draws a sheet. x, y: columns; series: the column whose values name the lines, "" = one.

    kind: "line", "points" (with a regression line and r), "bars", or "heat" (x and y are the axes, value the colour).
    logs: the logarithmic axes, of "xy". mark: (x, y) of a cell to mark in a heat map. outlines: for each entry of its
    legend, the (x, y) of the cells inside an outline, orange for the first and blue for the second.
    """

    x: str
    y: str
    series: str = ""
    kind: Literal["line", "points", "bars", "heat"] = "line"
    value: str = ""
    logs: str = ""
    mark: tuple[float | int, float | int] | None = None
    outlines: Mapping[str, Sequence[tuple[Cell, Cell]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table. published: the columns that have the paper's own numbers. folded: opens below its chart by a click.

    Raises: ConfigError.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    chart: Chart | None = None
    published: tuple[str, ...] = ()
    folded: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ConfigError(f"{self.title}: a row of {len(row)} cells under {len(self.columns)} columns: {row}")
        charted: tuple[str, ...] = ()
        if (chart := self.chart) is not None:
            value = (chart.value,) if chart.value or chart.kind == "heat" else ()
            charted = (chart.x, chart.y, *((chart.series,) if chart.series else ()), *value)
        for name in (*charted, *self.published):
            if name not in self.columns:
                raise ConfigError(f"{self.title}: no column {name!r}; {nearest(name, self.columns)}")

    def column(self, name: str) -> list[Cell]:
        """The values of one column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture. image: base64 of a PNG; layers: overlays (base64 of PNGs with alpha) by name."""

    title: str
    image: str
    note: str = ""
    layers: Mapping[str, str] | None = None


def spreadsheet_cell(value: Cell) -> Cell:
    """A cell of a CSV file; a text that a spreadsheet would compute begins with an apostrophe."""
    if not isinstance(value, str) or not re.match(r"[=@\t\r+-]", value):
        return value
    number = r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?"
    return value if re.fullmatch(rf"{number}( ?%)?( \[{number}, {number}\])?|[+-]", value) else f"'{value}"


def markdown_cell(text: str) -> str:
    """A text as one cell of a Markdown table, without HTML, line breaks and control characters of its own."""
    return re.sub("<(?=[A-Za-z/!?])", "&lt;", printable(" ".join(text.splitlines()))).replace("|", "\\|")
