"""Mixture-of-Top-k Attention, Figures 3, 4, 8, 9 and 10, read from the trained runs of `mita_table2`.

Pictures are of scikit-learn's photographs (its digits for grey images). Averages and accuracies are of the first test
images of the study's own set.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import Grid, GridError, MixerConfig
from regard.lab.analysis import Analysis, Cell, Chart, Picture, Sheet, Source, trained_runs
from regard.mixers.mita.mita import MiTA
from regard.mixers.shared.landmarks import pool_matrix, windows_of
from regard.mixers.spelling import spell
from regard.swapping.swap import retune, swap
from regard.tasks.classification import Classification
from regard.train.load import trained
from regard.train.run import Run

from .expert_choices import Choice, choices, first_inputs, overlay, photograph
from .table2 import STUDY

EVALUATED = 2000
"""Test images for one accuracy."""
PICTURED = 64
"""Test images for averages over selections."""
SEEDS = 3
"""Runs of a row that are averaged in Figure 9."""
_NUMBERS = (4, 9, 16, 25, 36, 49, 64)
_SOURCE = "MiTA, arXiv 2602.01219"
_STUDY = "mita_table2"


def _first(source: Source, row: str) -> Run:
    """The first finished run of a row. Raises: ConfigError or StoreError if there is none."""
    return source.run(trained_runs(source, _STUDY, row)[0][2])


def _some(source: Source, rows: Sequence[str]) -> dict[str, list[Run]]:
    """The first `SEEDS` finished runs of the rows that have any. Raises: as `_first`, if none has."""
    found: dict[str, list[Run]] = {}
    for row, _, key in trained_runs(source, _STUDY):
        if row in rows and len(found.setdefault(row, [])) < SEEDS:
            found[row].append(source.run(key))
    return found or {rows[0]: [_first(source, rows[0])]}


def _accuracy(model: nn.Module, run: Run) -> float:
    """Top-1 accuracy in percent on at most `EVALUATED` test images, as a task's `limit` takes them."""
    task = run.task
    if isinstance(task, Classification):
        task = task.at_most(EVALUATED)
    return task.score(model, torch.device("cpu")).metrics[task.metric]


# pictures: what the experts of one network choose


def keys_of(choice: Choice) -> Tensor:
    """Which cells each expert gathers, (B, H, m, cells) of 0 and 1."""
    grid, plan = choice.grid, choice.plan
    member = torch.zeros(*plan.keys.shape[:3], grid.tokens).scatter(-1, plan.keys, 1.0)
    return member[..., grid.span]


def queries_of(choice: Choice) -> Tensor:
    """Which cells are routed to each expert, (B, H, m, cells) of 0 and 1."""
    number = choice.plan.keys.shape[2]
    routed = torch.nn.functional.one_hot(choice.plan.experts, number).sum(-2).clamp(max=1)  # (B, H, N, m)
    return routed.mT[..., choice.grid.span].float()


def _tested(run: Run, model: nn.Module) -> dict[str, Choice]:
    return choices(model, first_inputs(run.task, PICTURED))


def figure3(source: Source) -> Sequence[Sheet | Picture]:
    """Keys and queries of the expert whose landmark lies in the middle of the picture, in every layer."""
    run = _first(source, "MiTA")
    mixer: Any = run.mixer
    shown = photograph(run.task)
    parts: list[Sheet | Picture] = []
    lines: list[tuple[Cell, ...]] = []
    for layer, choice in choices(trained(run, source.store), shown.inputs).items():
        expert = middle(mixer, choice.grid)
        keys, queries = (found[0, :, expert].mean(0) for found in (keys_of(choice), queries_of(choice)))
        frame = _window(mixer, choice, expert)
        layers = {
            "gathered keys": overlay(keys, choice.grid, frame),
            "routed queries": overlay(queries, choice.grid, frame),
        }
        parts.append(Picture(title=f"{layer}, expert {expert}", image=shown.image, note=shown.note, layers=layers))
        lines.append((layer, expert, int((keys > 0).sum()), int((queries > 0).sum()), len(keys)))
    sheet = Sheet(
        title="Cells of one expert",
        columns=("layer", "expert", "cells gathered by some head", "cells routed by some head", "cells"),
        rows=tuple(lines),
        note="Colour is the share of heads in which a cell is gathered, or routed to the expert; the red frame is the "
        "window over which its landmark is averaged.",
    )
    return [sheet, *parts]


