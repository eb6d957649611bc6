"""An Empirical Study of Spatial Attention Mechanisms, Figure 3 and Tables 1 to 3: multiply-accumulates."""

from collections.abc import Sequence
from dataclasses import dataclass

from regard.core import Grid, MixerConfig, Site
from regard.lab.engine.analysis import Analysis, Source
from regard.lab.studies.papers import ESA_PAPER
from regard.mixers import Conv, DeformableConv, DynamicConv, Factors
from regard.pages.sheets import Cell, Chart, Picture, Sheet

_TERMS = tuple(f"{number:04b}" for number in range(15, -1, -1))
_WINDOWS = (31, 25, 19, 13)


@dataclass(frozen=True)
class Layout:
    """Where a task's network has attention. base: its printed GMACs without. modules: (grid, channels, number).

    blocks: how many of the first modules follow 3x3 convolutions, which deformable ones may replace. tolerance: of a
    verdict, in GMACs.
    """

    name: str
    base: float
    modules: tuple[tuple[Grid, int, int], ...]
    blocks: int
    tolerance: float


DETECTION = Layout("detection", 213.7, ((Grid(50, 84), 256, 6), (Grid(25, 42), 512, 3)), 2, 0.1)
SEGMENTATION = Layout(
    "segmentation", 449.5, ((Grid(96, 96), 256, 6), (Grid(96, 96), 512, 3), (Grid(96, 96), 512, 1)), 2, 0.2
)
TEXT_TOKENS = 32
_TEXT_BASE = (12 * 8 * 512**2 + 512 * 37_000) * TEXT_TOKENS / 1e9
TRANSLATION = Layout("translation", _TEXT_BASE, ((Grid.sequence(TEXT_TOKENS), 512, 18),), 0, 0.0)
"""The Transformer base on pairs of sentences of `TEXT_TOKENS` tokens; the base is feed-forward nets and vocabulary."""
# the printed GMACs of configurations that the tables have
PRINTED = {
    "detection": {
        "w/o": 213.7, "1111": 281.4, "1110": 281.4, "1101": 281.4, "1100": 281.4, "0111": 253.6, "0110": 253.6,
        "0101": 251.1, "0100": 251.1, "1011": 281.4, "1010": 281.2, "1001": 281.4, "1000": 281.2, "0011": 250.1,
        "0010": 221.1, "0001": 247.6,
    },
    "segmentation": {
        "w/o": 449.5, "1111": 1112.1, "1110": 1112.1, "1101": 1112.1, "1100": 1112.1, "0111": 814.0, "0110": 814.0,
        "0101": 800.7, "0100": 800.7, "1011": 1112.1, "1010": 1111.2, "1001": 1112.1, "1000": 1111.2, "0011": 794.4,
        "0010": 489.5, "0001": 781.1,
    },
    "translation": {},
}  # fmt: skip
# Table 2: from -> to, and the printed accuracy: box mAP on COCO, mIoU on Cityscapes, BLEU on WMT14 English to German
PRINTED_PAIRS = (
    ("w/o", "1111", "36.4 -> 41.0", "71.9 -> 77.8", "20.9 -> 28.0"),
    ("1111", "1011", "38.8 -> 41.0", "76.7 -> 77.8", "27.7 -> 28.0"),
    ("1110", "1010", "38.8 -> 40.9", "76.7 -> 77.7", "27.7 -> 28.0"),
    ("1101", "1001", "38.8 -> 41.0", "76.7 -> 77.8", "27.7 -> 28.0"),
    ("1100", "1000", "38.8 -> 40.9", "76.7 -> 77.7", "27.7 -> 28.0"),
    ("0111", "0011", "38.8 -> 41.0", "76.6 -> 77.5", "27.6 -> 27.7"),
    ("0110", "0010", "38.8 -> 40.8", "76.6 -> 77.3", "27.6 -> 27.7"),
    ("0101", "0001", "38.6 -> 40.7", "76.3 -> 77.3", "27.4 -> 27.6"),
    ("0100", "w/o", "38.6 -> 39.9", "76.3 -> 77.2", "27.4 -> 27.3"),
)
TABLE3 = {
    "detection": {31: (229.4, 352.9), 25: (226.6, 306.8), 19: (224.4, 270.6), 13: (222.7, 244.3)},
    "segmentation": {31: (523.3, 1029.0), 25: (511.8, 840.4), 19: (502.6, 692.1), 13: (495.9, 584.3)},
}
ACCURACY3 = {
    31: ("38.6 -> 37.9", "75.5 -> 74.2", "27.4 -> 27.6"),
    25: ("38.6 -> 37.8", "75.5 -> 74.2", "27.4 -> 27.6"),
    19: ("38.6 -> 37.6", "75.4 -> 73.7", "27.4 -> 27.5"),
    13: ("38.5 -> 37.5", "74.4 -> 71.9", "27.3 -> 27.4"),
}


