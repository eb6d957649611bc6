"""Class scores at each position: segmentation."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.measure.mean_iou import confusion, margins, miou

from .judge import Change, Judge, divergence, image_mean


class ClassMaps(Judge):
    """(B, classes, h, w): the mean divergence over positions. What agrees is the mean IoU of both maps of best classes,
    over the classes that one of them has: most positions may be background.
    """

    kind = "classes"
    distance = "divergence of the class probabilities, in nats, the mean over positions"
    unit = " nats"
    kept = "mean IoU of the two maps of classes"
    sentence = "gives maps of classes with a mean IoU of {} % to the model's own"

    def change(self, before: Float[Tensor, "n K h w"], after: Float[Tensor, "n K h w"]) -> Change:
        old, new = before.log_softmax(1), after.log_softmax(1)
        maps = (scores.argmax(1).flatten(1).cpu().numpy() for scores in (old, new))
        ious = [miou(margins(confusion(x, y, before.shape[1]))) / 100 for x, y in zip(*maps, strict=True)]
        return image_mean(divergence(old, new)).clamp_min(0), torch.tensor(ious)

    def loss(self, before: Float[Tensor, "n K h w"], after: Float[Tensor, "n K h w"]) -> Float[Tensor, ""]:
        return divergence(before.log_softmax(1), after.log_softmax(1)).mean()
