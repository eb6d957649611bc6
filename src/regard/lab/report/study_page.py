"""The page of a study: one HTML file that works offline, in print, on a phone and, with less detail, without scripts.

Everything on it comes from the store; the template escapes text.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from regard.core import ConfigError, StoreError, UnsupportedError, nearest
from regard.files.atomic import write_atomically
from regard.lab.engine.claims import share_text
from regard.lab.engine.table import Table, snapshots
from regard.lab.studies.errata import errata_of
from regard.pages import figures, phrasing
from regard.pages.rendering import render_template
from regard.pages.theme import plain_figure

from .maps_section import maps_section
from .page_data import AXES, TIMES, StudyData, columns, environment, learning_curves, read_study
from .results_table import further_cells, kind_of, row_entries

_CARD = {
    "source": "source", "formula": "formula", "complexity": "complexity", "dynamic": "dynamic weights",
    "scaling": "scaling", "expert_type": "expert type", "expert_count": "number of experts",
    "construction": "construction", "topology": "topology", "prefix": "class and register tokens",
}  # fmt: skip
_MEASURED = (*TIMES, "memory_bytes")
_FACTORS = {"query_content": "query content", "key_content": "key content", "relative_position": "relative position"}


def write_report(results: Path | str, out: Path | str, name: str | None = None) -> list[Path]:
    """Write `out/NAME-SCALE.html` for every study in the store, or for all scales of one; returns the files.

    A damaged file stops the page of its study only: verdicts without one of the runs would look final. The others are
    written first.
    Raises: ConfigError if the store has no study of that name; StoreError if the store is empty or damaged, or a
    page cannot be written.
    """
    stored = snapshots(results)
    if not stored:
        raise StoreError(f"no study in {results} (expected {results}/studies/NAME-SCALE.json); regard study run NAME")
    chosen = [(study, scale) for study, scale in stored if name in (None, study, f"{study}-{scale}")]
    if not chosen:
        raise ConfigError(f"no results of {name!r} in {results}; {nearest(str(name), {study for study, _ in stored})}")
    pages: list[Path] = []
    errors: list[StoreError] = []
    for study, scale in chosen:
        path = Path(out) / f"{study}-{scale}.html"
        try:
            write_atomically(path, render(results, study, scale))
            pages.append(path)
        except StoreError as error:
            errors.append(error)
    if errors:
        written = f" ({len(pages)} other pages were written to {out})" if pages else ""
        raise StoreError("; ".join(map(str, errors)) + written) from errors[0]
    return pages


def render(results: Path | str, name: str, scale: str) -> str:
    """The page of one study at one scale as HTML. Equal results give equal bytes.

    Raises: StoreError if the study's snapshot or an outcome cannot be read.
    """
    study_data = read_study(Path(results), name, scale)
    view = _view(study_data, str(study_data.snapshot.get("scale") or scale))
    return render_template(
        "page.html", ("common.js", "page.js"), view, {"num": phrasing.number, "signed": phrasing.signed_number}
    )


def plot(results: Path | str, name: str, scale: str, format: str) -> bytes:
    """The study's metric against the first cost that rows have, for a paper. format: svg, pdf or png.

    Raises: StoreError as `render`; UnsupportedError without costs of two rows.
    """
    study_data = read_study(Path(results), name, scale)
    styles, rows, costs = _page_rows(study_data)
    points = _points(study_data, rows, costs[0]) if costs else []
    if not points:
        raise UnsupportedError(f"{name} has no two finished rows with costs to draw")
    return plain_figure(figures.tradeoff_figure(points, styles, *_axes(study_data, costs[0])), format)


def _page_rows(study_data: StudyData) -> tuple[list[figures.RowStyle], list[dict[str, Any]], list[str]]:
    """The style and entry of each row, and the costs that at least two rows have."""
    kinds = [kind_of(row, study_data.snapshot["baseline"]) for row in study_data.rows]
    styles = figures.row_styles(kinds)
    rows = row_entries(study_data, kinds, styles)
    costs = [axis for axis in AXES if sum(study_data.average(row, axis) is not None for row in range(len(rows))) > 1]
    return styles, rows, costs


def _view(study_data: StudyData, scale: str) -> dict[str, Any]:
    """All variables of the template."""
    table = study_data.table
    styles, rows, costs = _page_rows(study_data)
    cells, headings = further_cells(study_data, costs)
    for row, row_cells in zip(rows, cells, strict=True):
        row["cells"] = row_cells
    facts = environment(study_data)
    curves, boxes = _curves(study_data, styles)
    maps, overlays = maps_section(study_data)
    return {
        **_header(study_data, rows, scale), "baseline": study_data.snapshot["baseline"],
        "table_note": _table_note(rows, table), "columns": headings, "rows": rows,
        "claims": _claims(table), "claims_note": _claims_note(table),
        **_cost_section(study_data, rows, styles, costs, facts), "figures": curves, **maps,
        "cards": _cards(study_data), "errata": errata_of(study_data.snapshot.get("source") or ""),
        "notes": _notes(study_data), "environment": facts, "runs": _runs(study_data),
        "data": _data(study_data, rows, styles, costs, boxes, overlays),
    }  # fmt: skip


def _header(study_data: StudyData, rows: Sequence[Mapping[str, Any]], scale: str) -> dict[str, Any]:
    """Title, gate, answer, caption and warnings."""
    snapshot, table = study_data.snapshot, study_data.table
    measure = phrasing.quantity(snapshot["metric"])
    study = {key: snapshot.get(key) or "" for key in ("source", "question", "recipe")}
    study |= {"name": snapshot.get("study") or "", "title": snapshot.get("title") or "Study"}
    return {
        "study": study, "scale": scale, "measure": measure, "gate": _gate(table), "answer": table.headline,
        "better_first": "ascending" if measure.better == "lower" else "descending",
        "ranking": _ranking(rows, measure), "caption": _caption(study_data, scale),
        "warnings": [f"{warning[0].upper()}{warning[1:]}." for warning in table.warnings],
    }  # fmt: skip


def _cost_section(
    study_data: StudyData, rows: Sequence[Mapping[str, Any]], styles: Sequence[figures.RowStyle], costs: Sequence[str],
    facts: Sequence[tuple[str, list[str]]],
) -> dict[str, Any]:  # fmt: skip
    """The section on quality and cost; measured costs come last if the runs were not executed in the same way."""
    note = _execution_note(facts)
    axes = sorted(costs, key=lambda axis: axis in _MEASURED) if note else costs
    points = _points(study_data, rows, axes[0]) if axes else []
    return {
        "axes": [{"key": axis, "name": phrasing.quantity(axis).name} for axis in axes],
        "axes_note": " ".join(filter(None, (note, _shared_note(study_data)))),
        "measures": [{"key": key, "name": phrasing.quantity(key).name} for key in _measures(study_data)],
        "tradeoff": Markup(figures.tradeoff(points, styles, *_axes(study_data, axes[0]))) if points else "",
    }


def _curves(study_data: StudyData, styles: Sequence[figures.RowStyle]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(learning curves of every metric for wide and narrow screens, axes and values for the tooltip)."""
    curves, boxes = [], {}
    for metric in columns(study_data):
        lines = learning_curves(study_data, metric)
        if not lines:
            continue
        quantity, table = phrasing.quantity(metric), _curve_table(lines)
        curve = {"metric": metric, "name": quantity.name, "better": quantity.better, "table": table}
        values = [
            {"row": line.row, "epochs": line.epochs, "mean": [float(f"{value:.5g}") for value in line.mean]}
            for line in lines
        ]
        for size in ("wide", "narrow"):
            svg, box = figures.curves(lines, styles, quantity.name, size == "wide")
            curve[size] = Markup(svg)
            boxes[f"{metric}-{size}"] = {"box": box, "lines": values}
        curves.append(curve)
    return curves, boxes


