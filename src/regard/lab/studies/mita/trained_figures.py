"""Mixture-of-Top-k Attention, Figures 3, 4, 8, 9 and 10, read from the trained runs of `mita_table2`.

Maps are drawn over a photograph of scikit-learn (over a digit for grey images). Averages and accuracies are over the
first test images of the study's data.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import Grid, GridError, MixerConfig
from regard.lab.engine.analysis import Analysis, Source, trained_runs
from regard.lab.engine.study import Study
from regard.lab.studies.overlays import SMOKE_NOTE, first_inputs, overlay, photograph
from regard.lab.studies.papers import MITA_SOURCE
from regard.lab.tasks.classification import Classification
from regard.lab.train.load import load_trained
from regard.lab.train.run import Run
from regard.mixers import MiTA
from regard.mixers.shared.landmarks import landmark_windows, pool_matrix
from regard.mixers.spelling import spell
from regard.pages.sheets import Cell, Chart, Picture, Sheet
from regard.swapping.swap import retune, swap

from .expert_choices import Choice, choices
from .table2 import STUDY
from .table7 import STUDY as TABLE7

EVALUATED = 2000
"""Test images for one accuracy."""
TEST_IMAGES = 64
"""Test images for averages over selections."""
SEEDS = 3
"""Runs of a row that are averaged in Figure 9."""
_NUMBERS = (4, 9, 16, 25, 36, 49, 64)


def _first(source: Source, row: str) -> Run:
    """The first finished run of a row. Raises: ConfigError or StoreError if there is none."""
    return source.run(trained_runs(source, STUDY.name, row)[0][2])


def _several(source: Source, study: Study, rows: Sequence[str]) -> dict[str, list[Run]]:
    """The first `SEEDS` finished runs of each row that has any. Raises: ConfigError or StoreError if no row has one."""
    extra = study.setting(source.scale).task.extra
    runs: dict[str, list[Run]] = {}
    for row, _, key in trained_runs(source, study.name):
        if row in rows and len(runs.setdefault(row, [])) < SEEDS:
            runs[row].append(source.run(key).with_extra(extra))
    return runs or {rows[0]: [source.run(trained_runs(source, study.name, rows[0])[0][2])]}


def _accuracy(model: nn.Module, run: Run) -> float:
    """Top-1 accuracy in percent on at most `EVALUATED` test images, in the order of a task's `limit`."""
    task = run.task
    if isinstance(task, Classification):
        task = task.at_most(EVALUATED)
    return task.score(model, torch.device("cpu")).metrics[task.metric]


# what the experts of one network choose


def keys_of(choice: Choice) -> Tensor:
    """The patch tokens that each expert gathers, (B, H, m, cells) of 0 and 1."""
    return _membership(choice)[..., choice.grid.span]


def _membership(choice: Choice) -> Tensor:
    """The same of all tokens, (B, H, m, N)."""
    keys = choice.plan.keys
    return torch.zeros(*keys.shape[:3], choice.grid.tokens).scatter(-1, keys, 1.0)


def queries_of(choice: Choice) -> Tensor:
    """The patch tokens that are routed to each expert, (B, H, m, cells) of 0 and 1."""
    number = choice.plan.keys.shape[2]
    routed = torch.nn.functional.one_hot(choice.plan.experts, number).sum(-2).clamp(max=1)  # (B, H, N, m)
    return routed.mT[..., choice.grid.span].float()


def _choices_on_test_images(run: Run, model: nn.Module) -> dict[str, Choice]:
    return choices(model, first_inputs(run.task, TEST_IMAGES))


def figure3(source: Source) -> Sequence[Sheet | Picture]:
    """Keys and queries of the expert whose landmark lies in the middle of the picture, in every layer."""
    run = _first(source, "MiTA")
    mixer: Any = run.mixer
    picture = photograph(run.task)
    parts: list[Sheet | Picture] = []
    lines: list[tuple[Cell, ...]] = []
    for layer, choice in choices(load_trained(run, source.store), picture.inputs).items():
        expert = middle(mixer, choice.grid)
        keys, queries = (tokens[0, :, expert].mean(0) for tokens in (keys_of(choice), queries_of(choice)))
        frame = _window(mixer, choice, expert)
        drawn = {"gathered keys": keys, "routed queries": queries}
        layers = {name: overlay(share, choice.grid, frame) for name, share in drawn.items()}
        parts.append(Picture(title=f"{layer}, expert {expert}", image=picture.image, note=picture.note, layers=layers))
        lines.append((layer, expert, int((keys > 0).sum()), int((queries > 0).sum()), len(keys)))
    sheet = Sheet(
        title="Patch tokens of one expert",
        columns=("layer", "expert", "cells gathered by some head", "cells routed by some head", "cells"),
        rows=tuple(lines),
        note="Colour is the share of heads in which a patch token is gathered, or routed to the expert; the red frame "
        "is the window over which its landmark is averaged.",
    )
    return [sheet, *parts]


