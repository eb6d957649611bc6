"""The taxonomy of mechanisms: MiTA's Table 1 for all of them, read from their cards, and a picture of it."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.core import MixerConfig, StoreError
from regard.core.plain_text import plain_text
from regard.mixers import MIXERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STRATEGIES = ("none", "compress", "both", "route")
NUMBERS = ("one for all", "several", "one each")
_COLOURS = {"Q": "#0072b2", "K": "#d55e00", "V": "#009e73", "position": "#6b6b6b"}
_HEAD, _LINE, _PAD = 0.42, 0.40, 0.22  # inches
_LEFT, _COLUMN = 1.0, 3.0
_DARK = "\n@media (prefers-color-scheme: dark) {svg {filter: invert(0.92) hue-rotate(180deg)}}"
_LEGEND = (
    "Rows: number of experts (small print: number and kind). Letters: what the experts are built and selected from: "
    "queries Q, keys K, values V, position."
)


def taxonomy_rows(configs: Iterable[MixerConfig] = ()) -> list[dict[str, Any]]:
    """One row per mechanism, read from its card; without `configs`, all mechanisms with default fields."""
    rows = []
    for config in configs or [cls() for cls in MIXERS]:
        card = config.card
        rows.append(
            {
                "mechanism": type(config).__name__, "strategy": card.strategy, "experts": card.expert_type,
                "number": card.expert_count, "construction": card.construction, "topology": card.topology,
                "conditions": card.conditions, "query": card.query_content, "key": card.key_content,
                "relative": card.relative_position, "dynamic": card.dynamic, "cost": card.complexity,
                "discrete": card.discrete,
            }
        )  # fmt: skip
    return rows


@plain_text()
def write_picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write `picture` as an SVG file that is dark where the reader's system is.

    Raises: StoreError if it cannot be written.
    """

    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "regard"}):
        picture(rows).savefig(drawn, format="svg", metadata={"Date": None})
    try:
        path.write_text(drawn.getvalue().replace("</style>", f"{_DARK}</style>", 1), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


@plain_text()
def picture(rows: Sequence[dict[str, Any]]) -> "Figure":
    """A table with strategies as columns, numbers of experts as rows, and one line per mechanism.

    The kind of experts is printed below a name; beside it, as letters, what they are conditioned on.
    """
    from matplotlib.figure import Figure

    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["strategy"], _number(row["number"])), []).append(row)
    lines = [max(len(cells.get((strategy, number), ())) for strategy in STRATEGIES) for number in NUMBERS]
    heights = [number * _LINE + 2 * _PAD for number in lines]
    width, height = _LEFT + len(STRATEGIES) * _COLUMN, _HEAD + sum(heights) + 0.75
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    _frame(axes, heights, width)
    top = _HEAD
    for number, row_height in zip(NUMBERS, heights, strict=True):
        for column, strategy in enumerate(STRATEGIES):
            for line, row in enumerate(cells.get((strategy, number), ())):
                _entry(axes, row, _LEFT + column * _COLUMN + 0.15, top + _PAD + (line + 0.5) * _LINE)
        top += row_height
    axes.text(0.1, top + 0.35, _LEGEND, fontsize=8, va="center", color="#555555")
    return figure


def _number(count: str) -> str:
    """The row of the picture: one expert, one per query, or several."""
    return {"1": NUMBERS[0], "N": NUMBERS[2]}.get(count.strip(), NUMBERS[1])


def _frame(axes: Any, heights: Sequence[float], width: float) -> None:
    heads = {"none": "neither", "compress": "compress", "both": "compress and route", "route": "route"}
    for column, strategy in enumerate(STRATEGIES):
        left = _LEFT + column * _COLUMN
        axes.text(left + 0.15, _HEAD / 2, heads[strategy], fontsize=11, fontweight="bold", va="center")
        axes.plot([left, left], [0.05, _HEAD + sum(heights)], color="#dddddd", lw=1)
    top = _HEAD
    for number, row_height in zip(NUMBERS, heights, strict=True):
        axes.plot([0.05, width - 0.05], [top, top], color="#999999" if top == _HEAD else "#dddddd", lw=1)
        label = number.replace(" ", "\n", 1)
        axes.text(0.1, top + row_height / 2, label, fontsize=10, fontweight="bold", va="center")
        top += row_height
    axes.plot([0.05, width - 0.05], [top, top], color="#999999", lw=1)


def _entry(axes: Any, row: dict[str, Any], x: float, y: float) -> None:
    axes.text(x, y - 0.07, row["mechanism"], fontsize=10, va="center")
    several = _number(row["number"]) == NUMBERS[1]
    kind = f"{row['number']}: {row['experts']}" if several else row["experts"]
    axes.text(x, y + 0.10, kind, fontsize=6.5, va="center", color="#555555")
    letters = [part.strip() for part in row["conditions"].split(",") if part.strip()]
    for index, part in enumerate(letters):
        left = x + 1.75 + 0.2 * index
        text = "pos" if part == "position" else part
        axes.text(left, y - 0.07, text, fontsize=9, va="center", color=_COLOURS.get(part, "#000000"))
