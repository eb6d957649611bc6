"""Parameters of every model of the SKA and SNE papers beside the printed ones, built here."""

from collections.abc import Sequence

from regard.hosts.published import published_counts
from regard.lab.analysis import Analysis, Picture, Sheet, Source

_COLUMNS = ("model", "parameters", "printed", "verdict", "authors' code", "host", "mechanism", "note")


def sheets(source: Source) -> Sequence[Sheet | Picture]:
    """One sheet for each table."""
    tables: dict[str, list[tuple[str | int | None, ...]]] = {}
    for counted in published_counts():
        row = counted.row
        cells = (row.label, counted.params, row.params, counted.verdict, row.official, row.host, row.mixer, row.note)
        tables.setdefault(row.table, []).append(cells)
    return [
        Sheet(title=table, columns=_COLUMNS, rows=tuple(rows), published=("printed", "authors' code"))
        for table, rows in tables.items()
    ]


ANALYSIS = Analysis(
    name="host_counts",
    title="Sizes of the models of two papers",
    source="Static Key Attention in Vision, Tables 1 and 2; the embedding paper, Tables 2 and 4",
    question="Do the models that are built here have the printed numbers of parameters?",
    compute=sheets,
    notes=(
        "Verdict: R if our count rounds to the printed digits, T if it is cut off to them, no if neither.",
        "Counts are for 10 classes (SKA Table 1) or 1,000.",
    ),
)
