"""Mixture-of-Top-k Attention, Figure 5: throughput of three layers of width 128 against the number of tokens."""

from collections.abc import Sequence

from regard.core import Grid
from regard.lab.engine.analysis import Analysis, Source
from regard.lab.studies.papers import MITA_SOURCE
from regard.measure.bench import bench, conditions
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.pages.sheets import Cell, Chart, Picture, Sheet

SIDES = (16, 24, 32, 48)
"""Sides of the maps, in tokens; 128 landmarks need 8 x 16 windows."""
SECONDS = 0.3
"""How long each mechanism is timed at each number of tokens, at least 5 rounds."""
_LAYERS, _DIM, _HEADS, _BATCH = 3, 128, 2, 2
_MECHANISMS = {
    "softmax": Softmax(),
    "MiTA": MiTA(m=128, k=128),
    "MiTA, route only": MiTA(m=128, k=256, branches="route"),
}


def throughput(sides: Sequence[int] = SIDES, seconds: float = SECONDS) -> Sheet:
    """Inputs per second of three layers of each mechanism at inference, on one thread of this machine.

    sides: of the maps, in tokens. seconds: for each mechanism on each map; mechanisms take turns.
    """
    grids = [Grid(side, side) for side in sides]
    timings = bench(
        list(_MECHANISMS.values()), grids, dim=_DIM, heads=_HEADS, batch=_BATCH, part="layer", seconds=seconds
    )
    rows: list[tuple[Cell, ...]] = []
    for index, timing in enumerate(timings):
        name = list(_MECHANISMS)[index % len(_MECHANISMS)]
        median, low, high = (_BATCH / (_LAYERS * value) for value in (timing.seconds, timing.high, timing.low))
        speeds = [round(value, 2) for value in (median, low, high)]
        ratio = None if timing.ratio is None else round(1 / timing.ratio, 2)
        rows.append((name, timing.tokens, *speeds, ratio, timing.rounds))
    return Sheet(
        title="Inputs per second",
        columns=(
            "mechanism",
            "N",
            "inputs per second",
            "lower quartile",
            "upper quartile",
            "ratio to softmax",
            "rounds",
        ),
        rows=tuple(rows),
        note=f"Medians of CPU seconds of one thread, float32, {_BATCH} inputs at a time, mechanisms in turn; "
        f"{_LAYERS} attention layers with their projections (three times the time of one), no MLP. Comparable within "
        f"this table only. {'; '.join(conditions())}".strip(),
        chart=Chart(x="N", y="inputs per second", series="mechanism", logs="xy"),
    )


def compute(source: Source) -> Sequence[Sheet | Picture]:
    """The sheet, which needs no runs."""
    return [throughput()]


ANALYSIS = Analysis(
    name="mita_fig5",
    title="Throughput against the number of tokens",
    source=f"{MITA_SOURCE}, Figure 5",
    question="From how many tokens on is MiTA faster than softmax attention here?",
    compute=compute,
    notes=(
        "s = 1 and m = k = 128 as in Section 4.3; k = 256 for routing alone, as in the caption of Table 5: with 256 "
        "tokens these are all keys. The landmarks are windows of a square map.",
        "The paper measures whole networks on an RTX 4090 with a batch tuned for each length, and prints no numbers.",
    ),
)