def overhead(layout: Layout, config: MixerConfig | None, deformable: bool = False, accounting: str = "paper") -> float:
    """GMACs that attention adds to a network, with the offsets of deformable convolutions if they are counted."""
    total = 0
    for index, (grid, dim, number) in enumerate(layout.modules):
        site = Site(dim=dim, heads=8, grid=grid, qkv_bias=False)
        total += number * (config.cost(site, accounting).macs if config is not None else 0)
        if deformable and index < layout.blocks:
            total += number * (DeformableConv().cost(site, accounting).macs - Conv().cost(site, accounting).macs)
    return total / 1e9


def total(layout: Layout, config: MixerConfig | None, deformable: bool = False, accounting: str = "paper") -> float:
    """GMACs of the whole network."""
    return layout.base + overhead(layout, config, deformable, accounting)


def other_work(layout: Layout, config: Factors | DynamicConv | None, deformable: bool) -> tuple[float, float]:
    """Operations beside multiply-accumulates, in 10^9: exponentials of the softmax, products of interpolation."""
    exponentials = interpolation = 0
    for index, (grid, dim, number) in enumerate(layout.modules):
        site = Site(dim=dim, heads=8, grid=grid, qkv_bias=False)
        exponentials += number * (config.exponentials(site) if config is not None else 0)
        interpolation += number * DeformableConv().interpolation(site) * (deformable and index < layout.blocks)
    return exponentials / 1e9, interpolation / 1e9


def verdict(counted: float, printed: float, tolerance: float) -> str:
    """The verdict on a number of GMACs: "reproduced" within the tolerance, else the difference."""
    off = counted - printed
    return "reproduced" if abs(off) <= tolerance else f"off by {off:+.1f} G"


def _line(
    layout: Layout, name: str, config: Factors | DynamicConv | None, deformable: bool, printed: float | None
) -> list[Cell]:
    counted = total(layout, config, deformable)
    judged = "not printed" if printed is None else verdict(counted, printed, layout.tolerance)
    judged = "base" if config is None else judged
    executed = total(layout, config, deformable, "executed")
    others = [round(number, 3) for number in other_work(layout, config, deformable)]
    counts = (round(counted - layout.base, 2), round(counted, 2), printed, judged, round(executed, 2))
    return [layout.name, name, *counts, *others]


_COLUMNS = (
    "task", "configuration", "added GMACs", "GMACs", "printed GMACs", "verdict", "executed GMACs",
    "exponentials (10^9)", "interpolation (10^9)",
)  # fmt: skip


def _summary(rows: Sequence[Sequence[Cell]]) -> str:
    """How many of the printed numbers are reproduced, and which are not; base networks are not judged."""
    verdict_at = _COLUMNS.index("verdict")
    judged = [row for row in rows if row[verdict_at] not in ("not printed", "base")]
    off = [row for row in judged if row[verdict_at] != "reproduced"]
    differing = "; ".join(f"{row[1]} in {row[0]} ({row[verdict_at]})" for row in off)
    count = f"{len(judged) - len(off)} of {len(judged)} printed numbers reproduced"
    return f"{count}; not: {differing}" if off else count


