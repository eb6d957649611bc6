"""Static figures of a report: matplotlib SVG with the page's CSS variables as colours, and small heat maps.

Figures are drawn with placeholder colours, which `apply_theme` replaces by `var(--...)`, so that one SVG serves the
light and the dark theme. Text stays text. Equal data give equal bytes.
"""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from regard.files.paths import printable

INK, MUTED, RULE, CONTROL = "#0b0001", "#0b0002", "#0b0003", "#0b0004"
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", CONTROL: "--control"}

# Colours that people with the common colour vision deficiencies can distinguish, for a light and a dark page, with a
# contrast of at least 4.5:1. Rows after the sixth repeat a colour with another dash and marker.
LIGHT = ("#0067a5", "#b84300", "#00755a", "#a3357d", "#7d6000", "#5b50b5")
DARK = ("#5cb8f5", "#ff9a5c", "#3fd0a4", "#ee8fcb", "#e2c044", "#aaa2ff")
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")

STYLE: Any = {
    "text.parse_math": False,  # names are drawn as they are written
    "svg.fonttype": "none", "svg.hashsalt": "regard", "font.size": 11, "text.color": INK,
    "axes.edgecolor": RULE, "xtick.color": RULE, "ytick.color": RULE, "grid.color": RULE, "grid.linewidth": 0.6,
    "axes.labelcolor": MUTED, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
}  # fmt: skip


@dataclass(frozen=True)
class RowStyle:
    """The style of a row in all figures: colour with its CSS variable, dash, marker and line width."""

    color: str
    variable: str
    dash: Any
    marker: str
    width: float = 1.8


def row_styles(kinds: Sequence[str]) -> list[RowStyle]:
    """A style for each row; kinds are "baseline", "control" or "row"."""
    styles, rows, controls = [], 0, 0
    for kind in kinds:
        if kind == "baseline":
            styles.append(RowStyle(INK, "--ink", "solid", "o", 2.4))
        elif kind == "control":
            styles.append(RowStyle(CONTROL, "--control", DASHES[1 + controls % 3], "X", 1.5))
            controls += 1
        else:
            round_, color = divmod(rows, len(LIGHT))
            marker = MARKERS[rows % len(MARKERS)]
            styles.append(RowStyle(f"#0a00{color:02x}", f"--c{color}", DASHES[round_ % 4], marker))
            rows += 1
    return styles


@dataclass(frozen=True)
class Curve:
    """One row over epochs: mean, lowest and highest over its seeds."""

    row: int
    label: str
    epochs: list[float]
    mean: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


def curves(lines: Sequence[Curve], styles: Sequence[RowStyle], ylabel: str, wide: bool) -> tuple[str, dict[str, Any]]:
    """Learning curves with bands from the lowest to the highest seed, and the position of the axes for the tooltip."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(14.4, 5.6) if wide else (4.7, 4.2))
        axes = figure.add_axes((0.042, 0.09, 0.95, 0.885) if wide else (0.135, 0.12, 0.84, 0.85))
        for line in lines:
            style = styles[line.row]
            marker = style.marker if len(line.epochs) == 1 else "None"
            (drawn,) = axes.plot(line.epochs, line.mean, marker=marker, color=style.color, linestyle=style.dash,
                                 linewidth=style.width, zorder=3)  # fmt: skip
            drawn.set_gid(f"row{line.row}-line")
            if line.low and line.high:
                band = axes.fill_between(line.epochs, line.low, line.high, color=style.color, alpha=0.14, linewidth=0)
                band.set_gid(f"row{line.row}-band")
        _focus(axes, lines)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(ylabel, loc="left", fontsize=11, color=MUTED, pad=-2, y=1.0)
        axes.tick_params(length=0)
        axes.margins(x=0.01)
        box = _box(figure, axes)
        return apply_theme(figure, f"{ylabel}: learning curves"), box


def _focus(axes: Axes, lines: Sequence[Curve]) -> None:
    """Set the y range from the values after the first twelfth of training, with some room for the title."""
    both = [values for line in lines for values in (line.low or line.mean, line.high or line.mean)]
    late = [value for values in both for value in values[len(values) // 12 :] if np.isfinite(value)]
    if late and max(late) > min(late):
        room = max(late) - min(late)
        axes.set_ylim(min(late) - 0.04 * room, max(late) + 0.09 * room)


def _box(figure: Figure, axes: Axes) -> dict[str, Any]:
    """The axes' rectangle in the units of the SVG (points), and the data range."""
    width, height = (72 * side for side in figure.get_size_inches())
    (left, bottom), (right, top) = axes.get_position().get_points().tolist()
    edges = {"width": width, "left": left * width, "right": right * width}
    edges |= {"top": (1 - top) * height, "bottom": (1 - bottom) * height}
    rounded = {name: round(float(edge), 2) for name, edge in edges.items()}
    return {**rounded, "x": [round(float(x), 6) for x in axes.get_xlim()]}


