"""Fidelity: how far a model's layers and outputs change when other mechanisms stand in the place of attention.

Nothing here reads labels: the model as it was is the reference.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import DataError, MixerConfig
from regard.core.eval_mode import eval_mode
from regard.measure.bench_model import output_tensor
from regard.measure.intervals import Interval, interval, share_interval
from regard.swapping.layer_plan import LayerPlan

from .judges import Judge, choose
from .judges.judge import concatenate, named_outputs
from .substitutes import Substitutes


@dataclass(frozen=True, eq=False)
class AnswerChange:
    """The change of a model's output, for each image, by a judge (`regard.advice.judges`).

    distance: (n,), from 0. agrees: (n,), 1 where nothing changed; NaN where the judge does not tell. shares: whether
    these are shares, as of `Judge`. others: the changes of further outputs, by their judges.
    """

    distance: Float[np.ndarray, " n"]
    agrees: Float[np.ndarray, " n"]
    shares: bool = True
    others: Mapping[str, "AnswerChange"] = field(default_factory=dict)

    @classmethod
    def of(cls, distance: Sequence[float], agrees: Sequence[float]) -> "AnswerChange":
        """From plain numbers."""
        return cls(np.asarray(distance, np.float64), np.asarray(agrees, np.float64))

    @property
    def divergence(self) -> Interval:
        """Mean of `distance` over images, with its 95 % interval; infinite where one is no number."""
        if not np.isfinite(self.distance).all():
            return Interval(len(self.distance), math.inf)
        return interval(self.distance.tolist())

    @property
    def loss(self) -> float:
        """The mean of `divergence`."""
        return float(self.divergence.mean or 0.0)

    @property
    def agreement(self) -> Interval:
        """Mean of `agrees` in percent, with its 95 % interval; without one where all images have the same value."""
        if self.shares:
            return share_interval(self.agrees)
        if len(set(self.agrees)) == 1:  # a correlation over the images
            return Interval(len(self.agrees), 100 * float(self.agrees[0]))
        return interval((100 * self.agrees).tolist())


@dataclass(frozen=True, eq=False)
class OutputChange:
    """The change of one layer's output on the original's inputs, for each image.

    error: norm of the difference, divided by the norm of the original's output, (n,). cosine: of both outputs, (n,).
    """

    error: Float[np.ndarray, " n"]
    cosine: Float[np.ndarray, " n"]


class Fidelity:
    """Compares plans of layers with the model as it was, on prepared images (n, C, H, W).

    judges: of its outputs, the first decides; () = by the output (`judges.choose`).
    Raises: UnsupportedError if nothing in the model's output can be judged.
    """

    def __init__(self, substitutes: Substitutes, images: Tensor, judges: Sequence[Judge] = (), batch: int = 16) -> None:
        self.substitutes = substitutes
        self.batches = images.split(batch)
        self.judges = tuple(judges)
        self.original: list[list[Any]] = []  # what each judge reads, by batch
        with eval_mode(substitutes.model):
            for part in self.batches:
                output = substitutes.model(part)
                self.judges = self.judges or tuple(choose(output, part, substitutes.model))
                _refuse_nan(output)
                self.original.append([judge.read(output) for judge in self.judges])

    def part(self, first: int, end: int) -> "Fidelity":
        """The same comparison on the batches from `first` to before `end`."""
        part = copy.copy(self)
        part.batches, part.original = self.batches[first:end], self.original[first:end]
        return part

    def of_plan(self, plan: LayerPlan) -> AnswerChange:
        """What a plan of layers changes in the model's output."""
        with self.substitutes.install(plan):
            return self.of_model(self.substitutes.model)

    def of_model(self, model: nn.Module) -> AnswerChange:
        """What another model, such as a swapped copy, changes in the output."""
        found: list[list[tuple[Any, Any]]] = [[] for _ in self.judges]
        with eval_mode(model):
            for before, batch in zip(self.original, self.batches, strict=True):
                output = model(batch)
                for judge, old, row in zip(self.judges, before, found, strict=True):
                    after = judge.read(output)
                    row.append((old, after) if judge.whole else judge.change(old, after))
            changes = [
                _answer(judge, [judge.change(*map(concatenate, zip(*row, strict=True)))] if judge.whole else row)
                for judge, row in zip(self.judges, found, strict=True)
            ]
        return replace(changes[0], others=dict(zip(map(str, self.judges[1:]), changes[1:], strict=True)))

    def alone(
        self, report: Callable[[str, MixerConfig], None] | None = None
    ) -> dict[tuple[str, MixerConfig], AnswerChange]:
        """`of_plan` for each layer and mechanism alone, all other layers as they were. report: called before each."""
        changes = {}
        for name, layers in self.substitutes.layers.items():
            for mixer in layers:
                if report is not None:
                    report(name, mixer)
                changes[name, mixer] = self.of_plan({name: mixer})
        return changes

    def outputs(self) -> dict[tuple[str, MixerConfig], OutputChange]:
        """The change of each layer's output by each mechanism, on the inputs that the layer has in the original."""
        errors: dict[tuple[str, MixerConfig], list[tuple[Tensor, Tensor]]] = {}
        images = 0

        def compare(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            for mixer, layer in self.substitutes.layers[name].items():
                before, after = (x.movedim(layer.batch_dim, 0) for x in (output, output_tensor(layer(*args, **kwargs))))
                errors.setdefault((name, mixer), []).append(_change(before, after, images))

        with self.substitutes.observe(compare):
            for batch in self.batches:
                images = len(batch)
                self.substitutes.model(batch)
        return {key: OutputChange(*map(_as_array, zip(*pairs, strict=True))) for key, pairs in errors.items()}


def _refuse_nan(output: Any) -> None:
    """Raises: DataError if an output of the original has NaN, with which nothing can be compared."""
    for name, value in named_outputs(output).items():
        if value.isnan().any():
            raise DataError(
                f"the model's own output{f' {name}' if name else ''} is NaN for some images, so that nothing can be "
                "compared with it: look at its weights and at the normalisation of the images"
            )


def _answer(judge: Judge, parts: Sequence[tuple[Tensor, Tensor]]) -> AnswerChange:
    distance, agrees = (torch.cat(list(values)).cpu().double().numpy() for values in zip(*parts, strict=True))
    return AnswerChange(distance, agrees, judge.shares)


def _change(before: Tensor, after: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Relative error and cosine for each image; windows of an image lie one after another."""
    x, y = (value.reshape(images, -1).double() for value in (before, after))
    norm = x.norm(dim=1)
    return (y - x).norm(dim=1) / norm.clamp_min(1e-30), (x * y).sum(1) / (norm * y.norm(dim=1)).clamp_min(1e-30)


def _as_array(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(parts)).cpu().numpy()


def means(changes: Mapping[tuple[str, MixerConfig], AnswerChange]) -> dict[str, dict[MixerConfig, float]]:
    """The mean distance by layer and mechanism."""
    table: dict[str, dict[MixerConfig, float]] = {}
    for (name, mixer), change in changes.items():
        table.setdefault(name, {})[mixer] = float(change.distance.mean())
    return table
