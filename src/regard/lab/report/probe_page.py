"""The page of `regard probe`: the profile of each mechanism, the table of all, and what is decided."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from regard.files.atomic import write_atomically
from regard.lab.data.boards import PROBED
from regard.lab.engine.table import Table
from regard.lab.studies.probes.names import AVERAGE, BASELINE, NONE
from regard.lab.studies.probes.profile import Cell as ProfileCell
from regard.lab.studies.probes.study import CLAIMS, HYPOTHESES
from regard.pages.analysis_page import render_sheets
from regard.pages.phrasing import typeset
from regard.pages.sheets import Cell, Chart, Sheet

LIMITS = (
    "A probe says what a mechanism can learn in a small network on generated boards. It never judges a paper's claim "
    "about accuracy on images."
)


def write_probes(
    path: Path | str, cells: Mapping[str, Mapping[str, ProfileCell]], drawn: Sequence[str], boards: str,
    notes: Sequence[str], sheets: Sequence[Sheet] = (),
) -> Path:  # fmt: skip
    """Write the page of profiles and return the file. Raises: StoreError.

    cells: of every row and ability. drawn: rows with a chart of their own, beside the controls. boards: the set.
    sheets: shown first.
    """
    own = [_profile(row, cells) for row in drawn]
    return write_sheets(path, [*sheets, _table(cells), *own, _abilities(cells)], boards, notes)


def write_sheets(path: Path | str, sheets: Sequence[Sheet], boards: str, notes: Sequence[str] = ()) -> Path:
    """Write the page of sheets of the probes and return the file. Raises: StoreError."""
    question = "Which abilities does each mechanism learn, beside softmax attention and no attention?"
    limits = [LIMITS, f"Boards: {boards}.", *notes]
    write_atomically(path, render_sheets("regard probe", "What a mechanism can do", question, sheets, limits))
    return Path(path)


def sweep_sheet(rows: Sequence[tuple[str, int, int, float | None, int]]) -> Sheet:
    """The sheet of a sweep. rows: (mechanism, tokens, pairs, mean score in percent, seeds)."""
    columns = ("mechanism", "tokens", "pairs", "right, %", "seeds", "boards")
    cells = tuple((*row, f"{row[0]}, {row[1]} tokens") for row in rows)
    chart = Chart(x="pairs", y="right, %", series="boards")
    note = "Recall by content with more pairs on a board; a curve that falls is where a mechanism breaks."
    return Sheet(title="Where recall by content breaks", columns=columns, rows=cells, note=note, chart=chart)


def hypotheses_sheet(results: Path) -> Sheet:
    """The verdicts on the claims of each hypothesis, as the studies in a store have them.

    Raises: ConfigError without these studies; StoreError if one is damaged.
    """
    tables = {ability: Table.load(results, f"probes_{ability}", "desk") for ability in CLAIMS}
    rows = []
    for hypothesis in HYPOTHESES:
        for ability, row, expected in hypothesis.claims:
            (claim,) = (claim for claim in tables[ability].claims if claim.a == row)
            wanted = "supported" if expected else "contradicted"
            rows.append((hypothesis.name, ability, claim.text, wanted, typeset(claim.verdict.sentence)))
    sentences = " ".join(f"{hypothesis.name}: {hypothesis.sentence}." for hypothesis in HYPOTHESES)
    note = f"{sentences} Verdicts are those of the studies probes_*, over all seeds, corrected within each study."
    columns = ("hypothesis", "ability", "claim", "has to be", "verdict")
    return Sheet(title="Hypotheses", columns=columns, rows=tuple(rows), note=note)


def _table(cells: Mapping[str, Mapping[str, ProfileCell]]) -> Sheet:
    abilities = _abilities_of(cells)
    rows: list[tuple[Cell, ...]] = []
    for row, of_row in cells.items():
        # the number of seeds, or the fewest and the most that an ability has, of those that have any
        seeds = sorted({cell.n for cell in of_row.values() if cell.n}) or [0]
        number = seeds[0] if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        rows.append((row, *(_shown_value(of_row[ability]) for ability in abilities), number))
    note = (
        "Asking cells answered right, in percent: the mean of the seeds that learned, with their number where not all "
        "did, and of all seeds where none did. A seed has learned if it passed the middle between softmax attention "
        "and the better control."
    )
    return Sheet(title="All mechanisms", columns=("mechanism", *abilities, "seeds"), rows=tuple(rows), note=note)


def _profile(row: str, cells: Mapping[str, Mapping[str, ProfileCell]]) -> Sheet:
    """Bars of a mechanism beside the controls."""
    names = [name for name in (BASELINE, AVERAGE, NONE) if name in cells and name != row]
    shown = [(ability, name, cells[name][ability]) for ability in _abilities_of(cells) for name in (row, *names)]
    bars = []
    for ability, name, cell in shown:
        if cell.mean is not None:
            share = "" if cell.share is None else f"{100 * cell.share:.0f} %".replace("-", "−")
            seeds = f"{cell.learned} of {cell.n}" if cell.mixed else str(cell.n)  # "1 of 4" where only one learned
            bars.append((ability, name, round(cell.mean, 1), share, seeds))
    chart = Chart(x="ability", y="right, %", series="row", kind="bars")
    columns = ("ability", "row", "right, %", "of what softmax gains", "of seeds")
    note = (
        "What softmax gains, in the table below: its score minus that of the better control. Where only some seeds "
        "learned, bar and share are the mean of these."
    )
    return Sheet(title=row, columns=columns, rows=tuple(bars), chart=chart, folded=True, note=note)


def _abilities(cells: Mapping[str, Mapping[str, ProfileCell]]) -> Sheet:
    rows = tuple(
        (name, PROBED[name].needs, PROBED[name].question, round(100 / PROBED[name].classes, 1))
        for name in _abilities_of(cells)
    )
    return Sheet(title="What the boards ask", columns=("ability", "what", "question", "chance, %"), rows=rows)


def _abilities_of(cells: Mapping[str, Mapping[str, ProfileCell]]) -> list[str]:
    """The abilities that the rows have, in their order."""
    return list(next(iter(cells.values())))


def _shown_value(cell: ProfileCell) -> Cell:
    """A number, so that the column sorts, where all seeds count."""
    return str(cell) or None if cell.mixed or cell.mean is None else round(cell.mean, 1)
