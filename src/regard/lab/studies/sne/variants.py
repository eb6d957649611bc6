"""SNE paper, Table 5 and Figures 3 and 6: shared codes, the number of layers, the size of a code."""

from regard.core import ProjectionConfig
from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CONTROLS, small_settings
from regard.lab.studies.papers import SNE_PAPER
from regard.mixers import Softmax
from regard.projections import FSNE, SNE, LinearQKV

from .models import HOSTS, IMAGENET, RATE_NOTE, T12_FIELDS, XCIT_RECIPE, table2_rows, xcit


def _settings(small: tuple[Row, ...], paper: tuple[Row, ...]) -> dict[str, Setting]:
    return small_settings((*small, *CONTROLS)) | {"paper": Setting(IMAGENET, XCIT_RECIPE, (*paper, *CONTROLS))}


_SMALL_NOTE = "The small scales use softmax attention in a small ViT, not XCiT."
TABLE5 = Study(
    name="sne_table5",
    title="Codes that all layers share, or their own",
    source=f"{SNE_PAPER}, Table 5",
    question="Do layers need codes of their own?",
    baseline="shared",
    settings=_settings(
        (
            Row("shared", Softmax(projection=FSNE(code=8, width="matched", init="kaiming"))),
            Row("own", Softmax(projection=FSNE(code=8, width="matched", init="kaiming", tied=False))),
        ),
        (
            Row("shared", xcit(FSNE(code=8, width=186)), paper={"params": 2.9e6, "top1": 70.82},
                exact={"params": 3_051_832},
                notes=("The table prints 2.9M for it and 3.05M for the other row; both have 3.05M.",)),
            Row("own", xcit(FSNE(code=8, width=186, tied=False)), paper={"params": 3.05e6, "top1": 70.28},
                exact={"params": 3_052_096}),
        ),
    ),
    claims=(Claim("shared", "own", "top1", by=0.5),),
    notes=("With codes of three numbers or more, shared and own codes can express the same.", _SMALL_NOTE),
)  # fmt: skip


def _layers(count: int, small: bool) -> ProjectionConfig:
    if small:
        return SNE(layers=count, width="matched", init="kaiming")
    return SNE(layers=count) if count == 2 else SNE(layers=count, width="matched")


_LAYER_LABELS = {count: f"{count} {'layers' if count > 1 else 'layer'}" for count in range(1, 5)}
FIGURE3 = Study(
    name="sne_fig3",
    title="How many layers a query, key or value needs",
    source=f"{SNE_PAPER}, Figure 3",
    question="Are two layers the best number at equal parameters?",
    baseline="1 layer",
    settings=_settings(
        tuple(Row(label, Softmax(projection=_layers(count, True))) for count, label in _LAYER_LABELS.items()),
        tuple(Row(label, xcit(_layers(count, False))) for count, label in _LAYER_LABELS.items()),
    ),
    claims=tuple(Claim("2 layers", label, "top1") for count, label in _LAYER_LABELS.items() if count != 2),
    notes=(
        "The paper does not print the widths; here each number of layers has as many weights as one linear layer. One "
        "layer is a linear projection.",
        _SMALL_NOTE,
    ),
)

_CODES = (8, 16, 32, 64)
_PRINTED = {row.label: {"top1": row.paper["top1"]} for row in table2_rows()}
FIGURE6 = Study(
    name="sne_fig6",
    title="How long a code must be",
    source=f"{SNE_PAPER}, Figure 6",
    question="How does accuracy change with the size of the codes?",
    baseline="linear",
    settings=_settings(
        (
            Row("linear", Softmax()),
            *(Row(f"code {size}", Softmax(projection=FSNE(code=size, init="kaiming"))) for size in _CODES),
        ),
        (
            Row("linear", xcit(LinearQKV()), paper=_PRINTED["N12 linear"]),
            *(Row(f"code {size}", xcit(FSNE(code=size)), paper=_PRINTED[f"N12 F-SNE {size}"]) for size in _CODES),
            *(
                Row(f"T12 code {size}", xcit(FSNE(code=size)), host=HOSTS["T12"], paper=_PRINTED[f"T12 F-SNE {size}"],
                    recipe=T12_FIELDS)
                for size in _CODES
            ),
        ),
    ),
    claims=(Claim("code 8", "code 64", "top1"),),
    notes=("The paper's optimum is 8 for Nano and 16 for Tiny, from single runs.", _SMALL_NOTE, RATE_NOTE),
)  # fmt: skip
