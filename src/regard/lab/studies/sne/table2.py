"""Non-linear query, key and value embeddings under tiny model constraints, Table 2: XCiT with SNE, P-SNE and F-SNE."""

from dataclasses import replace

from regard.lab.engine.study import Claim, Row, Setting, Study, paper_claims
from regard.lab.studies.controls import CIFAR, CIFAR_RECIPE, CONTROLS, DIGITS, DIGITS_RECIPE
from regard.lab.studies.papers import SNE_PAPER

from .models import EMBEDDINGS, IMAGENET, RATE_NOTE, RECIPE_NOTE, SMALL, XCIT_RECIPE, table2_rows, xcit

_SMOKE_HOST = "xcit_desk(size=8, patch=2, dim=32, depth=2, heads=2)"
_DESK_HOST = "xcit_desk(size=32, patch=4, dim=64, depth=4, heads=2)"
_SMALL = (*(Row(f"N12 {label}", xcit(projection)) for label, projection in SMALL.items()), *CONTROLS)

_OTHERS = [name for name in EMBEDDINGS["N12"] if name not in ("linear", "P-SNE")]

STUDY = Study(
    name="sne_table2",
    title="Non-linear queries, keys and values",
    source=f"{SNE_PAPER}, Table 2",
    question="Do two layers in the place of the query, key and value matrices help a small model of the same size?",
    baseline="N12 linear",
    settings={
        "smoke": Setting(replace(DIGITS, host=_SMOKE_HOST), DIGITS_RECIPE, _SMALL),
        "desk": Setting(replace(CIFAR, host=_DESK_HOST), CIFAR_RECIPE, _SMALL, seeds=5),
        "paper": Setting(IMAGENET, XCIT_RECIPE, (*table2_rows(), *CONTROLS)),
    },
    claims=(
        *paper_claims(table2_rows()),
        *(Claim("N12 P-SNE", f"N12 {other}", "top1") for other in _OTHERS),
    ),
    notes=(
        "The small scales use a small XCiT: one convolution as its stem, two or four blocks, one class attention. "
        "Its local patch interaction mixes neighbours in every row, in the controls too, so that the gate asks what "
        "attention adds to it.",
        "Equal parameters are not equal work: P-SNE adds 10 % to the multiply-accumulates of the whole XCiT, F-SNE 8* "
        "adds 20 % although the three roles share the product with the input.",
        RATE_NOTE,
        RECIPE_NOTE,
        "The paper shows single runs without seeds; its differences to the baseline are -0.3 to +1.5 points.",
        "Codes and static keys get no weight decay; the temperature of XCA does, as in XCiT's own runs (but not in the "
        "desk runs of docs/results, which are older).",
    ),
)