def middle(mixer: MiTA, grid: Grid) -> int:
    """The index of the landmark in the middle of the grid; of an even number of rows or columns, below or right of it.

    Landmarks that are not means of windows have no position: of those it is the middle index.
    """
    if mixer.landmarks != "avg2d":
        return mixer.number // 2
    rows, columns = landmark_windows(grid, mixer.m)
    return rows // 2 * columns + columns // 2


def _window(mixer: MixerConfig | None, choice: Choice, expert: int) -> Tensor | None:
    """True in the landmark's window, (cells,), or None where landmarks have no windows."""
    if not isinstance(mixer, MiTA) or mixer.landmarks != "avg2d":
        return None
    return pool_matrix(choice.grid, mixer.m, policy=mixer.windows)[expert, choice.grid.span] > 0


def figure4(source: Source) -> Sequence[Sheet | Picture]:
    """How often each patch token is gathered, and the share that no expert of any head gathers, layer by layer."""
    run = _first(source, "MiTA")
    model, picture = load_trained(run, source.store), photograph(run.task)
    parts: list[Sheet | Picture] = []
    lines: list[tuple[Cell, ...]] = []
    tested = _choices_on_test_images(run, model)
    for depth, (layer, choice) in enumerate(choices(model, picture.inputs).items(), 1):
        counts = keys_of(choice).sum((1, 2))[0]
        layers = {"times gathered": overlay(counts, choice.grid), "never gathered": overlay(counts == 0, choice.grid)}
        parts.append(Picture(title=layer, image=picture.image, note=picture.note, layers=layers))
        lines.append((depth, layer, "photograph", _share(counts == 0), _extra(choice)))
        never = _share(keys_of(tested[layer]).sum((1, 2)) == 0)
        lines.append((depth, layer, f"{len(tested[layer].plan.keys)} test images", never, _extra(tested[layer])))
    sheet = Sheet(
        title="Patch tokens that no expert gathers",
        columns=("depth", "layer", "images", "share of cells", "extra tokens gathered"),
        rows=tuple(lines),
        note="Over all heads and experts. The landmarks still compress such tokens. Extra tokens gathered: the share "
        "of prefix and suffix tokens (class, registers) that some expert gathers.",
        chart=Chart(x="depth", y="share of cells", series="images"),
    )
    return [sheet, *parts]


def _share(where: Tensor) -> float:
    return round(float(where.float().mean()), 4)


