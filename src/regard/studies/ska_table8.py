"""Static Key Attention in Vision, Table 8: static keys on Fashion-MNIST."""

from regard.lab.recipe import Recipe
from regard.lab.study import Claim, Row, Setting, Study
from regard.mixers.cska import CSKA
from regard.mixers.ska import SKA
from regard.mixers.softmax import Softmax
from regard.tasks.classification import Classification

from .parts import CONTROLS, DIGITS, DIGITS_RECIPE

_SMALL = (Row("base", Softmax()), Row("SKA", SKA()), Row("CSKA", CSKA()), *CONTROLS)
_HOSTS = (("CvT", "cvt_13", (83.0, 84.4, 85.7)), ("ViT", "vit_s_32_spt", (83.2, 83.6, 84.1)),
          ("CaiT", "cait_s_32", (82.8, 83.3, 85.9)), ("Swin", "swin_t_32", (88.1, 88.0, 88.2)))  # fmt: skip
_B = {"ViT": SKA(init="paper", heads=10)}


def _paper() -> tuple[Row, ...]:
    rows = []
    for name, host, (base, ska, cska) in _HOSTS:
        label = "" if name == "ViT" else f"{name} "
        rows.append(Row(f"{label}base", None, host=host, paper={"top1": base}))
        rows.append(Row(f"{label}SKA", _B.get(name, SKA(init="paper")), host=host, paper={"top1": ska}))
        rows.append(Row(f"{label}CSKA", CSKA(init="paper"), host=host, paper={"top1": cska}))
    return tuple(rows)


STUDY = Study(
    name="ska_table8",
    title="Static keys on Fashion-MNIST",
    source="Static Key Attention in Vision, Table 8",
    question="Do static keys help on small grey images?",
    baseline="base",
    settings={
        "smoke": Setting(task=DIGITS, recipe=DIGITS_RECIPE, seeds=3, rows=_SMALL),
        "desk": Setting(
            task=Classification(
                host="vit_desk(size=28, patch=4, dim=64, depth=4, heads=2)", data="fashion_mnist", size=(28, 28)
            ),
            recipe=Recipe(epochs=8, batch=64, lr=2e-3, augment="crop", precision="bf16-mixed"),
            seeds=5,
            rows=_SMALL,
        ),
        "paper": Setting(
            task=Classification(host="vit_s_32_spt", data="FashionMNIST", size=(32, 32), classes=10, init="host"),
            recipe=Recipe(
                epochs=400, batch=512, optimizer="adam", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, warmup=0.0,
                clip=0.0, smoothing=0.0, augment="timm:rand-m9-n2", precision="16-mixed",
            ),
            seeds=3,
            rows=_paper(),
        ),
    },
    claims=(Claim("SKA", "base", "top1"), Claim("CSKA", "base", "top1"), Claim("CSKA", "SKA", "top1")),
    notes=(
        "Rows without a name are the ViT's. The printed accuracies are low for this set: a plain convolutional network "
        "exceeds 91.",
        "SVHN is the table's other half: `--data SVHN` takes it from torchvision; digits must not be flipped there.",
        "Paper scale has no controls.",
    ),
)  # fmt: skip
