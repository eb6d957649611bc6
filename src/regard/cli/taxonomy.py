"""`regard taxonomy`: MiTA's Table 1 for every mechanism of the package."""

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.core import ConfigError

from .tables import AsJson, show

Part = Annotated[str, typer.Option(help="Only those with this in the column, such as 'landmark'.")]


def taxonomy(
    strategy: Annotated[str, typer.Option(help="Only none, compress, route or both.")] = "",
    experts: Part = "",
    number: Annotated[str, typer.Option(help="Only this number of experts, such as 1, m or N.")] = "",
    construction: Part = "",
    topology: Part = "",
    conditions: Annotated[str, typer.Option(help="Only those that depend on all of these, such as 'Q,position'.")] = "",
    svg: Annotated[Path | None, typer.Option(help="Draw the places of the mechanisms into this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sort mechanisms by what they do about the cost of N keys a query (MiTA, Table 1); options filter the rows."""
    from regard.measure.taxonomy import draw, places

    rows = places()
    contained = {"experts": experts, "construction": construction, "topology": topology}
    for column, wanted in contained.items():
        rows = _keep(rows, column, wanted, lambda value, wanted: wanted.lower() in value.lower())
    rows = _keep(rows, "strategy", strategy, lambda value, wanted: value == wanted)
    rows = _keep(rows, "number", number, _same_number)
    rows = _keep(rows, "conditions", conditions, lambda value, wanted: _letters(wanted) <= _letters(value))
    if svg:
        draw(rows, svg)
    notes = [
        "experts: attention seen as a layer whose weights are made from keys and values; a query passes through one or "
        "several",
        "conditions: what decides how experts are made and found; query, key, relative: what the weights depend on",
    ]
    show(rows, as_json, notes=[*notes, *([f"drawn in {svg}"] if svg else [])])


def _keep(rows: list[dict[str, Any]], column: str, wanted: str, matches: Any) -> list[dict[str, Any]]:
    """Raises: ConfigError if no row is left, with what the column has."""
    kept = [row for row in rows if not wanted or matches(row[column], wanted)]
    if not kept:
        known = "; ".join(sorted({row[column] or "(nothing)" for row in rows}))
        raise ConfigError(f"no mechanism with {column} like {wanted!r}; among those left there are: {known}")
    return kept


def _same_number(value: str, wanted: str) -> bool:
    """`m` finds "m" and "m (+1)", `N/n` finds "N / n"."""
    plain = value.replace(" ", "")
    return wanted.replace(" ", "") in (plain, plain.partition("(")[0])


def _letters(text: str) -> set[str]:
    return {part.strip().lower() for part in text.split(",") if part.strip()}
