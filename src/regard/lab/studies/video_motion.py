"""A question of our own: which mechanisms follow what moves?

Boards of three frames: garments move by a cell from frame to frame, two of each kind. Where one was at first, and so
which digit stood beside it, follows from what it looks like and from how it moved; one frame, or one cell in all
frames, does not tell.
"""

from regard.lab.engine.study import Claim, Row, Study
from regard.lab.studies.probes.names import BASELINE
from regard.lab.studies.probes.study import CONTROLS, METRIC, setting_on
from regard.mixers import SKA, Agent, Linear, MiTA, Window

_ROWS = (
    *CONTROLS,
    Row("no mixing in time", Window(size=(1, 6, 6)), control=True, notes=("attention within each frame",)),
    Row("no mixing in space", Window(size=(3, 1, 1)), control=True, notes=("attention within a cell's frames",)),
    Row("MiTA", MiTA(m=(3, 3, 3), k=27)),
    Row("Agent", Agent(m=(3, 3, 3))),
    Row("Linear", Linear()),
    Row("Window", Window(size=(3, 3, 3))),
    Row("SKA", SKA()),
)
_BOARDS = "digit_boards(ability=motion)"

STUDY = Study(
    name="video_motion",
    title="Which mechanisms follow what moves",
    source="Regard",
    question="Two garments of each kind move over three frames: which digit stood beside this one in the first frame?",
    baseline=BASELINE,
    metric=METRIC,
    settings={
        "smoke": setting_on(_BOARDS, _ROWS, 2, host="vit_desk_video(frames=3, patch=14, dim=16, depth=1)", limit=64),
        "desk": setting_on(_BOARDS, _ROWS, 4),
    },
    claims=(
        Claim("MiTA", BASELINE, METRIC, within=3),
        *(Claim(BASELINE, row, METRIC) for row in ("Agent", "Linear", "Window", "SKA")),
    ),
    notes=(
        "MiTA's and Agent's landmarks are a quarter of the 108 tokens, as in the probes; MiTA's keys as many.",
        "Who knows the garment but not its way can answer 55 % of the questions: one of two digits.",
        "Recipe and claims were fixed after one pilot of softmax attention and of both controls.",
    ),
)
