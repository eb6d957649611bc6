"""A question of our own: what does a swap keep of a real trained network, by mechanism, number of tokens and layers?

`focus_vit` with each mechanism, right after the swap and, at 224 pixels, after its layers have learned, as by `regard
distill`. Sizes, mechanisms and steps were fixed before the first result.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np

from regard.advice.distill import distill_model
from regard.advice.learning import Distillation
from regard.core import Grid, Site
from regard.files.records import read_record_if_present, write_record
from regard.lab.engine.analysis import Analysis, Source
from regard.measure.intervals import interval
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.spelling import parse_mixer
from regard.pages.sheets import Cell, Chart, Sheet
from regard.swapping.swap import swap

from .half_the_time import (
    LEARNED,
    Change,
    Likeness,
    OneSize,
    likeness,
    mean_and_bounds,
    outputs,
    progress,
    record_folder,
)
from .network import PATCH, FocusViT, focus_vit

NAME = "focus_vit_swaps"
MIXERS: Mapping[int, tuple[str, ...]] = {
    224: ("MiTA(m=25, k=25)", "Agent(m=36)", "Window(size=8)", "Linear()", "TopK(k=25)", "SKA()"),
    336: ("MiTA(m=49, k=49)", "Agent(m=81)", "Window(size=12)", "Linear()", "TopK(k=49)", "SKA()"),
    518: ("MiTA(m=121, k=121)", "Agent(m=196)", "Window(size=19)", "Linear()", "TopK(k=121)", "SKA()"),
    896: ("MiTA(m=400, k=400)", "Agent(m=576)", "Window(size=32)", "Linear()", "TopK(k=400)", "SKA()"),
}  # fmt: skip
"""Pixels of a side -> mechanisms, with the most landmarks or the largest window at up to 0.3 of softmax's products."""
JUDGED: Mapping[int, int] = {224: 100, 336: 100, 518: 100, 896: 40}
"""Pixels -> pictures that judge."""
ONLY_ALL = 896
"""Pixels from which on the thirds of the layers are not swapped alone."""
STEPS: Mapping[int, int] = {224: 200}
"""Pixels -> steps of four pictures in which layers learn."""
SEEDS = 3
"""Of learning."""
_SCORES = ("correlation", "IoU", "cosine")
_ABOUT = ("pixels", "tokens", "mechanism", "layers")


class _Size(OneSize):
    """found: what its record keeps, so that an interrupted analysis goes on: by mechanism, layers and seed of learning
    (None: nothing learned), the likeness of each picture."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size, folder, focus_vit(size), JUDGED[size])
        self.found: dict[str, Likeness] = (read_record_if_present(self.record) or {}).get("found", {})

    def compute(self) -> None:
        """All that the record lacks."""
        cases: list[tuple[str, str, int | None]]
        cases = [(mixer, layers, None) for layers in self.layers for mixer in MIXERS[self.size]]
        if self.size in STEPS:
            cases += [(mixer, "all", seed) for seed in range(SEEDS) for mixer in MIXERS[self.size]]
        for mixer, layers, seed in cases:
            key = f"{mixer} | {layers} | {seed}"
            if key not in self.found:
                progress(f"{self.size} pixels: {key}")
                scores = self._judge("; ".join(f"{name}={mixer}" for name in self.layers[layers]), seed)
                self.found[key] = {name: [round(x, 5) for x in scores[name]] for name in _SCORES}
                write_record(self.record, {"found": self.found})

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        """Groups of layers and their names."""
        names = [f"backbone.blocks.{i}.attn" for i in range(len(self.model.backbone.blocks))]
        thirds = [list(part) for part in np.array_split(names, 3) if len(part)] if self.size < ONLY_ALL else []
        numbers = [(names.index(part[0]) + 1, names.index(part[-1]) + 1) for part in thirds]
        return {"all": names} | {f"{a} to {b}": part for (a, b), part in zip(numbers, thirds, strict=True)}

    def _judge(self, plan: str, seed: int | None) -> Likeness:
        if seed is None:
            swapped = swap(copy.deepcopy(self.model), plan, example=self.user.example)
        else:
            how = Distillation(steps=STEPS[self.size], batch=4, seed=seed)
            none = Distillation(steps=0, batch=4)
            swapped = distill_model(self.user, plan, self.learned, how, none, report=progress).model
        return likeness(self.before, outputs(cast(FocusViT, swapped), self.seen))

    def scores(self, mixer: str, layers: str, seed: int | None = None) -> Likeness:
        return self.found[f"{mixer} | {layers} | {seed}"]

    def about(self, mixer: str, layers: str) -> tuple[Cell, ...]:
        return self.size, (self.size // PATCH) ** 2, mixer.partition("(")[0], layers

    def rows(self, groups: Sequence[str]) -> list[tuple[Cell, ...]]:
        """Right after the swap, and its distance to MiTA, picture by picture."""
        rows = []
        for layers in groups:
            first, *_ = (self.scores(mixer, layers)["correlation"] for mixer in MIXERS[self.size])
            for mixer in MIXERS[self.size]:
                scores = self.scores(mixer, layers)
                apart = [a - b for a, b in zip(scores["correlation"], first, strict=True)]
                about = *self.about(mixer, layers), mixer, share(mixer, square(self.size))
                rows.append((*about, *_cells(scores), *mean_and_bounds(interval(apart))))
        return rows

    def learned_rows(self) -> list[tuple[Cell, ...]]:
        """After learning: of each picture the mean over seeds, and the means of the seeds apart."""
        rows = []
        for mixer in MIXERS[self.size]:
            seeds = [self.scores(mixer, "all", seed) for seed in range(SEEDS)]
            mean = {name: np.mean([scores[name] for scores in seeds], 0).tolist() for name in _SCORES}
            means = ", ".join(f"{np.mean(scores['correlation']):.3f}" for scores in seeds)
            before = self.scores(mixer, "all")["correlation"]
            gain = [a - b for a, b in zip(mean["correlation"], before, strict=True)]
            rows.append((*self.about(mixer, "all"), *_cells(mean), means, *mean_and_bounds(interval(gain))))
        return rows


def square(size: int) -> Grid:
    """The tokens of a picture of size x size pixels."""
    return Grid(size // PATCH, size // PATCH, prefix=1)


def share(mixer: str, grid: Grid) -> float:
    """Of softmax attention's products, those of a mechanism in a layer."""
    site = Site(dim=384, heads=6, grid=grid)
    own, softmax = (cast(HeadMixerConfig, parse_mixer(text)).operator_cost(site).macs for text in (mixer, "Softmax()"))
    return round(own / softmax, 2)


