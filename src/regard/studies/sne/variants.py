"""SNE paper, Table 5 and Figures 3 and 6: shared codes, the number of layers, the size of a code."""

from regard.core import ProjectionConfig
from regard.lab.study import Claim, Row, Setting, Study
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA
from regard.projections.linear import LinearQKV
from regard.projections.sne import FSNE, SNE
from regard.studies.controls import CIFAR, CIFAR_RECIPE, CONTROLS, DIGITS, DIGITS_RECIPE, XCIT_RECIPE
from regard.tasks.classification import Classification

SOURCE = "Rethinking Query, Key and Value Embedding in Vision Transformer under Tiny Model Constraints"
NANO, TINY = "xcit_nano_12_p16_224", "xcit_tiny_12_p16_224"
IMAGENET = Classification(host=NANO, data="imagenet", size=(224, 224), classes=1000, init="host")


def xcit(projection: ProjectionConfig) -> XCA:
    """XCiT's attention with a projection; its temperature decays as in the authors' runs."""
    return XCA(projection=projection, decay_temperature=True)


def _settings(small: tuple[Row, ...], paper: tuple[Row, ...]) -> dict[str, Setting]:
    return {
        "smoke": Setting(task=DIGITS, recipe=DIGITS_RECIPE, seeds=3, rows=(*small, *CONTROLS)),
        "desk": Setting(task=CIFAR, recipe=CIFAR_RECIPE, seeds=5, rows=(*small, *CONTROLS)),
        "paper": Setting(task=IMAGENET, recipe=XCIT_RECIPE, seeds=3, rows=(*paper, *CONTROLS)),
    }


_SMALL_NOTE = "The small scales stand on softmax attention in a small ViT, not on XCiT."
_SHARED = FSNE(code=8, width=186)
_OWN = FSNE(code=8, width=186, tied=False)
TABLE5 = Study(
    name="sne_table5",
    title="Codes that all layers share, or their own",
    source=f"{SOURCE}, Table 5",
    question="Do layers need codes of their own?",
    baseline="shared",
    settings=_settings(
        (
            Row("shared", Softmax(projection=FSNE(code=8, width="matched", init="kaiming"))),
            Row("own", Softmax(projection=FSNE(code=8, width="matched", init="kaiming", tied=False))),
        ),
        (
            Row("shared", xcit(_SHARED), paper={"params": 2.9e6, "top1": 70.82}, exact={"params": 3_051_832},
                notes=("The table prints 2.9M for it and 3.05M for the other row; both have 3.05M.",)),
            Row("own", xcit(_OWN), paper={"params": 3.05e6, "top1": 70.28}, exact={"params": 3_052_096}),
        ),
    ),
    claims=(Claim("shared", "own", "top1", by=0.5),),
    notes=("With codes of three numbers or more, shared and own codes can express the same.", _SMALL_NOTE),
)  # fmt: skip


def _layers(count: int, wide: bool) -> ProjectionConfig:
    if wide:
        return SNE(layers=count) if count == 2 else SNE(layers=count, width="matched")
    return SNE(layers=count, width="matched", init="kaiming")


FIGURE3 = Study(
    name="sne_fig3",
    title="How many layers a query, key or value needs",
    source=f"{SOURCE}, Figure 3",
    question="Are two layers the best number at equal parameters?",
    baseline="1 layer",
    settings=_settings(
        tuple(
            Row(f"{count} layer{'s' * (count > 1)}", Softmax(projection=_layers(count, False))) for count in range(1, 5)
        ),
        tuple(Row(f"{count} layer{'s' * (count > 1)}", xcit(_layers(count, True))) for count in range(1, 5)),
    ),
    claims=(
        Claim("2 layers", "1 layer", "top1"),
        Claim("2 layers", "3 layers", "top1"),
        Claim("2 layers", "4 layers", "top1"),
    ),
    notes=(
        "The paper does not say the widths; here each number of layers has as many weights as one linear layer. One "
        "layer is a linear projection.",
        _SMALL_NOTE,
    ),
)

_SIZES = {8: (70.6, 76.8), 16: (70.2, 77.2), 32: (70.3, 77.1), 64: (70.2, 77.1)}
FIGURE6 = Study(
    name="sne_fig6",
    title="How long a code must be",
    source=f"{SOURCE}, Figure 6",
    question="How does accuracy change with the size of the codes?",
    baseline="linear",
    settings=_settings(
        (
            Row("linear", Softmax()),
            *(Row(f"code {size}", Softmax(projection=FSNE(code=size, init="kaiming"))) for size in _SIZES),
        ),
        (
            Row("linear", xcit(LinearQKV()), paper={"top1": 69.9}),
            *(Row(f"code {size}", xcit(FSNE(code=size)), paper={"top1": nano}) for size, (nano, _) in _SIZES.items()),
            *(
                Row(f"T12 code {size}", xcit(FSNE(code=size)), host=TINY, paper={"top1": tiny})
                for size, (_, tiny) in _SIZES.items()
            ),
        ),
    ),
    claims=(Claim("code 8", "code 64", "top1"),),
    notes=("The paper's optimum is 8 for Nano and 16 for Tiny, from single runs.", _SMALL_NOTE),
)
