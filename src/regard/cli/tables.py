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

AsJson = Annotated[bool, typer.Option("--json", help="Print the same rows as JSON.")]


def show(rows: Sequence[Mapping[str, Any]], as_json: bool = False, title: str = "", notes: Sequence[str] = ()) -> None:
    """Print rows as a table with the keys of the first as headings, or as a JSON list on standard output.

    Numbers are right-aligned, with thousands separated; None is an empty cell. notes are printed below a table, and
    not in JSON.
    """
    if as_json:
        print(json.dumps([dict(row) for row in rows], indent=2, default=_plain))
        return
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in rows[0] if rows else ():
        number = any(isinstance(row[name], (int, float)) and not isinstance(row[name], bool) for row in rows)
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(value) for value in row.values()))
    # a file or a pipe has no width: wide enough that no table is cut
    console = Console(width=None if sys.stdout.isatty() else 240, markup=False, highlight=False)
    console.print(table)
    for note in notes:
        console.print(note)


def wrapped(notes: Sequence[str]) -> list[str]:
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
        return f"{value:.4g}"
    if isinstance(value, (frozenset, set)):
        return ", ".join(sorted(value))
    return str(value)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (frozenset, set)) else str(value)