def _cells(scores: Likeness) -> tuple[Cell, ...]:
    return Change(*(interval(scores[name]) for name in _SCORES)).cells


def compute(source: Source) -> Sequence[Sheet]:
    """What is kept right after the swap, in all layers and in a third of them, and after learning."""
    folder = record_folder(source, NAME)
    sizes = [_Size(size, folder) for size in MIXERS]
    for one in sizes:
        one.compute()
    scores = ("correlation", "low", "high", "IoU", "IoU low", "IoU high", "cosine")
    columns = (*_ABOUT, "spelling", "products", *scores, "minus MiTA", "from", "to")
    thirds = [row for one in sizes for row in one.rows([group for group in one.layers if group != "all"])]
    return [
        Sheet(
            title="All layers swapped", columns=columns, rows=tuple(row for one in sizes for row in one.rows(["all"])),
            chart=Chart(x="tokens", y="correlation", series="mechanism", logs="x"),
            note=f"No learning. {', '.join(f'{n} pictures at {size} pixels' for size, n in JUDGED.items())}, of "
            "imagenette_small's val. Correlation of the new map with the old one, IoU of their most salient fifths, "
            "each with its 95 % interval over pictures; cosine of the patch tokens. Products: of the attention in a "
            "layer, divided by softmax's. The last three: the correlation minus MiTA's, picture by picture.",
        ),
        Sheet(title="A third of the layers swapped", columns=columns, rows=tuple(thirds), note="As above."),
        Sheet(
            title="All layers swapped, after they have learned",
            columns=(*_ABOUT, *scores, "seeds", "gain", "from", "to"),
            rows=tuple(row for one in sizes if one.size in STEPS for row in one.learned_rows()),
            note=f"{LEARNED} pictures of the train split without labels, a quarter of which guards; "
            f"{', '.join(f'{n} steps of four at {size} pixels' for size, n in STEPS.items())}, {SEEDS} seeds: of each "
            "picture the mean over seeds; their own means under seeds. The last three: the gain by learning.",
        ),
    ]  # fmt: skip


ANALYSIS = Analysis(
    name=NAME,
    title="What a swap keeps of a network that is there",
    source="Regard",
    question="What does a swap keep of a real trained network, by mechanism, number of tokens and layers?",
    compute=compute,
    notes=(
        "The network is that of focus_vit: a DINOv2 ViT-S/14 that predicts saliency.",
        "Mechanisms have about equal cost: the most landmarks, or the largest window, with at most 0.3 of the products "
        "of softmax attention. Linear has fewer, TopK and SKA have more, whatever their settings.",
        "Sizes, mechanisms, steps and pictures were fixed before the first result of this analysis, and after a pilot "
        "without learning on up to 40 other photographs, which showed what MiTA, Agent, Linear and TopK keep.",
    ),
)
