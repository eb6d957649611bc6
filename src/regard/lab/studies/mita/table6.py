"""Mixture-of-Top-k Attention, Table 6: kinds of landmarks, their number, and single branches."""

from collections.abc import Sequence
from dataclasses import replace

from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CONTROLS, DEIT_RECIPE
from regard.lab.studies.papers import MITA_SOURCE
from regard.mixers import MiTA

from .recipes import DEIT_TASK, small_settings

# landmarks -> published top-1
_EXTRACTORS = {
    "avg2d": 71.1, "random": 70.6, "learned": 66.3, "avg1d": 70.4, "conv": 67.0, "dwconv": 68.8, "ToMe": 71.3,
}  # fmt: skip
_GRID = {(16, 16): 70.0, (16, 25): 71.0, (25, 16): 70.5, (25, 36): 71.7, (36, 25): 71.2, (36, 36): 71.7}
_COMPRESS = (
    "The table prints no m for this row; its 70.3 is also that of Agent attention in Table 2, and presumably of that "
    "model, with 49 landmarks.",
)
_ROUTE = (
    "Twice the keys, so that a query sees as many entries as with both branches. The paper doubles k in the caption of "
    "Table 5 only; its code has k = 50 for this row.",
)


def rows_of(number: int, grid: Sequence[tuple[int, int]], published: bool = False) -> tuple[Row, ...]:
    """Kinds of landmarks at m = k = number, other pairs (m, k), and single branches."""

    def paper(top1: float | int) -> dict[str, float | int]:
        return {"top1": top1} if published else {}

    base = MiTA(m=number, k=number)
    return (
        *(
            Row(label, replace(base, landmarks=label.lower()), paper=paper(top1))  # type: ignore[arg-type]
            for label, top1 in _EXTRACTORS.items()
        ),
        *(Row(f"m {m}, k {k}", MiTA(m=m, k=k), paper=paper(_GRID.get((m, k), 0))) for m, k in grid),
        Row("compress only", replace(base, branches="compress"), paper=paper(70.3), notes=_COMPRESS),
        Row("route only", replace(base, k=2 * number, branches="route"), paper=paper(70.8), notes=_ROUTE),
        *CONTROLS,
    )


STUDY = Study(
    name="mita_table6",
    title="Landmarks, their number, and the branches of MiTA",
    source=f"{MITA_SOURCE}, Table 6",
    question="Which landmarks does MiTA need, how many, and does it need both branches?",
    baseline="avg2d",
    settings={
        **small_settings(
            rows_of(4, ((4, 9), (9, 4), (9, 9))), rows_of(16, ((9, 9), (9, 16), (16, 9), (16, 25), (25, 16), (25, 25)))
        ),
        "paper": Setting(DEIT_TASK, DEIT_RECIPE, rows_of(25, tuple(_GRID), published=True)),
    },
    claims=tuple(
        Claim(a, b, "top1", by=by)
        for a, b, by in (
            ("avg2d", "random", 0.5), ("avg2d", "learned", 4.8), ("avg2d", "avg1d", 0.7), ("avg2d", "conv", 4.1),
            ("avg2d", "dwconv", 2.3), ("ToMe", "avg2d", 0.2), ("avg2d", "compress only", 0.8),
            ("avg2d", "route only", 0.3), ("m 25, k 36", "avg2d", 0.6), ("m 16, k 25", "m 25, k 16", 0.5),
            ("route only", "compress only", 0.5),
        )
    ),
    notes=(
        "avg2d is MiTA with m = k = 25 (desk: 16, smoke: 4); the other landmarks and the single branches have the same "
        "numbers.",
        "The paper prints no kernels of conv and dwconv: here stride floor(h / m_h) and the kernel that reaches the "
        "border, starting as the mean of the window.",
        "random draws new patch tokens in each training step, and uses one fixed set in the test.",
        "Desk scale has 13 epochs and three seeds, which can show differences of 2 points or more: learned, conv and "
        "dwconv can be judged.",
    ),
)  # fmt: skip
