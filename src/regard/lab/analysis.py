"""Analysis: a table or figure that trains nothing. It is computed from costs, or read from the runs of a study."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.core import ConfigError, StoreError, nearest
from regard.store.files import read_json, write_json
from regard.store.layout import places
from regard.store.results import Results, check_version

if TYPE_CHECKING:
    from regard.train.run import Run

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """How the page draws a sheet. x, y: columns; series: the column whose values are the lines, "" = one line.

    kind: "line", "points" (with a regression line and r), "bars", or "heat" (x and y are the axes, value the colour).
    logs: which axes are logarithmic, of "xy". mark: (x, y) of a point to mark in a heat map. outlines: words of its
    legend and the (x, y) of the cells that a line goes round, orange for the first and blue for the second.
    """

    x: str
    y: str
    series: str = ""
    kind: Literal["line", "points", "bars", "heat"] = "line"
    value: str = ""
    logs: str = ""
    mark: tuple[float | int, float | int] | None = None
    outlines: Mapping[str, Sequence[tuple[Cell, Cell]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table. published: names of columns that hold the paper's own numbers; verdict: the column that compares."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    chart: Chart | None = None
    published: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ConfigError(f"{self.title}: a row of {len(row)} cells under {len(self.columns)} columns: {row}")
        wanted = () if self.chart is None else (self.chart.x, self.chart.y, self.chart.series, self.chart.value)
        for name in (*wanted, *self.published):
            if name and name not in self.columns:
                raise ConfigError(f"{self.title}: no column {name!r}; {nearest(name, self.columns)}")

    def column(self, name: str) -> list[Cell]:
        """The values of one column."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing. image: base64 of a PNG; layers: overlays (base64 PNGs with alpha) that are shown on top, by name."""

    title: str
    image: str
    note: str = ""
    layers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Source:
    """What an analysis may read. scale: of the study that it draws on. read: the keys of the runs that were read."""

    store: Results
    scale: str
    read: dict[str, None] = field(default_factory=dict)

    def run(self, key: str) -> "Run":
        """A run of the store, which the result then names. Raises: StoreError."""
        from regard.train.run import read_run

        self.read[key] = None
        return read_run(self.store, key)

    def outcome(self, key: str) -> dict[str, Any]:
        """What a run of the store gave, {} before its end; the result then names the run. Raises: StoreError."""
        self.read[key] = None
        return self.store.outcome(key) or {}


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A table or figure that trains nothing.

    compute: makes the sheets and pictures. of: the study whose finished runs it reads, "" for none.
    """

    name: str
    title: str
    source: str
    question: str
    compute: Callable[[Source], Sequence[Sheet | Picture]]
    of: str = ""
    notes: tuple[str, ...] = ()


def analysis_path(results: Path | str, name: str, scale: str = "") -> Path:
    """Where the result of an analysis lies. scale: of the study that it reads."""
    return Path(results) / "analyses" / (f"{name}-{scale}.json" if scale else f"{name}.json")


def carry_out(analysis: Analysis, store: Results, scale: str = "desk") -> dict[str, Any]:
    """Compute, keep and return the result as plain data.

    Raises: StoreError if the runs that it reads are missing; whatever the computation raises.
    """
    from regard.train.environment import code_version, environment

    source = Source(store, scale)
    parts = analysis.compute(source)
    value = {
        "version": 1,
        "analysis": analysis.name,
        "title": analysis.title,
        "source": analysis.source,
        "question": analysis.question,
        "of": analysis.of,
        "scale": scale if analysis.of else "",
        "notes": list(analysis.notes),
        "sheets": [asdict(part) for part in parts if isinstance(part, Sheet)],
        "pictures": [asdict(part) for part in parts if isinstance(part, Picture)],
        "runs": [_named(key, store.outcome(key) or {}) for key in source.read],
        "environment": environment(_device(), ""),
        "code": code_version(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(analysis_path(store.root, analysis.name, scale if analysis.of else ""), value)
    return value


def _named(key: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """Which run it was, on which data."""
    known = {name: outcome.get(name) for name in ("study", "row", "seed", "code")}
    data = outcome.get("data") or {}
    return {"key": key, **known, "data": data.get("name"), "checksum": data.get("checksum")}


def _device() -> Any:
    import torch

    return torch.device("cpu")


def load_analysis(path: Path | str) -> dict[str, Any]:
    """A kept result. Raises: StoreError if it is missing (with what there is), damaged or of another version."""
    path = Path(path)
    if not path.exists():
        results, (name, _, scale) = path.parents[1], path.stem.partition("-")
        kept = ", ".join(f"--scale {place}" for place in places(results, name, "analyses"))
        hint = f"kept are {kept}" if kept else "`regard study run` computes it"
        raise StoreError(f"no result of {name}{f' at {scale} scale' if scale else ''} in {results}; {hint}")
    value: dict[str, Any] = read_json(path)
    check_version(path, value)
    return value


def analyses(results: Path | str) -> list[Path]:
    """The kept results of a store, by name."""
    return sorted((Path(results) / "analyses").glob("*.json"))


def markdown(value: Mapping[str, Any]) -> str:
    """Title, question, sheets and notes as Markdown; value as `carry_out` gives it."""
    lines = [f"# {value['title']}", "", f"{value['question']} (Source: {value['source']}.)"]
    for sheet in value["sheets"]:
        lines += ["", f"## {sheet['title']}", ""] + ([sheet["note"], ""] if sheet["note"] else [])
        lines += [_line(sheet["columns"]), _line(["---"] * len(sheet["columns"]))]
        lines += [_line(row) for row in sheet["rows"]]
    lines += ["", *(f"- {note}" for note in value["notes"])] if value["notes"] else []
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(_said(cell).replace("|", "\\|") for cell in cells) + " |"


def _said(cell: Cell) -> str:
    """A cell for a reader; exact numbers are in the CSV and the JSON."""
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) and abs(cell) < 1e4 else str(cell)


def separated(value: Mapping[str, Any]) -> str:
    """The sheets as CSV, one below the other, with the sheet's title in the first column."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for sheet in value["sheets"]:
        writer.writerow(["sheet", *sheet["columns"]])
        writer.writerows([sheet["title"], *row] for row in sheet["rows"])
    return out.getvalue()


def trained_runs(source: Source, study: str, rows: str = "*") -> "list[tuple[str, int, str]]":
    """(row, seed, key) of a study's finished runs in the store, in the order of its rows.

    Raises: StoreError if there are none.
    """
    from fnmatch import fnmatchcase

    from .table import load_snapshot

    snapshot = load_snapshot(source.store.root, study, source.scale)
    found = [(run["row"], int(run["seed"]), run["key"]) for run in snapshot["runs"]]
    done = [one for one in found if fnmatchcase(one[0], rows) and source.store.status(one[2]) == "done"]
    if not done:
        raise StoreError(
            f"no finished run of {study} ({source.scale} scale) in {source.store.root}; "
            f"regard study run {study} --scale {source.scale}"
        )
    return done


__all__ = [
    "Analysis",
    "Chart",
    "Picture",
    "Sheet",
    "Source",
    "analyses",
    "analysis_path",
    "carry_out",
    "load_analysis",
    "markdown",
    "separated",
    "trained_runs",
]
