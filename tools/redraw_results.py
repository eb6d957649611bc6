"""Draws the tables and pages of docs/results anew from their evidence: `python tools/redraw_results.py`.

Evidence has no learning curves and no attention maps, which are in the runs' own folders. The page's former sections
with these are kept.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

from regard.files.atomic import write_atomically
from regard.files.records import record_text
from regard.lab.engine.export import FORMATS, evidence, import_runs
from regard.lab.engine.table import Table
from regard.lab.report import render
from regard.lab.results.results import Results

RESULTS = Path(__file__).parents[1] / "docs" / "results"
KEPT = ("h-curves", "h-maps")
BEFORE = '{}<section aria-labelledby="h-cards">'
"""The section that follows learning curves and maps on a page."""


def files(file: Path) -> dict[str, str]:
    """The content of each file of a folder of results, by name, drawn from its evidence."""
    with tempfile.TemporaryDirectory() as folder:
        import_runs(file, Results(folder))
        snapshot = json.loads(file.read_text())["snapshot"]
        variant = snapshot.get("variant")
        name, scale = snapshot["study"], snapshot["scale"] + (f"+{variant}" if variant else "")
        table = Table.load(folder, name, scale)
        texts = {f"table.{form}": FORMATS[form](table) for form in ("csv", "json", "md")}
        texts["evidence.json"] = record_text(evidence(folder, name, scale))
        texts["report.html"] = with_kept_sections(render(folder, name, scale), file.with_name("report.html"))
    return texts


def with_kept_sections(page: str, former: Path) -> str:
    """The page with the learning curves and maps of the former one: sections, data of the script, and pictures."""
    old = former.read_text() if former.exists() else ""
    sections = [
        found[0]
        for name in KEPT
        if (found := re.search(rf'<section aria-labelledby="{name}">.*?</section>\n', old, re.S))
    ]
    if not sections:
        return page
    page = page.replace(BEFORE.format(""), BEFORE.format("\n".join(sections) + "\n"), 1)
    photos = "".join(re.findall(r"^\.photo-\d+\{.*\}\n", old, re.M))
    page = page.replace("</style>", f"{photos}</style>", 1)
    data, before = (_data(text) for text in (page, old))
    value = {**json.loads(data), **{name: json.loads(before)[name] for name in ("curves", "maps")}}
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace(data, text, 1)


def _data(page: str) -> str:
    return re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[0]


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
