"""Faster, Mask and Cascade R-CNN around any backbone, of torchvision's parts.

Parameters have torchvision's names (`backbone.body`, `backbone.fpn`, `rpn`, `roi_heads`), so that weights of a
torchvision detector with the same backbone fit.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from .backbone import Backbone
from .cascade import CODES, OVERLAPS, AgnosticPredictor, CascadeHeads
from .padding import Padding, hide_padding

Kind = Literal["faster", "mask", "cascade", "cascade_mask"]
DETECTORS: tuple[str, ...] = get_args(Kind)
"""The kinds of detectors; those with "mask" in their names predict masks too."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What is behind the backbone; the defaults are torchvision's, at the scale of COCO.

    classes: without the background. anchor: side of the anchors, in strides of their level. ratios: height / width of
    the anchors. proposals: of an image in (training, test), after their suppression; candidates: of each level
    before it, which many small objects need, 0 = as many as proposals. rois: of an image, from
    which the box head learns. head: width of the box head. mask_head: channels and number of convolutions of the mask
    head. detections: the largest number in an image.
    """

    classes: int
    anchor: float = 8.0
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    proposals: tuple[int, int] = (2000, 1000)
    candidates: int = 0
    rois: int = 512
    head: int = 1024
    mask_head: tuple[int, int] = (256, 4)
    detections: int = 100


class Targets:
    """What a detector learns from, `each` image's; not a list, whose boxes Fabric would round to 16 bits."""

    def __init__(self, each: list[dict[str, Tensor]]) -> None:
        self.each = each


class Anchors(AnchorGenerator):
    """torchvision's anchors, at the strides of the backbone.

    torchvision divides the sides of image and map, which is another number where a side is no multiple of the stride.
    """

    def __init__(self, strides: tuple[int, ...], anchor: float, ratios: tuple[float, ...]) -> None:
        sizes = tuple((anchor * stride,) for stride in strides)
        super().__init__(sizes, (ratios,) * len(sizes))  # type: ignore[arg-type]
        self.level_strides = strides

    def grid_anchors(self, grid_sizes: Any, strides: Any) -> list[Tensor]:
        """As in torchvision; `strides`, which it computes, are not used."""
        device = strides[0][0].device
        fixed = [[torch.tensor(stride, device=device)] * 2 for stride in self.level_strides]
        return super().grid_anchors(grid_sizes, fixed)


class Pool(MultiScaleRoIAlign):
    """torchvision's features inside boxes, from maps of given strides.

    torchvision takes the nearest power of two, which is another number for, say, patches of 14 pixels.
    """

    def __init__(self, strides: tuple[int, ...], output_size: int) -> None:
        super().__init__([str(level) for level in range(len(strides))], output_size, 2)
        first = round(math.log2(strides[0]))
        self.scales = [1 / stride for stride in strides]
        self.map_levels = initLevelMapper(first, first + len(strides) - 1)