def middle(mixer: MiTA, grid: Grid) -> int:
    """The landmark in the middle of the grid; of an even number of rows (columns) of windows the lower (right) one.

    Landmarks that are no windows of the picture have no place: of those, the middle number.
    """
    if mixer.landmarks != "avg2d":
        return mixer.number // 2
    rows, columns = windows_of(grid, mixer.m)
    return rows // 2 * columns + columns // 2


def _window(mixer: MixerConfig | None, choice: Choice, expert: int) -> Tensor | None:
    """Cells of the landmark's window, or None where landmarks have none."""
    if not isinstance(mixer, MiTA) or mixer.landmarks != "avg2d":
        return None
    return pool_matrix(choice.grid, mixer.m, policy=mixer.windows)[expert, choice.grid.span] > 0


def figure4(source: Source) -> Sequence[Sheet | Picture]:
    """How often each cell is gathered, and the share of cells that no expert of any head gathers, layer by layer."""
    run = _first(source, "MiTA")
    model, shown = trained(run, source.store), photograph(run.task)
    parts: list[Sheet | Picture] = []
    lines: list[tuple[Cell, ...]] = []
    tested = _tested(run, model)
    for place, (layer, choice) in enumerate(choices(model, shown.inputs).items(), 1):
        counts = keys_of(choice).sum((1, 2))[0]
        layers = {"times gathered": overlay(counts, choice.grid), "never gathered": overlay(counts == 0, choice.grid)}
        parts.append(Picture(title=layer, image=shown.image, note=shown.note, layers=layers))
        lines.append((place, layer, "photograph", _share(counts == 0), _extra(choice)))
        unseen = _share(keys_of(tested[layer]).sum((1, 2)) == 0)
        lines.append((place, layer, f"{len(tested[layer].plan.keys)} test images", unseen, _extra(tested[layer])))
    sheet = Sheet(
        title="Cells that no expert gathers",
        columns=("depth", "layer", "images", "share of cells", "extra tokens gathered"),
        rows=tuple(lines),
        note="Over all heads and experts. Such a cell is still in the values of the landmarks. Extra tokens (class, "
        "registers): the share that some expert gathers; none where the host has no such tokens.",
        chart=Chart(x="depth", y="share of cells", series="images"),
    )
    return [sheet, *parts]


def _share(where: Tensor) -> float:
    return round(float(where.float().mean()), 4)


