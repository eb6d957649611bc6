"""Parameters and FLOPs of every model of the SKA and SNE papers, as Regard builds it, beside the printed ones."""

from collections.abc import Sequence

import torch

from regard.lab.engine.analysis import Analysis, Source
from regard.lab.engine.dry_run import compare
from regard.pages.sheets import Cell, Picture, Sheet

from .papers import SKA_PAPER, SNE_PAPER
from .published_sizes import build, gigaflops, parameters, printed_rows, verdict

_COLUMNS = (
    "model", "parameters", "printed", "verdict", "authors' code", "GFLOPs", "printed GFLOPs", "verdict on GFLOPs",
    "host", "mechanism", "note",
)  # fmt: skip


def sheets(source: Source) -> Sequence[Sheet | Picture]:
    """One sheet for each table, then models with 100 classes."""
    return [*_printed_sheets(), _hundred()]


def _printed_sheets() -> list[Sheet]:
    """Every row as it is built on the meta device, whose FLOPs take some minutes to count."""
    tables: dict[str, list[tuple[Cell, ...]]] = {}
    for row in printed_rows():
        with torch.device("meta"):
            model = build(row)
        params, gflops = parameters(model), gigaflops(model)
        judged = verdict(round(gflops * 1e9), f"{row.gflops}G") if row.gflops else ""
        flops = (round(gflops, 4), float(row.gflops) if row.gflops else None, judged)
        cells = (row.label, params, row.params, verdict(params, row.params), row.official, *flops)
        tables.setdefault(row.table, []).append((*cells, row.host, row.mixer, row.note))
    published = ("printed", "authors' code", "printed GFLOPs")
    return [Sheet(title=table, columns=_COLUMNS, rows=tuple(rows), published=published)
            for table, rows in tables.items()]  # fmt: skip


def _hundred() -> Sheet:
    rows = []
    for row in printed_rows():
        if row.official_100 is not None:
            with torch.device("meta"):
                params = parameters(build(row, classes=100))
            rows.append((row.label, params, row.official_100, compare(params, row.counts[1], None), row.note))
    return Sheet(
        title="SKA Table 1 with 100 classes", columns=("model", "parameters", "authors' code", "verdict", "note"),
        rows=tuple(rows), published=("authors' code",),
        note="Verdict: against the authors' code, for CSKA-CvT-13 against the same model without its defect.",
    )  # fmt: skip


ANALYSIS = Analysis(
    name="host_counts",
    title="Sizes of the models of two papers",
    source=f"{SKA_PAPER}, Tables 1 and 2; {SNE_PAPER}, Tables 2 and 4",
    question="Do the models that are built here have the printed numbers of parameters?",
    compute=sheets,
    notes=(
        "Verdict: R if our count has the printed digits when rounded, T if it has them when cut off, no if neither.",
        "Counts of the papers' tables are for 10 classes (SKA Table 1) or 1,000.",
        "GFLOPs of one image: two per multiply-accumulate of matrix products and convolutions, as both papers count.",
    ),
)
