"""Charts of an analysis: lines, points with a regression, bars and heat maps, as themed SVG."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from . import figures

_OUTLINES = (("#e8590c", 2.2), ("#1c5fd6", 5.2))  # the thin line is visible on the thick one where they coincide
_HEAT = LinearSegmentedColormap.from_list("regard", ("#0b2545", "#13678a", "#45c4b0", "#f2e96b"))


def chart(sheet: Mapping[str, Any]) -> str:
    """The chart of a sheet as SVG, or "" if it has no chart or no numbers to draw."""
    spec = sheet.get("chart")
    if not spec:
        return ""
    rows = [dict(zip(sheet["columns"], row, strict=True)) for row in sheet["rows"]]
    drawn_column = spec["value"] if spec["kind"] == "heat" else spec["y"]
    rows = [row for row in rows if isinstance(row[drawn_column], int | float)]
    if not rows:
        return ""
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        {"line": _lines, "points": _points, "bars": _bars, "heat": _heat}[spec["kind"]](figure, axes, spec, rows)
        axes.tick_params(length=0)
        return figures.apply_theme(figure, sheet["title"])


def _lines(figure: Figure, axes: Axes, spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    for (label, members), style in _series(spec, rows):
        ordered = sorted(members, key=lambda row: row[spec["x"]])
        xs, ys = [row[spec["x"]] for row in ordered], [row[spec["y"]] for row in ordered]
        axes.plot(xs, ys, color=style.color, linestyle=style.dash, marker=style.marker, markersize=5, label=label)
    _finish(axes, spec)


def _points(figure: Figure, axes: Axes, spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    for (label, members), style in _series(spec, rows):
        xs = np.asarray([row[spec["x"]] for row in members], float)
        ys = np.asarray([row[spec["y"]] for row in members], float)
        text = label
        if len(xs) > 2 and xs.std() > 0 and ys.std() > 0:
            slope, height = np.polyfit(xs, ys, 1)
            ends = np.array([xs.min(), xs.max()])
            axes.plot(ends, slope * ends + height, color=style.color, linestyle=style.dash, linewidth=1)
            text = f"{label} r = {np.corrcoef(xs, ys)[0, 1]:.2f}, slope {slope:.3g}".strip()
        axes.plot(xs, ys, style.marker, color=style.color, label=text or None)
    _finish(axes, spec)


def _bars(figure: Figure, axes: Axes, spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    groups = _series(spec, rows)
    ticks = list(dict.fromkeys(str(row[spec["x"]]) for row in rows))
    width = 0.8 / len(groups)
    for index, ((label, members), style) in enumerate(groups):
        positions = [ticks.index(str(row[spec["x"]])) + (index - (len(groups) - 1) / 2) * width for row in members]
        axes.bar(positions, [row[spec["y"]] for row in members], width, color=style.color, label=label or None)
    rotated = max(map(len, ticks)) * len(ticks) > 60
    axes.set_xticks(range(len(ticks)), ticks, rotation=40 if rotated else 0, ha="right" if rotated else "center")
    axes.set_axisbelow(True)
    _finish(axes, spec)


def _heat(figure: Figure, axes: Axes, spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    xs = list(dict.fromkeys(row[spec["x"]] for row in rows))
    ys = list(dict.fromkeys(row[spec["y"]] for row in rows))
    values = np.full((len(ys), len(xs)), np.nan)
    for row in rows:
        values[ys.index(row[spec["y"]]), xs.index(row[spec["x"]])] = row[spec["value"]]
    norm = Normalize(np.nanmin(values), np.nanmax(values))
    axes.pcolormesh(values, cmap=_HEAT, norm=norm, edgecolors=figures.RULE, linewidth=0.5)
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            dark = sum(_HEAT(norm(value))[:3]) < 1.5
            axes.text(x + 0.5, y + 0.5, f"{value:.4g}", ha="center", va="center", fontsize=9,
                      color="#ffffff" if dark else "#101010")  # fmt: skip
    if spec.get("mark"):
        x, y = spec["mark"]
        if x in xs and y in ys:
            corner = (xs.index(x), ys.index(y))
            for color, width in (("#101010", 4.5), ("#ffffff", 2.0)):  # visible on dark and on light cells
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=color, linewidth=width, zorder=7))
    _outline(figure, axes, spec, xs, ys)
    axes.set_xticks(np.arange(len(xs)) + 0.5, [str(x) for x in xs])
    axes.set_yticks(np.arange(len(ys)) + 0.5, [str(y) for y in ys])
    if isinstance(ys[0], str):
        axes.invert_yaxis()  # text labels begin at the top; numbers increase upwards
    axes.grid(False)
    axes.set_xlabel(spec["x"])
    axes.set_title(f"{spec['value']} by {spec['y']} (rows)", loc="left", fontsize=11, color=figures.MUTED)


def _outline(figure: Figure, axes: Axes, spec: Mapping[str, Any], xs: Sequence[object], ys: Sequence[object]) -> None:
    """Lines around the cells of each outline, with a legend below; an outline without cells is left out."""
    drawn = []
    outlines = spec.get("outlines") or {}
    for index, ((label, cells), (color, width)) in enumerate(zip(outlines.items(), _OUTLINES, strict=False)):
        inside = set(map(tuple, cells))
        edges = borders(np.array([[(x, y) in inside for x in xs] for y in ys]))
        if not edges:
            continue
        along = [[point[axis] for edge in edges for point in (*edge, (np.nan, np.nan))] for axis in (0, 1)]
        line_style: dict[str, Any] = {"solid_capstyle": "projecting", "clip_on": False}
        axes.plot(*along, color="#ffffff", linewidth=width + 1.8, zorder=5 - 2 * index, **line_style)
        (line,) = axes.plot(*along, color=color, linewidth=width, zorder=6 - 2 * index, label=label, **line_style)
        line.set_gid(f"outline-{index}")
        drawn.append(line)
    if drawn:
        figure.legend(handles=drawn, loc="outside lower left", frameon=False, fontsize=9, ncols=len(drawn))


def borders(inside: NDArray[np.bool_]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The edges ((x, y), (x, y)) between cells inside and outside; row r is at y from r to r + 1."""
    padded = np.pad(inside, 1)
    horizontal = [((x, y), (x + 1, y)) for y, x in np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1]).tolist()]
    vertical = [((x, y), (x, y + 1)) for y, x in np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1]).tolist()]
    return horizontal + vertical


