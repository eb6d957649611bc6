"""`regard study show|run|export` for an analysis: a table or figure that trains nothing."""

import sys
from pathlib import Path

from regard.core import check_known
from regard.lab.results.results import Results
from regard.lab.studies import load_analysis

from .tables import show


def show_analysis(name: str, scale: str, results: Path, as_json: bool) -> None:
    """Print its question, the runs that it reads, and whether it has been computed."""
    from regard.lab.engine.analysis import analysis_path

    analysis = load_analysis(name)
    path = analysis_path(results, name, scale if analysis.of else "")
    line = {
        "name": name, "title": analysis.title, "source": analysis.source,
        "reads": f"runs of {analysis.of}, {scale} scale" if analysis.of else "nothing", "computed": path.exists(),
    }  # fmt: skip
    show([line], as_json, notes=[analysis.question, *analysis.notes])


def run_and_print_analysis(name: str, scale: str, results: Path, as_json: bool) -> None:
    """Compute, store and print it."""
    from regard.lab.engine.analysis import analysis_path, json_text, run_analysis

    analysis = load_analysis(name)
    value = run_analysis(analysis, Results(results), scale)
    if as_json:
        sys.stdout.write(json_text(value))
        return
    for sheet in value["sheets"]:
        lines = [dict(zip(sheet["columns"], row, strict=True)) for row in sheet["rows"]]
        show(lines, False, sheet["title"], [sheet["note"]] if sheet["note"] else [])
    path = analysis_path(results, name, scale if analysis.of else "")
    pictures = f", {len(value['pictures'])} pictures" if value["pictures"] else ""
    show([], False, notes=[f"stored in {path}{pictures}; regard report {name} --results {results} writes its page"])


def analysis_text(name: str, scale: str, results: Path, format: str) -> str:
    """The stored result as text. Raises: ConfigError for an unknown format; StoreError without a result."""
    from regard.lab.engine import analysis as stored

    check_known(format, stored.FORMATS, f"no format {format!r} for an analysis")
    analysis = load_analysis(name)
    path = stored.analysis_path(results, name, scale if analysis.of else "")
    return stored.FORMATS[format](stored.load_analysis(path))
