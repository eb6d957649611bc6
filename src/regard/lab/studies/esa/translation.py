"""An Empirical Study of Spatial Attention Mechanisms on translation: Figure 3c and 3d, Tables 2 and 3."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CONTROLS
from regard.lab.studies.papers import ESA_PAPER
from regard.lab.tasks.translation import Translation
from regard.lab.train.recipe import Recipe
from regard.mixers import DeformableConv, Factors

from .rows import PAIRS, factor_claims, factor_rows, figure3_rows, pair_rows, values_at, window_rows

WINDOWS, SMALL_WINDOWS = (31, 25, 19, 13), (13, 7, 3)
"""Widths of Table 3, and those of the small scales, whose sentences have about 15 tokens."""
_ALL = "'Factors(terms=\"1111\")'"
_UNIT = "'DeformableConv(kernel=3)'"
_HOSTS = {
    "smoke": 'translator(dim=16, depth=1, heads=2, hidden=32, positions="none", {studied})',
    "desk": 'translator(drop=0.2, positions="none", {studied})',
    "paper": 'translator(dim=512, depth=6, heads=8, hidden=2048, norm="post", positions="none", {studied})',
}
_PAPER_RECIPE = Recipe(
    epochs=25, batch=1140, optimizer="adam", lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, warmup=0.04,
    schedule="rsqrt", clip=0.0, augment="none", precision="bf16-mixed", average=5,
)  # fmt: skip
_DESK_RECIPE = Recipe(
    epochs=5, batch=160, optimizer="adam", lr=2e-3, weight_decay=0.0, warmup=0.25, schedule="rsqrt", augment="none",
    average=2,
)  # fmt: skip
NOTES = (
    "The digits are E1 to E4: query and key content, query content and relative position, key content alone, relative "
    "position alone. There are no absolute positions, as in the paper: a row without E2 and E4 does not know the order "
    "of words.",
    "While self-attention is studied, the attention from decoder to encoder has all factors, and the reverse.",
    "Desk scale is Multi30k (captions of about 12 words) with a small Transformer, smoke scale written numbers. At "
    "paper scale BLEU is sacreBLEU of whole sentences, with beam 4, penalty 0.6 and the average of the last 5 epochs; "
    "the paper prints tokenised BLEU and does not state its search: printed values are near at best.",
    "At paper scale 1,140 sentence pairs stand for a batch of 30,000 tokens of each language, and 25 epochs of 4.5 "
    "million pairs for 100,000 steps, 4,000 of them warm-up (`--set` changes them). WMT14 is the user's: a "
    "folder with train.en, train.de, val.en, val.de, test.en and test.de.",
)


def settings(rows: dict[str, tuple[Row, ...]], place: Literal["self", "cross"], studied: str) -> dict[str, Setting]:
    """Three scales. rows: by scale. studied: the host's option for the attention that is not studied."""
    smoke, desk, paper = (host.format(studied=studied) for host in _HOSTS.values())
    smoke_recipe = Recipe(epochs=1, batch=32, augment="none", weight_decay=0.0)
    task = Translation(host=paper, data="wmt14", vocabulary=37_000, place=place)
    smoke_task = replace(task, host=smoke, data="numbers", vocabulary=300, limit=96, beam=1)
    desk_task = replace(task, host=desk, data="multi30k", vocabulary=4000)
    return {
        "smoke": Setting(smoke_task, smoke_recipe, rows["smoke"], seeds=2),
        "desk": Setting(desk_task, _DESK_RECIPE, rows["desk"], seeds=4),
        "paper": Setting(task, _PAPER_RECIPE, rows["paper"]),
    }


def _deformable(scale: str, terms: str, values: dict[str, int | float]) -> Row:
    """A row with a deformable convolution before each self-attention (Figure 2c), or in its place."""
    if terms == "w/o":
        unit, note = DeformableConv(kernel=3), "The unit is in the place of self-attention."
        return Row("w/o + deformable", unit, paper=values, notes=(note,))
    host = _HOSTS[scale].format(studied=f"cross={_ALL}, unit={_UNIT}")
    note = "The unit starts as the identity."
    return Row(f"{terms} + deformable", Factors(terms=terms), host=host, paper=values, notes=(note,))


def _by_scale(rows: Callable[..., tuple[Row, ...]]) -> dict[str, tuple[Row, ...]]:
    """`figure3_rows` or `pair_rows` of every scale."""
    return {scale: rows(values_at("bleu", scale), partial(_deformable, scale)) for scale in _HOSTS}


FIGURE3_SELF = Study(
    name="esa_fig3_translation",
    title="Which factors does self-attention need in translation?",
    source=f"{ESA_PAPER}, Figure 3c",
    question="What do query content, key content and relative position each add to self-attention in translation?",
    baseline="1111",
    metric="bleu",
    settings=settings(_by_scale(figure3_rows), "self", f"cross={_ALL}"),
    claims=(*factor_claims("bleu"), Claim("1111", "1010", "bleu")),
    notes=("The last claim is not the paper's: without E2 and E4 the order of words is not known.", *NOTES),
)
_PLAIN = factor_rows(values_at("bleu", "desk"))
FIGURE3_CROSS = Study(
    name="esa_fig3_encoder_decoder",
    title="Which factors does the attention from decoder to encoder need?",
    source=f"{ESA_PAPER}, Figure 3d",
    question="Is query and key content (E1) what attention to the encoder lives on?",
    baseline="1111",
    metric="bleu",
    settings=settings(dict.fromkeys(_HOSTS, (*_PLAIN, CONTROLS[1])), "cross", f"attention={_ALL}"),
    claims=(
        Claim("1000", "1111", "bleu", within=1.0),
        *(Claim(row, "0111", "bleu") for row in ("1000", "1111")),
    ),
    notes=(
        "There is no row without this attention: the translation would not know its source. 0000 is its uniform "
        "average. Relative positions of the two sentences are differences of their word numbers.",
        *NOTES,
    ),
)
TABLE2 = Study(
    name="esa_table2_translation",
    title="Deformable convolution, or query content and relative position, in translation",
    source=f"{ESA_PAPER}, Table 2",
    question="Does deformable convolution do the work of query content and relative position (E2) on text?",
    baseline="1111",
    metric="bleu",
    settings=settings(_by_scale(pair_rows), "self", f"cross={_ALL}"),
    claims=tuple(Claim(f"{after} + deformable", before, "bleu", within=1.0) for before, after in PAIRS[1:]),
    notes=("On text the paper finds deformable convolution about as good as E2, on images better.", *NOTES),
)
_SMALL_ROWS = window_rows(SMALL_WINDOWS, 1)
_WINDOW_ROWS = {
    "smoke": _SMALL_ROWS, "desk": _SMALL_ROWS, "paper": window_rows(WINDOWS, 1, "bleu", kernel_bias=False),
}  # fmt: skip
TABLE3 = Study(
    name="esa_table3_translation",
    title="Dynamic convolution, or E2 in the same window, in translation",
    source=f"{ESA_PAPER}, Table 3",
    question="In the same window, is dynamic convolution as good on text as attention by E2?",
    baseline="0100 in 13",
    metric="bleu",
    settings=settings(_WINDOW_ROWS, "self", f"cross={_ALL}"),
    claims=tuple(Claim(f"dynamic {n}", f"0100 in {n}", "bleu", within=1.0) for n in (*WINDOWS, *SMALL_WINDOWS[1:])),
    notes=NOTES,
)
