"""Static figures of a report: matplotlib SVG whose colours are the page's CSS variables, and small heat maps.

Figures are drawn in stand-in colours, which `themed` turns into `var(--...)`: one SVG serves the light and the dark
page. Text stays text. The same data give the same bytes.
"""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

INK, MUTED, RULE, CONTROL = "#0b0001", "#0b0002", "#0b0003", "#0b0004"
_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", CONTROL: "--control"}

# Hues that people with any of the common colour deficiencies tell apart, in a darker and a lighter version: at least
# 4.5:1 against the page. Rows beyond the sixth repeat a hue with another dash and marker.
LIGHT = ("#0067a5", "#b84300", "#00755a", "#a3357d", "#7d6000", "#5b50b5")
DARK = ("#5cb8f5", "#ff9a5c", "#3fd0a4", "#ee8fcb", "#e2c044", "#aaa2ff")
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "regard",
    "font.size": 11,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.6,
}


@dataclass(frozen=True)
class Look:
    """How a row is drawn everywhere: the CSS variable of its colour, dash, marker; controls and baseline stand out."""

    color: str
    variable: str
    dash: Any
    marker: str
    width: float = 1.8


def looks(kinds: Sequence[str]) -> list[Look]:
    """A look for each row; kinds are "baseline", "control" or "row"."""
    made, hue, grey = [], 0, 0
    for kind in kinds:
        if kind == "baseline":
            made.append(Look(INK, "--ink", "solid", "o", 2.4))
        elif kind == "control":
            made.append(Look(CONTROL, "--control", DASHES[1 + grey % 3], "X", 1.5))
            grey += 1
        else:
            which, turn = hue % len(LIGHT), hue // len(LIGHT)
            made.append(Look(f"#0a00{which:02x}", f"--c{which}", DASHES[turn % 4], MARKERS[hue % len(MARKERS)]))
            hue += 1
    return made


@dataclass(frozen=True)
class Curve:
    """One row over epochs: mean, lowest and highest over its seeds."""

    row: int
    label: str
    epochs: list[float]
    mean: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


def curves(lines: Sequence[Curve], styles: Sequence[Look], ylabel: str, wide: bool) -> tuple[str, dict[str, Any]]:
    """Learning curves with bands from the lowest to the highest seed; also where the axes lie, for the pointer."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(14.4, 5.6) if wide else (4.7, 4.2))
        axes = figure.add_axes((0.042, 0.09, 0.95, 0.885) if wide else (0.135, 0.12, 0.84, 0.85))
        for line in lines:
            look = styles[line.row]
            (drawn,) = axes.plot(
                line.epochs, line.mean, color=look.color, linestyle=look.dash, linewidth=look.width, zorder=3
            )
            drawn.set_gid(f"row{line.row}-line")
            if len(line.epochs) == 1:
                drawn.set_marker(look.marker)
            if line.low and line.high:
                band = axes.fill_between(line.epochs, line.low, line.high, color=look.color, alpha=0.14, linewidth=0)
                band.set_gid(f"row{line.row}-band")
        _focus(axes, lines)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(ylabel, loc="left", fontsize=11, color=MUTED, pad=-2, y=1.0)
        axes.tick_params(length=0)
        axes.margins(x=0.01)
        box = _box(figure, axes)
        return themed(figure, f"{ylabel}: learning curves"), box


def _focus(axes: Axes, lines: Sequence[Curve]) -> None:
    """Leave the first tenth of training out of the y range where it would squeeze the rest; a title needs some room."""
    if not lines:
        return
    late = [value for line in lines for value in (line.low or line.mean)[len(line.mean) // 12 :]]
    late += [value for line in lines for value in (line.high or line.mean)[len(line.mean) // 12 :]]
    late = [value for value in late if np.isfinite(value)]
    if late and max(late) > min(late):
        room = max(late) - min(late)
        axes.set_ylim(min(late) - 0.04 * room, max(late) + 0.09 * room)


def _box(figure: Figure, axes: Axes) -> dict[str, Any]:
    """The axes' rectangle in the SVG's own units (points) and its data range."""
    width, height = (72 * side for side in figure.get_size_inches())
    place = axes.get_position()
    return {
        "width": round(width, 2),
        "left": round(place.x0 * width, 2),
        "right": round(place.x1 * width, 2),
        "top": round((1 - place.y1) * height, 2),
        "bottom": round((1 - place.y0) * height, 2),
        "x": [round(float(v), 6) for v in axes.get_xlim()],
    }


def tradeoff(points: Sequence[Mapping[str, Any]], styles: Sequence[Look], xlabel: str, ylabel: str, more: bool) -> str:
    """Accuracy against one cost with the Pareto front: what a reader without JavaScript sees.

    points: row, label, x, y, low, high. more: whether more of x is better.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 4.2))
        axes = figure.add_axes((0.09, 0.12, 0.88, 0.84))
        best = front([(point["x"], point["y"]) for point in points], more)
        axes.plot(*zip(*best, strict=True), color=MUTED, linestyle=(0, (2, 2)), linewidth=1, zorder=1)
        for point in points:
            look = styles[point["row"]]
            axes.plot(point["x"], point["y"], look.marker, color=look.color, markersize=7, zorder=3)
            if point["low"] is not None:
                axes.plot([point["x"]] * 2, [point["low"], point["high"]], color=look.color, linewidth=1.2, zorder=2)
            axes.annotate(point["label"], (point["x"], point["y"]), (7, 4), textcoords="offset points", fontsize=10)
        axes.set_xlabel(xlabel)
        axes.set_title(ylabel, loc="left", fontsize=11, color=MUTED, pad=-2)
        axes.margins(x=0.16, y=0.12)
        axes.tick_params(length=0)
        return themed(figure, f"{ylabel} against {xlabel}")


def front(points: Sequence[tuple[float, float]], more: bool) -> list[tuple[float, float]]:
    """The points that no other beats in both: sorted by x. more: whether more of x is better (y is always better high).

    Two points with the same values are both kept once.
    """
    kept: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (-point[0] if more else point[0], -point[1])):
        if not kept or y > kept[-1][1]:
            kept.append((x, y))
    return sorted(kept)


def themed(figure: Figure, title: str) -> str:
    """The figure as inline SVG: no prolog, date or style of its own, colours as CSS variables, rows as classes."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg", f'<svg role="img" aria-label="{_attribute(title)}"', 1)
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, f"var({variable})")
    text = re.sub(r"#0a00([0-9a-f]{2})", lambda match: f"var(--c{int(match[1], 16)})", text)
    text = re.sub(r'id="outline-(\d+)"', r'class="outline" data-outline="\1"', text)
    return re.sub(r'id="row(\d+)-(line|band)"', r'class="\2" data-row="\1"', text)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def heat(values: Sequence[float | int], height: int, width: int) -> str:
    """A map of weights as a data URI: one pixel a cell, amber whose opacity is the weight over the largest weight.

    Raises: ValueError unless there are height * width values.
    """
    weights = np.asarray(values, dtype=float).reshape(height, width)
    top = float(np.nanmax(weights)) if np.isfinite(weights).any() else 0.0
    share = np.clip(np.nan_to_num(weights) / top, 0, 1) if top > 0 else np.zeros_like(weights)
    pixels = np.empty((height, width, 4), np.uint8)
    pixels[..., :3] = (255, 176, 0)
    pixels[..., 3] = np.round(225 * share)
    out = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
