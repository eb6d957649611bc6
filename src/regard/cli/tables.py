"""Tables on the terminal, or the same rows as JSON."""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from regard.files.paths import printable, printable_lines

_UNBROKEN = 10_000
"""Characters; wider than any row."""

_WHOLE = 24
"""Names in a first column of so many characters at most are not broken."""

AsJson = Annotated[bool, typer.Option("--json", help="Print the same rows as JSON.")]


def show(rows: Sequence[Mapping[str, Any]], as_json: bool = False, title: str = "", notes: Sequence[str] = ()) -> None:
    """Print rows as a table with the keys of the first as headings, or as a JSON list on standard output.

    Numbers are right-aligned, with thousands separated; None is an empty cell. notes are printed below a table, and
    not in JSON. On a terminal long cells are broken to fit its width; elsewhere every row and note is one line.
    """
    if as_json:
        print(json.dumps([dict(row) for row in rows], indent=2, default=_plain))
        return
    table, notes = _table(rows), [printable_lines(note) for note in notes]
    before = [printable_lines(title)] if title else []
    if sys.stdout.isatty():
        Console(markup=False, highlight=False).print(*before, table, *notes, sep="\n")
        return
    console = Console(width=_UNBROKEN, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    print(*before, *(line.rstrip() for line in captured.get().splitlines()), *notes, sep="\n")


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in rows[0] if rows else ():
        number = any(isinstance(row[name], (int, float)) and not isinstance(row[name], bool) for row in rows)
        whole = not table.columns and max(len(cell(row[name])) for row in rows) <= _WHOLE
        table.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(cell(value) for value in row.values()))
    return table


def show_list(rows: Sequence[Mapping[str, Any]], as_json: bool = False) -> None:
    """Print a list of what there is: as `show` on a terminal, elsewhere for other programs, such as cut and column.

    That is a line for each row with a tab between cells, below a line of headings; an empty cell is "-".
    """
    if as_json or sys.stdout.isatty():
        show(rows, as_json)
        return
    names = list(rows[0])
    print(*names, sep="\t")
    for row in rows:
        values = [row.get(name) for name in names]
        print(*(str(value) if type(value) is int else cell(value) or "-" for value in values), sep="\t")


def without_empty_columns(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the columns that have no value in any of them."""
    used = {name for row in rows for name, value in row.items() if value not in (None, "")}
    return [{name: value for name, value in row.items() if name in used} for row in rows]


def wrap_notes(notes: Sequence[str]) -> list[str]:
    """Notes in lines of at most 100 characters; further lines of a note are indented."""
    return [line for note in notes for line in textwrap.wrap(note, 100, subsequent_indent="  ")]


def cell(value: Any) -> str:
    """A value as a short text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, (frozenset, set)):
        return ", ".join(sorted(value))
    return printable(str(value))


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (frozenset, set)) else str(value)
