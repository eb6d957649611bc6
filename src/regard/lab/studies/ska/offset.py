"""A question of our own: activations, scale and heads of convolutional static keys, where a run takes a minute."""

from collections.abc import Mapping
from dataclasses import replace

from regard.lab.engine.study import Claim, Row, Study
from regard.lab.studies.controls import CONTROLS
from regard.lab.studies.probes.study import METRIC, setting_of, task_of
from regard.mixers import CSKA, Softmax

_ROWS = (
    Row("attention", Softmax(), notes=("Projected keys, for context.",)),
    Row("softmax", CSKA()),
    *(Row(name, CSKA(activation=name)) for name in ("gelu", "relu", "starrelu")),
    Row("no scale", CSKA(scale=1.0)),
    *(Row(f"{heads} heads", CSKA(heads=heads)) for heads in (1, 8)),
    *CONTROLS,
)
_RATES: Mapping[str, float] = {"softmax": 6e-3, "starrelu": 3e-3, "w/o": 1.5e-3, "0000": 3e-3}
"""Of the rows that `--decide` has trained: the best of 0.0015, 0.003 and 0.006 on a tenth of the training boards."""

STUDY = Study(
    name="ska_offset",
    title="Activations, scale and heads of static keys, by relative place",
    source="Regard",
    question="Do convolutional static keys need the softmax, its scale, and several heads to read by relative place?",
    baseline="softmax",
    metric=METRIC,
    settings={
        "smoke": setting_of(task_of("offset", "digit_boards"), _ROWS, "smoke"),
        "desk": setting_of(task_of("offset"), tuple(replace(row, rate=_RATES.get(row.label)) for row in _ROWS), "desk"),
    },
    claims=(
        *(Claim("softmax", name, METRIC) for name in ("gelu", "relu", "starrelu")),
        Claim("softmax", "no scale", METRIC, within=1.0),
        Claim("8 heads", "1 heads", METRIC),
    ),
    notes=(
        "The boards are those of probes_offset: reading at a relative place is what a convolution of queries can do. "
        "CSKA reaches 98.4 there, softmax attention 98.0, a uniform average 20.7: a variant can lose, hardly gain.",
        "The claims are those of Table 4, without their amounts but for the scale, and of Figure 3.",
        "Rows and claims were fixed before any row but softmax, attention and the controls was trained.",
        "A probe says what a mechanism can learn in a small network, not how accurate it is on images: the register of "
        "claims names this study where it judges one of Table 4 or of Figure 3.",
    ),
)
