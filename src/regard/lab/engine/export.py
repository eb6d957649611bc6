"""Export of a study's table and evidence, and import of runs from another machine. Needs no torch."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.core import ConfigError, StoreError
from regard.files.atomic import read_bytes
from regard.files.records import is_record, parse_record, write_record
from regard.lab.results.housekeeping import remove_training
from regard.lab.results.import_checks import (
    check_listed,
    check_name,
    check_outcome,
    check_same_run,
    check_snapshot,
    further_runs,
)
from regard.lab.results.layout import setting_name
from regard.lab.results.results import Results
from regard.pages.sheets import markdown_cell, spreadsheet_cell

from .claims import stored_looks
from .table import Line, Table, listed_outcome, load_snapshot, snapshot_path, stored_snapshot
from .table import snapshots as stored_names

LONGEST = 400
"""Characters of an entry about the data that snapshots and evidence have; longer ones (the names of many classes, a
tokenizer) serve to build the model and stay in the store."""


def short_entries(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a record that have at most `LONGEST` characters as JSON."""
    return {name: value for name, value in record.items() if len(json.dumps(value)) <= LONGEST}


def evidence(root: Path | str, name: str, scale: str) -> dict[str, Any]:
    """A study's snapshot, all outcomes and the table as plain data, which `import_runs` can read."""
    snapshot = load_snapshot(root, name, scale)
    store = Results(root)
    stored = [outcome for run in snapshot["runs"] if (outcome := listed_outcome(store, run)) is not None]
    outcomes = [{**outcome, "data": short_entries(outcome.get("data") or {})} for outcome in stored]
    return {"snapshot": snapshot, "outcomes": outcomes, "table": Table.load(root, name, scale).to_json()}


def import_runs(path: Path | str, store: Results, replace: bool = False) -> dict[str, int]:
    """Import finished runs: an outcome file, a folder of them, another store, or evidence files.

    Runs that are finished in the store are not changed unless `replace`, which deletes the weights, maps and metrics by
    epoch of a run with other metrics. Returns the numbers of new runs, of known ones (finished in the store), of those
    of them that differ from the store's in their metrics, of snapshots, and of runs that are left out, because their
    task, recipe, mechanism or host differs from the store's study, or because the row already has their seed.
    Everything is checked before anything is written.
    Raises: StoreError if there is nothing to import, or a file is damaged or of another version.
    """
    outcomes, snapshots = _read_files(Path(path))
    if not outcomes and not snapshots:
        raise StoreError(f"{path} holds no outcome.json, snapshot or evidence file of regard; give a results folder")
    _check_seeds(outcomes, snapshots, store, f"nothing of {path} is taken: one of the two is damaged")
    counts = {"new": 0, "known": 0, "differ": 0, "snapshots": 0, "left out": 0}
    for snapshot in snapshots:
        _import_snapshot(snapshot, store, counts)
    for outcome in outcomes:
        _import_outcome(outcome, store, replace, counts)
    return counts


def csv_text(table: Table) -> str:
    """One line for each finished run: row, seed and the metrics."""
    names = sorted({name for run in table.runs for name in run["outcome"].get("metrics") or {}})
    names.sort(key=lambda name: name != table.metric)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", "seed", *map(spreadsheet_cell, names)])
    order = {line.label: index for index, line in enumerate(table.rows)}
    for run in sorted(table.runs, key=lambda run: (order[run["row"]], run["seed"])):
        metrics = run["outcome"].get("metrics") or {}
        writer.writerow([spreadsheet_cell(run["row"]), run["seed"], *map(metrics.get, names)])  # None is an empty cell
    return out.getvalue()


def json_text(table: Table) -> str:
    """The table with its claims and gate as JSON."""
    return json.dumps(table.to_json(), indent=1, ensure_ascii=False) + "\n"


def markdown(table: Table) -> str:
    """The table, its claims and warnings in Markdown."""
    lines = [f"**{markdown_cell(table.title)}** ({markdown_cell(table.caption)})", ""]
    lines += [markdown_cell(table.gate.sentence), ""]
    head = _head(table, "95 % interval")
    lines += [f"| {' | '.join(map(markdown_cell, head))} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(map(markdown_cell, cells))} |" for cells in _cells(table)]
    if table.gate.passed and table.gate.gain is not None:
        lines += ["", f"share: of what attention brings over the better control, {table.gate.gain:.2f}"]
    lines += ["", table.headline, "", *(f"- {markdown_cell(claim.sentence)}" for claim in table.claims)]
    lines += [f"- note: {markdown_cell(text)}" for text in (*table.warnings, *table.notes)]
    return "\n".join(lines) + "\n"


def latex(table: Table) -> str:
    """The table as a LaTeX tabular."""
    lines = [f"% {' '.join(_tex(f'{table.title}; {table.caption}').split())}", r"\begin{tabular}{lrrrrrrrr}", r"\hline"]
    lines += [" & ".join(map(_tex, _head(table, "interval"))) + r" \\", r"\hline"]
    lines += [" & ".join(map(_tex, cells)) + r" \\" for cells in _cells(table)]
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"