def _curve_table(lines: Sequence[figures.Curve]) -> dict[str, Any]:
    """Values at up to eight evenly spaced epochs, with the last one."""
    epochs = max((line.epochs for line in lines), key=len)
    shown = sorted({epochs[round(i * (len(epochs) - 1) / 7)] for i in range(8)})
    entries = []
    for line in lines:
        means = dict(zip(line.epochs, line.mean, strict=True))
        entries.append({"label": line.label, "values": [means.get(epoch) for epoch in shown]})
    return {"epochs": [f"{epoch:g}" for epoch in shown], "lines": entries}


def _execution_note(facts: Sequence[tuple[str, list[str]]]) -> str:
    """A warning if the runs were not executed in the same way, so that measured costs cannot be compared."""
    names = ("processor", "device", "devices", "threads", "compiled kernels", "torch.compile", "torch")
    several = phrasing.join_with_and([name for name, values in facts if name in names and len(values) > 1])
    text = f"The runs differ in {several}: compare rows by MACs and parameters, not by time or memory."
    return text if several else ""


def _shared_note(study_data: StudyData) -> str:
    """Why times are missing: others used the machine beside runs, or it is not known whether they did."""
    shared = [run.others for run in study_data.runs if not run.alone]
    if not shared:
        return ""
    used = [share for share in shared if share is not None]
    reasons = []
    if used:
        part = f" beside {len(used)}" if len(used) < len(shared) else ""
        most = f"{100 * max(used):.0f} % of the processors{part}"
        reasons = [f"other work, such as other runs of the study, used up to {most}"]
    if len(used) < len(shared):
        reasons.append(f"of {len(shared) - len(used)} it is not known whether they were alone")
    return (
        f"Times of {phrasing.count(len(shared), 'run')} are left out: {'; '.join(reasons)}. Runs that have the machine "
        "to themselves (--workers 1) show them."
    )


