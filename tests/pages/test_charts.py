"""Heat maps: lines round chosen cells."""

import re

import numpy as np

from regard.pages.charts import borders, chart

CELLS = [(m, k) for m in (1, 2, 3) for k in (1, 2)]


def sheet(**plan):
    chart = {"kind": "heat", "x": "m", "y": "k", "value": "top1", "series": "", "logs": "", "mark": None, **plan}
    rows = [(m, k, float(m * k)) for m, k in CELLS]
    return {"title": "grid", "columns": ("m", "k", "top1"), "rows": rows, "chart": chart}


def test_borders_of_known_cells():
    """An L of three cells has 8 edges, none of them between its own cells."""
    inside = np.array([[True, True], [True, False]])
    found = {frozenset(edge) for edge in borders(inside)}
    corners = [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (1, 2), (0, 2), (0, 1)]
    assert found == {frozenset(edge) for edge in zip(corners, [*corners[1:], corners[0]], strict=True)}
    assert borders(np.zeros((2, 3), bool)) == []


def edges(svg: str, place: int) -> list[tuple[float, ...]]:
    """(x, y, x, y) of the strokes of an outline, in cells from the lower left corner."""
    group = re.search(rf'data-outline="{place}">(.*?)</g>', svg, re.DOTALL)[1]
    strokes = re.findall(r"M ([\d.]+) ([\d.]+)\s+L ([\d.]+) ([\d.]+)", group)
    return [tuple(map(float, stroke)) for stroke in strokes]


def test_outlines_go_round_their_cells():
    """m = 2, 3 at k = 2, then all of m = 3 too: columns and rows are not exchanged."""
    svg = chart(sheet(outlines={"best": [(2, 2), (3, 2)], "good": [(2, 2), (3, 2), (3, 1)]}))
    best, good = edges(svg, 0), edges(svg, 1)
    assert (len(best), len(good)) == (6, 8)
    left, right = (pick(stroke[0] for stroke in good) for pick in (min, max))
    top, low = (pick(stroke[1] for stroke in good) for pick in (min, max))
    wide = (right - left) / 2
    assert {round((x - left) / wide, 3) for x0, _, x1, _ in best for x in (x0, x1)} == {0, 1, 2}
    assert {round((low - y) / (low - top), 3) for _, y0, _, y1 in best for y in (y0, y1)} == {0.5, 1}
    lower = min(x0 for x0, y0, x1, y1 in good if y0 == y1 == low)
    assert round((lower - left) / wide, 3) == 1  # the lower row is m = 3 alone
    assert ">best</text>" in svg
    assert ">good</text>" in svg
    assert svg == chart(sheet(outlines={"best": [(2, 2), (3, 2)], "good": [(2, 2), (3, 2), (3, 1)]}))


def test_a_heat_map_marks_its_point():
    marked, away = (chart(sheet(mark=mark)).count("#ffffff") for mark in ((2, 1), (9, 9)))
    assert marked == away + 1


def test_an_outline_without_cells_is_not_drawn():
    svg = chart(sheet(outlines={"best": [], "good": [(9, 9)]}))
    assert svg == chart(sheet())
    assert "outline" not in svg


def test_a_heat_map_of_words_is_drawn_from_above():
    plan = sheet()["chart"] | {"x": "run with", "y": "trained with"}
    rows = [("Softmax", "MiTA", 61.0), ("Softmax", "Agent", 62.0), ("MiTA", "MiTA", 63.0), ("MiTA", "Agent", 64.0)]
    svg = chart({"title": "swap", "columns": ("trained with", "run with", "top1"), "rows": rows, "chart": plan})
    found = re.findall(r' x="([\d.]+)" y="([\d.]+)"[^>]*>(6[1-4])</text>', svg)
    place = {number: (float(x), float(y)) for x, y, number in found}
    assert place["61"][0] < place["62"][0]  # MiTA, then Agent, as they came
    assert place["61"][1] < place["63"][1]  # Softmax above MiTA
    assert place["62"] == (place["64"][0], place["61"][1])


def test_a_cell_has_as_many_digits_as_the_table():
    svg = chart({"title": "m by k", "columns": ("m", "k", "top1"), "rows": [(1, 1, 67.95), (1, 2, 68.04)],
                 "chart": sheet()["chart"] | {"x": "m", "y": "k"}})  # fmt: skip
    assert ">67.95</text>" in svg
    assert ">68.04</text>" in svg
