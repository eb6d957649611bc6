"""A question of our own: what of MiTA's Table 6 holds for recall, where a run takes minutes and attention decides?"""

from collections.abc import Mapping
from dataclasses import replace

from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.probes.study import METRIC
from regard.mixers import MiTA, Softmax

from .growth import SMALL, recall
from .table6 import rows_of


def _rows(number: int, pairs: tuple[tuple[int, int], ...]) -> tuple[Row, ...]:
    """The rows of Table 6 at m = k = number, and as many keys of several experts."""
    experts = (Row(f"{s} experts", MiTA(m=number, k=number // s, experts=s)) for s in (2, 4))
    return (Row("Softmax", Softmax()), *rows_of(number, pairs), *experts)


RATES: Mapping[str, float] = {
    "avg2d": 3e-3, "random": 6e-3, "learned": 3e-3, "avg1d": 3e-3, "dwconv": 6e-3, "compress only": 6e-3,
    "route only": 1.5e-3, "w/o": 1.5e-3, "0000": 6e-3, "2 experts": 3e-3, "conv": 1.5e-3, "ToMe": 6e-3,
    "m 16, k 25": 3e-3, "m 25, k 16": 3e-3, "4 experts": 6e-3,
}  # fmt: skip
"""Of the rows that `--decide` has trained: the best of 0.0015, 0.003 and 0.006 on a tenth of the training boards."""


def _tuned(setting: Setting) -> Setting:
    return replace(setting, rows=tuple(replace(row, rate=RATES.get(row.label)) for row in setting.rows))


STUDY = Study(
    name="mita_recall",
    title="Landmarks, branches and experts of MiTA, by recall",
    source="Regard",
    question="Which landmarks does recall by content need, how many, which branches, and how many experts?",
    baseline="avg2d",
    metric=METRIC,
    settings={
        "smoke": recall("digit_boards", 6, _rows(4, ((4, 9), (9, 4))), 2, **SMALL),
        "desk": _tuned(recall("boards", 12, _rows(16, ((16, 25), (25, 16))), 3)),
    },
    claims=tuple(
        Claim(a, b, METRIC)
        for a, b in (
            *(("avg2d", kind) for kind in ("random", "learned", "avg1d", "conv", "dwconv")),
            ("ToMe", "avg2d"), ("avg2d", "compress only"), ("avg2d", "route only"), ("route only", "compress only"),
            ("m 16, k 25", "avg2d"), ("m 16, k 25", "m 25, k 16"), ("2 experts", "avg2d"), ("4 experts", "avg2d"),
        )
    ),
    notes=(
        "avg2d is MiTA with m = k = 16 on boards of 144 cells (smoke: 4 on 36); the other landmarks, single branches "
        "and experts have as many landmarks, and as many keys of a query.",
        "40 garments lie on the board, each with a digit, and are shown again: 5 of 9 cells are used.",
        "The claims are those of Table 6, here without their amounts, and that several experts are better than one, of "
        "which the paper prints nothing.",
        "576 cells were left out: in mita_growth MiTA with m = k = 36 reaches 24.6 there, and softmax attention 87.7.",
        "Rows and claims were fixed after mita_growth, which has avg2d and Softmax, before other rows were trained.",
        "A probe says what a mechanism can learn in a small network, not how accurate it is on images: the register of "
        "claims names this study where it judges one of Table 6.",
    ),
)  # fmt: skip
