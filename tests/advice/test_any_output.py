"""Seventeen models of six kinds of output, none of them Regard's: swapped, planned, distilled, saved, read again."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from library_hosts import HUGGING_HOSTS, HUGGING_PVT, SQUARE, TORCH_HOSTS, Encoder, detr, hugging, rt_detr
from regard.advice.distill import PLAN, WEIGHTS, distill_model
from regard.advice.fidelity import Fidelity
from regard.advice.judges.judge import named_outputs
from regard.advice.learning import Distillation
from regard.advice.substitutes import Substitutes
from regard.advice.user_model import UserModel, as_user_model, tensors
from regard.mixers.topk.topk import TopK
from regard.models.hugging_face import is_of_transformers
from small_hosts import perturb

from .models import images as coloured

SEGFORMER = {**HUGGING_PVT, "sr_ratios": [1, 1], "decoder_hidden_size": 16, "num_labels": 5}


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, img_size=64, **options)


class Regressor(nn.Module):
    """One number of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = Encoder(batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(x).mean(1))


class TwoHeads(nn.Module):
    """Saliency and class scores in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = timm_model("vit_tiny_patch16_224", depth=2)
        self.saliency, self.head = nn.ConvTranspose2d(192, 1, 16, 16), nn.Linear(192, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.backbone.forward_features(x)
        maps = tokens[:, 1:].mT.unflatten(2, (4, 4))
        return self.saliency(maps).sigmoid(), self.head(tokens[:, 0])


def detector() -> nn.Module:
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.out_channels = TORCH_HOSTS["SwinTransformer"]().model.features, 16  # type: ignore[union-attr]

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).permute(0, 3, 1, 2)  # type: ignore[operator]

    return FasterRCNN(
        Backbone(), num_classes=4, min_size=64, max_size=64, box_score_thresh=0.0, box_detections_per_img=10,
        rpn_anchor_generator=AnchorGenerator(((16, 32),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 4, 2), box_head=None,
    )  # fmt: skip


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "timm classifier": ("scores", lambda: timm_model("vit_tiny_patch16_224", depth=2, num_classes=7)),
    "timm without head": ("embedding", lambda: timm_model("vit_tiny_patch16_224", depth=2, num_classes=0)),
    "timm features": ("tokens", lambda: timm_model(
        "vit_tiny_patch16_224", depth=2, features_only=True, out_indices=(0, 1))),
    "torchvision ViT": ("scores", lambda: TORCH_HOSTS["VisionTransformer"]().model),
    "DINOv2": ("tokens", lambda: HUGGING_HOSTS["Dinov2Model"]().model),
    "ViT of transformers": ("scores", lambda: hugging("ViTForImageClassification", 2, **SQUARE, num_labels=7).model),
    "CLIP image tower": ("embedding", lambda: hugging(
        "CLIPVisionModelWithProjection", 2, **SQUARE, projection_dim=16).model),
    "SigLIP": ("tokens", lambda: HUGGING_HOSTS["SiglipVisionModel"]().model),
    "Depth Anything": ("map", lambda: HUGGING_HOSTS["DepthAnythingForDepthEstimation"]().model),
    "DPT": ("map", lambda: hugging(
        "DPTForDepthEstimation", 4, (64, 64), **{**SQUARE, "num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8).model),
    "SegFormer": ("classes", lambda: hugging("SegformerForSemanticSegmentation", 2, **SEGFORMER).model),
    "SAM encoder": ("tokens", lambda: HUGGING_HOSTS["SamVisionModel"]().model),
    "DETR": ("boxes", lambda: detr("DetrForObjectDetection").model),
    "RT-DETR": ("boxes", lambda: rt_detr("RTDetrForObjectDetection").model),
    "Faster R-CNN": ("boxes", detector),
    "regressor": ("map", Regressor),
    "two heads": ("map (0)", TwoHeads),
}  # fmt: skip
MIXER = TopK(k=4)
SIZES = {"SAM encoder": 96, "Depth Anything": 56, "RT-DETR": 128, "DETR": 64}
READ = """
import sys
import torch
from safetensors.torch import load_file
import regard
from advice.test_any_output import MODELS, values
torch.manual_seed(1)
folder, name = sys.argv[1], sys.argv[2]
if sys.argv[3] == "whole":
    model = regard.load(folder)
else:  # the user's own code builds it
    model = MODELS[name][1]().eval()
    regard.swap(model, folder + "/plan.json", example=load_file(folder + "/example")["x"][:1])
    model.load_state_dict(load_file(folder + "/weights.safetensors"))
example = load_file(folder + "/example")
with torch.no_grad():
    for number, value in enumerate(values(model(example["x"]))):
        torch.testing.assert_close(value, example[str(number)], rtol=1e-4, atol=1e-5)
"""


def values(output: Any) -> list[Tensor]:
    """Its tensors of numbers."""
    return [value.contiguous().clone() for value in named_outputs(output).values()]


def user(name: str) -> UserModel:
    torch.manual_seed(0)
    side = SIZES.get(name, 64)
    return as_user_model(perturb(MODELS[name][1](), 0.05), name, size=(side, side))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_any_output_is_judged_distilled_and_read_again(name: str, tmp_path: Path) -> None:
    model, how = user(name), Distillation(steps=5, batch=2, augment="none")
    judges = model.judges()
    assert str(judges[0]).startswith(MODELS[name][0])
    data = coloured(20, model.size)
    with Substitutes(model.network, [MIXER], model.example) as substitutes:
        fidelity = Fidelity(substitutes, model.prepare(tensors(data)), judges, batch=8)
        assert fidelity.of_plan({}).distance.max() < 1e-6
        names = [layer for layer in substitutes.names if substitutes.choices(layer)]
        assert fidelity.of_plan(dict.fromkeys(names, MIXER)).distance.mean() > 0
    plan = dict.fromkeys(names, MIXER)
    outcome = distill_model(model, plan, data, how, how, tmp_path)
    losses = [change.divergence.mean or 0.0 for change in outcome.changes.values()]
    assert losses == sorted(losses, reverse=True)
    x = model.prepare(tensors(data))[:2]
    with torch.no_grad():
        found = {str(number): value for number, value in enumerate(values(outcome.model.eval()(x)))}
    whole = is_of_transformers(outcome.model)
    assert whole or (tmp_path / PLAN).exists() and (tmp_path / WEIGHTS).exists()
    save_file({"x": x, **found}, tmp_path / "example")
    tests = Path(__file__).parents[1]
    given = [sys.executable, "-c", READ, str(tmp_path), name, "whole" if whole else "parts"]
    done = subprocess.run(given, capture_output=True, text=True, cwd=tests, check=False)
    assert done.returncode == 0, done.stderr
