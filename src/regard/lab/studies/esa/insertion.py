"""Attention inserted into a trained ResNet: equal logits at first, then the curve of fine-tuning (ESA, Figure 2a)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import cast

import torch
from torch import Tensor, nn

from regard.lab.engine.analysis import Analysis, Source, trained_runs
from regard.lab.engine.run_study import run_study
from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.results.metrics import Metrics
from regard.lab.studies.papers import ESA_PAPER
from regard.lab.tasks.classification import Classification
from regard.lab.train.checkpoint import trained_weights
from regard.lab.train.initial_weights import copy_weights
from regard.lab.train.load import load_trained
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.mixers import DeformableConv, Factors
from regard.pages.sheets import Cell, Chart, Picture, Sheet

from .attended_resnets import NOTES, SMOKE, controls, deformable, settings


def rows(host: str, start: Row) -> tuple[Row, ...]:
    """The plain network, the mechanisms that are inserted into it, and the controls."""
    return (
        replace(start, label="before", notes=("The plain network that all other rows start from.",)),
        *(Row(terms, Factors(terms=terms), start=start) for terms in ("0010", "0110", "1111")),
        Row("1111 parallel", Factors(terms="1111"), host=f"{host[:-1]}, parallel=True)", start=start,
            notes=("Beside the 3x3 convolution instead of after it, in all blocks of a stage but the first.",)),
        Row("deformable unit", DeformableConv(), start=start,
            notes=("In the place of attention, multiplied by gamma.",)),
        Row("0010 + deformable", Factors(terms="0010"), host=deformable(host), start=start,
            notes=("The 3x3 convolution before attention becomes deformable; its offsets start at zero.",)),
        *controls(start),
    )  # fmt: skip


def _settings() -> dict[str, Setting]:
    """Desk and paper scale are those of Table 2; runs of the same rows are shared with it."""
    start = Row("start", None, removed=True, recipe={"epochs": 6, "lr": 4e-3})
    task = Classification(host=SMOKE, data="digits", size=(12, 12), limit=448, init="host")
    recipe = Recipe(epochs=3, batch=64, lr=2e-3, augment="none")
    return {**settings(rows), "smoke": Setting(task, recipe, rows(SMOKE, start), seeds=2)}


STUDY = Study(
    name="esa_insertion",
    title="Attention inserted into a trained ResNet",
    source=f"{ESA_PAPER}, Figure 2a",
    question="What does a trained ResNet gain when attention is inserted into its blocks and training continues?",
    baseline="1111",
    settings=_settings(),
    claims=(
        *(Claim(row, "w/o", "top1") for row in ("0010 + deformable", "0110", "0010")),
        Claim("0010 + deformable", "0010", "top1"),
    ),
    notes=(
        "w/o is the fair control: the plain network, trained on for the same epochs without insertion. `before` had "
        "the first epochs only.",
        "`regard study run esa_insertion_curve` compares the logits at insertion, and has the curve from epoch 0 on.",
        *NOTES,
    ),
)


@dataclass(frozen=True)
class Inserted:
    """The effect of insertion on the network of one run, over all test images.

    difference: the largest of any logit. changed: images that get another class. before, after: top-1 accuracy in
    percent of the plain network, and of the one with the mechanism before its first step.
    """

    difference: float
    changed: int
    images: int
    before: float
    after: float


def compare_insertion(run: Run, plain: nn.Module) -> Inserted:
    """Compare a run's network as its training begins with the trained network that it starts from."""
    model = run.task.model(run.mixer, run.seed, run.removed)
    copy_weights(plain, model)
    task = cast(Classification, run.task)
    (before, labels), (after, _) = _logits(task, plain), _logits(task, model)
    classes_before, classes_after = before.argmax(-1), after.argmax(-1)
    top1 = [100 * (classes == labels).double().mean().item() for classes in (classes_before, classes_after)]
    changed = int((classes_before != classes_after).sum())
    return Inserted((before - after).abs().max().item(), changed, len(labels), *top1)


def _logits(task: Classification, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Logits and labels of all test images."""
    logits, labels = zip(*task.scores(model, torch.device("cpu")), strict=True)
    return torch.cat(logits), torch.cat(labels)


def curve(source: Source, study: Study = STUDY) -> Sequence[Sheet | Picture]:
    """Logits before and after insertion, and accuracy from epoch 0 on, of every row that starts from the plain network.

    At smoke scale missing runs are executed first, so that one command is enough. study: STUDY, or a smaller one.
    Raises: ConfigError or StoreError at another scale without finished runs.
    """
    if source.scale == "smoke":
        run_study(study, "smoke", source.store, workers=0)
    lines: list[tuple[Cell, ...]] = []
    epochs: dict[tuple[str, int], list[float]] = {}
    plain: dict[str, nn.Module] = {}
    for label, seed, key in trained_runs(source, study.name):
        run = source.run(key)
        if not isinstance(run.start, Run):
            continue
        if run.start.key not in plain:
            plain = {run.start.key: load_trained(source.run(run.start.key), source.store)}
        effect = compare_insertion(run, plain[run.start.key])
        accuracies = _accuracies(source, run)
        for epoch, value in {0: effect.after, **accuracies}.items():
            epochs.setdefault((label, epoch), []).append(value)
        end = accuracies[max(accuracies)], _gamma(source, run)
        lines.append((label, seed, effect.difference, effect.changed, effect.images, effect.before, effect.after, *end))
    at_insertion = Sheet(
        title="At insertion",
        columns=("row", "seed", "largest difference of a logit", "images with another class", "test images",
                 "top1 before", "top1 at epoch 0", "top1 at the end", "largest gamma at the end"),
        rows=tuple(lines),
        note="Between the trained plain network and the same one with the mechanism in it, untrained, in float32. "
        "gamma is zero, so that the difference is exactly 0. A deformable convolution in the place of the 3x3 one has "
        "the same weights and samples the map at rounded coordinates; its difference is due to rounding.",
    )  # fmt: skip
    tuning = Sheet(
        title="Fine-tuning",
        columns=("row", "epoch", "top1", "lowest", "highest", "seeds"),
        rows=tuple((*point, fmean(values), min(values), max(values), len(values)) for point, values in epochs.items()),
        note="Mean, lowest and highest over seeds. Epoch 0 is the network at insertion; w/o is trained without one.",
        chart=Chart(x="epoch", y="top1", series="row"),
    )
    return [at_insertion, tuning]


def _accuracies(source: Source, run: Run) -> dict[int, float]:
    """The task's metric by epoch, from the run's metrics.csv."""
    lines = Metrics(source.store.folder(run.key) / "metrics.csv").read()
    return {int(line["epoch"]): float(line[run.task.metric]) for line in lines if line[run.task.metric]}


def _gamma(source: Source, run: Run) -> float | None:
    """The largest |gamma| of the trained network, the factor of its attention; None without attention."""
    weights = trained_weights(source.store.folder(run.key))
    return max((abs(value.item()) for name, value in weights.items() if name.endswith(".gamma")), default=None)


ANALYSIS = Analysis(
    name="esa_insertion_curve", title="A trained ResNet before and after insertion, and fine-tuned",
    source=f"{ESA_PAPER}, Figure 2a", compute=curve, of=STUDY.name,
    question="Does insertion leave a trained network unchanged, and what does fine-tuning add?",
    notes=("At smoke scale, missing runs of `esa_insertion` are executed first, in seconds.",),
)  # fmt: skip
