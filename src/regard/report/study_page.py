"""The page of a study: one HTML file that works offline, on paper, on a phone, and without JavaScript as far as it can.

Everything on it comes from the store; the template escapes whatever is text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import regard
from regard.core import ConfigError, StoreError, nearest
from regard.lab.table import Table, snapshots
from regard.store.files import write_atomically
from regard.studies.errata import errata_of

from . import figures, phrasing
from .page_data import AXES, Maps, Material, attention, columns, environment, gather, learning
from .results_table import further_cells, kind_of, row_entries
from .theme import palette

_CARD = (
    ("source", "source"),
    ("formula", "formula"),
    ("complexity", "complexity"),
    ("dynamic", "dynamic weights"),
    ("scaling", "scaling"),
    ("expert_type", "expert type"),
    ("expert_count", "number of experts"),
    ("construction", "construction"),
    ("topology", "topology"),
    ("prefix", "class and register tokens"),
)
_TIMED = ("images_per_second", "seconds", "peak_memory_bytes")
_FACTORS = {"query_content": "query content", "key_content": "key content", "relative_position": "relative position"}


def write_report(results: Path | str, out: Path | str, name: str | None = None) -> list[Path]:
    """Write `out/NAME-SCALE.html` for every study in the store, or for all scales of one; returns the files.

    Raises: ConfigError if no study of that name has run; StoreError if the store is empty or cannot be read, or the
    page cannot be written.
    """
    found = snapshots(results)
    if not found:
        raise StoreError(f"no study in {results} (expected {results}/studies/NAME-SCALE.json); regard study run NAME")
    chosen = [(study, scale) for study, scale in found if name in (None, study, f"{study}-{scale}")]
    if not chosen:
        raise ConfigError(f"no results of {name!r} in {results}; {nearest(str(name), {study for study, _ in found})}")
    pages = []
    for study, scale in chosen:
        path = Path(out) / f"{study}-{scale}.html"
        write_atomically(path, render(results, study, scale))
        pages.append(path)
    return pages


def render(results: Path | str, name: str, scale: str) -> str:
    """The page of one study at one scale as HTML. The same results give the same bytes.

    Raises: StoreError if the study's snapshot or an outcome cannot be read.
    """
    material = gather(Path(results), name, scale)
    table = Table.load(Path(results), name, scale)
    tabled = {run["key"] for run in table.runs}  # devices are never mixed: some runs may not be in the table
    material = replace(material, runs=[run for run in material.runs if run.key in tabled])
    view = _view(material, table, str(material.snapshot.get("scale") or scale))
    folder = jinja2.PackageLoader("regard.report", "templates")
    engine = jinja2.Environment(loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    engine.filters["num"] = phrasing.number
    engine.filters["signed"] = phrasing.signed
    source = folder.get_source
    texts = {
        "css": Markup(source(engine, "page.css")[0]),
        "script": Markup(source(engine, "common.js")[0] + source(engine, "page.js")[0]),
    }
    return engine.get_template("page.html").render(**view, **texts, version=regard.__version__)


def _view(material: Material, table: Table, scale: str) -> dict[str, Any]:
    """All that the template prints."""
    snapshot = material.snapshot
    kinds = [kind_of(row, snapshot["baseline"]) for row in material.rows]
    styles = figures.looks(kinds)
    measure = phrasing.quantity(snapshot["metric"])
    rows = row_entries(material, table, kinds, styles)
    costs = [axis for axis in AXES if sum(material.average(row, axis) is not None for row in range(len(rows))) > 1]
    drawn, boxes = _figures(material, styles)
    cells, headings = further_cells(material, costs)
    for row, extra in zip(rows, cells, strict=True):
        row["cells"] = extra
    facts = environment(material)
    uneven = _uneven(facts)
    axes = sorted(costs, key=lambda axis: axis in _TIMED) if uneven else costs
    maps = attention(material)
    photos, pictures, overlays = _maps(maps, [row["label"] for row in rows])
    claims = _claims(table)
    gate = _gate(table)
    return {
        "study": {key: snapshot.get(key) or "" for key in ("name", "title", "source", "question", "recipe")}
        | {"name": snapshot.get("study") or snapshot.get("name") or "", "title": snapshot.get("title") or "Study"},
        "scale": scale,
        "baseline": snapshot["baseline"],
        "measure": measure,
        "better_first": "ascending" if measure.better == "lower" else "descending",
        "palette": palette(),
        "gate": gate,
        "answer": phrasing.answer([claim["verdict"].lower() for claim in claims], gate["state"], scale),
        "ranking": _ranking(rows, measure),
        "caption": _caption(material, scale),
        "warnings": _warnings(material, table),
        "table_note": _table_note(rows),
        "columns": headings,
        "rows": rows,
        "claims": claims,
        "claims_note": _claims_note(table),
        "axes": [{"key": axis, "name": phrasing.quantity(axis).name} for axis in axes],
        "axes_note": uneven,
        "measures": [{"key": key, "name": phrasing.quantity(key).name} for key in _measures(material)],
        "tradeoff": Markup(_tradeoff(material, rows, styles, axes[0])) if axes else "",
        "figures": drawn,
        "photos": photos,
        "maps": pictures,
        "map_layers": _layer_names(overlays),
        "map_heads": _head_names(overlays),
        "map_shape": f"{maps[0].grid[1]}/{maps[0].grid[0]}" if maps else "1",
        "map_pixels": "pixelated" if maps and len(maps[0].image) < 3000 else "auto",
        "maps_note": _maps_note(maps, material),
        "cards": _cards(material),
        "errata": errata_of(snapshot.get("source") or ""),
        "notes": _notes(material),
        "environment": facts,
        "runs": _runs(material),
        "data": _data(material, rows, styles, costs, boxes, overlays),
    }


def _figures(material: Material, styles: Sequence[figures.Look]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Learning curves of every measured quantity, for wide and narrow screens, and what the pointer reads from them."""
    learned, boxes = [], {}
    for metric in columns(material):
        lines = learning(material, metric)
        if not lines:
            continue
        known = phrasing.quantity(metric)
        drawn = {}
        for size in ("wide", "narrow"):
            svg, box = figures.curves(lines, styles, known.name, size == "wide")
            drawn[size] = Markup(svg)
            boxes[f"{metric}-{size}"] = {"box": box, "lines": [
                {"row": one.row, "epochs": one.epochs, "mean": [float(f"{v:.5g}") for v in one.mean]} for one in lines
            ]}  # fmt: skip
        learned.append(
            {"metric": metric, "name": known.name, "better": known.better, "table": _curve_table(lines), **drawn}
        )
    return learned, boxes


