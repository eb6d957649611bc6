"""Detectors: torchvision's boxes with its weights, cascades, images without objects, padding."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from regard.core import ConfigError, Grid, UnsupportedError
from regard.lab.tasks.detection.networks import DETECTORS, Detector, Heads, detection_backbone, make_detector
from regard.lab.tasks.detection.networks.padding import cannot_hide, kept_cells
from regard.measure.cost import count_macs
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA

SMALL = Heads(classes=2, anchor=3.0, proposals=(60, 40), rois=32, head=32, mask_head=(16, 1), detections=20)
ATTENDED = "attended_resnet18(mixer='Softmax()')"


def small(kind: str, host: str = ATTENDED, mixer: Softmax | None = None) -> Detector:
    torch.manual_seed(0)
    backbone = detection_backbone(host, mixer, size=(64, 96), width=16, strides=(8, 16, 32))
    return make_detector(kind, backbone, SMALL)


def targets(*counts: int) -> list[dict[str, Tensor]]:
    """For each image so many objects of 20 x 30 pixels."""
    made = []
    for count in counts:
        first = torch.arange(count)[:, None] * torch.tensor([15.0, 7.0]) + 2
        boxes = torch.cat([first, first + torch.tensor([20.0, 30.0])], 1)
        masks = torch.zeros(count, 64, 96, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        made.append({"boxes": boxes, "labels": 1 + torch.arange(count) % 2, "masks": masks})
    return made


@pytest.mark.parametrize("kind", ["faster", "mask"])
def test_boxes_are_those_of_torchvision_with_its_weights(kind: str) -> None:
    torch.manual_seed(1)
    resnet = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=nn.BatchNorm2d)
    make = FasterRCNN if kind == "faster" else MaskRCNN
    theirs = make(
        resnet, num_classes=4, min_size=96, max_size=128, image_mean=[0.0] * 3, image_std=[1.0] * 3,
        rpn_pre_nms_top_n_test=100, rpn_post_nms_top_n_test=100, box_detections_per_img=20,
    )  # fmt: skip
    with torch.no_grad():  # random weights give maps without contrast, and all boxes the same score
        for norm in (module for module in theirs.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.momentum = None
        theirs.backbone.train()(torch.rand(2, 3, 128, 128))
        theirs.roi_heads.box_predictor.cls_score.weight.mul_(5)
    backbone = detection_backbone("resnet18", None, size=(96, 128))
    ours = make_detector(kind, backbone, Heads(classes=3, proposals=(2000, 100), detections=20))
    ours.load_state_dict(theirs.state_dict())
    images = [torch.rand(3, 96, 128), torch.rand(3, 128, 96)]
    padded = torch.zeros(2, 3, 128, 128)
    padded[0, :, :96], padded[1, :, :, :96] = images
    with torch.inference_mode():
        expected = theirs.eval()(images)
        found = ours.eval()(padded, None, [(96, 128), (128, 96)])
    for one, other in zip(found, expected, strict=True):
        assert len(other["boxes"]) > 10
        assert other["scores"].std() > 0.01
        torch.testing.assert_close(one["boxes"], other["boxes"], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(one["scores"], other["scores"], rtol=1e-4, atol=1e-5)
        assert torch.equal(one["labels"], other["labels"])
        assert ("masks" in one) == (kind == "mask")


@pytest.mark.parametrize("kind", DETECTORS)
def test_a_step_with_and_without_objects_reaches_the_attention(kind: str) -> None:
    """Without any object the loss is finite, and that of boxes and masks is 0."""
    model = small(kind).train()
    for block in (module for name, module in model.named_modules() if name.endswith("attn")):
        nn.init.ones_(block.gamma)  # at zero nothing reaches the mechanism
    for norm in (module for name, module in model.named_modules() if name.endswith("bn2")):
        nn.init.ones_(norm.weight)  # timm starts each residual branch at zero
    given = targets(3, 0)
    if "mask" not in kind:
        given = [{name: value for name, value in target.items() if name != "masks"} for target in given]
    losses = model(torch.randn(2, 3, 64, 96), given)
    assert ("loss_mask" in losses) == ("mask" in kind)
    loss = torch.stack(list(losses.values())).sum()
    assert torch.isfinite(loss)
    loss.backward()
    attention = {name: p for name, p in model.named_parameters() if ".attn." in name}
    assert len(attention) >= 12
    for name, parameter in attention.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    losses = model(torch.randn(2, 3, 64, 96), targets(0, 0))
    assert all(torch.isfinite(value) for value in losses.values())
    boxes = [value for name, value in losses.items() if "box_reg" in name or "mask" in name]
    assert boxes
    assert all(value.item() == 0 for value in boxes)


def test_a_cascade_predicts_boxes_inside_the_image_once() -> None:
    model = small("cascade_mask").eval()
    with torch.no_grad():
        for stage in model.roi_heads.stages:
            stage.box_predictor.cls_score.weight.mul_(5)
    with torch.inference_mode():
        (found,) = model(torch.randn(1, 3, 64, 96))
    boxes = found["boxes"]
    assert 0 < len(boxes) <= SMALL.detections
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert boxes.min() >= 0
    assert (boxes <= torch.tensor([96.0, 64.0, 96.0, 64.0])).all()
    assert found["masks"].shape == (len(boxes), 1, 28, 28)
    assert set(found["labels"].tolist()) <= {1, 2}


def test_scores_of_a_cascade_are_the_mean_of_its_stages() -> None:
    model = small("cascade").eval()
    stages = model.roi_heads.stages
    with torch.no_grad():
        for stage, bias in zip(stages, (1.0, 2.0, 3.0), strict=True):
            stage.box_predictor.cls_score.weight.zero_()
            stage.box_predictor.cls_score.bias.copy_(torch.tensor([0.0, bias, 0.0]))
    with torch.inference_mode():
        (found,) = model(torch.randn(1, 3, 64, 96))
    each = [torch.tensor([0.0, bias, 0.0]).softmax(0)[1] for bias in (1.0, 2.0, 3.0)]
    scores = found["scores"][found["labels"] == 1]
    torch.testing.assert_close(scores, torch.stack(each).mean().expand_as(scores))


@pytest.mark.parametrize(
    ("host", "mixer"),
    [
        (ATTENDED, None),
        ("attended_resnet18", Softmax()),
        ("skaformer_desk", None),
        ("skaformer_desk(mixers=('conv','cska','attn','attn'))", None),
        ("swin_tiny_patch4_window7_224(window_size=2, depths=(1,1,1,1))", None),
        ("vit_desk(patch=8, depth=2)", Softmax()),
        ("vit_desk(patch=8, depth=2)", None),
        ("convnext_atto", None),
    ],
)
def test_any_host_gives_maps_of_the_strides(host: str, mixer: Softmax | None) -> None:
    backbone = detection_backbone(host, mixer, size=(64, 96), width=16, strides=(8, 16, 32, 64)).eval()
    with torch.inference_mode():
        maps = backbone(torch.randn(2, 3, 64, 96))
    shapes = [tuple(x.shape) for x in maps.values()]
    assert list(maps) == ["0", "1", "2", "3"]
    assert shapes == [(2, 16, -(-64 // stride), -(-96 // stride)) for stride in (8, 16, 32, 64)]


def test_attention_is_removed_from_a_backbone() -> None:
    removed = detection_backbone(ATTENDED, None, size=(64, 96), width=16, strides=(8, 16, 32), removed=True)
    without = detection_backbone("resnet18", None, size=(64, 96), width=16, strides=(8, 16, 32))
    assert sum(p.numel() for p in removed.parameters()) == sum(p.numel() for p in without.parameters())


@pytest.mark.parametrize(
    ("host", "strides", "words"),
    [
        ("resnet18", (4, 16), "double"),
        ("skaformer_desk", (2, 4), "has maps of strides 4, 8, 16, 32"),
        ("vit_desk(patch=6)", (4, 8), "no multiples"),
        ("no_such_host", (8,), "no host"),
        ("attended_resnet18", (4, 8), "leave out stages of attended_resnet18: name coarser strides, up to 32"),
    ],
)
def test_strides_that_a_host_cannot_give_are_refused(host: str, strides: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        detection_backbone(host, None, size=(96, 96), strides=strides)


def test_kept_cells_are_those_inside_the_image() -> None:
    keep = kept_cells([(8, 16), (16, 9)], (16, 16), Grid(4, 4, 1), torch.device("cpu"))
    assert keep.shape == (2, 17)
    assert keep[:, 0].all()
    assert keep[0, 1:].view(4, 4).tolist() == [[True] * 4] * 2 + [[False] * 4] * 2
    assert keep[1, 1:].view(4, 4).tolist() == [[True, True, True, False]] * 4


def test_padding_is_hidden_from_attention() -> None:
    model = small("faster", "vit_desk(patch=8, depth=2)", Softmax())
    model.hide_padding()
    body = model.backbone.body.eval()
    images = torch.randn(2, 3, 64, 96)
    other = images.clone()
    other[0, :, 32:] = 50.0
    other[1, :, :, 48:] = -50.0
    with torch.inference_mode():
        model._padding[0].begin([(32, 96), (64, 48)], (64, 96))
        one, two = body(images)[0], body(other)[0]
        model._padding[0].end()
        seen = body(other)[0]
    torch.testing.assert_close(one[0, :, :4], two[0, :, :4])
    torch.testing.assert_close(one[1, :, :, :6], two[1, :, :, :6])
    assert (seen[0, :, :4] - one[0, :, :4]).abs().max() > 1e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_padding_is_hidden_where_a_checkpointed_block_runs_again(reentrant: bool) -> None:
    """Gradients of a pass, before whose backward pass another one with other padding has run."""
    sizes = [[(32, 96), (64, 48)], [(64, 40), (24, 96)]]

    def gradients(checkpointed: bool) -> list[Tensor]:
        model = small("faster", "vit_desk(patch=8, depth=3)", Softmax()).double().train()
        for block in model.backbone.body.model.blocks[1:] if checkpointed else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
        passes = [model._features(images, each, (64, 96)) for each in (sizes[:1] if reentrant else sizes)]
        sum(level.square().mean() for level in passes[0].values()).backward()
        return [parameter.grad for parameter in model.backbone.parameters() if parameter.grad is not None]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_padding_that_cannot_be_hidden_is_refused_with_the_reason() -> None:
    own = detection_backbone("vit_desk(patch=8, depth=1)", None, size=(64, 96), width=16, strides=(8, 16))
    assert "host's own attention in body" in cannot_hide(own)
    channels = detection_backbone("vit_desk(patch=8, depth=1)", XCA(), size=(64, 96), width=16, strides=(8, 16))
    assert "XCA in body" in cannot_hide(channels)
    slots = detection_backbone("attended_resnet18", None, size=(64, 96), width=16, strides=(8, 16, 32))
    assert cannot_hide(slots) == ""
    model = make_detector("faster", channels, SMALL).eval()
    with pytest.raises(UnsupportedError, match="cannot apply a padding mask"):
        model(torch.randn(1, 3, 64, 96), None, [(64, 80)])


def test_counted_operations_depend_on_nothing_else() -> None:
    model = small("cascade_mask")
    counts = {count_macs(model, (torch.randn(1, 3, 64, 96), None, None, True)) for _ in range(2)}
    meta = small("cascade_mask").to("meta")
    counts.add(count_macs(meta, (torch.empty(1, 3, 64, 96, device="meta"), None, None, True)))
    assert len(counts) == 1
    # three box heads on 40 boxes: 16 channels of 7 x 7 to 32, 32 to 32, 32 to 3 classes and 4 coordinates
    boxes = 3 * 40 * (16 * 49 * 32 + 32 * 32 + 32 * 7)
    assert counts.pop() > boxes