def factors(terms: str) -> Factors | None:
    """The mechanism of a configuration, None for "w/o"."""
    return None if terms == "w/o" else Factors(terms=terms)


def figure3() -> Sheet:
    """The axis of Figure 3: what the 16 configurations add, and what 0010 with deformable convolution adds."""
    rows = []
    for layout in (DETECTION, SEGMENTATION, TRANSLATION):
        printed = PRINTED[layout.name]
        for terms in ("w/o", *_TERMS):
            rows.append(_line(layout, terms, factors(terms), False, printed.get(terms)))
        for terms in ("w/o", "0010") if layout.blocks else ():
            rows.append(_line(layout, f"{terms} + deformable", factors(terms), True, printed[terms]))
    return Sheet(
        title="Figure 3: what the configurations cost",
        columns=_COLUMNS,
        rows=tuple(map(tuple, rows)),
        published=("printed GMACs",),
        note=f"{_summary(rows)}. Printed numbers are those of Tables 2 and 3; the figure prints none, and has w/o in "
        "the place of 0000. The paper's formula for 0000 weights every pair of positions; here it is one mean.",
        chart=Chart(x="configuration", y="added GMACs", series="task", kind="bars"),
    )


def table2() -> Sheet:
    """Every pair of Table 2."""
    rows: list[list[Cell]] = []
    for layout in (DETECTION, SEGMENTATION):
        column, printed = (2 if layout is DETECTION else 3), PRINTED[layout.name]
        for pair in PRINTED_PAIRS:
            rows.append([*_line(layout, pair[0], factors(pair[0]), False, printed[pair[0]]), None, None])
            line = _line(layout, f"{pair[1]} + deformable", factors(pair[1]), True, printed[pair[1]])
            rows.append([*line, pair[column], pair[4]])
    return _pairs_sheet(
        "Table 2: deformable convolution in the place of query content and relative position", rows,
        "The paper counts neither the prediction of offsets nor interpolation; the executed column counts the "
        "prediction (3x3), interpolation has a column of its own.",
    )  # fmt: skip


def table3() -> Sheet:
    """Every window of Table 3."""
    rows: list[list[Cell]] = []
    for layout in (DETECTION, SEGMENTATION):
        column = 0 if layout is DETECTION else 1
        for window in _WINDOWS:
            e2, dynamic = TABLE3[layout.name][window]
            accuracy = ACCURACY3[window]
            line = _line(layout, f"0100 in {window}x{window}", Factors(terms="0100", window=window), False, e2)
            rows.append([*line, None, None])
            line = _line(layout, f"dynamic {window}x{window}", DynamicConv(kernel=window), False, dynamic)
            rows.append([*line, accuracy[column], accuracy[2]])
    return _pairs_sheet(
        "Table 3: dynamic convolution and query content with relative position, in the same window", rows,
        "Windows are counted whole at the border. The form of 0100 that is executed works on tiles where the window "
        "is small beside the map; elsewhere it computes all weights and masks them. The taps of dynamic convolution "
        "are elementwise products; the paper and both columns count them.",
    )  # fmt: skip


def _pairs_sheet(title: str, rows: Sequence[Sequence[Cell]], note: str) -> Sheet:
    """A table whose rows are pairs, with the printed accuracies."""
    further = ("printed accuracy (mAP, mIoU)", "printed BLEU")
    return Sheet(
        title=title, columns=(*_COLUMNS, *further), rows=tuple(map(tuple, rows)),
        published=("printed GMACs", *further), note=f"{_summary(rows)}. Rows are pairs: from, then to. {note}",
    )  # fmt: skip


