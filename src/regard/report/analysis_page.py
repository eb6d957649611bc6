"""The page of an analysis: its tables, charts and pictures in one offline HTML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import regard
from regard.lab.analysis import analyses, load_analysis
from regard.store.files import write_atomically
from regard.studies.errata import errata_of

from . import phrasing
from .charts import chart
from .theme import palette

LONG = 12
"""Rows of a table that are shown beneath a chart of the same numbers; longer ones are folded."""


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
    """The page as HTML; value as `regard.lab.analysis.carry_out` gives it. The same value gives the same bytes."""
    folder = jinja2.PackageLoader("regard.report", "templates")
    engine = jinja2.Environment(loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    engine.filters["cell"] = cell
    texts = {"css": Markup(folder.get_source(engine, "page.css")[0])}
    texts["script"] = Markup(folder.get_source(engine, "common.js")[0])
    sheets = [_shown(sheet) for sheet in value["sheets"]]
    view = {"runs": [], **value, "sheets": sheets, "palette": palette(), "version": regard.__version__}
    view["errata"] = errata_of(value["source"])
    return engine.get_template("sheets.html").render(**view, **texts)


def _shown(sheet: Mapping[str, Any]) -> dict[str, Any]:
    """What the template needs of a sheet; a long table under its own chart is folded."""
    svg = chart(sheet)
    return {**sheet, "svg": Markup(svg), "words": _words(sheet), "folded": bool(svg) and len(sheet["rows"]) > LONG}


def _words(sheet: Mapping[str, Any]) -> list[bool]:
    """For each column whether it holds text only, which is set to the left."""
    return [all(isinstance(value, str | None) for value in column) for column in zip(*sheet["rows"], strict=True)] or [
        False
    ] * len(sheet["columns"])


def cell(value: str | float | int | None) -> str:
    """A cell as text: integers with thousands apart, other numbers with four significant figures."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if abs(value) >= 1e4:
        return phrasing.compact(value)
    return f"{value:.4g}".replace("-", "−")
