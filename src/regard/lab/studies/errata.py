"""Errata: numbers and statements of the four papers that exact counts or tests contradict, and how to check them.

They are data: `<paper>/errata.json`.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from regard.lab.engine.analysis import Analysis, Source
from regard.pages.sheets import Picture, Sheet

from .papers import MITA_PAPER, PAPERS, SNE_PAPER, read_rows


class Erratum(NamedTuple):
    """where: table, figure or equation. printed: number or statement. actual: what is right. check: how to see it."""

    where: str
    printed: str
    actual: str
    check: str


ERRATA = {paper: tuple(Erratum(**row) for row in read_rows(folder, "errata.json")) for folder, paper in PAPERS.items()}
_NAMES = {**{paper: paper for paper in ERRATA}, "MiTA": MITA_PAPER, "the embedding paper": SNE_PAPER}
"""First words of a study's source -> title of the paper."""


def errata_of(source: str) -> tuple[Erratum, ...]:
    """The errata of the tables and figures that a study's source names, such as "MiTA, arXiv 2602.01219, Table 2".

    Papers are separated by "; ". Empty for other sources; an erratum that names no table or figure belongs to none.
    """
    errata: list[Erratum] = []
    for part in source.split("; "):
        paper = next((paper for name, paper in _NAMES.items() if part.startswith(name)), None)
        numbers = _numbers(part)
        tables = any(kind == "Table" for kind, _ in numbers)
        for erratum in ERRATA[paper] if paper else ():
            if numbers & _numbers(erratum.where) or (tables and erratum.where == "All tables"):
                errata.append(erratum)
    return tuple(errata)


def _numbers(text: str) -> set[tuple[str, int]]:
    """("Table", 2) and ("Table", 3) for "Tables 2 and 3, deformable rows"; "2 to 4" and "2-4" are three tables."""
    numbered = set()
    for kind, first, between, last in re.findall(r"(Table|Figure)s? (\d+)(?:( and | to |-)(\d+))?", text):
        numbers = [int(first)] if not last else [int(first), int(last)]
        if between in (" to ", "-"):
            numbers = list(range(numbers[0], numbers[1] + 1))
        numbered |= {(kind, number) for number in numbers}
    return numbered


def sheets(source: Source) -> Sequence[Sheet | Picture]:
    """One sheet for each paper."""
    columns = ("where", "printed", "found", "how to see it")
    return [Sheet(title=paper, columns=columns, rows=tuple(map(tuple, errata))) for paper, errata in ERRATA.items()]


ANALYSIS = Analysis(
    name="errata",
    title="What the printed numbers cannot be",
    source="the four papers",
    question="Which printed figures do exact counts, tests or the authors' own code contradict?",
    compute=sheets,
    notes=(
        "Counts are of built models; G is 1e9. The static-key paper counts two FLOPs per multiply-accumulate, the "
        "MiTA and spatial-attention papers one.",
    ),
)