def _series(
    spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[tuple[str, list[Mapping[str, Any]]], figures.RowStyle]]:
    """((label, its rows), its style), in the order of appearance."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row[spec["series"]]) if spec["series"] else "", []).append(row)
    return list(zip(groups.items(), figures.row_styles(["row"] * len(groups)), strict=True))


def _plain() -> ticker.FuncFormatter:
    """Tick labels without powers of ten."""
    return ticker.FuncFormatter(lambda value, _: f"{value:,g}")


def _finish(axes: Axes, spec: Mapping[str, Any]) -> None:
    if "x" in spec["logs"]:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(_plain())
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    elif spec["kind"] == "line" and all((np.asarray(line.get_xdata(), float) % 1 == 0).all() for line in axes.lines):
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if "y" in spec["logs"]:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high < 50 * low:  # too few powers of ten for ticks
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(_plain())
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel(spec["x"] if spec["kind"] != "bars" else "")
    axes.set_title(spec["y"], loc="left", fontsize=11, color=figures.MUTED)
    if spec["series"] or spec["kind"] == "points":
        handles, labels = axes.get_legend_handles_labels()
        if any(labels) and spec["kind"] == "bars":  # bars fill the whole width: no free place inside
            axes.figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize=9, ncols=4)
        elif any(labels):
            axes.legend(handles, labels, frameon=False, fontsize=9, ncols=2 if len(labels) > 6 else 1)
