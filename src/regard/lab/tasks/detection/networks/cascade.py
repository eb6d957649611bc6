"""Cascade R-CNN: boxes that are refined three times, each time against a higher overlap (Cai and Vasconcelos 2018)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image

OVERLAPS = (0.5, 0.6, 0.7)
"""IoU from which a box is an object, for each stage."""
CODES = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
"""Weights of the coordinates in the box code of each stage."""
WEIGHTS = (1.0, 0.5, 0.25)
"""Weight of the losses of each stage."""


class AgnosticPredictor(nn.Module):
    """Class scores and one box for all classes, of a box head's features (n, width)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(width, classes)
        self.bbox_pred = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x), self.bbox_pred(x)


class CascadeHeads(nn.Module):
    """The heads of a Cascade (Mask) R-CNN, in the place of torchvision's `RoIHeads`.

    stages: `RoIHeads` with an `AgnosticPredictor` each; every stage samples and encodes its own boxes, and the next one
    gets the boxes that it predicts. Scores are the mean of all stages' on the boxes of the last. The mask head, if the
    first stage has one, learns from the first stage's positive boxes and predicts on the final boxes.
    """

    def __init__(self, stages: list[RoIHeads]) -> None:
        super().__init__()
        self.stages: Any = nn.ModuleList(stages)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Predictions of each image in evaluation mode, losses in training."""
        if not self.training:
            return self._predictions(features, proposals, image_shapes), {}
        assert targets is not None
        losses: dict[str, Tensor] = {}
        for number, (stage, weight) in enumerate(zip(self.stages, WEIGHTS, strict=True)):
            proposals, matched, labels, codes = stage.select_training_samples(proposals, targets)
            logits, deltas = predict(stage, features, proposals, image_shapes)
            classes, all_codes = torch.cat(labels), torch.cat(list(codes))
            positive = classes > 0
            box_loss = F.smooth_l1_loss(deltas[positive], all_codes[positive], beta=1 / 9, reduction="sum")
            losses[f"loss_classifier_{number}"] = weight * F.cross_entropy(logits, classes)
            losses[f"loss_box_reg_{number}"] = weight * box_loss / max(len(classes), 1)
            if number == 0 and stage.has_mask():
                rows = [part > 0 for part in labels]
                boxes = [part[row] for part, row in zip(proposals, rows, strict=True)]
                found = [part[row] for part, row in zip(matched, rows, strict=True)]
                masks, kinds = ([target[name] for target in targets] for name in ("masks", "labels"))
                masked = mask_logits(stage, features, boxes, image_shapes)
                losses["loss_mask"] = maskrcnn_loss(masked, boxes, masks, kinds, found)
            proposals = refine(stage, deltas, proposals, image_shapes)
        return [], losses

    def _predictions(
        self, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        scores, stages = [], self.stages
        for number, stage in enumerate(stages):
            logits, deltas = predict(stage, features, proposals, image_shapes)
            scores.append(logits.softmax(-1))
            if number < len(stages) - 1:
                proposals = refine(stage, deltas, proposals, image_shapes)
        mean = torch.stack(scores).mean(0)
        codes = deltas.repeat(1, mean.shape[-1])  # the same box for every class
        found = stages[-1].postprocess_detections(mean.log(), codes, proposals, image_shapes)
        results = [{"boxes": b, "scores": s, "labels": y} for b, s, y in zip(*found, strict=True)]
        if stages[0].has_mask():
            logits = mask_logits(stages[0], features, [result["boxes"] for result in results], image_shapes)
            probabilities = maskrcnn_inference(logits, [result["labels"] for result in results])
            for result, masks in zip(results, probabilities, strict=True):
                result["masks"] = masks
        return results


def predict(
    stage: Any, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Class logits and box codes of a stage for all proposals of the batch."""
    pooled = stage.box_roi_pool(features, proposals, image_shapes)
    return stage.box_predictor(stage.box_head(pooled))


def mask_logits(
    stage: Any, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
) -> Tensor:
    """Mask logits (n, classes, 28, 28) of a stage for all boxes of the batch."""
    return stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, boxes, image_shapes)))


@torch.no_grad()
def refine(stage: Any, deltas: Tensor, proposals: list[Tensor], image_shapes: list[tuple[int, int]]) -> list[Tensor]:
    """The boxes that a stage predicts, without a gradient, inside the images and at least one pixel wide and high.

    A thinner box is widened: in evaluation every box has one score of each stage.
    """
    boxes = stage.box_coder.decode(deltas.detach().float(), proposals).flatten(0, 1)
    split = boxes.split([len(part) for part in proposals])
    return [_at_least_one_pixel(part, shape) for part, shape in zip(split, image_shapes, strict=True)]


def _at_least_one_pixel(boxes: Tensor, shape: tuple[int, int]) -> Tensor:
    boxes = clip_boxes_to_image(boxes, shape)
    first = torch.minimum(boxes[:, :2], boxes.new_tensor([shape[1] - 1.0, shape[0] - 1.0]))
    return torch.cat([first, torch.maximum(boxes[:, 2:], first + 1)], 1)