def _extra(choice: Choice) -> float | None:
    """The share of extra tokens that some expert of some head gathers."""
    grid, plan = choice.grid, choice.plan
    if not grid.extra:
        return None
    member = torch.zeros(*plan.keys.shape[:3], grid.tokens).scatter(-1, plan.keys, 1.0).amax((1, 2))
    cells = torch.zeros(grid.tokens, dtype=torch.bool)
    cells[grid.span] = True
    return _share(member[:, ~cells])


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Means over experts, heads and images.

    found, by_chance: intersection over union. empty: share of experts without queries.
    """

    found: float
    by_chance: float
    empty: float


def overlap(keys: Tensor, queries: Tensor) -> Overlap:
    """How far the cells that an expert gathers are those that are routed to it; both (..., cells) of 0 and 1.

    by_chance: for random sets of the same sizes a and b of n cells, (ab / n) / (a + b - ab / n). An expert without
    queries counts 0; hard clustering would give 1.
    """
    both, a, b = (keys * queries).sum(-1), keys.sum(-1), queries.sum(-1)
    chance = a * b / keys.shape[-1]
    pairs = ((both, a + b - both), (chance, a + b - chance))
    found, by_chance = (float((part / whole.clamp_min(1e-9)).mean()) for part, whole in pairs)
    return Overlap(found=found, by_chance=by_chance, empty=float((b == 0).float().mean()))


def figure8(source: Source) -> Sequence[Sheet | Picture]:
    """Overlap of keys and queries of an expert, layer by layer, between two lines of reference."""
    run = _first(source, "MiTA")
    lines: list[tuple[Cell, ...]] = []
    empty: list[tuple[Cell, ...]] = []
    for place, (layer, choice) in enumerate(_tested(run, trained(run, source.store)).items(), 1):
        seen = overlap(keys_of(choice), queries_of(choice))
        for name, value in (
            ("trained", round(seen.found, 4)),
            ("random sets", round(seen.by_chance, 4)),
            ("hard clustering", 1.0),
        ):
            lines.append((place, layer, name, value))
        empty.append((place, layer, round(seen.empty, 4)))
    return [
        Sheet(
            title="Overlap of the keys and queries of an expert",
            columns=("depth", "layer", "of", "intersection over union"),
            rows=tuple(lines),
            note=f"Mean over experts, heads and {PICTURED} test images at most; cells only. An expert without queries "
            "counts 0. Random sets have the sizes of the trained ones.",
            chart=Chart(x="depth", y="intersection over union", series="of"),
        ),
        Sheet(title="Experts without queries", columns=("depth", "layer", "share"), rows=tuple(empty)),
    ]


# other mechanisms, and other numbers, in a trained network


def exchanged(model: nn.Module, mixer: MixerConfig) -> nn.Module:
    """A copy of a trained network with another mechanism and the same weights."""
    return swap(copy.deepcopy(model), mixer).eval()


_EXCHANGED = ("Softmax", "Agent", "MiTA")


def figure9(source: Source) -> Sequence[Sheet | Picture]:
    """Accuracy of networks that were trained with one mechanism and run with another, nothing being trained again."""
    mixers = {row.label: row.mixer for row in STUDY.rows(source.scale, ",".join(_EXCHANGED))}
    found = _some(source, _EXCHANGED)
    lines: list[tuple[Cell, ...]] = []
    for row, runs in found.items():
        accuracies: dict[str, list[float]] = {other: [] for other in mixers}
        for run in runs:
            model = trained(run, source.store)
            for other, mixer in mixers.items():
                tested = model if other == row or mixer is None else exchanged(model, mixer)
                accuracies[other].append(_accuracy(tested, run))
        own = fmean(accuracies[row])
        lines += [
            (row, other, round(fmean(values), 2), round(100 * fmean(values) / own, 1), len(runs))
            for other, values in accuracies.items()
        ]
    said = ", ".join(spell(mixer) for mixer in mixers.values() if mixer is not None)
    left = [row for row in _EXCHANGED if row not in found]
    missing = f" Not trained yet: {', '.join(left)}." if left else ""
    return [
        Sheet(
            title="Another mechanism at inference",
            columns=("trained with", "run with", "top-1", "percent of its own", "runs"),
            rows=tuple(lines),
            note=f"{said}, on {EVALUATED} test images at most. All have the same parameters (Agent without bias), so "
            f"that every network runs with each. The paper omits the diagonal.{missing}",
            chart=Chart(
                kind="heat",
                x="run with",
                y="trained with",
                value="top-1",
                outlines={"run as trained": tuple((row, row) for row in found)},
            ),
        )
    ]


def retuned(model: nn.Module, run: Run, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Accuracy with other numbers (m, k) of a trained MiTA network; numbers that its grid cannot have are left out.

    The model is left with the last numbers.
    """
    found = {}
    for m, k in pairs:
        try:
            found[m, k] = _accuracy(retune(model, m=m, k=k), run)
        except GridError:
            continue
    return found


def boundaries(found: Mapping[tuple[int, int], float], trained_at: tuple[int, int]) -> dict[tuple[int, int], str]:
    """Where an accuracy lies: not below that of the training point, at least 99 % of it, or below."""
    own = found[trained_at]
    words = {pair: "at least as trained" if top1 >= own else "at least 99 %" for pair, top1 in found.items()}
    return {pair: words[pair] if top1 >= 0.99 * own else "below" for pair, top1 in found.items()}


