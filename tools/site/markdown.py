"""Pieces of pages: numbers, tables of numbers, links between pages."""

import os.path
from collections.abc import Mapping
from typing import Any

from regard.pages.phrasing import number, signed_number


def interval(value: Mapping[str, Any] | None, sign: bool = False) -> str:
    """A mean with its 95 % interval on one line, such as "+5.2 [+3.8, +6.7]"; "" without a mean.

    value: has mean, low and high. sign: whether positive numbers have a plus.
    """
    if not value or value["mean"] is None:
        return ""
    show = signed_number if sign else number
    if value["low"] is None:
        return show(value["mean"])
    return f"{show(value['mean'])} [{show(value['low'])}, {show(value['high'])}]".replace(" ", "\u00a0")


def link(text: str, target: str, page: str) -> str:
    """A Markdown link from a page to a file; both are paths below the folder of pages, target with an anchor or not."""
    return f"[{text}]({os.path.relpath(target, os.path.dirname(page) or '.')})"


def size(value: float | None) -> str:
    """A count with three significant figures and a unit: "5.72 M", "1.25 G"; "" for None."""
    if value is None:
        return ""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}" if value < 999.5 * factor else f"{value / factor:.0f} {unit}"
    return f"{value:g}"
