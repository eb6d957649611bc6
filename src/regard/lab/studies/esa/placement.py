"""An Empirical Study of Spatial Attention Mechanisms, Section 4: where attention is put into a residual block."""

from regard.lab.engine.study import Claim, Row, Study
from regard.lab.studies.controls import CONTROLS
from regard.lab.studies.papers import ESA_PAPER
from regard.mixers import Factors

from .dense import NOTES, SCALES, TASKS, settings

_ALL = Factors(terms="1111")
_PLACES = {"1111 parallel": "parallel=True", "1111 in conv4": "stages=(3,)", "1111 in conv5": "stages=(4,)"}


def _rows(scale: str) -> tuple[Row, ...]:
    host = TASKS["segmentation"][scale].host
    return (
        Row("1111", _ALL, notes=("After the 3x3 convolution of each block of conv4 and conv5, and in the head.",)),
        *(Row(label, _ALL, host=f"{host[:-1]}, {option})") for label, option in _PLACES.items()),
        Row("1111 without the head's", _ALL, task={"head": "conv" if scale == "paper" else "conv(heads=2)"}),
        *CONTROLS,
    )


STUDY = Study(
    name="esa_placement",
    title="Attention in series or in parallel, and at which place",
    source=f"{ESA_PAPER}, Section 4",
    question="Does it matter whether attention is after the convolution of a residual block or beside it, and where?",
    baseline="1111",
    metric="miou",
    settings=settings("segmentation", {scale: _rows(scale) for scale in SCALES}),
    claims=tuple(Claim(label, "1111", "miou", within=2.0) for label in (*_PLACES, "1111 without the head's")),
    notes=(
        "The paper says in a sentence that results are similar for different designs; it prints no numbers.",
        "1111 and both controls are those of `esa_fig3_segmentation`, and are trained once for both.",
        *NOTES["segmentation"],
    ),
)