FORMATS = {"csv": csv_text, "json": json_text, "md": markdown, "tex": latex}


def _head(table: Table, interval: str) -> tuple[str, ...]:
    return "row", "n", table.metric, interval, f"minus {table.baseline}", interval, "share", "parameters", "MACs"


def _cells(table: Table) -> Iterator[tuple[str, ...]]:
    for line in table.rows:
        label = f"{line.label} (control)" if line.control else line.label
        yield (
            label, str(line.n), *statistics_cells(line, 2), "" if line.share is None else f"{100 * line.share:.0f} %",
            "" if line.parameters is None else f"{line.parameters:,}", "" if line.macs is None else f"{line.macs:,}",
        )  # fmt: skip


def statistics_cells(line: Line, digits: int) -> tuple[str, str, str, str]:
    """Mean and interval of a row, and of its difference to the row that it is compared with."""
    own = number_text(line.mean, digits), _span(line.low, line.high, digits)
    if (difference := line.difference) is None:
        return *own, "", ""
    against = line.against and f" (minus {line.against})"
    change = number_text(difference.mean, digits, "+") + against
    return *own, change, _span(difference.low, difference.high, digits, "+")


def number_text(value: float | None, digits: int, sign: str = "") -> str:
    """A number with so many digits after the point; "" for None."""
    return "" if value is None else f"{value:{sign}.{digits}f}"


def _span(low: float | None, high: float | None, digits: int, sign: str = "") -> str:
    return "" if low is None or high is None else f"[{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)


def _read_files(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(outcomes, snapshots) in a file or folder, checked."""
    if not path.exists():
        raise StoreError(f"there is no {path}; give a file or folder with finished runs")
    outcomes, snapshots = list[dict[str, Any]](), list[dict[str, Any]]()
    for file in [path] if path.is_file() else sorted(path.rglob("*.json")):
        data = read_bytes(file)
        if path.is_dir() and (file.name == "run.json" or file.parent.name == "probes" or not is_record(file, data)):
            continue
        file_outcomes, file_snapshots = _contents(parse_record(file, data))
        for snapshot in file_snapshots:
            check_snapshot(file, snapshot)
            check_name(file, snapshot)
            try:
                stored_looks(snapshot)
            except ConfigError as error:
                raise StoreError(f"{file}: of its interim analyses, {error}; the file is damaged") from error
        for outcome in file_outcomes:
            check_outcome(file, outcome)
            if file.name == "outcome.json":
                check_same_run(file, outcome)
        outcomes += file_outcomes
        snapshots += file_snapshots
    return outcomes, snapshots


def _check_seeds(
    outcomes: Sequence[Mapping[str, Any]], snapshots: Sequence[Mapping[str, Any]], store: Results, remedy: str
) -> None:
    """Outcomes and snapshots, given ones and those of the store, have the same seed of each run. Raises: StoreError."""
    runs = [run for snapshot in snapshots for run in snapshot["runs"]]
    found = {run["key"]: store.outcome(run["key"]) for run in runs} | {each["key"]: each for each in outcomes}
    stored = [load_snapshot(store.root, *name) for name in stored_names(store.root)]
    for run in (*runs, *(run for snapshot in stored for run in snapshot["runs"])):
        if (outcome := found.get(run["key"])) is not None:
            check_listed(outcome, run, remedy)


def _contents(value: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """(outcomes, snapshots) in the content of a file."""
    if "status" in value and "key" in value:
        return [value], []
    if {"rows", "runs", "metric", "study"} <= value.keys():
        return [], [value]
    if {"snapshot", "outcomes"} <= value.keys():
        outcomes = value["outcomes"]
        return outcomes if isinstance(outcomes, list) else [outcomes], [value["snapshot"]]
    return [], []


def _import_outcome(value: Mapping[str, Any], store: Results, replace: bool, counts: dict[str, int]) -> None:
    key = value["key"]
    present = store.outcome(key)
    if present is not None and present.get("status") == "done" and not replace:
        counts["known"] += 1
        counts["differ"] += present.get("metrics") != value.get("metrics")
        return
    with store.lock(key, wait=10.0) as folder:
        if present is None or present.get("metrics") != value.get("metrics"):
            remove_training(folder)  # weights that were trained here are not those of this outcome
        store.finish(key, dict(value))
    counts["new"] += 1


def _import_snapshot(value: dict[str, Any], store: Results, counts: dict[str, int]) -> None:
    """Write a snapshot that the store does not have; else add its runs of equal rows to the store's snapshot."""
    name, setting = value["study"], setting_name(value["scale"], value.get("variant"))
    path, stored = snapshot_path(store.root, name, setting), stored_snapshot(store.root, name, setting)
    counts["snapshots"] += 1
    if stored is None:
        write_record(path, value)
        return
    further, keys = further_runs(stored, value), {run["key"] for run in stored["runs"]}
    counts["left out"] += sum(run not in further and run["key"] not in keys for run in value["runs"])
    if further:
        write_record(path, {**stored, "runs": [*stored["runs"], *further]})
