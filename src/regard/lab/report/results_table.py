"""The table of results on a page: statistics of each row with a small chart, costs, and the paper's numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from regard.pages import figures, phrasing

from .page_data import StudyData


def kind_of(row: Mapping[str, Any], baseline: str) -> str:
    """The kind of a row: "baseline", "control" or "row"."""
    return "baseline" if row["label"] == baseline else "control" if row.get("control") else "row"


def row_entries(
    study_data: StudyData, kinds: Sequence[str], styles: Sequence[figures.RowStyle]
) -> list[dict[str, Any]]:
    """One entry for each row: its statistics from the table, its style, and a small chart of its interval."""
    metric, entries = study_data.snapshot["metric"], list[dict[str, Any]]()
    parts = zip(study_data.rows, study_data.table.rows, styles, strict=True)
    for index, (description, line, style) in enumerate(parts):
        values = [(run.seed, run.metrics[metric]) for run in study_data.of(index) if metric in run.metrics]
        dashes = "none" if style.dash == "solid" else " ".join(str(step * 1.6) for step in style.dash[1])
        entries.append({
            "label": line.label, "kind": kinds[index], "color": style.variable, "dashes": dashes,
            "spelling": description.get("spelling") or "", "host": description.get("host") or "",
            "n": line.n, "mean": line.mean, "low": line.low, "high": line.high,
            "difference": line.difference if line.difference and line.difference.n else None, "values": values,
            "against": line.against, "share": None if line.share is None else phrasing.number(100 * line.share, 0),
            "title": ", ".join(f"seed {seed}: {phrasing.number(value, 2)}" for seed, value in values),
            "failed": sum(run.row == index for run in study_data.failed),
        })  # fmt: skip
    edges = [edge for row in entries for edge in (row["low"], row["high"], *(v for _, v in row["values"]))]
    drawn = [edge for edge in edges if edge is not None]
    base = next((row["mean"] for row in entries if row["kind"] == "baseline"), None)
    for row in entries:
        row["bar"] = Markup(_bar(row, min(drawn), max(drawn), base)) if drawn and row["mean"] is not None else ""
    return entries


def _bar(row: Mapping[str, Any], low: float | int, high: float | int, base: float | int | None) -> str:
    """Interval, mean and seeds of a row as SVG, on the same axis for all rows; the markup has numbers only."""

    def x(value: float | int) -> str:
        return f"{6 + 164 * (value - low) / ((high - low) or 1):.1f}"

    stroke = f'style="stroke:var({row["color"]})"'
    parts = [f'<line class="base" x1="{x(base)}" x2="{x(base)}" y1="0" y2="19"/>'] if base is not None else []
    if row["low"] is not None:
        parts.append(f'<line x1="{x(row["low"])}" x2="{x(row["high"])}" y1="9.5" y2="9.5" stroke-width="2" {stroke}/>')
    parts += [f'<line class="seed" x1="{x(v)}" x2="{x(v)}" y1="4" y2="15" {stroke}/>' for _, v in row["values"]]
    parts.append(f'<circle cx="{x(row["mean"])}" cy="9.5" r="4" style="fill:var({row["color"]})"/>')
    return f'<svg class="bar" viewBox="0 0 176 19" aria-hidden="true">{"".join(parts)}</svg>'


def further_cells(
    study_data: StudyData, costs: Sequence[str]
) -> tuple[list[list[dict[str, Any]]], list[dict[str, str]]]:
    """(cells of each row, headings) of the other columns: measured costs, then the paper's own numbers."""
    titles = {"images_per_second": ("Images/s", "training"), "inference_per_second": ("Images/s", "inference"),
              "macs": ("MACs", ""), "parameters": ("Parameters", ""), "seconds": ("Time", "per run"),
              "memory_bytes": ("Memory", "added, bytes")}  # fmt: skip
    headings = [{"title": titles[axis][0], "small": titles[axis][1],
                 "first": "descending" if phrasing.quantity(axis).better == "higher" else "ascending"}
                for axis in costs]  # fmt: skip
    published: dict[str, None] = {}
    for description in study_data.rows:
        published.update(dict.fromkeys([*(description.get("paper") or {}), *(description.get("exact") or {})]))
    headings += [{"title": "Paper", "small": key, "first": "descending"} for key in published]
    cells = []
    for index, description in enumerate(study_data.rows):
        line = []
        for axis in costs:
            value = study_data.average(index, axis)
            text = phrasing.duration(value) if axis == "seconds" else phrasing.compact(value)
            line.append({"value": value, "text": text, "title": "" if value is None else f"{value:,.0f}"})
        cells.append([*line, *(_published_value(description, key) for key in published)])
    return cells, headings


def _published_value(description: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The paper's number for a row; the exact number, if there is one, is the tooltip."""
    printed = (description.get("paper") or {}).get(key)
    exact = (description.get("exact") or {}).get(key)
    value = printed if printed is not None else exact
    if value is None:
        return {"value": None, "text": "", "title": ""}
    text = phrasing.compact(value) if abs(value) >= 1000 else phrasing.number(value, 2).rstrip("0").rstrip(".")
    return {"value": value, "text": text, "title": f"exactly {exact:,}" if exact is not None else ""}
