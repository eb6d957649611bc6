"""The page of tables, charts and pictures, as one offline HTML file."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from regard import __version__

from . import phrasing
from .charts import chart
from .rendering import render_template
from .sheets import Sheet

MAX_OPEN_ROWS = 12
"""A longer table below a chart of the same numbers is collapsed."""


def render_sheets(command: str, title: str, question: str, sheets: Sequence[Sheet], notes: Sequence[str]) -> str:
    """The page of what a command measured just now, as HTML."""
    return render_analysis({
        "analysis": command, "title": title, "source": "", "question": question, "of": "", "scale": "",
        "notes": list(notes), "sheets": [asdict(sheet) for sheet in sheets], "pictures": [],
        "environment": {"machine": f"{platform.system()} {platform.machine()}", "python": platform.python_version()},
        "code": __version__, "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    })  # fmt: skip


def render_analysis(value: Mapping[str, Any], errata: Sequence[Any] = ()) -> str:
    """The page of an analysis's result (title, question, sheets, pictures, notes ...) as HTML, with the errata of its
    paper. Equal values give equal bytes."""
    sheets = [_sheet_view(sheet) for sheet in value["sheets"]]
    view = {"runs": [], **value, "sheets": sheets, "errata": errata}
    return render_template("sheets.html", ("common.js",), view, {"cell": cell})


def _sheet_view(sheet: Mapping[str, Any]) -> dict[str, Any]:
    """The template's fields of a sheet."""
    svg, rows = chart(sheet), sheet["rows"]
    collapsed = bool(svg) and (sheet.get("folded") or len(rows) > MAX_OPEN_ROWS)
    columns = [[row[index] for row in rows] for index in range(len(sheet["columns"]))]
    text = [bool(rows) and all(isinstance(value, str | None) for value in column) for column in columns]  # aligned left
    return {**sheet, "svg": Markup(svg), "text_columns": text, "collapsed": collapsed}


def cell(value: str | float | int | None) -> str:
    """A cell as text: integers with thousands separators, other numbers with four significant figures."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if abs(value) >= 1e4:
        return phrasing.compact(value)
    return f"{value:.4g}".replace("-", "−")