def _curve_table(lines: Sequence[figures.Curve]) -> dict[str, Any]:
    """At most eight epochs, evenly spread, the last one among them."""
    epochs = max((line.epochs for line in lines), key=len)
    shown = sorted({epochs[round(i * (len(epochs) - 1) / 7)] for i in range(8)})
    entries = []
    for line in lines:
        at = dict(zip(line.epochs, line.mean, strict=True))
        entries.append({"label": line.label, "values": [at.get(epoch) for epoch in shown]})
    return {"epochs": [f"{epoch:g}" for epoch in shown], "lines": entries}


def _uneven(facts: Sequence[tuple[str, list[str]]]) -> str:
    """A warning where the runs were not computed in one way, so that what was measured cannot be compared."""
    ways = ("processor", "device", "devices", "threads", "compiled kernels", "torch.compile", "torch")
    several = [name for name, values in facts if name in ways and len(values) > 1]
    if not several:
        return ""
    return f"The runs differ in {phrasing.listed(several)}: compare rows by MACs and parameters, not by time or memory."


def _measures(material: Material) -> list[str]:
    """The metrics that runs ended with, the study's own first."""
    names = {material.snapshot["metric"]: None}
    for run in material.runs:
        names.update(dict.fromkeys(run.metrics))
    return list(names)


def _tradeoff(material: Material, rows: Sequence[Mapping[str, Any]], styles: Sequence[figures.Look], axis: str) -> str:
    points = [
        {"row": index, "label": row["label"], "x": material.average(index, axis), "y": row["mean"],
         "low": row["low"], "high": row["high"]}
        for index, row in enumerate(rows)
    ]  # fmt: skip
    drawn = [point for point in points if point["x"] is not None and point["y"] is not None]
    known, measure = phrasing.quantity(axis), phrasing.quantity(material.snapshot["metric"])
    return figures.tradeoff(drawn, styles, known.name, measure.name, known.better == "higher") if drawn else ""


