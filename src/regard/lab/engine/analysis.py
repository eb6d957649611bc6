"""Analysis: a table or figure without training, computed from formulas or from the finished runs of a study."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.core import ConfigError, StoreError
from regard.core.validation import check_fields, field_rule, short_repr
from regard.files.records import read_record, write_record
from regard.lab.results.layout import setting_names
from regard.lab.results.results import Results
from regard.pages.sheets import Cell, Chart, Picture, Sheet, markdown_cell, spreadsheet_cell

from .table import load_snapshot

if TYPE_CHECKING:
    from regard.lab.train.run import Run


@dataclass(frozen=True)
class Source:
    """The store that an analysis reads. scale: that of the study. read: the keys of the runs that were read."""

    store: Results
    scale: str
    read: dict[str, None] = field(default_factory=dict)

    def run(self, key: str) -> "Run":
        """A run of the store; the result of the analysis lists it. Raises: StoreError."""
        from regard.lab.train.run import read_run

        self.read[key] = None
        return read_run(self.store, key)

    def outcome(self, key: str) -> dict[str, Any]:
        """The outcome of a run, {} if it is not finished; the result of the analysis lists it. Raises: StoreError."""
        self.read[key] = None
        return self.store.outcome(key) or {}


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A table or figure without training.

    compute: returns its sheets and pictures. of: the study whose finished runs it reads, "" if it reads none.
    """

    name: str
    title: str
    source: str
    question: str
    compute: Callable[[Source], Sequence[Sheet | Picture]]
    of: str = ""
    notes: tuple[str, ...] = ()


def analysis_path(results: Path | str, name: str, scale: str = "") -> Path:
    """The path of an analysis's result. scale: of the study that it reads."""
    return Path(results) / "analyses" / (f"{name}-{scale}.json" if scale else f"{name}.json")