def _measures(study_data: StudyData) -> list[str]:
    """The final metrics of the runs, the study's metric first."""
    names = {study_data.snapshot["metric"]: None}
    for run in study_data.runs:
        names.update(dict.fromkeys(run.metrics))
    return list(names)


def _points(study_data: StudyData, rows: Sequence[Mapping[str, Any]], axis: str) -> list[dict[str, Any]]:
    """The rows that have both a cost and a mean, as `figures.tradeoff_figure` takes them."""
    points = [
        {"row": index, "label": row["label"], "x": study_data.average(index, axis), "y": row["mean"],
         "low": row["low"], "high": row["high"]}
        for index, row in enumerate(rows)
    ]  # fmt: skip
    return [point for point in points if point["x"] is not None and point["y"] is not None]


def _axes(study_data: StudyData, axis: str) -> tuple[str, str, bool]:
    """The names of both axes, and whether a higher cost is better."""
    cost = phrasing.quantity(axis)
    return cost.name, phrasing.quantity(study_data.snapshot["metric"]).name, cost.better == "higher"


def _claims(table: Table) -> list[dict[str, str]]:
    claims = []
    for judged in table.claims:
        verdict = judged.verdict
        detail = "; ".join(filter(None, (verdict.detail, share_text(judged.share))))
        claims.append({"verdict": verdict.word.capitalize(), "css": verdict.word.replace(" ", ""),
                       "text": judged.text, "detail": phrasing.typeset(detail)})  # fmt: skip
    return claims


def _claims_note(table: Table) -> str:
    if all(claim.verdict.p is None for claim in table.claims):
        return "A verdict needs the 95 % interval of the difference, paired by seed; no claim can be judged here."
    analyses, own = "", "95 % interval"
    if table.looks is not None:
        pairs = phrasing.join_with_and([*map(str, table.looks.pairs)])
        analyses, own = f"interim analyses at {pairs} seeds and over ", "interim analyses"
    return (f"Supported and contradicted: after Holm's correction over {analyses}"
            f"the study's {phrasing.count(len(table.claims), 'claim')}, so that at most 5 % of such studies have one "
            "false verdict. "
            f"Suggested: only the claim's own {own}, paired by seed, decides it; by chance alone that "
            "happens to one claim in twenty.")  # fmt: skip


def _gate(table: Table) -> dict[str, str]:
    """The first sentence of the page: whether the baseline is better than every control, and what follows."""
    state, first = table.gate.word, ""
    if table.gate.passed:
        first = "Mixing tokens helps at this scale. "
    elif table.gate.passed is False:
        first = "Mixing tokens does not help at this scale, so no claim is judged. "
    elif table.scale != "smoke" and any(line.control for line in table.rows):
        first = "It is not decided whether mixing tokens helps at this scale, so no claim is judged yet. "
    sentence = f"{first}{phrasing.typeset(table.gate.sentence)}"
    return {"state": state, "css": state.replace(" ", ""), "sentence": sentence}


def _ranking(rows: Sequence[Mapping[str, Any]], measure: phrasing.Quantity) -> str:
    """The best and the worst row, without controls, in one sentence."""
    compared = [row for row in rows if row["kind"] != "control" and row["mean"] is not None]
    if len(compared) < 2:
        return ""
    ordered = sorted(compared, key=lambda row: row["mean"], reverse=measure.better == "higher")
    best, worst = ordered[0], ordered[-1]
    return (f"Without the controls, on average {best['label']} is first ({phrasing.number(best['mean'])}) "
            f"and {worst['label']} is last ({phrasing.number(worst['mean'])}).")  # fmt: skip


