"""Mixture-of-Top-k Attention, Figure 5: throughput of a network of three layers against the number of tokens."""

from collections.abc import Sequence

import torch

from regard.lab.engine.analysis import Analysis, Source
from regard.lab.studies.papers import MITA_SOURCE
from regard.measure.bench import conditions
from regard.measure.bench_model import OWN, bench_model
from regard.mixers import MiTA
from regard.mixers.spelling import spell
from regard.pages.sheets import Cell, Chart, Picture, Sheet

SIDES = (16, 32, 64, 128, 256)
"""Sides of the maps, in tokens: 256 to 65,536 of them; 128 landmarks need 8 x 16 windows."""
SECONDS = 0.3
"""How long each network is timed at each number of tokens, at least 5 rounds."""
_PATCH = 2
_HOST = f"vit_desk(size={_PATCH * SIDES[0]}, patch={_PATCH}, dim=128, depth=3, heads=2)"
_MECHANISMS = {"MiTA": MiTA(m=128, k=128), "MiTA, route only": MiTA(m=128, k=256, branches="route")}


def throughput(sides: Sequence[int] = SIDES, seconds: float = SECONDS) -> Sheet:
    """Inputs per second of a network of three layers of width 128 with each mechanism, at inference on this machine.

    sides: of the maps, in tokens. seconds: for each network at each size; networks take turns.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    labels = {OWN: "softmax", **{spell(config): name for name, config in _MECHANISMS.items()}}
    rows: list[tuple[Cell, ...]] = []
    sizes = [(_PATCH * side, _PATCH * side) for side in sides]
    for timing in bench_model(_HOST, list(_MECHANISMS.values()), sizes, batch=1, device=device, seconds=seconds):
        side = int(timing.grid.split("x")[0]) // _PATCH
        speeds = [float(f"{1 / value:.3g}") for value in (timing.seconds, timing.high, timing.low)]
        ratio = None if timing.ratio is None else round(1 / timing.ratio, 2)
        rows.append((labels[timing.mixer], side**2, *speeds, ratio, timing.rounds))
    speed = ("inputs per second", "lower quartile", "upper quartile", "ratio to softmax")
    return Sheet(
        title="Inputs per second",
        columns=("mechanism", "N", *speed, "rounds"),
        rows=tuple(rows),
        note=f"Medians of {'GPU seconds' if device == 'cuda' else 'CPU seconds of one thread'}, float32, one input "
        "at a time, networks in turn: patches, three layers with MLPs, head. A row of 0 rounds is estimated from the "
        "size before by its multiply-accumulates: it would take over a minute. Comparable within this table only. "
        f"{'; '.join(conditions())}".strip(),
        chart=Chart(x="N", y="inputs per second", series="mechanism", logs="xy"),
    )  # fmt: skip


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
        "The paper measures networks of sequences on an RTX 4090 with a batch tuned for each length, 4K to 64K tokens, "
        "and prints no numbers.",
    ),
)
