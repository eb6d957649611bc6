"""A question of our own: how must the landmarks and keys of MiTA grow with the number of tokens?

Recall by content on boards of 36, 144 and 576 cells, of which the same share shows and asks. Both numbers stay, grow
with the side of the board, or grow with its cells.
"""

from collections.abc import Mapping

from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CONTROLS
from regard.lab.studies.probes.study import METRIC, setting_on
from regard.mixers import MiTA, Softmax

SIDES = (6, 12, 24)
NUMBERS = {
    6: ((4, 4), (9, 9), (16, 16)),
    12: ((4, 4), (9, 9), (16, 16), (36, 36), (9, 36), (36, 9)),
    24: ((9, 9), (36, 36), (144, 144)),
}
"""Side -> the pairs (m, k)."""
SMALL: Mapping[str, int | str] = {"host": "vit_desk(patch=14, dim=16, depth=1, heads=2)", "limit": 64}
"""Fields of the task at smoke scale."""


def _data(side: int, boards: str) -> str:
    """Boards of side x side cells of which 5 of 9 cells are used, as the probes have it."""
    return f"{boards}(ability=content, pairs={side * side * 5 // 18}, side={side})"


def _label(side: int, m: int = 0, k: int = 0) -> str:
    """MiTA's m / k, or softmax, at a number of tokens."""
    return f"MiTA {m}/{k} at {side**2}" if m else f"softmax at {side**2}"


def _rows(boards: str, sides: tuple[int, ...]) -> tuple[Row, ...]:
    rows = []
    for side in sides:
        task = {} if side == 12 else {"data": _data(side, boards)}
        rows.append(Row(_label(side), Softmax(), task=task))
        rows += [Row(_label(side, m, k), MiTA(m=m, k=k), task=task) for m, k in NUMBERS[side]]
    return (*rows, *CONTROLS)


def recall(boards: str, side: int, rows: tuple[Row, ...], seeds: int, **small: int | str) -> Setting:
    """Recall by content on boards of a side. small: fields of the task that make it smaller."""
    return setting_on(_data(side, boards), rows, seeds, **small)


STUDY = Study(
    name="mita_growth",
    title="Landmarks and keys of MiTA for more tokens",
    source="Regard",
    question="How must the numbers of landmarks m and keys k grow with the number of tokens?",
    baseline=_label(12),
    metric=METRIC,
    settings={
        "smoke": recall("digit_boards", 12, _rows("digit_boards", (6, 12)), 2, **SMALL),
        "desk": recall("boards", 12, _rows("boards", SIDES), 4),
    },
    claims=(
        Claim(_label(12), _label(12, 9, 9), METRIC, than=(_label(6), _label(6, 9, 9))),
        *(Claim(_label(12, m, m), _label(12), METRIC, within=3) for m in (16, 36)),
        Claim(_label(12, 9, 36), _label(12, 36, 9), METRIC),
    ),
    notes=(
        "10, 40 or 160 garments lie on the board, each with a digit, and are shown again: 5 of 9 cells are used.",
        "The first claim: with the same m and k the loss is larger on 144 tokens than on 36. The next two: it is "
        "within 3 points where m and k grow with the side, or with the cells. The last: keys are worth more than "
        "landmarks.",
        "Claims and rows were fixed after one pilot of softmax attention on 144 tokens, and before MiTA was run there.",
        "A probe says what a mechanism can learn in a small network; it judges no claim about accuracy on images.",
    ),
)  # fmt: skip
