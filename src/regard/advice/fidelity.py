"""Fidelity: how far a model's layers and class scores change when other mechanisms stand in the place of attention.

Nothing here reads labels: the model as it was is the reference.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from regard.core import MixerConfig, UnsupportedError
from regard.core.eval_mode import eval_mode
from regard.measure.bench_model import output_tensor
from regard.measure.intervals import Interval, interval, share_interval
from regard.measure.mean_iou import confusion, margins, miou
from regard.swapping.layer_plan import LayerPlan

from .substitutes import Substitutes

SCORES = ("logits", "out", "scores")
"""Names of class scores in outputs of Hugging Face and torchvision."""


@dataclass(frozen=True, eq=False)
class ScoreChange:
    """The change of a model's class scores, for each image.

    kl: Kullback-Leibler divergence of the new class probabilities from the old ones, in nats, (n,); of dense
    predictions the mean over positions. agrees: whether the best class is the same, (n,); of dense predictions the mean
    IoU of both maps of best classes, over the classes that one of them has: most positions may be background.
    """

    kl: Float[np.ndarray, " n"]
    agrees: Float[np.ndarray, " n"]

    @classmethod
    def of(cls, kl: Sequence[float], agrees: Sequence[float]) -> "ScoreChange":
        """From plain numbers."""
        return cls(np.asarray(kl, np.float64), np.asarray(agrees, np.float64))

    @property
    def divergence(self) -> Interval:
        """Mean of `kl` over images, with its 95 % interval."""
        return interval(self.kl.tolist())

    @property
    def agreement(self) -> Interval:
        """Percent of images with the same best class, or mean IoU of the maps of best classes; 95 % interval."""
        return share_interval(self.agrees)


@dataclass(frozen=True, eq=False)
class OutputChange:
    """The change of one layer's output on the original's inputs, for each image.

    error: norm of the difference, divided by the norm of the original's output, (n,). cosine: of both outputs, (n,).
    """

    error: Float[np.ndarray, " n"]
    cosine: Float[np.ndarray, " n"]


class Fidelity:
    """Compares plans of layers with the model as it was, on prepared images (n, C, H, W).

    Raises: UnsupportedError if the model returns no class scores; ConfigError if they do not fit into memory.
    """

    def __init__(self, substitutes: Substitutes, images: Tensor, batch: int = 16) -> None:
        self.substitutes = substitutes
        self.batches = images.split(batch)
        self.original: list[Tensor] = []
        with eval_mode(substitutes.model):
            for part in self.batches:
                self.original.append(_log_probabilities(substitutes.model, part))

    @property
    def dense(self) -> bool:
        """Whether the model gives scores at each position."""
        return self.original[0].ndim > 2

    def part(self, first: int, end: int) -> "Fidelity":
        """The same comparison on the batches from `first` to before `end`."""
        part = copy.copy(self)
        part.batches, part.original = self.batches[first:end], self.original[first:end]
        return part

    def scores(self, plan: LayerPlan) -> ScoreChange:
        """What a plan of layers changes in the class scores."""
        with self.substitutes.installed(plan):
            return self.of_model(self.substitutes.model)

    def of_model(self, model: nn.Module) -> ScoreChange:
        """What another model, such as a swapped copy, changes in the class scores."""
        kl, agrees = [], []
        with eval_mode(model):
            for before, batch in zip(self.original, self.batches, strict=True):
                after = _log_probabilities(model, batch)
                kl.append(_image_mean(divergence(before, after)))
                agrees.append(_agreement(before.argmax(1), after.argmax(1), before.shape[1]))
        return ScoreChange(torch.cat(kl).clamp_min(0).cpu().double().numpy(), torch.cat(agrees).cpu().double().numpy())

    def alone(
        self, report: Callable[[str, MixerConfig], None] | None = None
    ) -> dict[tuple[str, MixerConfig], ScoreChange]:
        """`scores` for each layer and mechanism alone, all other layers as they were. report: called before each."""
        changes = {}
        for name, layers in self.substitutes.layers.items():
            for mixer in layers:
                if report is not None:
                    report(name, mixer)
                changes[name, mixer] = self.scores({name: mixer})
        return changes

    def outputs(self) -> dict[tuple[str, MixerConfig], OutputChange]:
        """The change of each layer's output by each mechanism, on the inputs that the layer has in the original."""
        errors: dict[tuple[str, MixerConfig], list[tuple[Tensor, Tensor]]] = {}
        images = 0

        def compare(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            for mixer, layer in self.substitutes.layers[name].items():
                before, after = (x.movedim(layer.batch_dim, 0) for x in (output, output_tensor(layer(*args, **kwargs))))
                errors.setdefault((name, mixer), []).append(_change(before, after, images))

        with self.substitutes.observed(compare):
            for batch in self.batches:
                images = len(batch)
                self.substitutes.model(batch)
        return {key: OutputChange(*map(_joined, zip(*pairs, strict=True))) for key, pairs in errors.items()}


def _log_probabilities(model: nn.Module, images: Tensor) -> Float[Tensor, "B K ..."]:
    return class_scores(model(images)).log_softmax(1)


def class_scores(output: Any) -> Float[Tensor, "B K ..."]:
    """Class scores in a model's output: (B, classes), or (B, classes, h, w) of dense predictions, float32.

    The output itself, the first of a tuple, or what a mapping or an object calls "logits", "out" or "scores".
    Raises: UnsupportedError if there are none.
    """
    tensor = output[0] if isinstance(output, tuple) and output else output
    for name in SCORES:
        if isinstance(output, Mapping) and name in output:
            tensor = output[name]
        elif isinstance(getattr(output, name, None), Tensor):
            tensor = getattr(output, name)
    if not isinstance(tensor, Tensor) or tensor.ndim not in (2, 4) or tensor.shape[1] < 2:
        came = (
            f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(output).__name__}"
        )
        raise UnsupportedError(
            f"the model returns {came}, no class scores (B, classes) or (B, classes, h, w) with two classes or more; "
            "use a model with its classifier (detectors are not judged)"
        )
    return tensor.float()


