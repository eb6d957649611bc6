"""`regard taxonomy`: MiTA's Table 1, for every mechanism of the package."""

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.core import ConfigError

from .run_options import path_option
from .tables import AsJson, show


def taxonomy(
    strategy: Annotated[str, typer.Option(help="Only this strategy: none, compress, route or both.")] = "",
    conditions: Annotated[str, typer.Option(help="Only rows that depend on all of these, such as 'Q,position'.")] = "",
    svg: Annotated[Path | None, path_option("Also draw the mechanisms into this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how mechanisms reduce the cost of N keys for each query (MiTA, Table 1); options filter the rows."""
    from regard.measure.taxonomy import taxonomy_rows, write_picture

    rows = taxonomy_rows()
    rows = _filter_rows(rows, "strategy", strategy, lambda value, text: value == text)
    rows = _filter_rows(rows, "conditions", conditions, lambda value, text: _parts(text) <= _parts(value))
    if svg:
        write_picture(rows, svg)
    notes = [
        "an expert: a layer whose weights are computed from keys and values; a query passes through one or several",
        "conditions: what the construction and choice of experts depend on",
        "query, key, relative: whether the weights depend on query content, key content, relative position",
    ]
    show(rows, as_json, notes=[*notes, *([f"drawn in {svg}"] if svg else [])])


def _filter_rows(rows: list[dict[str, Any]], column: str, text: str, matches: Any) -> list[dict[str, Any]]:
    """The rows whose column matches, all for an empty text. Raises: ConfigError if no row is left."""
    filtered = [row for row in rows if not text or matches(row[column], text)]
    if not filtered:
        values = "; ".join(sorted({row[column] or "(empty)" for row in rows}))
        raise ConfigError(f"no mechanism has {text!r} in {column}; the remaining rows have: {values}")
    return filtered


def _parts(text: str) -> set[str]:
    return {part.strip().lower() for part in text.split(",") if part.strip()}
