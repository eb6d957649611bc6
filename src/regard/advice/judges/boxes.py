"""Boxes with scores: detectors."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import UnsupportedError

from .judge import Change, Judge, divergence

TRUTH = 10
"""The old boxes of an image, by their scores, that new ones are measured against."""
KEPT = "average precision of the new boxes, with the ten best old ones of each image as truth (IoU 0.5)"
SENTENCE = "finds the model's own boxes with an average precision of {} %"


class QueryBoxes(Judge):
    """Class scores (B, Q, K) and boxes (B, Q, 4) of queries, centre and sides as shares of the image (DETR and its
    kin): the mean change of a query's box and of its class probabilities, weighted by its old score.

    sigmoid: each class has a probability of its own; else the last one is "no object".
    """

    kind = "boxes"
    distance = "mean change of the boxes, as a share of the image, and of their class probabilities"
    kept, sentence = KEPT, SENTENCE

    def __init__(self, *, sigmoid: bool = False) -> None:
        super().__init__()
        self.sigmoid = sigmoid

    def read(self, output: Any) -> Float[Tensor, "n Q S"]:
        parts = dict(output) if isinstance(output, Mapping) else vars(output)
        return torch.cat([parts["logits"], parts["pred_boxes"]], -1).float()

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.sigmoid else logits.softmax(-1)[..., :-1]

    def change(self, before: Float[Tensor, "n Q S"], after: Float[Tensor, "n Q S"]) -> Change:
        old, new = (self._probabilities(x[..., :-4]) for x in (before, after))
        weight = old.amax(-1) / old.amax(-1).sum(-1, keepdim=True).clamp_min(1e-12)
        moved = (after - before)[..., -4:].abs().mean(-1) + (new - old).abs().sum(-1) / 2
        ap = [average_precision(*_best(*pair)) for pair in zip(before, old, after, new, strict=True)]
        return (weight * moved).sum(-1), torch.tensor(ap)

    def loss(self, before: Float[Tensor, "n Q S"], after: Float[Tensor, "n Q S"]) -> Float[Tensor, ""]:
        old, new = before[..., :-4], after[..., :-4]
        weight = self._probabilities(old).amax(-1)
        boxes = (weight * (after - before)[..., -4:].abs().sum(-1)).sum() / weight.sum().clamp_min(1e-12)
        if self.sigmoid:
            return torch.nn.functional.binary_cross_entropy_with_logits(new, old.sigmoid()) + 5 * boxes
        return divergence(old.log_softmax(-1).movedim(-1, 1), new.log_softmax(-1).movedim(-1, 1)).mean() + 5 * boxes


class FoundBoxes(Judge):
    """A list with a dict of boxes (n, 4), labels and scores for each image (torchvision's detectors): one minus what
    agrees. The boxes are chosen, so that they have no gradients: layers learn, the output does not.
    """

    kind = "boxes"
    distance = "1 - average precision of the new boxes"
    kept, sentence = KEPT, SENTENCE
    learnable = False

    def read(self, output: Any) -> list[dict[str, Tensor]]:
        if not found_boxes(output):
            raise UnsupportedError("the output has no boxes, labels and scores for each image now")
        return list(output)

    def change(self, before: list[dict[str, Tensor]], after: list[dict[str, Tensor]]) -> Change:
        ap = torch.tensor([average_precision(_first(x), y) for x, y in zip(before, after, strict=True)])
        return 1 - ap, ap

    def loss(self, before: Any, after: Any) -> Float[Tensor, ""]:
        raise UnsupportedError("boxes that a detector has chosen have no gradients: give --output-steps 0")


def found_boxes(output: Any) -> bool:
    """Whether an output is of the form of torchvision's detectors."""
    names = {"boxes", "labels", "scores"}
    return isinstance(output, list) and bool(output) and all(isinstance(x, Mapping) and names <= set(x) for x in output)


def _best(before: Tensor, old: Tensor, after: Tensor, new: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The old boxes that count, and all new ones, of one image. before, after: (Q, K + 4); old, new: (Q, K)."""
    from torchvision.ops import box_convert

    found = []
    for values, probabilities in ((before, old), (after, new)):
        scores, labels = probabilities.max(-1)
        found.append({"boxes": box_convert(values[..., -4:], "cxcywh", "xyxy"), "scores": scores, "labels": labels})
    return _first(found[0]), found[1]


def _first(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rows = found["scores"].argsort(descending=True, stable=True)[:TRUTH]
    return {name: found[name][rows] for name in ("boxes", "labels", "scores")}


def average_precision(truth: Mapping[str, Tensor], found: Mapping[str, Tensor], least: float = 0.5) -> float:
    """The average precision of found boxes (corners), by their scores; a box is right if it has the label of a true one
    that no better box took, and an IoU of `least` with it. 1 if there is neither a true nor a found box.
    """
    from torchvision.ops import box_iou

    wanted = len(truth["boxes"])
    if not wanted:
        return float(not len(found["boxes"]))
    order = found["scores"].argsort(descending=True, stable=True)
    overlap = box_iou(found["boxes"][order].float(), truth["boxes"].float())
    overlap = overlap.masked_fill(found["labels"][order][:, None] != truth["labels"], -1)
    right = []
    for row in overlap:
        best = int(row.argmax())
        right.append(bool(row[best] >= least))
        if right[-1]:
            overlap[:, best] = -1
    hits = torch.tensor(right, dtype=torch.float64)
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    envelope = precision.flip(0).cummax(0).values.flip(0) if len(hits) else precision
    return float((hits * envelope).sum() / wanted)
