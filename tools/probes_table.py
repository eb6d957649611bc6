"""All mechanisms on all abilities, from the committed evidence: `python -m tools.probes_table`.

Writes the table of docs/probes.md; the site has a page of all cells.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from regard.lab.data.boards import NAMES, PROBED
from regard.lab.engine.export import import_runs
from regard.lab.report.probe_page import hypotheses_sheet, write_probes
from regard.lab.results.results import Results
from regard.lab.studies.probes.profile import Cell, profiles
from regard.lab.studies.probes.run import profile_runs, scores
from regard.lab.studies.probes.study import FURTHER, ROWS, SEEDS
from tools.generate import between, write
from tools.site.evidence import RESULTS, ROOT

MARK = "<!-- generated: probes -->"
TEXT = ROOT / "docs" / "probes.md"
SEED_MARKS = {1: "¹", 2: "²", 3: "³"}
"""Of numbers with fewer seeds than the studies have."""
Cells = Mapping[str, Mapping[str, Cell]]


@contextmanager
def store() -> Iterator[Results]:
    """A store with the runs of the seven studies."""
    with tempfile.TemporaryDirectory() as folder:
        for ability in PROBED:
            import_runs(RESULTS / f"probes_{ability}-desk" / "evidence.json", Results(folder))
        yield Results(folder)


def cells(results: Results) -> Cells:
    """The cell of every mechanism and ability, the controls first."""
    found = scores(profile_runs((*ROWS, *FURTHER), tuple(PROBED), NAMES[0], seeds=SEEDS), results)
    return profiles(found, found, tuple(PROBED))


def table(found: Cells) -> str:
    """The cells as Markdown."""
    lines = [f"| mechanism | {' | '.join(PROBED)} |", "|---" * (1 + len(PROBED)) + "|"]
    lines += [f"| {row} | {' | '.join(map(shown, of_row.values()))} |" for row, of_row in found.items()]
    return "\n".join(lines)


def shown(cell: Cell) -> str:
    """The cell, marked where it has few seeds."""
    return str(cell) + SEED_MARKS.get(cell.n, "")


def text(found: Cells) -> str:
    """docs/probes.md with the table between its marks."""
    return between(TEXT.read_text(encoding="utf-8"), MARK, table(found))


def page() -> str:
    """The page of all cells."""
    own = [row.label for row in (*ROWS, *FURTHER)]
    with store() as results, tempfile.TemporaryDirectory() as folder:
        sheets = [hypotheses_sheet(results.root)]
        file = write_probes(f"{folder}/p.html", cells(results), own, NAMES[0], [], sheets)
        return file.read_text(encoding="utf-8")


def main() -> None:
    """Write the table where it differs."""
    with store() as results:
        write(TEXT, text(cells(results)))


if __name__ == "__main__":
    main()
