"""The pages of stored analyses."""

from pathlib import Path

from regard.files.atomic import write_atomically
from regard.lab.engine.analysis import analyses, load_analysis
from regard.lab.studies.errata import errata_of
from regard.pages.analysis_page import render_analysis


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
