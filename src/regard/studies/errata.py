"""Errata: numbers and statements of the four papers that exact counts or tests contradict, with how to see it."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from regard.lab.analysis import Analysis, Picture, Sheet, Source

SKA_PAPER = "Static Key Attention in Vision"
SNE_PAPER = "Rethinking Query, Key and Value Embedding in Vision Transformer under Tiny Model Constraints"
MITA_PAPER = "Mixture-of-Top-k Attention"
ESA_PAPER = "An Empirical Study of Spatial Attention Mechanisms in Deep Networks"


class Erratum(NamedTuple):
    """where: table or equation. printed: what stands there. found: what is true. see: how to see it."""

    where: str
    printed: str
    found: str
    see: str


ERRATA: dict[str, tuple[Erratum, ...]] = {
    SKA_PAPER: (
        Erratum(
            "Table 1, SKA-ViT-S a", "8.1M parameters", "8,249,322 (with unused temperatures 8,249,328)",
            "Six static keys save 1.373M. The printed figure needs the plain patch embedding.",
        ),
        Erratum(
            "Table 1, FLOPs of the a rows", "ViT 1.25G, CaiT 1.37G, CvT 0.21G", "1.0900G, 1.2072G, 0.1941G",
            "The printed figures are those of the larger b models: 1.2564, 1.3780 and 0.2109.",
        ),
        Erratum(
            "Table 1, FLOPs of CvT-13", "0.17G", "0.2008G",
            "0.1653G belongs to another implementation with 19,555,146 parameters; the printed 19.6M is not its count.",
        ),
        Erratum(
            "Table 1, FLOPs of CSKA", "ViT 1.33G, CaiT 1.44G, Swin 1.52G", "1.2945G, 1.4085G, 1.0497G",
            "Counted by torch's FLOP counter on the built models.",
        ),
        Erratum(
            "Table 1, CSKA-CvT, CIFAR-100", "+0.9", "+1.3", "51.1 minus 49.8.",
        ),
        Erratum(
            "Table 2, CAFormer-S18", "83.3 top-1", "83.6 in its source",
            "The claimed +0.1 of CSKAFormer-S18 (83.4) is -0.2 against the published baseline.",
        ),
        Erratum(
            "Table 2, CSKAFormer-S18", "8.2G FLOPs", "12.798G",
            "A grouped 3x3 key on the 28x28 grid costs 1.4G in each layer.",
        ),
        Erratum(
            "Table 2, CSKAFormer-B36", "48.4G FLOPs", "82.380G", "The same in twelve layers.",
        ),
        Erratum(
            "Table 2, SKAFormer", "26M and 97M parameters", "stage 2: 26,555,922 and 100,074,550",
            "Both figures together fit only stages {2,3} or {4}, which the paper does not mention; the code has {3,4} "
            "without a query projection (23,565,336).",
        ),
        Erratum(
            "Table 6, caption", "an MLP among the mechanisms", "the table has none", "Read beside its rows.",
        ),
        Erratum(
            "Table 6, SepConv", "9D + 2D^2 parameters", "4D^2 + 98D + 2 in MetaFormer",
            "MetaFormer's block has expansion 2 and a 7x7 kernel.",
        ),
        Erratum(
            "Table 9, Swin and CvT", "stages (2,2,2); widths 64/128/256", "5.04M and 8.8M parameters",
            "Table 1 prints 26.6M and 19.6M, which other widths and depths give; 3 heads do not divide 128.",
        ),
        Erratum(
            "Algorithm 2", "a grouped convolution makes keys", "it cannot run",
            "Channels do not match and the class key comes last. Text, Table 6 and code agree on a convolution that "
            "makes the logits; this is CSKA here.",
        ),
        Erratum(
            "text on stage 2", "nine ConvFormer layers", "three", "Nine is stage 3 of S18, and those are attention.",
        ),
        Erratum(
            "text on parameters", "static keys have fewer parameters", "not where tokens outnumber the width",
            "DeiT-T grows from 5,717,416 to 5,726,632.",
        ),
    ),
    SNE_PAPER: (
        Erratum(
            "Table 2, F-SNE 16* on Nano", "h = 182, matched", "3,056,608 against 3,053,224",
            "The row is larger than the baseline; h = 180 would be matched.",
        ),
        Erratum("Table 2, F-SNE 64 on Nano", "2.9M", "2,953,576", "Cut off, not rounded."),
        Erratum("Table 2, F-SNE 64 on Tiny", "6.3M", "6,419,248", "Table 4 prints 6.4M for the same model."),
        Erratum("Table 4, F-SNE 16* on Tiny", "6.3M", "6,712,720", "Table 2 prints 6.7M for the same model."),
        Erratum(
            "Table 5, F-SNE 8*", "2.9M shared, 3.05M unshared", "3,051,832 and 3,052,096",
            "Unshared codes are 264 numbers more.",
        ),
        Erratum(
            "Tables 2 to 4", "the same number of parameters", "more work",
            "P-SNE adds 10 % and F-SNE 8* 20 % to the multiply-accumulates of the whole model.",
        ),
        Erratum(
            "Table 3, baseline N12", "71.7", "72.2 in XCiT's own list", "Against 72.2 only F-SNE 8* gains.",
        ),
        Erratum("Equation 3", "division by the temperature", "multiplication", "XCiT's code multiplies, from 1."),
        Erratum(
            "Tables 2 to 6", "gains of 0.2 to 0.5 points", "single runs", "No seeds are given, so no interval exists.",
        ),
        Erratum(
            "Table 4, Cars", "five of six T12 F-SNE rows at 92.3", "improbable", "Both SNE rows are 91.8 as well.",
        ),
    ),
    MITA_PAPER: (
        Erratum(
            "Appendix A", "m = k = N is full attention", "a mixture of softmax and Agent attention",
            "Landmarks are further slots of the softmax; only the routed branch alone with k = N is softmax attention.",
        ),
        Erratum(
            "Equation 10 and the released code", "landmark logits q.l / sqrt(d)", "q.l / d",
            'It scales landmark keys before a kernel that scales again: MiTA(preset="official").',
        ),
        Erratum(
            "text on pooling", "windows that do not overlap", "3,4,4,4,3 cells from 0,2,5,8,11",
            "Adaptive pooling of 14 cells to 5 overlaps.",
        ),
        Erratum(
            "pooling in the code", "patches", "class token and all patches but the last",
            "The released file pools q[:, :-1] as a square.",
        ),
        Erratum(
            "Table 2, DWC + gate, S", "22M parameters", "23,870,824",
            "The gate is a fourth projection; the printed 4.7G includes it.",
        ),
        Erratum(
            "Table 2, MHLA-T", "1.1G", "1.51 GMAC", "It is trained on 256 tokens; 1.13 belongs to 196.",
        ),
        Erratum("Table 3, MHLA-S + DWC", "4.2G", "4.34 GMAC", "Without the convolution, at 196 tokens."),
        Erratum(
            "Table 3, InLine-DeiT-S", "DeiT-S", "width 320, 10 heads, 288 pixels",
            "16,734,760 parameters; it is another host.",
        ),
        Erratum(
            "Tables 2 and 3", "FLOPs", "multiply-accumulates", "DeiT-S has 4.60 GMAC, printed as 4.6G.",
        ),
        Erratum(
            "Table 2, Agent and FLatten", "1.1G, 6.1M", "1.16 GMAC, 6,173,608", "Cut off, not rounded.",
        ),
        Erratum(
            "Table 6, compress only", "70.3 with m = 25", "the Agent row of Table 2",
            "It has m = 49; the two figures are the same model's.",
        ),
        Erratum(
            "Appendix C", "backbones at 224", "Section 4.2 says 384", "The appendix probably means Table 7.",
        ),
    ),
    ESA_PAPER: (
        Erratum("All tables", "FLOPs", "multiply-accumulates", "Reproduced to 0.1 G by the formulas here."),
        Erratum(
            "Tables 2 and 3, deformable rows", "no overhead", "offsets and interpolation are left out",
            'cost(site, accounting="executed") counts the offsets, interpolation(site) the rest.',
        ),
        Erratum(
            "Table 1, E4", "O(N^2 C)", "O(N (H + W) C)",
            "Without E1 the weights factorise over rows and columns; exact to rounding.",
        ),
        Erratum(
            "text on Cityscapes", "5,000 fine training images", "2,975", "5,000 is the number of all fine images.",
        ),
        Erratum(
            "Segmentation, 1000 and 1010", "1111.2 GMAC", "1111.5 GMAC", "The one misfit of its cost formula.",
        ),
        Erratum(
            "the public module for E2 without E4", "0100, 0110, 1100, 1110", "wrong on square maps, fails on others",
            "The query map is transposed before the vertical product (largest error 0.4 to 0.9).",
        ),
    ),
}  # fmt: skip


_CALLED = {**{paper: paper for paper in ERRATA}, "MiTA": MITA_PAPER, "the embedding paper": SNE_PAPER}
"""What the sources of studies begin with."""


def errata_of(source: str) -> tuple[Erratum, ...]:
    """The errata of the tables and figures that a study's source names, such as "MiTA, arXiv 2602.01219, Table 2".

    Papers are parted by "; ". Nothing for other sources; errata of a text or an equation belong to no table.
    """
    found: list[Erratum] = []
    for part in source.split("; "):
        paper = next((paper for name, paper in _CALLED.items() if part.startswith(name)), None)
        wanted = _places(part)
        tables = any(kind == "Table" for kind, _ in wanted)
        for erratum in ERRATA[paper] if paper else ():
            if wanted & _places(erratum.where) or (tables and erratum.where == "All tables"):
                found.append(erratum)
    return tuple(found)


def _places(text: str) -> set[tuple[str, int]]:
    """("Table", 2) and ("Table", 3) for "Tables 2 and 3, deformable rows"; "2 to 4" and "2-4" are three."""
    found = set()
    for kind, first, between, last in re.findall(r"(Table|Figure)s? (\d+)(?:( and | to |-)(\d+))?", text):
        numbers = [int(first)] if not last else [int(first), int(last)]
        if between in (" to ", "-"):
            numbers = list(range(numbers[0], numbers[1] + 1))
        found |= {(kind, number) for number in numbers}
    return found


def sheets(source: Source) -> Sequence[Sheet | Picture]:
    """One sheet for each paper."""
    columns = ("where", "printed", "found", "how to see it")
    return [Sheet(title=paper, columns=columns, rows=tuple(map(tuple, found))) for paper, found in ERRATA.items()]


ANALYSIS = Analysis(
    name="errata",
    title="What the printed numbers cannot be",
    source="the four papers",
    question="Which printed figures do exact counts, tests or the authors' own code contradict?",
    compute=sheets,
    notes=(
        "Counts are of built models; G is 1e9. The static-key paper counts two FLOPs a multiply-accumulate, the MiTA "
        "and spatial-attention papers one.",
    ),
)
