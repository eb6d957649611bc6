"""What many studies have in common: the controls, and the settings of the small scales."""

from regard.lab.study import Row
from regard.mixers.factors.factors import Factors
from regard.tasks.classification import Classification
from regard.train.recipe import Recipe

CONTROLS = (
    Row("w/o", None, control=True, removed=True, notes=("No token mixing at all: every attention is taken out.",)),
    Row("0000", Factors(terms="0000"), control=True, notes=("Uniform average of the values.",)),
)

DIGITS = Classification(host="vit_desk(size=8, patch=2, dim=32, depth=2, heads=2)", data="digits", size=(8, 8))
"""Seconds a run: proves that everything works."""
DIGITS_RECIPE = Recipe(epochs=8, batch=32, lr=4e-3, augment="none")

CIFAR = Classification(host="vit_desk(size=32, patch=4, dim=64, depth=4, heads=2)", data="cifar10", size=(32, 32))
"""64 tokens, 45,000 training images: about ten minutes a run on one core."""
CIFAR_RECIPE = Recipe(epochs=10, batch=64, lr=2e-3, precision="bf16-mixed")

DEIT_RECIPE = Recipe(
    epochs=300,
    batch=1024,
    lr=1e-3,
    betas=(0.9, 0.999),
    weight_decay=0.05,
    warmup=5 / 300,
    floor=0.01,
    clip=0.0,
    smoothing=0.1,
    mixup=0.8,
    cutmix=1.0,
    augment="timm:rand-m9-mstd0.5-inc1",
    erasing=0.25,
    precision="bf16-mixed",
)
METAFORMER_RECIPE = Recipe(
    epochs=310,
    batch=4096,
    optimizer="lamb",
    lr=8e-3,
    betas=(0.9, 0.999),
    weight_decay=0.05,
    warmup=20 / 310,
    floor=1e-5 / 8e-3,
    cooldown=10 / 310,
    clip=0.0,
    smoothing=0.1,
    mixup=0.8,
    cutmix=1.0,
    augment="timm:rand-m9-mstd0.5-inc1",
    erasing=0.25,
    precision="bf16-mixed",
)
XCIT_RECIPE = Recipe(
    epochs=400,
    batch=512,
    accumulate=8,
    lr=4e-3,
    betas=(0.9, 0.999),
    weight_decay=0.05,
    warmup=5 / 400,
    floor=2.5e-3,
    clip=0.0,
    smoothing=0.1,
    mixup=0.8,
    cutmix=1.0,
    augment="timm:rand-m9-mstd0.5-inc1",
    erasing=0.25,
    ema=0.99996,
    precision="bf16-mixed",
)