def run_analysis(analysis: Analysis, store: Results, scale: str = "desk") -> dict[str, Any]:
    """Compute the result of an analysis, store it, and return it as plain data.

    Raises: StoreError if the runs that it reads are missing; what `compute` raises.
    """
    import torch

    from regard.lab.train.environment import code_version, environment

    source = Source(store, scale)
    parts = analysis.compute(source)
    value = {
        "analysis": analysis.name,
        **{name: getattr(analysis, name) for name in ("title", "source", "question", "of")},
        "scale": scale if analysis.of else "",
        "notes": list(analysis.notes),
        "sheets": [asdict(part) for part in parts if isinstance(part, Sheet)],
        "pictures": [asdict(part) for part in parts if isinstance(part, Picture)],
        "runs": [_run_record(key, store.outcome(key) or {}) for key in source.read],
        "environment": environment(torch.device("cpu"), ""),
        "code": code_version(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_record(analysis_path(store.root, analysis.name, scale if analysis.of else ""), value)
    return value


def _run_record(key: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """What a result records of a run that was read: its key, study, row, seed, code version and data."""
    fields = {name: outcome.get(name) for name in ("study", "row", "seed", "code")}
    data = outcome.get("data") or {}
    return {"key": key, **fields, "data": data.get("name"), "checksum": data.get("checksum")}


def load_analysis(path: Path | str) -> dict[str, Any]:
    """A stored result. Raises: StoreError if it is missing (with a list of scales), damaged or of another version."""
    path = Path(path)
    if not path.exists():
        results, (name, _, scale) = path.parents[1], path.stem.partition("-")
        scales = ", ".join(f"--scale {setting}" for setting in setting_names(results, name, "analyses"))
        hint = f"there are results with {scales}" if scales else "`regard study run` computes it"
        raise StoreError(f"no result of {name}{f' at {scale} scale' if scale else ''} in {results}; {hint}")
    return _checked(path, read_record(path))


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("analysis", "title", "source", "question", "of", "scale", "code", "finished"), str),
    "notes": Sequence[str], "environment": Mapping[str, Any], "runs": Sequence[Mapping[str, Cell]],
    "sheets": Sequence[Mapping[str, Any]], "pictures": Sequence[Mapping[str, Any]],
}  # fmt: skip
"""The entries of a result; older ones have no runs."""


def _checked(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """A result as `run_analysis` returns it. Raises: StoreError with the file's name if it is another one."""
    value = {"runs": [], **value}
    try:
        for name, kind in _KINDS.items():
            rule = field_rule(kind)
            if rule is not None and not rule.holds(value.get(name)):
                raise ConfigError(f"{name} is {short_repr(value.get(name))}; {rule.expected} is expected")
        pictures = [Picture(**entries) for entries in value["pictures"]]
        for picture in pictures:
            check_fields(picture)
        sheets = [_sheet(_tuples(entries)) for entries in value["sheets"]]
    except (ConfigError, TypeError) as error:
        raise StoreError(f"{path} is damaged or of another version ({error}); delete it and run it again") from error
    runs = [_run_record("", {}) | run for run in value["runs"]]
    shown = {"sheets": [asdict(sheet) for sheet in sheets], "pictures": [asdict(picture) for picture in pictures]}
    return {**value, **shown, "runs": runs}


def _sheet(entries: Mapping[str, Any]) -> Sheet:
    """Raises: ConfigError, TypeError."""
    chart = entries.get("chart")
    sheet = Sheet(**{**entries, "chart": None if chart is None else Chart(**chart)})
    check_fields(replace(sheet, rows=()))
    if sheet.chart is not None:
        check_fields(sheet.chart)
    wrong = [cell for row in sheet.rows for cell in row if not isinstance(cell, Cell)]
    if wrong:
        raise ConfigError(f"{sheet.title}: a cell is {short_repr(wrong[0])}; a text or number is expected")
    return sheet


def _tuples(value: Any) -> Any:
    """A value of JSON with tuples for its lists."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def analyses(results: Path | str) -> list[Path]:
    """The files of a store's analysis results, by name."""
    return sorted((Path(results) / "analyses").glob("*.json"))


def markdown(value: Mapping[str, Any]) -> str:
    """Title, question, sheets and notes as Markdown; value: as `run_analysis` returns it."""
    title, question, source = (markdown_cell(value[name]) for name in ("title", "question", "source"))
    lines = [f"# {title}", "", f"{question} (Source: {source}.)"]
    for sheet in value["sheets"]:
        note = markdown_cell(sheet["note"])
        lines += ["", f"## {markdown_cell(sheet['title'])}", ""] + ([note, ""] if note else [])
        lines += [_line(sheet["columns"]), _line(["---"] * len(sheet["columns"]))]
        lines += [_line(row) for row in sheet["rows"]]
    lines += ["", *(f"- {markdown_cell(note)}" for note in value["notes"])] if value["notes"] else []
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(markdown_cell(_text(cell)) for cell in cells) + " |"


def _text(cell: Cell) -> str:
    """A cell with four significant figures; CSV and JSON have the exact numbers."""
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) and abs(cell) < 1e4 else str(cell)


def csv_text(value: Mapping[str, Any]) -> str:
    """The sheets as CSV, one after the other, with the sheet's title in the first column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for sheet in value["sheets"]:
        writer.writerow(["sheet", *sheet["columns"]])
        writer.writerows([*map(spreadsheet_cell, [sheet["title"], *row])] for row in sheet["rows"])
    return out.getvalue()


def json_text(value: Mapping[str, Any]) -> str:
    """The result as JSON."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


FORMATS = {"csv": csv_text, "json": json_text, "md": markdown}


def trained_runs(source: Source, study: str, rows: str = "*") -> "list[tuple[str, int, str]]":
    """(row, seed, key) of a study's finished runs in the store, in the order of the snapshot. rows: a glob of labels.

    Raises: StoreError if there are none.
    """
    snapshot = load_snapshot(source.store.root, study, source.scale)
    runs = [
        (run["row"], int(run["seed"]), run["key"])
        for run in snapshot["runs"]
        if fnmatchcase(run["row"], rows) and source.store.status(run["key"]) == "done"
    ]
    if not runs:
        raise StoreError(
            f"no finished run of {study} ({source.scale} scale) in {source.store.root}; "
            f"regard study run {study} --scale {source.scale}"
        )
    return runs
