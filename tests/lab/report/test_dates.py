"""Pages can be compared byte by byte: a figure says nothing about when or with what it was drawn."""

import re

import pytest

from regard.pages import figures


def drawn() -> str:
    curve = figures.Curve(0, "row", [1.0, 2.0, 3.0], [10.0, 20.0, 25.0], [9.0, 19.0, 24.0], [11.0, 21.0, 26.0])
    return figures.curves([curve], figures.row_styles(["baseline"]), "accuracy", True)[0]


def test_a_figure_has_no_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib takes the date of a figure from SOURCE_DATE_EPOCH where that is set, else from the clock."""
    made = []
    for moment in ("0", "1000000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", moment)
        made.append(drawn())
    assert made[0] == made[1]
    assert not re.search(r"\d{4}-\d\d-\d\dT\d\d:|1970-01-01|2001-09-09", made[0])
    assert "dc:date" not in made[0]
    assert "Matplotlib" not in made[0]
