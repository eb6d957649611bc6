"""An Empirical Study of Spatial Attention Mechanisms, Figure 3: the 16 configurations of the four factors."""

from dataclasses import replace

from regard.lab.engine.study import Row, Setting, Study
from regard.lab.studies.controls import CANVAS, CANVAS_RECIPE, CIFAR, CIFAR_RECIPE, CONTROLS, DEIT_RECIPE, imagenet
from regard.lab.studies.papers import ESA_PAPER
from regard.mixers import Factors
from regard.mixers.factors.factors import FACTORS

from .rows import TERMS, factor_claims


def _meaning(terms: str) -> str:
    return " + ".join(meaning for bit, meaning in zip(terms, FACTORS.values(), strict=True) if bit == "1")


_ROWS = (
    *(Row(terms, Factors(terms=terms, scale=None), notes=(f"{_meaning(terms).capitalize()}.",)) for terms in TERMS),
    *CONTROLS,
    *(Row(f"{terms} unscaled", Factors(terms=terms), notes=("The paper's formula.",)) for terms in ("1111", "0111")),
)
STUDY = Study(
    name="esa_fig3",
    title="Which of the four factors does a vision transformer need?",
    source=f"{ESA_PAPER}, Figure 3",
    question="What do query content, key content and relative position each add to self-attention?",
    baseline="1111",
    settings={
        "smoke": Setting(replace(CANVAS, limit=320), CANVAS_RECIPE, _ROWS, seeds=2),
        "desk": Setting(CIFAR, CIFAR_RECIPE, _ROWS),
        "paper": Setting(imagenet("deit_small_patch16_224(qkv_bias=False, drop_path_rate=0.1)"), DEIT_RECIPE, _ROWS),
    },
    claims=factor_claims("top1"),
    notes=(
        "The digits are E1 to E4: query and key content, query content and relative position, key content alone, "
        "relative position alone.",
        "Queries have no bias: with one, 1000 would be 1010 (its product with the keys is a key content term).",
        "The paper's figure is of detection, segmentation and translation, these rows are of classification: printed "
        "values are not shown beside them, and findings are judged as directions.",
        "That 1100 is as good as 0011 is the paper's sentence that modules with query-sensitive terms only perform on "
        "par with those with query-irrelevant terms only.",
        "Logits have the factor d^-0.5 of the host, so that 1000 is the host's own attention. The paper has none; its "
        "formula is in the rows called unscaled. A first desk study of all rows without the factor was stopped "
        "after the first of four seeds: 1111 was below both controls, so that no claim could be judged.",
        "All rows keep the heads and values. The cost of a row is that of the form that runs here; "
        "`regard cost --accounting paper` has the paper's.",
    ),
)
