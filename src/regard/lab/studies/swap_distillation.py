"""A question of our own: what does distillation give back of the accuracy that a swap costs?

Trained segmenters of `mita_table4` with softmax attention get other mechanisms in all layers, as by `regard swap`, and
learn what they lost, as by `regard distill`: from images without labels. The task needs its attention (`cued`).
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch
from torch import nn

from regard.advice.distill import distill_model
from regard.advice.learning import Distillation
from regard.advice.user_model import UserModel
from regard.core import MixerConfig
from regard.images.images import Images
from regard.lab.engine.analysis import Analysis, Source, trained_runs
from regard.lab.tasks.segmentation import Segmentation
from regard.lab.train.load import load_user_run
from regard.lab.train.run import Run
from regard.measure.intervals import interval
from regard.mixers import SKA, Agent, Factors, Linear, MiTA
from regard.mixers.spelling import spell
from regard.pages.sheets import Cell, Chart, Picture, Sheet

from .mita.table4 import STUDY

ORIGINAL = "linear"
"""The row of the networks that are swapped: softmax attention and a linear head."""
TRAINED = {"MiTA": "MiTA, linear", "Factors": "0000"}
"""A mechanism's name -> the row of the study that was trained with it from the start."""
IMAGES = 1024
"""Training images to learn from, without their masks; a quarter of them is left out, as `regard distill` judges by
it. On the command line: --images."""
LAYERS, SCORES = Distillation(steps=200, augment="none"), Distillation(steps=1000, lr=1e-4, augment="none")
"""How each layer, then the whole model learns: as `regard distill --steps 200 --output-steps 1000 --augment none`. In a
flipped image the cue would be in another corner."""
STEPS = {"swapped": (0, 0), "layers learned": (1, 0), "scores learned": (1, 1)}
"""What has been learned -> whether by the layers, and whether by the class scores."""
COLUMNS = ("mechanism", "step", "miou", "against the original", "low", "high", "given back %", "networks")


def mechanisms(scale: str) -> tuple[MixerConfig, ...]:
    """What is swapped in: MiTA as in the study, three others with few or static keys, and the uniform average."""
    mita = next(row.mixer for row in STUDY.setting(scale).rows if row.label == TRAINED["MiTA"])
    assert isinstance(mita, MiTA)
    return (mita, Agent(m=mita.number), Linear(), SKA(), Factors(terms="0000"))


def training_images(run: Run) -> Images:
    """The first training images of a run's task; their labels are zeros. Raises: DataError."""
    assert isinstance(run.task, Segmentation)
    part = run.task.part("train")
    rows = range(min(IMAGES, len(part)))
    return Images(np.stack([part[row].image for row in rows]), np.zeros(len(rows), np.int64))


def learn(user: UserModel, mixer: MixerConfig, images: Images, steps: tuple[int, int]) -> nn.Module:
    """A copy of a model with a mechanism in all layers, after the steps of its layers and of its class scores."""
    layers, scores = (replace(how, steps=how.steps * n) for how, n in zip((LAYERS, SCORES), steps, strict=True))
    return distill_model(user, mixer, images, layers, scores, guard=False).model


def _miou(model: nn.Module, run: Run) -> float:
    """Of the task's test images, in percent."""
    return run.task.score(model, torch.device("cpu")).metrics[STUDY.metric]


def figure(source: Source) -> Sequence[Sheet | Picture]:
    """Mean IoU after each step of each mechanism, paired with that of the same network before its swap."""
    originals = {seed: source.run(key) for _, seed, key in trained_runs(source, STUDY.name, ORIGINAL)}
    users = {seed: load_user_run(source.store.folder(run.key)) for seed, run in originals.items()}
    before = {seed: _miou(users[seed].network, run) for seed, run in originals.items()}
    own = _round(fmean(before.values()))
    lines: list[tuple[Cell, ...]] = [("softmax", "original", own, *(None,) * 4, len(before))]
    for mixer in mechanisms(source.scale):
        scores: dict[str, dict[int, float]] = {step: {} for step in STEPS}
        for step, steps in STEPS.items():
            for seed, run in originals.items():
                scores[step][seed] = _miou(learn(users[seed], mixer, training_images(run), steps), run)
        scores |= _trained_from_the_start(source, mixer)
        lines += [_line(mixer, step, values, before, scores["swapped"]) for step, values in scores.items()]
    sheet = Sheet(
        title="Swapped, then distilled",
        columns=COLUMNS,
        rows=tuple(lines),
        note=f"{LAYERS.steps} steps of {LAYERS.batch} images in which each layer learns its predecessor's output, then "
        f"{SCORES.steps} in which the whole network learns the class scores of the original; no label is read. Against "
        "the original: the mean of paired differences with its 95 % interval, not corrected for their number. Given "
        "back: the share of the loss by the swap; below zero, learning made it worse. Trained: with this mechanism and "
        "all labels from the start, by the study.",
        chart=Chart(kind="bars", x="mechanism", y="miou", series="step"),
    )
    return [sheet]


def _trained_from_the_start(source: Source, mixer: MixerConfig) -> dict[str, dict[int, float]]:
    """The scores of the study's own runs with a mechanism, where it has any: {"trained": {seed: mean IoU}}."""
    scores = {
        seed: source.outcome(key)["metrics"][STUDY.metric]
        for row, seed, key in trained_runs(source, STUDY.name)
        if row == TRAINED.get(type(mixer).__name__)
    }
    return {"trained": scores} if scores else {}


def _line(
    mixer: MixerConfig, step: str, values: dict[int, float], before: dict[int, float], swapped: dict[int, float]
) -> tuple[Cell, ...]:
    change = interval([values[seed] - before[seed] for seed in sorted(values.keys() & before.keys())])
    lost = fmean(before.values()) - fmean(swapped.values())
    mean = fmean(values.values())
    given = round(100 * (mean - fmean(swapped.values())) / lost, 1) if lost > 0 and step != "trained" else None
    ends = (_round(end) for end in (change.mean, change.low, change.high))
    return (spell(mixer), step, _round(mean), *ends, given, len(values))


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


ANALYSIS = Analysis(
    name="swap_distillation",
    title="What distillation gives back after a swap",
    source="Regard",
    question="How much of the accuracy that a swap costs does distillation without labels give back?",
    compute=figure,
    of=STUDY.name,
    notes=(
        "The networks are those of the row `linear` of `mita_table4`: segmenters of `cued`, which need attention.",
        "Steps, images and rates were fixed before the first result.",
    ),
)
