"""Mixture-of-Top-k Attention, Tables 1 to 3: parameters and MACs of every mechanism, beside the printed ones."""

from collections.abc import Sequence

from regard.core import RegardError
from regard.lab.engine.analysis import Analysis, Source
from regard.lab.studies.papers import MITA_SOURCE
from regard.lab.studies.published_sizes import verdict
from regard.mixers import MIXERS
from regard.mixers.spelling import spell
from regard.pages.sheets import Cell, Picture, Sheet

from .printed import PUBLISHED, SMALL, TINY

VERDICTS = {"R": "rounded", "T": "cut off", "R,T": "rounded", "no": "not reproduced"}
"""Verdicts of `published_sizes.verdict` as text."""


def printed_sheet() -> Sheet:
    """Every printed row, with the parameters and MACs that are counted here."""
    rows: list[tuple[Cell, ...]] = []
    for row in PUBLISHED.values():
        cells: tuple[Cell, ...] = (None, row.params, "cited", None, row.macs, "cited")
        if row.mixer is not None:
            params, macs = row.body.count(row.mixer)
            judged_params, judged_macs = VERDICTS[verdict(params, row.params)], VERDICTS[verdict(macs, row.macs)]
            cells = (params, row.params, judged_params, round(macs / 1e9, 3), row.macs, judged_macs)
        rows.append((row.table, row.label, *cells, row.note))
    judged = [row for row in rows if row[4] != "cited"]
    reproduced = [sum(row[column] != "not reproduced" for row in judged) for column in (4, 7)]
    return Sheet(
        title="Printed parameters and multiply-accumulates",
        columns=("table", "row", "parameters", "printed", "verdict", "GMACs", "printed G", "verdict on G", "note"),
        rows=tuple(rows),
        published=("printed", "printed G"),
        note=f"Of {len(judged)} rows, the parameters of {reproduced[0]} and the MACs of {reproduced[1]} are "
        "reproduced, rounded or cut off.",
    )


def library_sheet() -> Sheet:
    """Every mechanism of the library in DeiT-T and DeiT-S, with its default options."""
    rows: list[tuple[Cell, ...]] = []
    for kind in MIXERS:
        config = kind()
        try:
            cells = [number for body in (TINY, SMALL) for number in body.count(config)]
            note = ""
        except RegardError as error:
            cells, note = [None] * 4, str(error)  # type: ignore[list-item]
        card = config.card
        rows.append((card.title, spell(config), *cells, card.expert_count, card.topology, note))
    columns = ("mechanism", "configuration", *(f"{count} {size}" for size in "TS" for count in ("parameters", "MACs")))
    return Sheet(
        title="Every mechanism in DeiT-T and DeiT-S",
        columns=(*columns, "experts", "topology", "note"),
        rows=tuple(rows),
        note="Images of 224 in patches of 16 with a class token, 1000 classes, biases of q, k and v where a mechanism "
        "projects them. Norms, activations and softmax are not counted.",
    )


def compute(source: Source) -> Sequence[Sheet | Picture]:
    """Both sheets, which need no runs."""
    return [printed_sheet(), library_sheet()]


ANALYSIS = Analysis(
    name="mita_counts",
    title="Parameters and work of efficient attention in DeiT",
    source=f"{MITA_SOURCE}, Tables 1 to 3",
    question="Are the printed parameters and FLOPs right, and what do the other mechanisms need?",
    compute=compute,
    notes=(
        "The paper calls multiply-accumulates FLOPs; 1 G = 10^9. Products of landmarks with keys and queries are "
        "computed once and used twice (Algorithm 1); computed twice, MiTA-T would round to 1.2G.",
        "SViTE prunes weights: its numbers are cited, not counted.",
    ),
)