class Detector(nn.Module):
    """A detector of two stages: region proposals, then heads on the features inside them.

    images (B, C, H, W) are normalised. sizes: (height, width) of each image in its upper left corner, the rest is
    padding; None = all of it. Padding is hidden from attention, see `padding`.
    In training mode, with targets, the result is a dict of losses. targets: for each image boxes (n, 4) float32 in
    pixels of its tensor (left, top, right, bottom), labels (n,) int64 from 1 and, for masks, masks (n, H, W) uint8.
    Under autocast the backbone alone has 16 bits: boxes and what is computed from them have 32, since 16 cannot tell
    pixels of large images apart.
    In evaluation mode it is a list of predictions: boxes, scores, labels and masks (n, 1, 28, 28), probabilities inside
    the boxes. counted: the heads run on the largest number of boxes instead, and the result is the features and the
    heads' outputs; the number of operations then depends on nothing else, also on the meta device.
    Raises: UnsupportedError for padding that cannot be hidden from attention.
    """

    def __init__(self, backbone: Backbone, rpn: RegionProposalNetwork, roi_heads: nn.Module) -> None:
        super().__init__()
        self.backbone, self.rpn, self.roi_heads = backbone, rpn, roi_heads
        self._padding: list[Padding] = []

    def hide_padding(self) -> None:
        """Let the detector take padded images. Raises: UnsupportedError if a mechanism cannot apply a padding mask."""
        if not self._padding:
            self._padding.append(hide_padding(self.backbone))

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        targets: Targets | list[dict[str, Tensor]] | None = None,
        sizes: list[tuple[int, int]] | None = None,
        counted: bool = False,
    ) -> Any:
        whole = (images.shape[-2], images.shape[-1])
        padded = sizes is not None and any(tuple(size) != whole for size in sizes)
        features = self._features(images, sizes if padded else None, whole)
        sizes = sizes if padded and sizes is not None else [whole] * len(images)
        features = {name: level.float() if level.itemsize == 2 else level for name, level in features.items()}
        each = targets.each if isinstance(targets, Targets) else targets
        with nullcontext() if images.is_meta else torch.autocast(images.device.type, enabled=False):
            if counted:
                return features, self._largest_outputs(features, len(images))
            if self.training and each is None:
                raise ValueError("a detector in training mode needs targets; use eval() for predictions")
            proposals, proposal_losses = self.rpn(ImageList(images, sizes), features, each)
            predictions, losses = self.roi_heads(features, proposals, sizes, each)
        return {**losses, **proposal_losses} if self.training else predictions

    def _features(
        self, images: Tensor, padded: list[tuple[int, int]] | None, whole: tuple[int, int]
    ) -> dict[str, Tensor]:
        """The maps of the backbone. padded: sizes of images with padding beside them."""
        if padded is not None:
            self.hide_padding()
        for padding in self._padding:
            padding.begin(padded, whole)
        try:
            features: dict[str, Tensor] = self.backbone(images)
        finally:
            for padding in self._padding:
                padding.end()
        return features

    def _largest_outputs(self, features: dict[str, Tensor], images: int) -> list[Any]:
        """The outputs of all heads on the largest number of boxes, all equal."""
        outputs: list[Any] = [self.rpn.head(list(features.values()))]
        stages: Any = self.roi_heads.stages if isinstance(self.roi_heads, CascadeHeads) else [self.roi_heads]
        level = next(iter(features.values()))
        boxes = images * self.rpn._post_nms_top_n["testing"]
        for stage in stages:
            side = stage.box_roi_pool.output_size[0]
            outputs.append(stage.box_predictor(stage.box_head(level.new_zeros(boxes, level.shape[1], side, side))))
        if stages[0].has_mask():
            side, found = stages[0].mask_roi_pool.output_size[0], images * stages[-1].detections_per_img
            inner = stages[0].mask_head(level.new_zeros(found, level.shape[1], side, side))
            outputs.append(stages[0].mask_predictor(inner))
        return outputs


def make_detector(kind: str, backbone: Backbone, options: Heads) -> Detector:
    """A detector of a kind in `DETECTORS`."""
    anchors = Anchors(backbone.strides, options.anchor, options.ratios)
    train, test = options.proposals
    head = RPNHead(backbone.out_channels, len(options.ratios))
    before = {"training": options.candidates or train, "testing": options.candidates or test}
    after = {"training": train, "testing": test}
    rpn = RegionProposalNetwork(anchors, head, 0.7, 0.3, 256, 0.5, before, after, 0.7)
    masks = "mask" in kind
    if "cascade" not in kind:
        return Detector(backbone, rpn, _heads(backbone, options, masks))
    stages = [_heads(backbone, options, masks and number == 0, number) for number in range(len(OVERLAPS))]
    return Detector(backbone, rpn, CascadeHeads(stages))


def _heads(backbone: Backbone, options: Heads, masks: bool, stage: int | None = None) -> RoIHeads:
    """torchvision's heads. stage: number of a stage of a cascade, None = the only one."""
    strides = backbone.strides[: backbone.computed]
    pool = Pool(strides, 7)
    classes, width = options.classes + 1, backbone.out_channels
    predictor: nn.Module
    if stage is None:
        overlap, codes, predictor = 0.5, None, FastRCNNPredictor(options.head, classes)
    else:
        overlap, codes, predictor = OVERLAPS[stage], CODES[stage], AgnosticPredictor(options.head, classes)
    box_head = TwoMLPHead(width * 7**2, options.head)
    sampling = (overlap, overlap, options.rois, 0.25, codes)
    heads = RoIHeads(pool, box_head, predictor, *sampling, 0.05, 0.5, options.detections)
    if masks:
        channels, convolutions = options.mask_head
        heads.mask_roi_pool = Pool(strides, 14)
        heads.mask_head = MaskRCNNHeads(width, (channels,) * convolutions, 1)
        heads.mask_predictor = MaskRCNNPredictor(channels, channels, classes)
    return heads
