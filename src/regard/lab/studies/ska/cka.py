"""A question of our own: do networks with static keys learn the features of networks with softmax attention?

The SKA paper wishes for such a comparison (Sec. 7). The rows are those of Table 1. Two networks that differ by their
seed alone have features that differ too: their similarity is what the others are compared with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import cast

import torch

from regard.core import StoreError
from regard.explain.cka import LayerSimilarity, compare_layers
from regard.lab.engine.analysis import Analysis, Source, trained_runs
from regard.lab.engine.study import Setting, Study
from regard.lab.studies.overlays import SMOKE_NOTE, first_inputs
from regard.lab.train.load import load_trained
from regard.lab.train.recipe import Recipe
from regard.pages.sheets import Cell, Chart, Picture, Sheet

from .table1 import STUDY as TABLE1

NAME = "ska_cka"
TEST_IMAGES = 128
"""Test images whose tokens are compared."""
_SOFTMAX, _OTHERS = "Softmax", ("SKA a", "CSKA")


def _setting(scale: str, rows_of: str, seeds: int, **recipe: int | str) -> Setting:
    """Of Table 1: the setting of a scale with the rows of another. recipe: fields that are changed."""
    setting, rows = TABLE1.setting(scale), {row.label: row for row in TABLE1.rows(rows_of)}
    labels = (_SOFTMAX, *_OTHERS, *(label for label, row in rows.items() if row.control))
    changed = replace(cast(Recipe, setting.recipe), **recipe)  # type: ignore[arg-type]
    return replace(setting, recipe=changed, rows=tuple(rows[label] for label in labels), seeds=seeds)


STUDY = Study(
    name=NAME,
    title="Features of static keys and of softmax attention",
    source="Regard",
    question="Do networks with static keys learn the same features as networks with softmax attention?",
    baseline=_SOFTMAX,
    settings={
        "smoke": _setting("smoke", "desk", 2),
        "desk": _setting("desk", "desk", 3, epochs=4, precision="32-true"),
        "paper": _setting("paper", "paper", 3),
    },
    notes=(
        "Rows, tasks and recipes are those of ska_table1, at desk scale with 4 epochs in float32.",
        "The study trains the networks; the analysis ska_cka_layers compares their features. Nothing is claimed: rows, "
        "seeds and images were fixed before any run was compared.",
    ),
)


def similarities(source: Source) -> dict[str, list[LayerSimilarity]]:
    """By row: the similarities of softmax's layers, seed i, with the row's, seed j, for all i and j that differ.

    Softmax with itself: i < j. Raises: StoreError if softmax has fewer than two finished seeds.
    """
    keys: dict[str, dict[int, str]] = {}
    for row, seed, key in trained_runs(source, NAME):
        keys.setdefault(row, {})[seed] = key
    seeds = keys.get(_SOFTMAX, {})
    if len(seeds) < 2:
        raise StoreError(f"{NAME} has {len(seeds)} finished runs of {_SOFTMAX}; the comparison needs two seeds")
    runs = {key: source.run(key) for row in (_SOFTMAX, *_OTHERS) for key in keys.get(row, {}).values()}
    models = {key: load_trained(run, source.store) for key, run in runs.items()}
    images = first_inputs(runs[next(iter(seeds.values()))].task, TEST_IMAGES)
    found: dict[str, list[LayerSimilarity]] = {}
    for row in (_SOFTMAX, *_OTHERS):
        pairs = [(i, j) for i in seeds for j in keys.get(row, {}) if (i < j if row == _SOFTMAX else i != j)]
        if pairs:
            found[row] = [compare_layers(models[seeds[i]], models[keys[row][j]], images) for i, j in pairs]
    return found


def sheets(source: Source) -> Sequence[Sheet | Picture]:
    """The similarity of equal layers, then that of all pairs of layers."""
    found = similarities(source)
    missing = [row for row in _OTHERS if row not in found]
    note = (
        f"Means over pairs of networks with different seeds; tokens of the first {TEST_IMAGES} test images, at the "
        "input of each attention layer. Softmax beside itself is what a seed alone changes; the last column is how far "
        "the mean lies below that."
    )
    note += f" Not trained yet: {', '.join(missing)}." if missing else ""
    columns = ("softmax beside", "depth", "layer", "CKA", "least", "greatest", "pairs", "below softmax")
    of_pairs = ("softmax beside", "depth of softmax", "depth of the other", "CKA")
    chart = Chart(x="depth", y="CKA", series="softmax beside")
    title = "The same layer of two networks"
    return [
        Sheet(title=title, columns=columns, rows=tuple(_layer_lines(found)), note=note, chart=chart),
        Sheet(title="All pairs of layers", columns=of_pairs, rows=tuple(_pair_lines(found))),
    ]


def _layer_lines(found: Mapping[str, Sequence[LayerSimilarity]]) -> list[tuple[Cell, ...]]:
    floor = [fmean(float(one.values[i, i]) for one in found[_SOFTMAX]) for i in range(len(found[_SOFTMAX][0].rows))]
    lines: list[tuple[Cell, ...]] = []
    for row, every in found.items():
        for i, layer in enumerate(every[0].rows):
            values = [float(one.values[i, i]) for one in every]
            mean = fmean(values)
            numbers = (round(mean, 4), round(min(values), 4), round(max(values), 4), len(values))
            lines.append((row, i + 1, layer, *numbers, round(floor[i] - mean, 4)))
    return lines


def _pair_lines(found: Mapping[str, Sequence[LayerSimilarity]]) -> list[tuple[Cell, ...]]:
    means = {row: torch.stack([one.values for one in every]).mean(0).tolist() for row, every in found.items()}
    return [
        (row, i + 1, j + 1, round(value, 4))
        for row, mean in means.items()
        for i, line in enumerate(mean)
        for j, value in enumerate(line)
    ]


ANALYSIS = Analysis(
    name="ska_cka_layers",
    title="Features of static keys beside those of softmax attention",
    source="Regard",
    question="In which layers do static keys lead to other features than softmax attention?",
    compute=sheets,
    of=NAME,
    notes=(
        "CKA is linear (Kornblith et al. 2019): 1 for features that differ by a rotation, a scale and a shift.",
        f"The first layer is before any attention. At smoke scale: {SMOKE_NOTE}",
    ),
)
