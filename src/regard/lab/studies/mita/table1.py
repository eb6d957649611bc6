"""Mixture-of-Top-k Attention, Table 1, for all mechanisms of the library: how they reduce the cost of attention."""

import base64
import io
from collections.abc import Sequence
from typing import Any

from regard.lab.engine.analysis import Analysis, Source
from regard.lab.studies.papers import MITA_SOURCE
from regard.measure.taxonomy import picture, taxonomy_rows
from regard.mixers.spelling import parse, spell
from regard.pages.sheets import Picture, Sheet

_COLUMNS = ("mechanism", "strategy", "experts", "number", "construction", "topology", "conditions", "cost")
_KERNEL = ("compress", "linear layer", "1", "kernelisation", "all-to-one")
_TTT = ("compress", "arbitrary module", "1", "test-time training", "all-to-one")
_SKIM = ("route", "MLP of width k", "N", "light skim", "N x one-to-one")
NAMED: dict[str, tuple[str, tuple[str, str, str, str, str]]] = {
    "Softmax": ("Softmax()", ("none", "MLP of width N", "1", "identity", "all-to-one")),
    "Linear attention": ("Linear()", _KERNEL),
    "FLatten": ("FLatten()", _KERNEL),
    "PolaFormer": ("PolaFormer()", ("compress", "linear layer, 2 polarity streams", *_KERNEL[2:])),
    "Performer": ("Performer()", _KERNEL),
    "InLine": (
        "InLine()", ("compress", "linear layer + mean (affine)", "1", "kernelisation without normaliser", "all-to-one")
    ),
    "MHLA": ("MHLA()", ("compress", "linear layer", "m", "local prior + kernelisation", "m x (N/m)-to-one")),
    "Linformer": ("Linformer()", ("compress", "MLP of width m", "1", "learned projection", "all-to-one")),
    "PVT": ("PVT()", ("compress", "MLP of width N / r^2", "1", "learned strided projection", "all-to-one")),
    "Nystromformer": ("Nystrom()", ("compress", "MLP of width m + inverse", "1", "landmark probing", "all-to-one")),
    "Agent": ("Agent()", ("compress", "MLP of width m", "1", "landmark probing", "all-to-one")),
    "TTT": ('ViT3(inner="linear", local=False, clip=False, batch=16, loss="squared")', _TTT),
    "ViT^3": ("ViT3()", _TTT),
    "Deformable DETR": ("DeformableDETR()", ("route", "MLP of width K", "N", "offset prediction", "N x one-to-one")),
    "DAT": ("DAT()", ("route", "MLP of width N_s", "1", "offset prediction", "N-to-one")),
    "Swin": ("Window()", ("route", "MLP of width w^2", "N / w^2", "locality prior", "N/w^2 x w^2-to-one")),
    "BiFormer": ("BRA()", ("route", "MLP", "N / n", "locality prior", "N/n-to-N/n")),
    "MoBA": ("MoBA()", ("route", "MLP of width n", "N / n", "locality prior", "N-to-N/n")),
    "NSA": ("NSA()", ("both", "MLP", "N / n (+1)", "locality prior", "N-to-N/n")),
    "Reformer": (
        "Reformer()", ("route", "MLP of the width of a bucket", "buckets", "hashing", "buckets x many-to-one")
    ),
    "Spark": ('TopK(indexer="spark", statistical=True)', _SKIM),
    "DSA": ('TopK(indexer="lightning")', _SKIM),
    "Top-k attention": ("TopK()", _SKIM),
    "Sparsifiner": (
        "Sparsifiner()", ("route", "MLP of variable width", "N", "learned low-rank mask", "N x one-to-one")
    ),
    "MiTA": ("MiTA()", ("both", "MLP of width k (+ shared width m)", "m (+1)", "landmark probing", "N-to-m")),
}  # fmt: skip
"""Mechanisms by the names of their papers: the spelling that runs, and strategy, kind and number of experts,
construction and topology as they are read from the paper."""

_DIFFERENCES = {
    "BiFormer": "a query sees the keys of k regions of n tokens",
    "NSA": "k blocks of n tokens, and one expert for the N / n compressed keys",
    "Sparsifiner": "its budget is a number of keys, here exactly k",
}


def named_sheet() -> Sheet:
    """Every named mechanism with its spelling; a cell that differs from the paper's has the paper's in brackets."""
    rows, equal = [], 0
    configs = [parse(text) for text, _ in NAMED.values()]
    for (name, (_, printed)), config, row in zip(NAMED.items(), configs, taxonomy_rows(configs), strict=True):
        ours = [str(row[column]) for column in _COLUMNS[1:6]]
        cells = [a if a == b else f"{a} [{b}]" for a, b in zip(ours, printed, strict=True)]
        equal += sum(a == b for a, b in zip(ours, printed, strict=True))
        rows.append((name, spell(config), *cells, _DIFFERENCES.get(name, "")))
    columns = ("name", "spelling", *_COLUMNS[1:6], "why it differs")
    note = f"{equal} of {5 * len(rows)} cells are those that this project reads in the paper."
    return Sheet(title="The paper's mechanisms by name", columns=columns, rows=tuple(rows), note=note)


def compute(source: Source) -> Sequence[Sheet | Picture]:
    """The paper's mechanisms, the table of all and its picture, from the cards; it needs no runs."""
    rows = taxonomy_rows()
    sheet = Sheet(
        title="How mechanisms reduce the cost",
        columns=_COLUMNS,
        rows=tuple(tuple(row[name] for name in _COLUMNS) for row in rows),
        note="Attention is described as a layer that a query passes through and whose weights are computed from keys "
        "and values: an expert. strategy: whether keys are compressed, queries are routed, or both. number: of "
        "experts; N is one for each query. conditions: what the construction and choice of experts depend on.",
    )
    return [named_sheet(), sheet, Picture(title="Strategy and number of experts", image=_png(rows))]


def _png(rows: Sequence[dict[str, Any]]) -> str:
    figure, out = picture(rows), io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return base64.b64encode(out.getvalue()).decode()


ANALYSIS = Analysis(
    name="mita_table1",
    title="How mechanisms reduce the cost of attention",
    source=f"{MITA_SOURCE}, Table 1",
    question="Which mechanisms compress keys, which route queries, and on what does this depend?",
    compute=compute,
    notes=(
        "The first table also has mechanisms that the paper's Tables 2 to 5 compare and its Table 1 does not list; "
        "`regard taxonomy` prints and filters the table of all.",
    ),
)
