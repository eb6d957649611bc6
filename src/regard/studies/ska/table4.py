"""Static Key Attention in Vision, Table 4: what may stand in the place of the softmax."""

from regard.lab.study import Claim, Row, Setting, Study
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.cska import CSKA
from regard.studies.controls import CIFAR, CIFAR_RECIPE, CONTROLS, DIGITS, DIGITS_RECIPE, METAFORMER_RECIPE
from regard.tasks.classification import Classification

_SMALL = (
    Row("attention", Softmax(), notes=("Projected keys, for context.",)),
    Row("softmax", CSKA()),
    Row("gelu", CSKA(activation="gelu")),
    Row("relu", CSKA(activation="relu")),
    Row("starrelu", CSKA(activation="starrelu")),
    Row("none", CSKA(activation="none"), notes=("The logits themselves: as functions of the tokens, linear.",)),
    Row("no scale", CSKA(scale=1.0)),
    *CONTROLS,
)


def _row(label: str, options: str, top1: float) -> Row:
    mixers = ("conv", f"CSKA({options})", "attn", "attn")
    host = f"cskaformer_s18(mixers={mixers!r}, drop_path_rate=0.15)"
    return Row(label, None, host=host, paper={"params": 28e6, "top1": top1}, exact={"params": 28_973_778})


_PAPER = (
    _row("softmax", "", 83.4),
    _row("gelu", "activation='gelu'", 81.5),
    _row("relu", "activation='relu'", 81.1),
    _row("starrelu", "activation='starrelu'", 81.3),
    _row("no scale", "scale=1.0", 83.3),
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
        Claim("softmax", "gelu", "top1", by=1.9),
        Claim("softmax", "relu", "top1", by=2.3),
        Claim("softmax", "starrelu", "top1", by=2.1),
        Claim("softmax", "no scale", "top1", within=1.0),
    ),
    notes=(
        "Weights of the other activations are not divided by the number of keys, since the paper mentions no division.",
        "Paper scale has the recipe of Table 2 and no controls: take a study of the small scales for the gate.",
    ),
)
