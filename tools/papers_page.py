"""docs/papers.md, each table and figure of the four papers and what runs it: `python -m tools.papers_page`.

Rows are those of the studies at paper scale; what does not run is in `lab/studies/not_run.json`, with its reason.
tests/tools/test_papers_page.py fails when the page is stale.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from regard.lab.studies import ANALYSES, STUDIES, load_study
from regard.lab.studies.papers import ESA_PAPER, MITA_PAPER, SKA_PAPER, SNE_PAPER
from tools.docs_pages import table
from tools.generate import ROOT, write

PAGE = ROOT / "docs" / "papers.md"
NOTE = "<!-- written by tools/papers_page.py: run `make generated`, do not edit -->"
PAPERS = {"SKA": (SKA_PAPER, 9, 5), "SNE": (SNE_PAPER, 6, 6), "MiTA": (MITA_PAPER, 7, 10), "ESA": (ESA_PAPER, 3, 3)}
"""Short name -> title, and the numbers of its tables and of its figures."""
REASONS = {
    "code": "the code is in no installed package",
    "data": "the data may not be had",
    "weights": "no attention or projection, but weights that are pruned in training",
    "cited": "networks of others, which this project has no printed numbers of",
}
NOT_RUN: Mapping[str, Mapping[str, Any]] = json.loads(
    (ROOT / "src/regard/lab/studies/not_run.json").read_text(encoding="utf-8")
)


def places(paper: str) -> list[str]:
    """ "Table 1" to the last figure of a paper."""
    _, tables, figures = PAPERS[paper]
    return [f"Table {n}" for n in range(1, tables + 1)] + [f"Figure {n}" for n in range(1, figures + 1)]


def runners() -> dict[tuple[str, str], list[str]]:
    """(paper, place) -> the studies and analyses whose source in the catalogue names it."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, (_, _, source) in {**STUDIES, **ANALYSES}.items():
        for paper in PAPERS:
            for place in _named(source) if re.search(rf"\b{paper}\b", source) else ():
                found[paper, place].append(name)
    return found


def _named(source: str) -> Iterator[str]:
    """The tables and figures that "SNE, Table 6 and Figure 4" or "ESA, Tables 1-3, Figure 3" names."""
    for kind, first, joint, last in re.findall(r"(Table|Figure)s? (\d+)[a-d]?(?:( and |-)(\d+))?", source):
        numbers = range(int(first), int(last) + 1) if joint == "-" else [int(n) for n in (first, last) if n]
        yield from (f"{kind} {number}" for number in numbers)


def paper_rows(names: list[str]) -> int:
    """The rows that the studies of a place have at paper scale, without controls."""
    settings = [load_study(name).settings for name in names if name in STUDIES]
    return sum(not row.control for found in settings if "paper" in found for row in found["paper"].rows)


def lines(paper: str) -> Iterator[tuple[str, int, int, str, str]]:
    """Place, rows that run, all rows, what runs them, and what does not run, with its reason."""
    found = runners()
    for place in places(paper):
        names, without = found.get((paper, place), []), NOT_RUN[paper].get(place, {})
        rows = paper_rows(names)
        if isinstance(without, str):
            yield place, rows, rows, "", without
            continue
        yield place, rows, rows + len(without), ", ".join(f"`{name}`" for name in names), printed_only(without)


def printed_only(rows: Mapping[str, tuple[str, str]]) -> str:
    """The rows that do not run, with their printed values, by reason. rows: label -> (printed, reason)."""
    parts = []
    for reason in dict.fromkeys(reason for _, reason in rows.values()):
        named = [f"{row} ({printed})" for row, (printed, given) in rows.items() if given == reason]
        parts.append(f"{', '.join(named)}: {REASONS[reason]}")
    return "; ".join(parts)


def page() -> str:
    """The whole page."""
    parts = [
        NOTE,
        "# The papers, table by table\n",
        "Each table and figure with the studies and analyses that run it, by name ([how they are run](deciding.md)). "
        "Rows are counted at paper scale, without the controls that Regard adds; a figure or an analysis without "
        "trained rows counts none. A row that does not run is a printed number, with the reason.\n",
    ]
    total = [0, 0]
    for paper, (title, *_) in PAPERS.items():
        body = []
        for place, run, rows, by, missing in lines(paper):
            total = [total[0] + run, total[1] + rows]
            body.append((place, by, f"{run} of {rows}" if rows else "", missing))
        parts += [f"## {title}\n", table(("place", "runs with", "rows that run", "printed only"), body) + "\n"]
    number = sum(len(places(paper)) for paper in PAPERS)
    parts.insert(3, f"In all {number} tables and figures; {total[0]} of {total[1]} rows run.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    write(PAGE, page())