def figure10(source: Source) -> Sequence[Sheet | Picture]:
    """Accuracy of a trained network over (m, k) at inference, with the point of training and two boundaries."""
    run = _first(source, "MiTA")
    mixer: Any = run.mixer
    model = trained(run, source.store)
    tokens = next(iter(choices(model, first_inputs(run.task, 1)).values())).grid.tokens
    numbers = sorted({number for number in (*_NUMBERS, mixer.number, mixer.k) if number <= tokens})
    found = retuned(model, run, [(m, k) for m in numbers for k in numbers])
    point = (mixer.number, mixer.k)
    where = boundaries(found, point)
    rows = tuple(
        (m, k, round(top1, 2), round(100 * top1 / found[point], 1), where[m, k]) for (m, k), top1 in found.items()
    )
    return [
        Sheet(
            title="Other numbers at inference",
            columns=("m", "k", "top-1", "percent of trained", "where"),
            rows=rows,
            note=f"Trained with m = {point[0]}, k = {point[1]} (marked): {found[point]:.2f} on {EVALUATED} test images "
            f"at most. {_told(where, 'at least as trained')} {_told(where, 'at least 99 %')}",
            chart=Chart(kind="heat", x="m", y="k", value="top-1", mark=point, outlines=outlines(where)),
        )
    ]


def outlines(where: Mapping[tuple[int, int], str]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The numbers inside each boundary: those that are at least as good as trained also have at least 99 % of it."""
    return {
        "at least as trained": tuple(pair for pair, said in where.items() if said == "at least as trained"),
        "at least 99 % of it": tuple(pair for pair, said in where.items() if said != "below"),
    }


def _told(where: Mapping[tuple[int, int], str], word: str) -> str:
    """A boundary in words: how many of the numbers lie there, and the cheapest."""
    inside = [pair for pair, said in where.items() if said == word]
    if not inside:
        return f"{word.capitalize()}: nowhere."
    cheapest = min(inside, key=lambda pair: (2 * pair[0] + pair[1], pair))  # 4 N m C + 2 N k C
    return f"{word.capitalize()}: {len(inside)} of {len(where)}, the cheapest m = {cheapest[0]}, k = {cheapest[1]}."


_NOTE = (
    "The network is the first finished seed of the row MiTA; a smoke run is hardly trained, and shows the road only."
)
FIGURE3 = Analysis(
    name="mita_fig3",
    title="What one expert gathers, and who is routed to it",
    source=f"{_SOURCE}, Figure 3",
    question="Do the keys and queries of an expert belong together?",
    compute=figure3,
    of=_STUDY,
    notes=(_NOTE,),
)
FIGURE4 = Analysis(
    name="mita_fig4",
    title="Cells that no expert gathers",
    source=f"{_SOURCE}, Figure 4",
    question="Does choosing keys prune the picture?",
    compute=figure4,
    of=_STUDY,
    notes=(_NOTE,),
)
FIGURE8 = Analysis(
    name="mita_fig8",
    title="Overlap of keys and queries",
    source=f"{_SOURCE}, Figure 8",
    question="How near is an expert to a cluster, whose keys and queries are the same cells?",
    compute=figure8,
    of=_STUDY,
    notes=(_NOTE,),
)
FIGURE9 = Analysis(
    name="mita_fig9",
    title="Another mechanism at inference",
    source=f"{_SOURCE}, Figure 9",
    question="What is left of a network that runs with another mechanism than it was trained with?",
    compute=figure9,
    of=_STUDY,
    notes=(
        "The paper prints no numbers here; its text says that networks trained with softmax attention keep more than "
        "95 % with MiTA.",
        f"Means over the first {SEEDS} finished seeds of each row.",
    ),
)
FIGURE10 = Analysis(
    name="mita_fig10",
    title="Other numbers of landmarks and keys at inference",
    source=f"{_SOURCE}, Figure 10",
    question="How many landmarks and keys does a trained network need?",
    compute=figure10,
    of=_STUDY,
    notes=(_NOTE, "The paper takes networks of 1024 and 196 tokens and prints no numbers."),
)