def _caption(study_data: StudyData, scale: str) -> str:
    """Scale, data, numbers of images and runs, and training time."""
    data = next((run.outcome["data"] for run in study_data.runs if run.outcome.get("data")), None)
    data = data or study_data.snapshot.get("data") or {}
    variant = study_data.snapshot.get("variant")
    parts = [f"{scale.capitalize()} scale" + (f", changed: {variant}" if variant else "")]
    if data.get("name"):
        unit, words = data.get("unit", "images"), {"train": "training", "test": "test"}
        sizes = [f"{data[part]:,} {word} {unit}" for part, word in words.items() if isinstance(data.get(part), int)]
        name = "own data" if data["name"].startswith("own:") else data["name"]
        parts.append(name + (f" ({', '.join(sizes)})" if sizes else ""))
    seconds = phrasing.duration(sum(run.outcome.get("seconds") or 0 for run in study_data.runs))
    parts.append(f"{phrasing.count(len(study_data.runs), 'finished run')}, {seconds} of training in total")
    return "; ".join(parts) + "."


def _table_note(rows: Sequence[Mapping[str, Any]], table: Table) -> str:
    if not any(row["low"] is not None for row in rows):
        return "Intervals need at least three seeds."
    note = "Intervals are 95 % t-intervals over seeds, differences are paired by seed."
    if table.gate.passed and table.gate.gain is not None:
        gain = phrasing.number(table.gate.gain)
        note += f" Percentages are of what attention brings over the better control, {gain}."
    return note


def _cards(study_data: StudyData) -> list[dict[str, Any]]:
    """Each mechanism once, with the rows that use it."""
    cards: dict[str, tuple[list[tuple[str, str]], list[str]]] = {}
    for row in study_data.rows:
        if card := row.get("card"):
            cards.setdefault(card["title"], (_facts(card), []))[1].append(row["label"])
    return [{"title": title, "facts": facts, "labels": ", ".join(of)} for title, (facts, of) in cards.items()]


def _facts(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    factors = [name for key, name in _FACTORS.items() if card.get(key)]
    facts = [("weights depend on", phrasing.join_with_and(factors) if factors else "nothing (equal for every input)")]
    for key, name in _CARD.items():
        if value := card.get(key):
            facts.append((name, value if isinstance(value, str) else ", ".join(sorted(value))))
    return facts


def _notes(study_data: StudyData) -> list[dict[str, str]]:
    """Notes of the study, then of the rows; a note of several rows is listed once."""
    labels_of: dict[str, list[str]] = {note: [] for note in study_data.snapshot.get("notes") or []}
    for row in study_data.rows:
        for note in row.get("notes") or []:
            labels_of.setdefault(note, []).append(row["label"])
    return [{"label": ", ".join(labels), "text": text} for text, labels in labels_of.items()]


def _runs(study_data: StudyData) -> list[dict[str, Any]]:
    metric = study_data.snapshot["metric"]
    return [
        {"label": study_data.rows[run.row]["label"], "seed": run.seed, "key": run.key,
         "status": run.outcome.get("status", ""), "value": run.metrics.get(metric),
         "seconds": seconds, "time": phrasing.duration(seconds)}
        for run in [*study_data.runs, *study_data.failed]
        for seconds in [run.outcome.get("seconds") if run.alone else None]
    ]  # fmt: skip


def _data(
    study_data: StudyData, rows: Sequence[Mapping[str, Any]], styles: Sequence[figures.RowStyle], costs: Sequence[str],
    boxes: Mapping[str, Any], overlays: Mapping[int, Any],
) -> Markup:  # fmt: skip
    """The data of the page's script as JSON, in which "<" is escaped."""
    measures = _measures(study_data)
    entries = []
    for index, row in enumerate(rows):
        means = {key: study_data.average(index, key) for key in measures}
        quality = {key: None if mean is None else {"mean": mean} for key, mean in means.items()}
        if row["mean"] is not None:
            quality[study_data.snapshot["metric"]] = {"mean": row["mean"], "low": row["low"], "high": row["high"]}
        entries.append({
            "label": row["label"], "short": row["label"] if len(row["label"]) <= 24 else row["label"][:23] + "…",
            "color": row["color"], "marker": styles[index].marker, "y": quality,
            "x": {axis: study_data.average(index, axis) for axis in costs},
        })  # fmt: skip

    def describe(keys: Sequence[str]) -> list[dict[str, str]]:
        quantities = [(key, phrasing.quantity(key)) for key in keys]
        return [{"key": key, "name": quantity.name, "better": quantity.better} for key, quantity in quantities]

    value = {"rows": entries, "axes": describe(costs), "measures": describe(measures), "curves": boxes,
             "maps": overlays}  # fmt: skip
    return Markup(json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"))
