"""A question of our own: MiTA with several experts of each query, and as many keys attended by a query."""

from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CONTROLS, DEIT_RECIPE
from regard.mixers import MiTA, Softmax

from .recipes import DEIT_TASK, small_settings

_BASELINE = "1 expert"


def _rows(m: int, keys: int) -> tuple[Row, ...]:
    """m landmarks; 1, 2 and 4 experts of a query, which attends to `keys` of their keys in all rows."""
    numbers = {_BASELINE: 1, "2 experts": 2, "4 experts": 4}
    rows = (Row(label, MiTA(m=m, k=keys // s, experts=s)) for label, s in numbers.items())
    return (*rows, Row("Softmax", Softmax()), *CONTROLS)


STUDY = Study(
    name="mita_experts",
    title="Several experts of each query",
    source="Regard",
    question="Are several experts with few keys better than one with many, at as many keys for each query?",
    baseline=_BASELINE,
    settings={
        **small_settings(_rows(4, 4), _rows(16, 16)),
        "paper": Setting(DEIT_TASK, DEIT_RECIPE, _rows(25, 24)),
    },
    claims=(
        *(Claim(experts, _BASELINE, "top1") for experts in ("2 experts", "4 experts")),
        Claim("4 experts", _BASELINE, "top1", within=1.0),
    ),
    notes=(
        "The paper defines s experts of each query (Eq. 11-12) and trains one; its code for two halves k, as here.",
        "m is 4, 16 and 25 at the three scales, and k times the experts 4, 16 and 24. A key that two experts "
        "share counts twice.",
        "Recipe and seeds are those of mita_table6, whose row avg2d is the one expert of the small scales.",
        "Rows and claims were fixed before two or four experts were trained.",
    ),
)
