"""Static Key Attention in Vision, Table 4: other activations in the place of the softmax."""

from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CONTROLS, small_settings
from regard.lab.studies.papers import SKA_PAPER
from regard.mixers import CSKA, Softmax

from .models import METAFORMER_NOTE, METAFORMER_RECIPE, METAFORMER_TASK, PARAMS_CSKA_S18, S18, START_NOTE, metaformer

_SMALL = (
    Row("attention", Softmax(), notes=("Projected keys, for context.",)),
    Row("softmax", CSKA()),
    Row("gelu", CSKA(activation="gelu")),
    Row("relu", CSKA(activation="relu")),
    Row("starrelu", CSKA(activation="starrelu")),
    Row("none", CSKA(activation="none"), notes=("The logits are the weights: linear functions of the tokens.",)),
    Row("no scale", CSKA(scale=1.0)),
    *CONTROLS,
)


def _row(label: str, options: str, top1: float) -> Row:
    spelled = ", ".join(filter(None, (options, "init='paper'")))
    host = metaformer(("conv", f"CSKA({spelled})", "attn", "attn"), "cskaformer_s18", S18)
    return Row(label, None, host=host, paper={"params": 28e6, "top1": top1}, exact={"params": PARAMS_CSKA_S18})


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
    source=f"{SKA_PAPER}, Table 4",
    question="Do static keys need the softmax and its scale?",
    baseline="softmax",
    settings={
        **small_settings(_SMALL, seeds=(3, 3)),
        "paper": Setting(METAFORMER_TASK, METAFORMER_RECIPE, _PAPER),
    },
    claims=(
        *(Claim("softmax", name, "top1", by=by) for name, by in (("gelu", 1.9), ("relu", 2.3), ("starrelu", 2.1))),
        Claim("softmax", "no scale", "top1", within=1.0),
    ),
    notes=(
        "Weights of the other activations are not divided by the number of keys, since the paper mentions no division.",
        METAFORMER_NOTE,
        START_NOTE,
    ),
)