def _extra(choice: Choice) -> float | None:
    """The share of prefix and suffix tokens that some expert of some head gathers."""
    grid = choice.grid
    if not grid.extra:
        return None
    patches = torch.zeros(grid.tokens, dtype=torch.bool)
    patches[grid.span] = True
    return _share(_membership(choice).amax((1, 2))[:, ~patches])


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Means over experts, heads and images.

    measured, by_chance: intersection over union. empty: share of experts without queries.
    """

    measured: float
    by_chance: float
    empty: float


def overlap(keys: Tensor, queries: Tensor) -> Overlap:
    """Overlap of the patch tokens that an expert gathers and those routed to it; both (..., cells) of 0 and 1.

    by_chance: for random sets of the same sizes a and b of n tokens, (ab / n) / (a + b - ab / n). An expert without
    queries counts 0; hard clustering would give 1.
    """
    both, a, b = (keys * queries).sum(-1), keys.sum(-1), queries.sum(-1)
    chance = a * b / keys.shape[-1]
    pairs = ((both, a + b - both), (chance, a + b - chance))
    measured, by_chance = (float((part / whole.clamp_min(1e-9)).mean()) for part, whole in pairs)
    return Overlap(measured=measured, by_chance=by_chance, empty=float((b == 0).float().mean()))


def figure8(source: Source) -> Sequence[Sheet | Picture]:
    """Overlap of keys and queries of an expert, layer by layer, with two references."""
    run = _first(source, "MiTA")
    lines: list[tuple[Cell, ...]] = []
    empty: list[tuple[Cell, ...]] = []
    for depth, (layer, choice) in enumerate(_choices_on_test_images(run, load_trained(run, source.store)).items(), 1):
        result = overlap(keys_of(choice), queries_of(choice))
        shares = {"trained": result.measured, "random sets": result.by_chance, "hard clustering": 1.0}
        lines += [(depth, layer, name, round(value, 4)) for name, value in shares.items()]
        empty.append((depth, layer, round(result.empty, 4)))
    return [
        Sheet(
            title="Overlap of the keys and queries of an expert",
            columns=("depth", "layer", "of", "intersection over union"),
            rows=tuple(lines),
            note=f"Mean over experts, heads and {TEST_IMAGES} test images at most; patch tokens only. An expert "
            "without queries counts 0. Random sets have the sizes of the trained ones.",
            chart=Chart(x="depth", y="intersection over union", series="of"),
        ),
        Sheet(title="Experts without queries", columns=("depth", "layer", "share"), rows=tuple(empty)),
    ]


# other mechanisms, and other m and k, in a trained network


def exchange(model: nn.Module, mixer: MixerConfig) -> nn.Module:
    """A copy of a trained network with another mechanism and the same weights."""
    return swap(copy.deepcopy(model), mixer).eval()


def figure9(source: Source) -> Sequence[Sheet | Picture]:
    """Accuracy of networks that are trained with one mechanism and run with another, without further training."""
    return [_exchanged(source, STUDY, ("Softmax", "Agent", "MiTA"))]


def tuned_figure9(source: Source) -> Sequence[Sheet | Picture]:
    """The same of a trained network that was fine-tuned with each mechanism."""
    agent = next(row.label for row in TABLE7.rows(source.scale) if row.label.startswith("Agent"))
    return [_exchanged(source, TABLE7, ("Softmax", agent, "MiTA"))]


def _exchanged(source: Source, study: Study, labels: Sequence[str]) -> Sheet:
    """labels: rows of the study whose networks have the same parameters."""
    mixers = {row.label: row.mixer for row in study.rows(source.scale, ",".join(labels))}
    runs_of = _several(source, study, labels)
    lines: list[tuple[Cell, ...]] = []
    for row, runs in runs_of.items():
        accuracies: dict[str, list[float]] = {label: [] for label in mixers}
        for run in runs:
            model = load_trained(run, source.store)
            for label, mixer in mixers.items():
                network = model if label == row or mixer is None else exchange(model, mixer)
                accuracies[label].append(_accuracy(network, run))
        reference = fmean(accuracies[row])
        lines += [
            (row, label, round(fmean(values), 2), round(100 * fmean(values) / reference, 1), len(runs))
            for label, values in accuracies.items()
        ]
    spellings = ", ".join(spell(mixer) for mixer in mixers.values() if mixer is not None)
    untrained = [row for row in labels if row not in runs_of]
    missing = f" Not trained yet: {', '.join(untrained)}." if untrained else ""
    return Sheet(
        title="Another mechanism at inference",
        columns=("trained with", "run with", "top-1", "percent of its own", "runs"),
        rows=tuple(lines),
        note=f"{spellings}, on {EVALUATED} test images at most. All have the same parameters (Agent without bias), "
        f"so that every network runs with each. The paper omits the diagonal.{missing}",
        chart=Chart(kind="heat", x="trained with", y="run with", value="top-1",
                    outlines={"run as trained": tuple((row, row) for row in runs_of)}),
    )  # fmt: skip


def accuracies_at(model: nn.Module, run: Run, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Accuracy with other pairs (m, k) of a trained MiTA network; pairs that do not fit its grid are left out.

    The model keeps the last pair.
    """
    accuracies = {}
    for m, k in pairs:
        try:
            accuracies[m, k] = _accuracy(retune(model, m=m, k=k), run)
        except GridError:
            continue
    return accuracies


_BANDS = ("at least as trained", "at least 99 %")


def boundaries(accuracies: Mapping[tuple[int, int], float], trained_at: tuple[int, int]) -> dict[tuple[int, int], str]:
    """The band of each accuracy: at least that of the trained pair, at least 99 % of it, or below."""
    reference = accuracies[trained_at]
    return {
        pair: _BANDS[0] if top1 >= reference else _BANDS[1] if top1 >= 0.99 * reference else "below"
        for pair, top1 in accuracies.items()
    }


