"""Errata: numbers and statements of the four papers that exact counts or tests contradict, and how to check them."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from regard.lab.engine.analysis import Analysis, Source
from regard.pages.sheets import Picture, Sheet

from .papers import ESA_PAPER, MITA_PAPER, SKA_PAPER, SNE_PAPER


class Erratum(NamedTuple):
    """where: table, figure or equation. printed: number or statement. actual: what is right. check: how to see it."""

    where: str
    printed: str
    actual: str
    check: str


_ROWS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    SKA_PAPER: (
        ("Table 1, SKA-ViT-S a", "8.1M parameters", "8,249,322 (with unused temperatures 8,249,328)",
         "Six static keys save 1.373M. The printed figure needs the plain patch embedding."),
        ("Table 1, FLOPs of the a rows", "ViT 1.25G, CaiT 1.37G, CvT 0.21G", "1.0900G, 1.2072G, 0.1941G",
         "The printed figures are those of the larger b models: 1.2564, 1.3780 and 0.2109."),
        ("Table 1, FLOPs of CvT-13", "0.17G", "0.2008G",
         "0.1653G belongs to another implementation with 19,555,146 parameters; the printed 19.6M is not its count."),
        ("Table 1, FLOPs of CSKA", "ViT 1.33G, CaiT 1.44G, Swin 1.52G", "1.2945G, 1.4085G, 1.0497G",
         "Counted by torch's FLOP counter on the built models."),
        ("Table 1, CSKA-CvT, CIFAR-100", "+0.9", "+1.3", "51.1 minus 49.8."),
        ("Table 2, CAFormer-S18", "83.3 top-1", "83.6 in its source",
         "Against the published baseline the claimed +0.1 of CSKAFormer-S18 (83.4) is -0.2."),
        ("Table 2, CSKAFormer-S18", "8.2G FLOPs", "12.798G",
         "A grouped 3x3 key on the 28x28 grid costs 1.4G in each layer."),
        ("Table 2, CSKAFormer-B36", "48.4G FLOPs", "82.380G", "The same in twelve layers."),
        ("Table 2, SKAFormer", "26M and 97M parameters", "stage 2: 26,555,922 and 100,074,550",
         "Both figures together fit only stages {2,3} or {4}, which the paper does not mention; the code has {3,4} "
         "without a query projection (23,565,336)."),
        ("Table 3, ResNet-50 and -101", "376G and 518G FLOPs", "518.7G and 670.2G",
         "Two for each multiply-accumulate of Mask R-CNN at 800 x 1280, by which Swin-T (533.2G), ConvNeXt-T (523.9G) "
         "and ConvFormer-S18 (500.9G) are as printed: 518G belongs to ResNet-50."),
        ("Table 3, CAFormer-S18", "508G FLOPs", "688.8G",
         "498.4G without the products of attention, which counters of layers leave out."),
        ("Table 3, CSKAFormer-S18", "512G FLOPs", "2,652.1G; 799.3G in windows of 28 x 28",
         "A grouped 3x3 key on the 100x160 grid costs 295 GMAC in each of three layers; how 784 trained keys serve "
         "16,000 tokens is not said."),
        ("Table 6, caption", "an MLP among the mechanisms", "the table has none", "Read beside its rows."),
        ("Table 6, SepConv", "9D + 2D^2 parameters", "4D^2 + 98D + 2 in MetaFormer",
         "MetaFormer's block has expansion 2 and a 7x7 kernel."),
        ("Table 9, Swin and CvT", "stages (2,2,2); widths 64/128/256", "5.04M and 8.8M parameters",
         "Table 1 prints 26.6M and 19.6M, which other widths and depths give; 3 heads do not divide 128."),
        ("Algorithm 2", "a grouped convolution makes keys", "it cannot run",
         "Channels do not match and the class key comes last. Text, Table 6 and code agree on a convolution that "
         "makes the logits; this is CSKA here."),
        ("text on stage 2", "nine ConvFormer layers", "three", "Nine is stage 3 of S18, and those are attention."),
        ("Section 5.1 on Table 1", "consistent improvements in both accuracy and computational efficiency",
         "CIFAR-100: SKA-ViT -1.7 and -1.5, SKA-Swin a -0.9, CSKA-Swin -0.8",
         "Of the same table: CSKA-Swin has 4949 images per second against 5105 of its host, SKA-CaiT b 6830 against "
         "7358."),
        ("Section 6.2 on Figure 3", "a slight increase in cost with more heads", "784 biases per head and layer",
         "Heads share the width: filters and multiply-accumulates of the convolution are the same for any number."),
        ("Section 4.1 and Algorithm 1", "logits q K^T without a scale", "d^-0.5 in the authors' code",
         "The scale belongs to the method: Table 4 has its removal (No Scaling) as a variant, 83.3 against 83.4."),
        ("Algorithm 2, class token", "one cls_k for all queries", "keys of its own for the query of the class token",
         'The convolution gives no logits off the grid: CSKA(rows="static") has a static key for them, as the '
         "authors' ViT has, rows=\"centre\" the centre tap; cols=\"static\" is cls_k."),
    ),
    SNE_PAPER: (
        ("Table 2, F-SNE 16* on Nano", "h = 182, matched", "3,056,608 against 3,053,224",
         "The row is larger than the baseline; h = 180 would be matched."),
        ("Table 2, F-SNE 64 on Nano", "2.9M", "2,953,576", "Cut off, not rounded."),
        ("Table 2, F-SNE 64 on Tiny", "6.3M", "6,419,248", "Table 4 prints 6.4M for the same model."),
        ("Table 4, F-SNE 16* on Tiny", "6.3M", "6,712,720", "Table 2 prints 6.7M for the same model."),
        ("Table 5, F-SNE 8*", "2.9M shared, 3.05M unshared", "3,051,832 and 3,052,096",
         "Unshared codes are 264 numbers more."),
        ("Tables 2 to 4", "the same number of parameters", "more work",
         "P-SNE adds 10 % and F-SNE 8* 20 % to the multiply-accumulates of the whole model."),
        ("Table 3, baseline N12", "71.7", "72.2 in XCiT's own list", "Against 72.2 only F-SNE 8* gains."),
        ("Equation 3", "division by the temperature", "multiplication", "XCiT's code multiplies, from 1."),
        ("Tables 2 to 6", "gains up to 1.5 (Table 2) and 2.7 points (Table 4)", "single runs",
         "No seeds are given, so no interval exists. On Cars all T12 rows lose, by 0.4 to 0.9 points."),
        ("Section 5.2 on Table 3", "shared methods improve under distillation", "F-SNE 8: 71.7, as the baseline",
         "71.7 minus 71.7 is 0.0."),
        ("Table 4, Cars", "five of six T12 F-SNE rows at 92.3", "improbable", "Both SNE rows are 91.8 as well."),
    ),
    MITA_PAPER: (
        ("Appendix A", "m = k = N is full attention", "a mixture of softmax and Agent attention",
         "Landmarks are further slots of the softmax; only the routed branch alone with k = N is softmax attention."),
        ("Equation 10 and the released code", "landmark logits q.l / sqrt(d)", "q.l / d",
         'It scales landmark keys before a kernel that scales again: MiTA(preset="official").'),
        ("text on pooling", "windows that do not overlap", "3,4,4,4,3 cells from 0,2,5,8,11",
         "Adaptive pooling of 14 cells to 5 overlaps."),
        ("pooling in the code", "patches", "class token and all patches but the last",
         "The released file pools q[:, :-1] as a square."),
        ("Table 2, DWC + gate, S", "22M parameters", "23,870,824",
         "The gate is a fourth projection; the printed 4.7G includes it."),
        ("Table 2, MHLA-T", "1.1G", "1.51 GMAC", "It is trained on 256 tokens; 1.13 belongs to 196."),
        ("Table 3, MHLA-S + DWC", "4.2G", "4.34 GMAC", "Without the convolution, at 196 tokens."),
        ("Table 3, InLine-DeiT-S", "DeiT-S", "width 320, 10 heads, 288 pixels",
         "16,734,760 parameters; it is another host."),
        ("Tables 2 and 3", "FLOPs", "multiply-accumulates", "DeiT-S has 4.60 GMAC, printed as 4.6G."),
        ("Table 2, Agent and FLatten", "1.1G, 6.1M", "1.16 GMAC, 6,173,608", "Cut off, not rounded."),
        ("Table 6, compress only", "70.3, without m", "the figure of the Agent row of Table 2",
         "That row has m = 49 and compresses only: presumably the two are one model, not one with m = 25."),
        ("Appendix C", "backbones at 224", "Section 4.2 says 384", "The appendix probably means Table 7."),
    ),
    ESA_PAPER: (
        ("All tables", "FLOPs", "multiply-accumulates", "Reproduced to 0.1 G by the formulas here."),
        ("Tables 2 and 3, deformable rows", "no overhead", "offsets and interpolation are left out",
         'cost(site, accounting="executed") counts the offsets, interpolation(site) the rest.'),
        ("Table 1, E4", "O(N^2 C)", "O(N (H + W) C)",
         "Without E1 the weights factorise over rows and columns; exact to rounding."),
        ("text on Cityscapes", "5,000 fine training images", "2,975", "5,000 is the number of all fine images."),
        ("Segmentation, 1000 and 1010", "1111.2 GMAC", "1111.5 GMAC", "The one misfit of its cost formula."),
        ("the public module for E2 without E4", "0100, 0110, 1100, 1110", "wrong on square maps, fails on others",
         "The query map is transposed before the vertical product (largest error 0.4 to 0.9)."),
    ),
}  # fmt: skip
ERRATA = {paper: tuple(Erratum(*row) for row in rows) for paper, rows in _ROWS.items()}


_NAMES = {**{paper: paper for paper in ERRATA}, "MiTA": MITA_PAPER, "the embedding paper": SNE_PAPER}
"""First words of a study's source -> title of the paper."""


