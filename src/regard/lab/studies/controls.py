"""What many studies share: controls, tasks and recipes of the small scales, ImageNet, and DeiT's recipe."""

from regard.lab.engine.study import Row, Setting
from regard.lab.tasks.classification import Classification
from regard.lab.train.recipe import Recipe
from regard.mixers import Factors

CONTROLS = (
    Row("w/o", None, control=True, removed=True, notes=("No token mixing at all: every attention is removed.",)),
    Row("0000", Factors(terms="0000"), control=True, notes=("Uniform average of the values.",)),
)

DIGITS = Classification(host="vit_desk(size=8, patch=2, dim=32, depth=2, heads=2)", data="digits", size=(8, 8))
"""Seconds per run: tests that everything runs."""
DIGITS_RECIPE = Recipe(epochs=8, batch=32, lr=4e-3, augment="none")

CANVAS = Classification(
    host="vit_desk(size=12, patch=2, dim=32, depth=2, heads=2, mlp_ratio=2.0)", data="digits-canvas", size=(12, 12)
)
"""Digits at random positions on 12 x 12 pixels, 36 tokens."""
CANVAS_RECIPE = Recipe(epochs=2, batch=32, lr=4e-3, betas=(0.9, 0.99), augment="none")

CIFAR = Classification(host="vit_desk(size=32, patch=4, dim=64, depth=4, heads=2)", data="cifar10", size=(32, 32))
"""64 tokens, 45,000 training images: about ten minutes per run on one core."""
CIFAR_RECIPE = Recipe(epochs=10, batch=64, lr=2e-3, precision="bf16-mixed")

DEIT_RECIPE = Recipe(
    epochs=300, batch=1024, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, warmup=5 / 300, floor=0.01, clip=0.0,
    smoothing=0.1, mixup=0.8, cutmix=1.0, augment="timm:rand-m9-mstd0.5-inc1", erasing=0.25, precision="bf16-mixed",
)  # fmt: skip
"""The recipe of DeiT; those of XCiT, MetaFormer and ViT-5 differ from it in a few fields."""


def imagenet(host: str) -> Classification:
    """ImageNet-1K at 224 x 224 pixels in a host that keeps its own initial weights."""
    return Classification(host=host, data="imagenet", size=(224, 224), classes=1000, init="host")


def small_settings(
    smoke: tuple[Row, ...], desk: tuple[Row, ...] | None = None, *, seeds: tuple[int, int] = (3, 5)
) -> dict[str, Setting]:
    """Smoke scale on digits and desk scale on CIFAR-10. desk: None for the rows of smoke. seeds: of smoke, of desk."""
    return {
        "smoke": Setting(DIGITS, DIGITS_RECIPE, smoke, seeds[0]),
        "desk": Setting(CIFAR, CIFAR_RECIPE, smoke if desk is None else desk, seeds[1]),
    }