def _maps(maps: Sequence[Maps], labels: Sequence[str]) -> tuple[list[str], list[dict[str, Any]], dict[int, list[Any]]]:
    """The pictures, each once; a figure for each row that looks at the last layer; all overlays by row."""
    photos = list(dict.fromkeys(one.image for one in maps))
    overlays: dict[int, list[Any]] = {}
    entries = []
    for one in maps:
        height, width = one.grid
        drawn = [
            [figures.heat(each, height, width) for each in (layer["mean"], *layer["heads"])] for layer in one.layers
        ]
        if drawn:
            overlays[one.row] = drawn
        place = ""
        if one.query is not None:
            y, x = one.query
            place = (f"left:{100 * x / width:.3f}%;top:{100 * y / height:.3f}%;"
                     f"width:{100 / width:.3f}%;height:{100 / height:.3f}%")  # fmt: skip
        entries.append({"row": one.row, "label": labels[one.row], "photo": photos.index(one.image), "query": place,
                        "src": drawn[-1][0] if drawn else ""})  # fmt: skip
    return photos, entries, overlays


def _layer_names(overlays: Mapping[int, list[Any]]) -> list[dict[str, Any]]:
    """Layers by their share of the depth, so that rows with another number of layers can be compared."""
    depth = max(map(len, overlays.values()), default=1)
    return [{"share": f"{i / max(depth - 1, 1):.4f}", "name": f"{i + 1} of {depth}"} for i in range(depth)]


def _head_names(overlays: Mapping[int, list[Any]]) -> list[str]:
    heads = max((len(layer) - 1 for layers in overlays.values() for layer in layers), default=0)
    return ["mean of all", *(f"head {i + 1}" for i in range(heads))]


def _maps_note(maps: Sequence[Maps], material: Material) -> str:
    if not maps:
        return ""
    query = "the framed cell" if maps[0].query is not None else "all cells on average"
    shown = {one.row for one in maps}
    others = [row["label"] for index, row in enumerate(material.rows) if index not in shown and material.of(index)]
    without = f" Without maps, for lack of weights between tokens: {phrasing.listed(others)}." if others else ""
    credits = list(dict.fromkeys(one.credit for one in maps if one.credit))
    return (f"Attention from {query} over the cells of the picture: the stronger the amber, the larger the weight. "
            "Each map is scaled to its own largest weight. First seed of each row, trained weights."
            + without + "".join(f" Picture: {credit}." for credit in credits))  # fmt: skip


def _claims(table: Table) -> list[dict[str, str]]:
    made = []
    for judged in table.claims:
        verdict = judged.verdict
        numbers = phrasing.typeset(verdict.sentence.removeprefix(f"{verdict.word}: "))
        made.append({"verdict": verdict.word.capitalize(), "css": verdict.word.replace(" ", ""),
                     "text": judged.text, "detail": numbers})  # fmt: skip
    return made


def _claims_note(table: Table) -> str:
    judged = sum(claim.verdict.word in ("supported", "contradicted", "undecided") for claim in table.claims)
    if not judged:
        return "Verdicts are taken from the 95 % interval of the difference, paired by seed; none can be taken here."
    return (f"Taken from the 95 % interval of the difference, paired by seed. "
            f"Of {phrasing.count(judged, 'judged claim')}, "
            f"{table.expected_wrong:.2g} would be expected to come out wrong by chance.")  # fmt: skip


def _gate(table: Table) -> dict[str, str]:
    """The first line of the page: whether the baseline beats both controls, and what follows from it."""
    state = {True: "passed", False: "not passed", None: "undecided"}[table.gate.passed]
    sentence = phrasing.typeset(table.gate.sentence)
    if table.gate.passed:
        sentence = f"Mixing tokens pays at this scale. {sentence}"
    elif table.gate.passed is False:
        sentence = f"Mixing does not pay at this scale, and nothing is judged. {sentence}"
    elif table.gate.passed is None and table.scale != "smoke" and any(line.control for line in table.rows):
        sentence = f"It is not decided yet whether mixing pays at this scale, and nothing is judged. {sentence}"
    return {"state": state, "css": state.replace(" ", ""), "sentence": sentence}


def _ranking(rows: Sequence[Mapping[str, Any]], measure: phrasing.Quantity) -> str:
    """Best and worst row without the controls, in one sentence."""
    shown = [row for row in rows if row["kind"] != "control" and row["mean"] is not None]
    if len(shown) < 2:
        return ""
    ordered = sorted(shown, key=lambda row: row["mean"], reverse=measure.better == "higher")
    best, last = ordered[0], ordered[-1]
    return (f"On average {best['label']} is best ({phrasing.number(best['mean'])}) "
            f"and {last['label']} last ({phrasing.number(last['mean'])}).")  # fmt: skip


