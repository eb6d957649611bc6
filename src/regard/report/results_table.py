"""The table of results on a page: each row's statistics, its picture of them, what it cost, what the paper printed."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from regard.lab.table import Table

from . import figures, phrasing
from .page_data import Material


def kind_of(row: Mapping[str, Any], baseline: str) -> str:
    """What a row is to the comparison: baseline, control or row."""
    return "baseline" if row["label"] == baseline else "control" if row.get("control") else "row"


def row_entries(
    material: Material, table: Table, kinds: Sequence[str], styles: Sequence[figures.Look]
) -> list[dict[str, Any]]:
    """One entry for each row: its statistics from the table, its look, and the little picture of its interval."""
    known = {row.label: row for row in table.rows}
    metric, made = material.snapshot["metric"], []
    for index, description in enumerate(material.rows):
        label = description["label"]
        own = known.get(label)
        values = [(run.seed, run.metrics[metric]) for run in material.of(index) if metric in run.metrics]
        look = styles[index]
        made.append({
            "label": label, "kind": kinds[index], "color": look.variable, "dashes": _dashes(look),
            "spelling": description.get("spelling") or "", "host": description.get("host") or "",
            "n": own.n if own else 0, "mean": own.mean if own else None,
            "low": own.low if own else None, "high": own.high if own else None,
            "difference": own.difference if own and own.difference and own.difference.n else None, "values": values,
            "title": ", ".join(f"seed {seed}: {phrasing.number(value, 2)}" for seed, value in values),
            "failed": sum(run.row == index for run in material.failed),
        })  # fmt: skip
    everything = [edge for row in made for edge in (row["low"], row["high"], *(v for _, v in row["values"]))]
    edges = [edge for edge in everything if edge is not None]
    base = next((row["mean"] for row in made if row["kind"] == "baseline"), None)
    for row in made:
        row["bar"] = Markup(_bar(row, min(edges), max(edges), base)) if edges and row["mean"] is not None else ""
    return made


def _bar(row: Mapping[str, Any], low: float | int, high: float | int, base: float | int | None) -> str:
    """Interval, mean and seeds of a row on the axis that all rows share; numbers alone go into the markup."""

    def x(value: float | int) -> str:
        return f"{6 + 164 * (value - low) / ((high - low) or 1):.1f}"

    stroke = f'style="stroke:var({row["color"]})"'
    parts = [f'<line class="base" x1="{x(base)}" x2="{x(base)}" y1="0" y2="19"/>'] if base is not None else []
    if row["low"] is not None:
        parts.append(f'<line x1="{x(row["low"])}" x2="{x(row["high"])}" y1="9.5" y2="9.5" stroke-width="2" {stroke}/>')
    parts += [f'<line class="seed" x1="{x(v)}" x2="{x(v)}" y1="4" y2="15" {stroke}/>' for _, v in row["values"]]
    parts.append(f'<circle cx="{x(row["mean"])}" cy="9.5" r="4" style="fill:var({row["color"]})"/>')
    return f'<svg class="bar" viewBox="0 0 176 19" aria-hidden="true">{"".join(parts)}</svg>'


def _dashes(look: figures.Look) -> str:
    return "none" if look.dash == "solid" else " ".join(str(step * 1.6) for step in look.dash[1])


def further_cells(material: Material, costs: Sequence[str]) -> tuple[list[list[dict[str, Any]]], list[dict[str, str]]]:
    """The further columns: measured costs, then the paper's own numbers, as (cells of each row, headings)."""
    titles = {"images_per_second": ("Images/s", "training"), "macs": ("MACs", ""), "parameters": ("Parameters", ""),
              "seconds": ("Time", "a run"), "peak_memory_bytes": ("Memory", "peak, bytes")}  # fmt: skip
    headings = [{"title": titles[axis][0], "small": titles[axis][1],
                 "first": "descending" if phrasing.quantity(axis).better == "higher" else "ascending"}
                for axis in costs]  # fmt: skip
    published: dict[str, None] = {}
    for description in material.rows:
        published.update(dict.fromkeys([*(description.get("paper") or {}), *(description.get("exact") or {})]))
    for key in published:
        headings.append({"title": "Paper", "small": key, "first": "descending"})
    cells = []
    for index, description in enumerate(material.rows):
        line = []
        for axis in costs:
            value = material.average(index, axis)
            text = phrasing.duration(value) if axis == "seconds" else phrasing.compact(value)
            line.append({"value": value, "text": text, "title": "" if value is None else f"{value:,.0f}"})
        for key in published:
            line.append(_published(description, key))
        cells.append(line)
    return cells, headings


def _published(description: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What the paper prints for a row; where the exact number is known, it is behind the pointer."""
    printed = (description.get("paper") or {}).get(key)
    exact = (description.get("exact") or {}).get(key)
    value = printed if printed is not None else exact
    if value is None:
        return {"value": None, "text": "", "title": ""}
    text = phrasing.compact(value) if abs(value) >= 1000 else phrasing.number(value, 2).rstrip("0").rstrip(".")
    return {"value": value, "text": text, "title": f"exactly {exact:,}" if exact is not None else ""}