def errata_of(source: str) -> tuple[Erratum, ...]:
    """The errata of the tables and figures that a study's source names, such as "MiTA, arXiv 2602.01219, Table 2".

    Papers are separated by "; ". Empty for other sources; an erratum that names no table or figure belongs to none.
    """
    errata: list[Erratum] = []
    for part in source.split("; "):
        paper = next((paper for name, paper in _NAMES.items() if part.startswith(name)), None)
        numbers = _numbers(part)
        tables = any(kind == "Table" for kind, _ in numbers)
        for erratum in ERRATA[paper] if paper else ():
            if numbers & _numbers(erratum.where) or (tables and erratum.where == "All tables"):
                errata.append(erratum)
    return tuple(errata)


def _numbers(text: str) -> set[tuple[str, int]]:
    """("Table", 2) and ("Table", 3) for "Tables 2 and 3, deformable rows"; "2 to 4" and "2-4" are three tables."""
    numbered = set()
    for kind, first, between, last in re.findall(r"(Table|Figure)s? (\d+)(?:( and | to |-)(\d+))?", text):
        numbers = [int(first)] if not last else [int(first), int(last)]
        if between in (" to ", "-"):
            numbers = list(range(numbers[0], numbers[1] + 1))
        numbered |= {(kind, number) for number in numbers}
    return numbered


def sheets(source: Source) -> Sequence[Sheet | Picture]:
    """One sheet for each paper."""
    columns = ("where", "printed", "found", "how to see it")
    return [Sheet(title=paper, columns=columns, rows=tuple(map(tuple, errata))) for paper, errata in ERRATA.items()]


ANALYSIS = Analysis(
    name="errata",
    title="What the printed numbers cannot be",
    source="the four papers",
    question="Which printed figures do exact counts, tests or the authors' own code contradict?",
    compute=sheets,
    notes=(
        "Counts are of built models; G is 1e9. The static-key paper counts two FLOPs per multiply-accumulate, the "
        "MiTA and spatial-attention papers one.",
    ),
)