def tradeoff(
    points: Sequence[Mapping[str, Any]], styles: Sequence[RowStyle], xlabel: str, ylabel: str, more: bool
) -> str:
    """`tradeoff_figure` as SVG, for readers without JavaScript."""
    return apply_theme(tradeoff_figure(points, styles, xlabel, ylabel, more), f"{ylabel} against {xlabel}")


def tradeoff_figure(
    points: Sequence[Mapping[str, Any]], styles: Sequence[RowStyle], xlabel: str, ylabel: str, more: bool
) -> Figure:
    """Accuracy against a cost with the Pareto front. points: row, label, x, y, low, high. more: higher x is better."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2))
        axes = figure.add_axes((0.09, 0.12, 0.88, 0.84))
        best = front([(point["x"], point["y"]) for point in points], more)
        axes.plot(*zip(*best, strict=True), color=MUTED, linestyle=(0, (2, 2)), linewidth=1, zorder=1)
        for point in points:
            style = styles[point["row"]]
            axes.plot(point["x"], point["y"], style.marker, color=style.color, markersize=7, zorder=3)
            if point["low"] is not None:
                axes.plot([point["x"]] * 2, [point["low"], point["high"]], color=style.color, linewidth=1.2, zorder=2)
            axes.annotate(
                printable(point["label"]), (point["x"], point["y"]), (7, 4), textcoords="offset points", fontsize=10
            )
        axes.set_xlabel(xlabel)
        axes.set_title(ylabel, loc="left", fontsize=11, color=MUTED, pad=-2)
        axes.margins(x=0.16, y=0.12)
        axes.tick_params(length=0)
        return figure


def front(points: Sequence[tuple[float, float]], more: bool) -> list[tuple[float, float]]:
    """The Pareto front, sorted by x; equal points occur once. Higher y is better; more: whether higher x is, too."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (-point[0] if more else point[0], -point[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return sorted(best)


def apply_theme(figure: Figure, title: str) -> str:
    """The figure as inline SVG without prolog, date and style sheet; colours are CSS variables, rows have data-row."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title, "text.parse_math": False}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    for side in ("width", "height"):
        text = re.sub(rf'(<svg\b[^>]*?) {side}="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    for placeholder, variable in VARIABLES.items():
        text = text.replace(placeholder, f"var({variable})")
    text = re.sub(r"#0a00([0-9a-f]{2})", lambda match: f"var(--c{int(match[1], 16)})", text)
    text = re.sub(r'id="outline-(\d+)"', r'class="outline" data-outline="\1"', text)
    return re.sub(r'id="row(\d+)-(line|band)"', r'class="\2" data-row="\1"', text)


def heat(values: Sequence[float | int], height: int, width: int) -> str:
    """A map of weights as a data URI: one amber pixel per cell, whose opacity is the weight over the largest weight.

    Raises: ValueError unless there are height * width values.
    """
    weights = np.asarray(values, dtype=float).reshape(height, width)
    largest = float(np.nanmax(weights)) if np.isfinite(weights).any() else 0.0
    share = np.clip(np.nan_to_num(weights) / largest, 0, 1) if largest > 0 else np.zeros_like(weights)
    pixels = np.empty((height, width, 4), np.uint8)
    pixels[..., :3] = (255, 176, 0)
    pixels[..., 3] = np.round(225 * share)
    out = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