def divergence(before: Float[Tensor, "B K ..."], after: Float[Tensor, "B K ..."]) -> Float[Tensor, "B ..."]:
    """The Kullback-Leibler divergence from log probabilities, in nats; a class of probability 0 before adds nothing."""
    share = before.exp()
    return torch.where(share > 0, share * (before - after), 0.0).sum(1)


def _image_mean(values: Float[Tensor, "B ..."]) -> Float[Tensor, " B"]:
    return values.reshape(len(values), -1).mean(1)


def _agreement(before: Int64[Tensor, "B ..."], after: Int64[Tensor, "B ..."], classes: int) -> Float[Tensor, " B"]:
    """For each image whether its best class is the same, or the mean IoU of both maps over the classes in them."""
    if before.ndim == 1:
        return (before == after).float()
    maps = (scores.flatten(1).cpu().numpy() for scores in (before, after))
    return torch.tensor([miou(margins(confusion(x, y, classes))) / 100 for x, y in zip(*maps, strict=True)])


def _change(before: Tensor, after: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Relative error and cosine for each image; windows of an image lie one after another."""
    x, y = (value.reshape(images, -1).double() for value in (before, after))
    norm = x.norm(dim=1)
    return (y - x).norm(dim=1) / norm.clamp_min(1e-30), (x * y).sum(1) / (norm * y.norm(dim=1)).clamp_min(1e-30)


def _joined(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(parts)).cpu().numpy()


def means(changes: Mapping[tuple[str, MixerConfig], ScoreChange]) -> dict[str, dict[MixerConfig, float]]:
    """The mean divergence by layer and mechanism."""
    table: dict[str, dict[MixerConfig, float]] = {}
    for (name, mixer), change in changes.items():
        table.setdefault(name, {})[mixer] = float(change.kl.mean())
    return table