def _caption(material: Material, scale: str) -> str:
    """Scale, data and sizes: what every table has to say about itself."""
    data = next((run.outcome["data"] for run in material.runs if run.outcome.get("data")), None)
    data = data or material.snapshot.get("data") or {}
    variant = material.snapshot.get("variant")
    parts = [f"{scale.capitalize()} scale" + (f", changed: {variant}" if variant else "")]
    if data.get("name"):
        sizes = [f"{data[part]:,} {word} images" for part, word in (("train", "training"), ("test", "test"))
                 if isinstance(data.get(part), int)]  # fmt: skip
        parts.append(f"{data['name']}" + (f" ({', '.join(sizes)})" if sizes else ""))
    done = len(material.runs)
    seconds = sum(run.outcome.get("seconds") or 0 for run in material.runs)
    parts.append(f"{phrasing.count(done, 'finished run')}, {phrasing.duration(seconds)} of training in all")
    return "; ".join(parts) + "."


def _warnings(material: Material, table: Table) -> list[str]:
    """What a reader must know before believing the table, and why runs failed."""
    said = [f"{warning[0].upper()}{warning[1:]}." for warning in table.warnings]
    for run in material.failed:
        label = material.rows[run.row]["label"]
        said.append(f"{label}, seed {run.seed} failed: {run.outcome.get('error') or 'no reason was recorded'}.")
    return said


def _table_note(rows: Sequence[Mapping[str, Any]]) -> str:
    if any(row["low"] is not None for row in rows):
        return "Intervals are 95 % t-intervals over seeds, differences are paired by seed."
    return "Fewer than three seeds: no intervals."


def _cards(material: Material) -> list[dict[str, Any]]:
    """Each mechanism once, with the rows that use it."""
    found: dict[str, dict[str, Any]] = {}
    for row in material.rows:
        card = row.get("card")
        if card:
            entry = found.setdefault(card["title"], {"title": card["title"], "facts": _facts(card), "rows": []})
            entry["rows"].append(row["label"])
    return [{**entry, "labels": ", ".join(entry["rows"])} for entry in found.values()]


def _facts(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    used = [name for key, name in _FACTORS.items() if card.get(key)]
    facts = [("weights depend on", phrasing.listed(used) if used else "nothing: they are the same for every input")]
    for key, name in _CARD:
        value = card.get(key)
        if value:
            facts.append((name, value if isinstance(value, str) else ", ".join(sorted(value))))
    return facts


def _notes(material: Material) -> list[dict[str, str]]:
    """Notes of the study, then of the rows; a note that several rows share stands once."""
    found: dict[str, list[str]] = {note: [] for note in material.snapshot.get("notes") or []}
    for row in material.rows:
        for note in row.get("notes") or []:
            found.setdefault(note, []).append(row["label"])
    return [{"label": ", ".join(labels), "text": text} for text, labels in found.items()]


def _runs(material: Material) -> list[dict[str, Any]]:
    metric = material.snapshot["metric"]
    return [
        {"label": material.rows[run.row]["label"], "seed": run.seed, "key": run.key,
         "status": run.outcome.get("status", ""), "value": run.metrics.get(metric),
         "seconds": run.outcome.get("seconds"), "time": phrasing.duration(run.outcome.get("seconds"))}
        for run in [*material.runs, *material.failed]
    ]  # fmt: skip


def _data(
    material: Material,
    rows: Sequence[Mapping[str, Any]],
    styles: Sequence[figures.Look],
    costs: Sequence[str],
    boxes: Mapping[str, Any],
    overlays: Mapping[int, Any],
) -> Markup:
    """What the page's script reads, as JSON that cannot end its element."""
    measures = _measures(material)
    entries = []
    for index, row in enumerate(rows):
        quality: dict[str, Any] = {}
        for key in measures:
            mean = material.average(index, key)
            quality[key] = None if mean is None else {"mean": mean}
        if row["mean"] is not None:
            quality[material.snapshot["metric"]] = {"mean": row["mean"], "low": row["low"], "high": row["high"]}
        entries.append({
            "label": row["label"], "short": row["label"] if len(row["label"]) <= 24 else row["label"][:23] + "…",
            "color": row["color"], "marker": styles[index].marker, "y": quality,
            "x": {axis: material.average(index, axis) for axis in costs},
        })  # fmt: skip
    axes = [{"key": key, "name": phrasing.quantity(key).name, "better": phrasing.quantity(key).better} for key in costs]
    shown = [
        {"key": key, "name": phrasing.quantity(key).name, "better": phrasing.quantity(key).better} for key in measures
    ]
    value = {"rows": entries, "axes": axes, "measures": shown, "curves": boxes, "maps": overlays}
    return Markup(json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"))
