"""Static Key Attention in Vision, Table 4: what may stand in the place of the softmax."""

from regard.lab.study import Claim, Row, Setting, Study
from regard.mixers.ska import SKA
from regard.mixers.softmax import Softmax
from regard.tasks.classification import Classification

from .parts import CIFAR, CIFAR_RECIPE, CONTROLS, DIGITS, DIGITS_RECIPE, METAFORMER_RECIPE

_SMALL = (
    Row("attention", Softmax(), notes=("Projected keys, for context.",)),
    Row("softmax", SKA()),
    Row("gelu", SKA(activation="gelu")),
    Row("relu", SKA(activation="relu")),
    Row("starrelu", SKA(activation="starrelu")),
    Row("none", SKA(activation="none"), notes=("The logits themselves: linear in the tokens.",)),
    Row("no scale", SKA(scale=1.0)),
    *CONTROLS,
)
_HOST = "cskaformer_s18(mixers=('conv', '{}', 'attn', 'attn'))"
_PAPER = (
    Row("softmax", None, host="cskaformer_s18", paper={"params": 28e6, "top1": 83.4}),
    Row("no scale", None, host=_HOST.format("CSKA(scale=1.0)"), paper={"params": 28e6, "top1": 83.3}),
)

STUDY = Study(
    name="ska_table4",
    title="Softmax, or another activation, on static keys",
    source="Static Key Attention in Vision, Table 4",
    question="Do static keys need the softmax and its scale?",
    baseline="softmax",
    settings={
        "smoke": Setting(task=DIGITS, recipe=DIGITS_RECIPE, seeds=3, rows=_SMALL),
        "desk": Setting(task=CIFAR, recipe=CIFAR_RECIPE, seeds=3, rows=_SMALL),
        "paper": Setting(
            task=Classification(host="cskaformer_s18", data="imagenet", size=(224, 224), classes=1000, init="host"),
            recipe=METAFORMER_RECIPE,
            seeds=3,
            rows=_PAPER,
        ),
    },
    claims=(
        Claim("softmax", "gelu", "top1"),
        Claim("softmax", "relu", "top1"),
        Claim("softmax", "starrelu", "top1"),
        Claim("softmax", "no scale", "top1", within=1.0),
    ),
    notes=(
        "Small scales take SKA, whose activations run without a softmax; the paper's table is of CSKAFormer-S18; its "
        "rows with GELU (81.5), ReLU (81.1) and StarReLU (81.3) have no CSKA twin here.",
        "Weights of the other activations are not divided by the number of keys, since the paper mentions no division.",
        "Paper scale has no controls: take a study of the small scales for the gate.",
    ),
)
