"""Reports: one offline HTML page for each study and analysis. Needs no torch."""

from pathlib import Path

from regard.lab.engine.table import snapshots

from .analysis_page import render_analysis, write_analyses
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


__all__ = ["render", "render_analysis", "write_analyses", "write_pages", "write_report"]
