"""Class scores of images."""

import warnings

from jaxtyping import Float
from torch import Tensor

from .judge import Change, Judge, divergence


class Scores(Judge):
    """(B, classes) with two classes or more: the Kullback-Leibler divergence of the new class probabilities."""

    kind = "scores"
    distance = "divergence of the class probabilities, in nats"
    unit = " nats"
    kept = "images with the same best class"
    sentence = "keeps the best class of {} % of the images"

    def change(self, before: Float[Tensor, "n K"], after: Float[Tensor, "n K"]) -> Change:
        if bool((before >= 0).all()) and bool(((before.sum(1) - 1).abs() < 1e-3).all()):
            warnings.warn(
                "the model's rows sum to 1: they are taken as scores before a softmax, so divergences are too small; "
                "give a model that returns scores, or judge=", stacklevel=2,
            )  # fmt: skip
        old, new = before.log_softmax(1), after.log_softmax(1)
        return divergence(old, new).clamp_min(0), (old.argmax(1) == new.argmax(1)).float()

    def loss(self, before: Float[Tensor, "n K"], after: Float[Tensor, "n K"]) -> Float[Tensor, ""]:
        return divergence(before.log_softmax(1), after.log_softmax(1)).mean()
