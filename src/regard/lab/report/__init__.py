"""Reports: one offline HTML page for each study and analysis. Needs no torch."""

from pathlib import Path

from regard.files.atomic import write_atomically
from regard.lab.engine.analysis import analyses, load_analysis
from regard.lab.engine.table import snapshots
from regard.lab.studies.errata import errata_of
from regard.pages.analysis_page import render_analysis

from .study_page import render, write_report


def write_pages(results: Path | str, out: Path | str, name: str | None = None) -> list[Path]:
    """Write a page for each study and analysis in the store, or for those of one name, and return the files.

    Raises: ConfigError if the store has no results of that name; StoreError if the store is empty or damaged, or a
    page cannot be written.
    """
    pages = write_analyses(results, out, name)
    if pages and (name is not None or not snapshots(results)):
        return pages
    return pages + write_report(results, out, name)


def write_analyses(results: Path | str, out: Path | str, name: str | None = None) -> list[Path]:
    """Write `out/NAME.html` for every analysis in the store, or the one of that name; returns the files.

    Raises: StoreError if a result is damaged or a page cannot be written.
    """
    pages = []
    for path in analyses(results):
        value = load_analysis(path)
        if name in (None, value["analysis"], path.stem):
            page = Path(out) / f"{path.stem}.html"
            write_atomically(page, render_analysis(value, errata_of(value["source"])))
            pages.append(page)
    return pages


__all__ = ["render", "write_analyses", "write_pages", "write_report"]
