"""Results on the move: export of a study's evidence, and import of runs from another machine. Needs no torch."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.core import StoreError
from regard.store.files import read_json, write_json
from regard.store.import_checks import check_name, check_outcome, check_snapshot, further_runs
from regard.store.layout import place_of
from regard.store.results import Results

from .table import Table, load_snapshot, right_bits, snapshot_path


def evidence(root: Path | str, name: str, scale: str) -> dict[str, Any]:
    """One value with the snapshot, all outcomes and the table; `import_runs` takes it in again."""
    snapshot = load_snapshot(root, name, scale)
    store = Results(root)
    found = [store.outcome(run["key"]) for run in snapshot["runs"]]
    table = Table.load(root, name, scale).to_json()
    return {"snapshot": snapshot, "outcomes": [outcome for outcome in found if outcome is not None], "table": table}


def import_runs(path: Path | str, store: Results, replace: bool = False) -> dict[str, int]:
    """Take in finished runs: an outcome file, a folder of them, another store, or evidence files.

    Runs that the store has already finished stay as they are unless `replace`. Returns the numbers of runs that are
    new and that were known, of snapshots, and of runs left out: those that a snapshot lists, but that cannot stand in
    the study that is here, since their task, recipe, mechanism or host is another one or the row has their seed.
    Everything is checked before anything is written.
    Raises: StoreError if there is nothing to take in, or a file is damaged or of another version.
    """
    outcomes, shots = _values(Path(path))
    if not outcomes and not shots:
        raise StoreError(f"{path} holds no outcome.json, snapshot or evidence file of regard; give a results folder")
    counts = {"new": 0, "known": 0, "snapshots": 0, "left out": 0}
    for shot in shots:
        _take_snapshot(shot, store, counts)
    for outcome in outcomes:
        _take_outcome(outcome, store, replace, counts)
    return counts


def csv_text(table: Table) -> str:
    """One line a finished run: row, seed and the metrics."""
    names = sorted({name for run in table.runs for name in run["outcome"].get("metrics") or {}})
    names.sort(key=lambda name: name != table.metric)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", "seed", *names])
    order = {line.label: place for place, line in enumerate(table.rows)}
    for run in sorted(table.runs, key=lambda run: (order[run["row"]], run["seed"])):
        metrics = run["outcome"].get("metrics") or {}
        writer.writerow([run["row"], run["seed"], *("" if metrics.get(n) is None else metrics[n] for n in names)])
    return out.getvalue()


def json_text(table: Table) -> str:
    """The table with its claims and gate."""
    return json.dumps(table.to_json(), indent=1, ensure_ascii=False) + "\n"


def markdown(table: Table) -> str:
    """The table, its claims and warnings in Markdown."""
    lines = [f"**{table.title}** ({table.caption})", "", table.gate.sentence, ""]
    head = ("row", "n", table.metric, "95 % interval", f"minus {table.baseline}", "95 % interval", "parameters", "MACs")
    lines += [f"| {' | '.join(_pipe(cell) for cell in head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(_pipe(cell) for cell in cells)} |" for cells in _cells(table)]
    lines += ["", *(f"- {claim.text}: {claim.verdict.sentence}" for claim in table.claims)]
    judged = sum(claim.verdict.p is not None for claim in table.claims)
    if judged:
        lines.append(f"- of {judged} judged claims, {table.expected_wrong:.2g} would be expected wrong by chance")
    lines += [f"- note: {text}" for text in (*table.warnings, *table.notes)]
    return "\n".join(lines) + "\n"


def latex(table: Table) -> str:
    """A tabular of the table."""
    head = ("row", "n", table.metric, "interval", f"minus {table.baseline}", "interval", "parameters", "MACs")
    lines = [f"% {table.title}; {table.caption}", r"\begin{tabular}{lrrrrrrr}", r"\hline"]
    lines += [" & ".join(map(_tex, head)) + r" \\", r"\hline"]
    lines += [" & ".join(map(_tex, cells)) + r" \\" for cells in _cells(table)]
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"


FORMATS = {"csv": csv_text, "json": json_text, "md": markdown, "tex": latex}


def _cells(table: Table) -> Iterator[tuple[str, ...]]:
    for line in table.rows:
        gap = line.difference
        label = f"{line.label} (control)" if line.control else line.label
        yield (
            label, str(line.n), _number(line.mean), _span(line.low, line.high),
            "" if gap is None else _number(gap.mean, "+"), "" if gap is None else _span(gap.low, gap.high, "+"),
            "" if line.parameters is None else f"{line.parameters:,}", "" if line.macs is None else f"{line.macs:,}",
        )  # fmt: skip


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.2f}"


def _span(low: float | None, high: float | None, sign: str = "") -> str:
    return "" if low is None or high is None else f"[{low:{sign}.2f}, {high:{sign}.2f}]"


def _pipe(text: str) -> str:
    return text.replace("|", "\\|")


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)


def _values(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(outcomes, snapshots) below a path, checked."""
    if not path.exists():
        raise StoreError(f"there is no {path}; give a file or folder with finished runs")
    outcomes, shots = list[dict[str, Any]](), list[dict[str, Any]]()
    for file in [path] if path.is_file() else sorted(path.rglob("*.json")):
        if path.is_dir() and (file.name == "run.json" or file.parent.name == "probes"):
            continue
        ended, listed = _parts(read_json(file))
        for shot in listed:
            check_snapshot(file, shot)
            check_name(file, shot)
        for outcome in ended:
            check_outcome(file, outcome)
            _check_bits(file, outcome)
        outcomes += ended
        shots += listed
    return outcomes, shots


def _check_bits(path: Path, outcome: Mapping[str, Any]) -> None:
    """The accuracy of a run is that of the images which it had right."""
    right, told = right_bits(outcome), (outcome.get("metrics") or {}).get("top1")
    if right is not None and told is not None and not abs(100 * float(right.mean()) - told) < 0.005:
        raise StoreError(
            f"{path}: run {outcome['key']} has top1 {told:g}, but by its bits {100 * right.mean():g} % of the images "
            "were right; the file is damaged or was changed"
        )


def _parts(value: Any) -> tuple[list[Any], list[Any]]:
    """(outcomes, snapshots) that a file holds."""
    if not isinstance(value, dict):
        return [], []
    if "status" in value and "key" in value:
        return [value], []
    if {"rows", "runs", "metric", "study", "version"} <= value.keys():
        return [], [value]
    if {"snapshot", "outcomes"} <= value.keys():
        outcomes = value["outcomes"]
        return outcomes if isinstance(outcomes, list) else [outcomes], [value["snapshot"]]
    return [], []


def _take_outcome(value: Mapping[str, Any], store: Results, replace: bool, counts: dict[str, int]) -> None:
    key = value["key"]
    known = store.outcome(key)
    if known is not None and known.get("status") == "done" and not replace:
        counts["known"] += 1
        return
    with store.lock(key):
        store.finish(key, dict(value))
    counts["new"] += 1


def _take_snapshot(value: dict[str, Any], store: Results, counts: dict[str, int]) -> None:
    """A snapshot that is not here is taken over; into one that is here, runs of the same rows are added."""
    name, place = value["study"], place_of(value)
    path = snapshot_path(store.root, name, place)
    counts["snapshots"] += 1
    if not path.exists():
        write_json(path, value)
        return
    mine = load_snapshot(store.root, name, place)
    further, keys = further_runs(mine, value), {run["key"] for run in mine["runs"]}
    counts["left out"] += sum(run not in further and run["key"] not in keys for run in value["runs"])
    if further:
        write_json(path, {**mine, "runs": [*mine["runs"], *further]})
