"""What `regard study show|run|export` does with an analysis: a table or figure that trains nothing."""

import json
from pathlib import Path

from regard.core import ConfigError, nearest
from regard.store.results import Results
from regard.studies import load_analysis

from .tables import show

_FORMATS = ("csv", "json", "md")


def show_analysis(name: str, scale: str, results: Path, as_json: bool) -> None:
    """What it answers, what it reads, and whether it has been computed."""
    from regard.lab.analysis import analysis_path

    analysis = load_analysis(name)
    path = analysis_path(results, name, scale if analysis.of else "")
    line = {
        "name": name, "title": analysis.title, "source": analysis.source,
        "reads": f"runs of {analysis.of}, {scale} scale" if analysis.of else "nothing", "computed": path.exists(),
    }  # fmt: skip
    show([line], as_json, notes=[analysis.question, *analysis.notes])


def run_analysis(name: str, scale: str, results: Path, as_json: bool) -> None:
    """Compute, keep and print it."""
    from regard.lab.analysis import analysis_path, carry_out

    analysis = load_analysis(name)
    value = carry_out(analysis, Results(results), scale)
    if as_json:
        print(json.dumps(value, indent=1, ensure_ascii=False))
        return
    for sheet in value["sheets"]:
        lines = [dict(zip(sheet["columns"], row, strict=True)) for row in sheet["rows"]]
        show(lines, False, sheet["title"], [sheet["note"]] if sheet["note"] else [])
    path = analysis_path(results, name, scale if analysis.of else "")
    pictures = f", {len(value['pictures'])} pictures" if value["pictures"] else ""
    show([], False, notes=[f"kept in {path}{pictures}; regard report {name} --results {results} draws the page"])


def analysis_text(name: str, scale: str, results: Path, format: str) -> str:
    """The kept result as text. Raises: ConfigError for a format that it does not have; StoreError if there is none."""
    from regard.lab import analysis as kept

    if format not in _FORMATS:
        raise ConfigError(f"no format {format!r} for an analysis; {nearest(format, _FORMATS)}")
    found = load_analysis(name)
    value = kept.load_analysis(kept.analysis_path(results, name, scale if found.of else ""))
    if format == "json":
        return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    return kept.markdown(value) if format == "md" else kept.separated(value)