def figure10(source: Source) -> Sequence[Sheet | Picture]:
    """Accuracy of a trained network over (m, k) at inference, with the point of training and two boundaries."""
    run = _first(source, "MiTA")
    mixer: Any = run.mixer
    model = load_trained(run, source.store)
    tokens = next(iter(choices(model, first_inputs(run.task, 1)).values())).grid.tokens
    numbers = sorted({number for number in (*_NUMBERS, mixer.number, mixer.k) if number <= tokens})
    accuracies = accuracies_at(model, run, [(m, k) for m in numbers for k in numbers])
    point = (mixer.number, mixer.k)
    reference, bands = accuracies[point], boundaries(accuracies, point)
    rows = tuple(
        (m, k, round(top1, 2), round(100 * top1 / reference, 1), bands[m, k]) for (m, k), top1 in accuracies.items()
    )
    return [
        Sheet(
            title="Other numbers at inference",
            columns=("m", "k", "top-1", "percent of trained", "where"),
            rows=rows,
            note=f"Trained with m = {point[0]}, k = {point[1]} (marked): {reference:.2f} on {EVALUATED} test images at "
            f"most. {' '.join(_band_note(band, inside, len(bands)) for band, inside in outlines(bands).items())}",
            chart=Chart(kind="heat", x="m", y="k", value="top-1", mark=point, outlines=outlines(bands)),
        )
    ]


def outlines(bands: Mapping[tuple[int, int], str]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The pairs (m, k) inside each boundary; the second boundary contains the first."""
    return {
        "at least as trained": tuple(pair for pair, band in bands.items() if band == _BANDS[0]),
        "at least 99 % of it": tuple(pair for pair, band in bands.items() if band in _BANDS),
    }


def _band_note(name: str, inside: Sequence[tuple[int, int]], number: int) -> str:
    """How many of so many pairs lie inside a boundary, and the cheapest of them."""
    if not inside:
        return f"{name.capitalize()}: nowhere."
    cheapest = min(inside, key=lambda pair: (2 * pair[0] + pair[1], pair))  # 4 N m C + 2 N k C
    return f"{name.capitalize()}: {len(inside)} of {number}, the cheapest m = {cheapest[0]}, k = {cheapest[1]}."


_NOTE = f"The network is the first finished seed of the row MiTA; {SMOKE_NOTE}"


_NOTES9 = (
    "The paper prints no numbers here; its text says that networks trained with softmax attention keep more than 95 % "
    "with MiTA.",
    "This is Figure 9a, with the networks of `mita_table2` at the scale of the analysis; 9b (DeiT-S) is not drawn.",
    f"Means over the first {SEEDS} finished seeds of each row.",
)
_NOTES9_TUNED = (
    _NOTES9[0],
    "This is Figure 9 with the networks of `mita_table7`, which start from trained weights and are fine-tuned with "
    "each mechanism: at desk scale a DINOv2 ViT-S/14.",
    _NOTES9[2],
)
_NOTES10 = (
    _NOTE,
    "The paper has ViT-T at 512 pixels, 1024 tokens (10a), and ViT-L at 224 pixels, 196 tokens (10b), and prints no "
    "numbers. Here the network is that of `mita_table2`: DeiT-T at 224 pixels at paper scale.",
)
FIGURE3, FIGURE4, FIGURE8, FIGURE9, FIGURE10 = (
    Analysis(name=f"mita_fig{number}", title=title, source=f"{MITA_SOURCE}, Figure {number}", question=question,
             compute=compute, of=STUDY.name, notes=notes)
    for number, title, question, compute, notes in (
        (3, "Keys and queries of one expert", "Do the keys and queries of an expert belong together?", figure3,
         (_NOTE,)),
        (4, "Patch tokens that no expert gathers", "Does choosing keys prune the picture?", figure4, (_NOTE,)),
        (8, "Overlap of keys and queries",
         "How similar is an expert to a cluster, whose keys and queries are the same tokens?", figure8, (_NOTE,)),
        (9, "Another mechanism at inference",
         "How much of its accuracy does a network keep with another mechanism than it was trained with?", figure9,
         _NOTES9),
        (10, "Other numbers of landmarks and keys at inference",
         "How many landmarks and keys does a trained network need?", figure10, _NOTES10),
    )
)  # fmt: skip
TUNED_FIGURE9 = replace(
    FIGURE9, name="mita_fig9_tuned", title="Another mechanism after fine-tuning",
    compute=tuned_figure9, of=TABLE7.name, notes=_NOTES9_TUNED,
)  # fmt: skip
