"""Mixture-of-Top-k Attention, Table 1, for all mechanisms of the library: how they reduce the cost of attention."""

import base64
import io
from collections.abc import Sequence
from typing import Any

from regard.lab.engine.analysis import Analysis, Source
from regard.lab.studies.papers import MITA_SOURCE
from regard.measure.taxonomy import picture, taxonomy_rows
from regard.pages.sheets import Picture, Sheet

_COLUMNS = ("mechanism", "strategy", "experts", "number", "construction", "topology", "conditions", "cost")


def compute(source: Source) -> Sequence[Sheet | Picture]:
    """The table and its picture, from the cards of the mechanisms; it needs no runs."""
    rows = taxonomy_rows()
    sheet = Sheet(
        title="How mechanisms reduce the cost",
        columns=_COLUMNS,
        rows=tuple(tuple(row[name] for name in _COLUMNS) for row in rows),
        note="Attention is described as a layer that a query passes through and whose weights are computed from keys "
        "and values: an expert. strategy: whether keys are compressed, queries are routed, or both. number: of "
        "experts; N is one for each query. conditions: what the construction and choice of experts depend on.",
    )
    return [sheet, Picture(title="Strategy and number of experts", image=_png(rows))]


def _png(rows: Sequence[dict[str, Any]]) -> str:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure, out = picture(rows), io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return base64.b64encode(out.getvalue()).decode()


ANALYSIS = Analysis(
    name="mita_table1",
    title="How mechanisms reduce the cost of attention",
    source=f"{MITA_SOURCE}, Table 1",
    question="Which mechanisms compress keys, which route queries, and on what does this depend?",
    compute=compute,
    notes=("The paper's table has fewer mechanisms; `regard taxonomy` prints and filters this one.",),
)
