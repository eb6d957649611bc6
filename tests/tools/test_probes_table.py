"""The table of all mechanisms in docs/probes.md and its page follow from the committed evidence."""

import html
import json
import re
from collections import defaultdict
from statistics import fmean

import pytest

from regard.lab.data.boards import PROBED
from tools import probes_table
from tools.site.evidence import RESULTS


@pytest.fixture(scope="module")
def found() -> probes_table.Cells:
    with probes_table.store() as results:
        return probes_table.cells(results)


def test_the_table_is_not_stale(found) -> None:
    assert probes_table.TEXT.read_text() == probes_table.text(found), "run `make generated`"


@pytest.mark.slow
def test_the_page_has_every_mechanism_and_the_verdicts(found) -> None:
    page = html.unescape(probes_table.page())
    assert [row for row in found if page.count(row) < 2] == [], "run `make generated`"
    plain = re.sub(r"<[^>]*>", "\n", page)
    shown = [str(cell).removesuffix(".0") for of_row in found.values() for cell in of_row.values() if cell.n]
    assert [text for text in shown if text not in plain.replace("−", "-")] == [], "run `make generated`"
    assert "Hypotheses" in plain


def test_numbers_are_means_of_the_runs_in_the_evidence(found) -> None:
    for ability in PROBED:
        seeds = defaultdict(list)
        evidence = json.loads((RESULTS / f"probes_{ability}-desk" / "evidence.json").read_text())
        rows = {run["key"]: run["row"] for run in evidence["snapshot"]["runs"]}
        for run in evidence["outcomes"]:
            seeds[rows[run["key"]]].append(run["metrics"]["cells"])
        for row, of_row in found.items():
            cell, values = of_row[ability], seeds[row]
            assert cell.n == len(values)
            if values and cell.learned in (0, cell.n):
                assert cell.mean == pytest.approx(fmean(values))
            mark = {1: "¹", 2: "²", 3: "³"}.get(cell.n, "")
            assert probes_table.shown(cell) == str(cell) + mark
