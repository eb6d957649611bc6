"""Mixture-of-Top-k Attention, Figure 5: throughput of three layers of width 128 against the number of tokens."""

from collections.abc import Sequence

from regard.core import Grid
from regard.lab.analysis import Analysis, Cell, Chart, Picture, Sheet, Source
from regard.measure.bench import bench, conditions
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax

SIDES = (8, 16, 32, 48)
SECONDS = 0.3
"""Repetition of each mechanism at each number of tokens, at least 5 rounds."""
_LAYERS, _DIM, _HEADS, _BATCH = 3, 128, 2, 2
_MECHANISMS = {
    "softmax": Softmax(),
    "MiTA": MiTA(m=25, k=25),
    "MiTA, route only": MiTA(m=25, k=50, branches="route"),
}


def throughput(sides: Sequence[int] = SIDES, seconds: float = SECONDS) -> Sheet:
    """Inference of the three mechanisms on maps of these sides, interleaved, one thread of this machine."""
    grids = [Grid(side, side) for side in sides]
    timings = bench(
        list(_MECHANISMS.values()), grids, dim=_DIM, heads=_HEADS, batch=_BATCH, part="layer", seconds=seconds
    )
    rows: list[tuple[Cell, ...]] = []
    for place, timing in enumerate(timings):
        name = list(_MECHANISMS)[place % len(_MECHANISMS)]
        images, low, high = (_BATCH / (_LAYERS * value) for value in (timing.seconds, timing.high, timing.low))
        speeds = (round(value, 2) for value in (images, low, high, 1 / timing.ratio))
        rows.append((name, timing.tokens, *speeds, timing.rounds))
    return Sheet(
        title="Inputs a second",
        columns=("mechanism", "N", "inputs a second", "lower quartile", "upper quartile", "ratio to softmax", "rounds"),
        rows=tuple(rows),
        note=f"Medians of CPU seconds of one thread, float32, {_BATCH} inputs at a time, mechanisms interleaved; "
        f"{_LAYERS} attention layers with their projections (three times the time of one), no MLP. Comparable within "
        f"this table only. {'; '.join(conditions())}".strip(),
        chart=Chart(x="N", y="inputs a second", series="mechanism", logs="xy"),
    )


def compute(source: Source) -> Sequence[Sheet | Picture]:
    """The sheet; nothing is read."""
    return [throughput()]


ANALYSIS = Analysis(
    name="mita_fig5",
    title="Throughput against the number of tokens",
    source="MiTA, arXiv 2602.01219, Figure 5",
    question="From how many tokens on is MiTA faster than softmax attention here?",
    compute=compute,
    notes=(
        "The paper measures whole networks on an RTX 4090 with a batch tuned for each length, and prints no numbers.",
    ),
)
