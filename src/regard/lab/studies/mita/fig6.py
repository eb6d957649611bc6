"""Mixture-of-Top-k Attention, Figure 6: accuracy over numbers m of landmarks and k of keys, trained for each pair."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from regard.lab.engine.analysis import Analysis, Source, trained_runs
from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CANVAS_RECIPE, CONTROLS, DEIT_RECIPE
from regard.lab.studies.papers import MITA_SOURCE
from regard.mixers import MiTA, Softmax
from regard.pages.sheets import Cell, Chart, Picture, Sheet

from .recipes import CIFAR100_RECIPE, CIFAR100_TASK, DEIT_TASK, SMOKE_TASK

NAME = "mita_fig6"
_BASELINE = "Softmax"


def label(m: int, k: int) -> str:
    """The label of the row with m landmarks and k keys."""
    return f"m {m}, k {k}"


def _rows(landmarks: Sequence[int], keys: Sequence[int]) -> tuple[Row, ...]:
    """Softmax, the controls, and every pair."""
    pairs = [Row(label(m, k), MiTA(m=m, k=k)) for m in landmarks for k in keys]
    return (Row(_BASELINE, Softmax()), *CONTROLS, *pairs)


_NUMBERS = (9, 16, 25, 36, 49, 64)
STUDY = Study(
    name=NAME,
    title="Landmarks and keys of MiTA, trained for each pair",
    source=f"{MITA_SOURCE}, Figure 6",
    question="What does accuracy gain from more landmarks, and what from more keys?",
    baseline=_BASELINE,
    settings={
        "smoke": Setting(SMOKE_TASK, CANVAS_RECIPE, _rows((4, 9), (4, 9)), seeds=2),
        "desk": Setting(CIFAR100_TASK, CIFAR100_RECIPE, _rows((4, 16, 36), (4, 16, 36, 64))),
        "paper": Setting(replace(DEIT_TASK, data="CIFAR100", classes=100), DEIT_RECIPE, _rows(_NUMBERS, _NUMBERS)),
    },
    claims=(
        *(Claim(label(m, k), label(16, 16), "top1") for m, k in ((36, 36), (16, 64), (36, 16))),
        Claim(label(16, 36), label(36, 16), "top1"),
    ),
    notes=(
        "The paper names neither the network nor the recipe and prints no numbers: here DeiT-T and its recipe on "
        "CIFAR-100 at 224 pixels, m and k from 9 to 64. Desk scale: 10,000 images of CIFAR-100 in 24 x 24 windows.",
        "Claims: larger m and k both help, and k should rather be larger than m (Appendix A of the paper).",
        "The analysis mita_fig6_map draws the map.",
    ),
)


def heat(source: Source) -> Sequence[Sheet | Picture]:
    """Mean accuracy over the finished seeds of every pair as a map, with the MACs of the network."""
    accuracies: dict[str, list[float]] = {}
    macs: dict[str, int | None] = {}
    for name, _, key in trained_runs(source, NAME):
        outcome = source.outcome(key)
        accuracies.setdefault(name, []).append(float(outcome["metrics"]["top1"]))
        macs[name] = outcome.get("macs")
    plain = fmean(accuracies[_BASELINE]) if _BASELINE in accuracies else None
    pairs = {row.label: row.mixer for row in STUDY.rows(source.scale) if isinstance(row.mixer, MiTA)}
    lines: list[tuple[Cell, ...]] = []
    for name, mixer in pairs.items():
        if name in accuracies:
            top1, count = fmean(accuracies[name]), macs[name]
            difference = None if plain is None else round(top1 - plain, 2)
            millions = None if count is None else round(count / 1e6, 2)
            lines.append((mixer.number, mixer.k, round(top1, 2), difference, len(accuracies[name]), millions))
    against = "Softmax is not trained yet." if plain is None else f"Softmax attention has {plain:.2f}."
    note = f"{len(lines)} of {len(pairs)} pairs are trained; means over their finished seeds. {against}"
    columns = ("m", "k", "top-1", "against softmax", "seeds", "MMACs")
    chart = Chart(kind="heat", x="m", y="k", value="top-1")
    return [Sheet(title=ANALYSIS.title, columns=columns, rows=tuple(lines), note=note, chart=chart)]


ANALYSIS = Analysis(
    name="mita_fig6_map", title="Accuracy over landmarks and keys", source=f"{MITA_SOURCE}, Figure 6", of=NAME,
    question="Which pairs of m and k are worth their cost?", compute=heat,
    notes=("The paper's map is of CIFAR-100 and prints no numbers.",),
)  # fmt: skip