_SAME_ORDER = 3
# (mechanism, configuration, printed complexity, its terms for N positions and C channels)
_COMPLEXITY = (
    ("E1", Factors(terms="1000"), "O(N^2 C + N C^2)", lambda n, c: n * n * c + n * c * c),
    ("E2", Factors(terms="0100"), "O(N^2 C + N C^2)", lambda n, c: n * n * c + n * c * c),
    ("E3", Factors(terms="0010"), "O(N C^2)", lambda n, c: n * c * c),
    ("E4", Factors(terms="0001"), "O(N^2 C + N C^2)", lambda n, c: n * n * c + n * c * c),
    ("regular convolution", Conv(), "O(N C^2 N_k)", lambda n, c: n * c * c * 9),
    ("deformable convolution", DeformableConv(), "O(N C^2 N_k)", lambda n, c: n * c * c * 9),
    ("dynamic convolution", DynamicConv(kernel=3), "O(N C N_g N_k + N C^2)", lambda n, c: n * c * 16 * 9 + n * c * c),
)
_SWEEP = tuple((side, dim) for side in (16, 32, 64, 128) for dim in (64, 256, 1024))


def table1() -> Sheet:
    """What each mechanism depends on, and whether its cost grows as printed."""
    rows = []
    for name, config, printed, terms in _COMPLEXITY:
        sites = [Site(dim=dim, heads=8, grid=Grid(side, side), qkv_bias=False) for side, dim in _SWEEP]
        ratios = [config.cost(site, "paper").macs / terms(site.grid.tokens, site.dim) for site in sites]
        parts = ("query_content", "key_content", "relative_position")
        depends = [part.replace("_", " ") for part in parts if getattr(config.card, part)]
        same = "same order" if max(ratios) / min(ratios) <= _SAME_ORDER else "another order"
        rows.append((name, ", ".join(depends), printed, round(min(ratios), 2), round(max(ratios), 2), same))
    matching = sum(row[-1] == "same order" for row in rows)
    return Sheet(
        title="Table 1: what mechanisms depend on, and how their cost grows",
        columns=("mechanism", "depends on", "printed complexity", "least ratio", "largest ratio", "verdict"),
        rows=tuple(rows),
        published=("printed complexity",),
        note=f"{matching} of {len(rows)} grow as printed. Ratio: multiply-accumulates divided by the terms in O(.), "
        "on maps of 16x16 to 128x128 with 64 to 1024 channels; the same order if it varies by at most a factor "
        f"{_SAME_ORDER}.",
    )


def compute(source: Source) -> Sequence[Sheet | Picture]:
    """All four sheets, which need no runs."""
    return [table1(), figure3(), table2(), table3()]


ANALYSIS = Analysis(
    name="esa_costs",
    title="What the factors, deformable and dynamic convolution cost",
    source=f"{ESA_PAPER}, Tables 1-3 and Figure 3",
    question="Do the paper's counting rules give its printed GMACs, and what is executed?",
    compute=compute,
    notes=(
        "Detection: images of 800x1333, attention in conv4 (maps of 50x84, 256 channels, 6 blocks) and conv5 "
        "(25x42, 512, 3). Segmentation: maps of 96x96 in conv4 and conv5, and one module of 512 channels after the "
        "backbone. This layout is inferred: it reproduces the printed numbers. The base network is the printed w/o.",
        f"Translation: the Transformer base, two sentences of {TEXT_TOKENS} tokens, the configuration in all 18 "
        "attentions (of encoder, decoder and between them); the paper prints no numbers of it.",
        "The paper calls multiply-accumulates FLOPs; 1 G = 10^9. Tolerances: 0.1 G in detection, 0.2 G in "
        "segmentation.",
        "The executed column counts what this library runs for one image in float32, with its faster forms: products "
        "of matrices, and the taps of dynamic convolution, which are elementwise products. The two columns after it "
        "count other operations: exponentials of the softmax, and samples times bilinear weights (4 per tap and "
        "channel). Other elementwise products, such as gates, are not counted.",
    ),
)
