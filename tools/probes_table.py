"""All mechanisms on all abilities, from the committed evidence: `python -m tools.probes_table`.

Writes the table of docs/probes.md and the page docs/results/probes.html.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from regard.lab.data.boards import ABILITIES, NAMES
from regard.lab.engine.export import import_runs
from regard.lab.report.probe_page import hypotheses_sheet, write_probes
from regard.lab.results.results import Results
from regard.lab.studies.probes.names import AVERAGE, BASELINE, NONE
from regard.lab.studies.probes.profile import Cell, profiles
from regard.lab.studies.probes.run import profile_runs, scores
from regard.lab.studies.probes.study import FURTHER, ROWS, SEEDS
from tools.generate import between
from tools.site.evidence import RESULTS, ROOT

MARK = "<!-- generated: probes -->"
TEXT, PAGE = ROOT / "docs" / "probes.md", RESULTS / "probes.html"
SEED_MARKS = {1: "¹", 2: "²", 3: "³"}
"""Of numbers with fewer seeds than the studies have."""
Cells = Mapping[str, Mapping[str, Cell]]


@contextmanager
def store() -> Iterator[Results]:
    """A store with the runs of the seven studies."""
    with tempfile.TemporaryDirectory() as folder:
        for ability in ABILITIES:
            import_runs(RESULTS / f"probes_{ability}-desk" / "evidence.json", Results(folder))
        yield Results(folder)


def cells(results: Results) -> Cells:
    """The cell of every mechanism and ability, the controls first."""
    found = scores(profile_runs((*ROWS, *FURTHER), tuple(ABILITIES), NAMES[0], seeds=SEEDS), results)
    return profiles(found, found, tuple(ABILITIES))


def table(found: Cells) -> str:
    """The cells as Markdown."""
    lines = [f"| mechanism | {' | '.join(ABILITIES)} |", "|---" * (1 + len(ABILITIES)) + "|"]
    lines += [f"| {row} | {' | '.join(map(shown, of_row.values()))} |" for row, of_row in found.items()]
    return "\n".join(lines)


def shown(cell: Cell) -> str:
    """The cell, marked where it has few seeds."""
    return str(cell) + SEED_MARKS.get(cell.n, "")


def text(found: Cells) -> str:
    """docs/probes.md with the table between its marks."""
    return between(TEXT.read_text(encoding="utf-8"), MARK, table(found))


def main() -> None:
    """Write the table, and the page where the table differs or there is none."""
    with store() as results:
        found = cells(results)
        if (new := text(found)) != TEXT.read_text(encoding="utf-8") or not PAGE.exists():
            TEXT.write_text(new, encoding="utf-8")
            own = [row.label for row in (*ROWS, *FURTHER)]
            write_probes(PAGE, found, own, (BASELINE, AVERAGE, NONE), NAMES[0], [], [hypotheses_sheet(results.root)])
            print(f"wrote {TEXT.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
