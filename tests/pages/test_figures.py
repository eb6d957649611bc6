import re

import numpy as np
import pytest

from photos import decoded
from regard.pages import figures
from regard.pages.theme import SHADES


def line(row: int = 0) -> figures.Curve:
    return figures.Curve(row, "a <row>", [1.0, 2.0, 3.0], [10.0, 20.0, 25.0], [9.0, 19.0, 24.0], [11.0, 21.0, 26.0])


def drawn(wide: bool = True) -> str:
    return figures.curves([line(), line(1)], figures.row_styles(["baseline", "row"]), "accuracy & <more>", wide)[0]


def test_the_same_data_give_the_same_bytes(monkeypatch):
    """matplotlib takes the date of a figure from SOURCE_DATE_EPOCH where that is set, else from the clock."""
    made = []
    for moment in ("0", "1000000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", moment)
        made.append(drawn())
    assert made[0] == made[1]
    assert not re.search(r"\d{4}-\d\d-\d\dT\d\d:|1970-01-01|2001-09-09", made[0])
    assert "dc:date" not in made[0]
    assert "Matplotlib" not in made[0]


def test_figures_take_their_colours_from_the_page_and_keep_their_text():
    svg = drawn()
    assert "var(--c0)" in svg
    assert "var(--ink)" in svg
    assert "#0a00" not in svg
    assert "#0b00" not in svg
    assert ">epoch</text>" in svg
    assert "<metadata" not in svg
    assert "<style" not in svg
    assert 'data-row="1"' in svg


def test_the_pointer_finds_the_axes_where_they_are_drawn():
    svg, box = figures.curves([line()], figures.row_styles(["row"]), "accuracy", wide=False)
    width, height = (float(part) for part in svg.split('viewBox="0 0 ')[1].split('"')[0].split())
    assert box["width"] == pytest.approx(width)
    assert 0 < box["left"] < box["right"] < width
    assert 0 < box["top"] < box["bottom"] < height
    first = svg.split('data-row="0"')
    start = next(part for part in first if ' d="M ' in part and "stroke-linecap" in part)
    x = float(start.split(' d="M ')[1].split()[0])
    at = box["left"] + (1.0 - box["x"][0]) / (box["x"][1] - box["x"][0]) * (box["right"] - box["left"])
    assert x == pytest.approx(at, abs=0.1)  # epoch 1 of the drawn line


@pytest.mark.parametrize("more", [True, False])
def test_no_point_beats_one_of_the_pareto_front(more):
    rng = np.random.default_rng(0)
    points = [tuple(map(float, point)) for point in rng.integers(0, 9, (40, 2))]
    sign = 1 if more else -1

    def beaten(p):
        return any(sign * q[0] >= sign * p[0] and q[1] >= p[1] and q != p for q in points)

    assert figures.front(points, more) == sorted({p for p in points if not beaten(p)})


def test_rows_look_different_and_controls_are_grey():
    styles = figures.row_styles(["baseline", *["row"] * 14, "control", "control"])
    different = {(style.variable, str(style.dash)) for style in styles}
    assert len(different) == len(styles)
    assert [look.variable for look in styles[-2:]] == ["--control"] * 2


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_stand_out_from_the_page(theme):
    shades = SHADES[theme]
    text = [name for name in shades if name not in ("page", "raised", "line", "rule")]
    for ground in ("page", "raised"):
        for name in text:
            low, high = sorted((luminance(shades[name]), luminance(shades[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)


def test_a_heat_map_keeps_rows_and_columns():
    weights = np.zeros((2, 3))
    weights[1, 0], weights[0, 2] = 0.5, 0.25
    pixels = decoded(figures.heat(weights.ravel().tolist(), 2, 3).split(",")[1])
    assert pixels.shape == (2, 3, 4)
    assert pixels[1, 0, 3] == 225
    assert pixels[0, 2, 3] == pytest.approx(112.5, abs=1)
    assert pixels[..., 3].astype(int).sum() == pytest.approx(337, abs=1)


def test_a_map_without_weights_is_empty():
    assert figures.heat([0.0] * 6, 2, 3) == figures.heat([float("nan")] * 6, 2, 3)
