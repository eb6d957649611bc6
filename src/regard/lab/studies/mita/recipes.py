"""Hosts and recipes of the MiTA paper's studies, and the two small scales that they share."""

from dataclasses import replace

from regard.lab.engine.study import Row, Setting
from regard.lab.studies.controls import CANVAS, CANVAS_RECIPE, DEIT_RECIPE, imagenet
from regard.lab.tasks.classification import Classification
from regard.lab.train.recipe import Recipe

SMOKE_TASK = replace(CANVAS, limit=320)
_DESK_HOST = "vit_desk(size=24, patch=2, dim=64, depth=4, heads=2, mlp_ratio=2.0)"
DESK_TASK = Classification(host=_DESK_HOST, data="cifar10", size=(24, 24), cut=True)
"""CIFAR-10 in windows of 24 x 24: 12 x 12 tokens."""
DESK_RECIPE = Recipe(epochs=13, batch=64, lr=2e-3, augment="flip", precision="bf16-mixed")
CIFAR100_TASK = replace(DESK_TASK, data="cifar100_small")
"""10,000 images of CIFAR-100 in the same windows."""
CIFAR100_RECIPE = replace(DESK_RECIPE, epochs=20)

DEIT_T, DEIT_S = (f"deit_{size}_patch16_224(drop_path_rate=0.1)" for size in ("tiny", "small"))
DEIT_TASK = imagenet(DEIT_T)
VIT5_RECIPE = replace(
    DEIT_RECIPE, epochs=800, batch=2048, optimizer="lamb", lr=4e-3, warmup=5 / 800, floor=2.5e-3, smoothing=0.0,
    augment="timm:3a", erasing=0.0,
)  # fmt: skip
DEIT_FIELDS = {name: value for name, value in vars(DEIT_RECIPE).items() if value != getattr(VIT5_RECIPE, name)}
"""Fields that a row in DeiT changes in ViT-5's recipe."""


def small_settings(smoke: tuple[Row, ...], desk: tuple[Row, ...], desk_seeds: int = 3) -> dict[str, Setting]:
    """Smoke scale with digits on a canvas, and desk scale with CIFAR-10."""
    return {
        "smoke": Setting(SMOKE_TASK, CANVAS_RECIPE, smoke, seeds=2),
        "desk": Setting(DESK_TASK, DESK_RECIPE, desk, desk_seeds),
    }
