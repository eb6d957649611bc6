"""The page of an analysis: tables, charts and pictures in one offline HTML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from regard.files.atomic import write_atomically
from regard.lab.engine.analysis import analyses, load_analysis
from regard.lab.studies.errata import errata_of
from regard.pages import phrasing
from regard.pages.charts import chart
from regard.pages.rendering import render_template

MAX_OPEN_ROWS = 12
"""A longer table below a chart of the same numbers is collapsed."""


def write_analyses(results: Path | str, out: Path | str, name: str | None = None) -> list[Path]:
    """Write `out/NAME.html` for every analysis in the store, or the one of that name; returns the files.

    Raises: StoreError if a result is damaged or a page cannot be written.
    """
    pages = []
    for path in analyses(results):
        value = load_analysis(path)
        if name in (None, value["analysis"], path.stem):
            page = Path(out) / f"{path.stem}.html"
            write_atomically(page, render_analysis(value))
            pages.append(page)
    return pages


def render_analysis(value: Mapping[str, Any]) -> str:
    """The page as HTML, of a value that `regard.lab.engine.analysis.run_analysis` returned. Equal values give equal bytes."""
    sheets = [_sheet_view(sheet) for sheet in value["sheets"]]
    view = {"runs": [], **value, "sheets": sheets, "errata": errata_of(value["source"])}
    return render_template("sheets.html", ("common.js",), view, {"cell": cell})


def _sheet_view(sheet: Mapping[str, Any]) -> dict[str, Any]:
    """The template's fields of a sheet."""
    svg = chart(sheet)
    collapsed = bool(svg) and (sheet.get("folded") or len(sheet["rows"]) > MAX_OPEN_ROWS)
    return {**sheet, "svg": Markup(svg), "text_columns": _text_columns(sheet), "collapsed": collapsed}


def _text_columns(sheet: Mapping[str, Any]) -> list[bool]:
    """Whether each column has only text, which is aligned left."""
    if not sheet["rows"]:
        return [False] * len(sheet["columns"])
    return [all(isinstance(value, str | None) for value in column) for column in zip(*sheet["rows"], strict=True)]


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
