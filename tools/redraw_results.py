"""Draws the tables of docs/results anew from their evidence, and their pages for the site.

`python tools/redraw_results.py [FOLDER ...]` writes the tables. Learning curves and attention maps, which need the
folders of the runs, are on the pages that `regard report` writes.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.files.atomic import write_atomically
from regard.files.records import record_text
from regard.lab.engine.export import FORMATS, evidence, import_runs
from regard.lab.engine.table import Table
from regard.lab.report import render
from regard.lab.results.results import Results
from regard.lab.studies.errata import errata_of
from regard.pages.analysis_page import render_analysis

RESULTS = Path(__file__).parents[1] / "docs" / "results"


@contextmanager
def _imported(file: Path) -> Iterator[tuple[str, str, str]]:
    """A store with the runs of an evidence.json: (its folder, the study, the setting)."""
    with tempfile.TemporaryDirectory() as folder:
        import_runs(file, Results(folder))
        snapshot = json.loads(file.read_text())["snapshot"]
        variant = snapshot.get("variant")
        yield folder, snapshot["study"], snapshot["scale"] + (f"+{variant}" if variant else "")


def files(file: Path) -> dict[str, str]:
    """The content of each file of a folder of results, by name, drawn from its evidence."""
    with _imported(file) as (folder, name, scale):
        table = Table.load(folder, name, scale)
        texts = {f"table.{form}": FORMATS[form](table) for form in ("csv", "json", "md")}
        texts["evidence.json"] = record_text(evidence(folder, name, scale))
    return texts


def page(folder: Path) -> str:
    """The page of a folder of results: of a study with evidence.json, or of an analysis."""
    if (folder / "evidence.json").exists():
        with _imported(folder / "evidence.json") as (store, name, scale):
            return render(store, name, scale)
    value = json.loads((folder / "table.json").read_text())
    return render_analysis(value, errata_of(value["source"]))


def main() -> None:
    """Write the files of the folders that are named, or of all. Raises: SystemExit for a folder without evidence."""
    found = {str(file.parent.relative_to(RESULTS)): file for file in sorted(RESULTS.rglob("evidence.json"))}
    chosen = sys.argv[1:] or list(found)
    if unknown := [folder for folder in chosen if folder not in found]:
        raise SystemExit(f"no evidence.json below docs/results in {', '.join(unknown)}; a name is quickstart-desk, say")
    for folder in chosen:
        for name, text in files(found[folder]).items():
            write_atomically(found[folder].with_name(name), text)
        print(folder)


if __name__ == "__main__":
    main()
