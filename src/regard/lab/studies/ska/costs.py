"""Static Key Attention in Vision, Tables 6 and 7 and Figure 4: costs and shared weights of four mechanisms."""

from collections.abc import Callable, Sequence

from regard.core import Cost, Grid, Site
from regard.lab.engine.analysis import Analysis, Source
from regard.lab.studies.papers import SKA_PAPER
from regard.mixers import CSKA, SKA, Softmax
from regard.pages.sheets import Chart, Picture, Sheet

_SIDES = (8, 12, 16, 24, 28, 32)
_WIDTHS = (64, 128, 256, 384, 512, 768)


def _sepconv(site: Site) -> Cost:
    """As Table 6 counts it: a 3x3 depth-wise convolution between two linear maps, without expansion."""
    width = 9 * site.dim + 2 * site.dim**2
    return Cost(width, site.grid.tokens * width)


_MECHANISMS: dict[str, Callable[[Site], Cost]] = {
    "SepConv": _sepconv, "self-attention": Softmax().cost, "SKA": SKA().cost, "CSKA": CSKA(bias=False).cost,
}  # fmt: skip
# the formulas as Table 6 prints them, for N tokens and width D: (parameters, FLOPs)
_PRINTED: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "SepConv": lambda n, d: (9 * d + 2 * d * d, n * (9 * d + 2 * d * d)),
    "self-attention": lambda n, d: (4 * d * d, n * (2 * n * d + 4 * d * d)),
    "SKA": lambda n, d: (n * d + 3 * d * d, n * (2 * n * d + 3 * d * d)),
    "CSKA": lambda n, d: (9 * n * d + 3 * d * d, n * (10 * n * d + 3 * d * d)),
}


def _site(side: int, dim: int) -> Site:
    return Site(dim=dim, heads=dim // 32, grid=Grid(side, side), qkv_bias=False, out_bias=False)


def table6(source: Source) -> Sequence[Sheet | Picture]:
    """Parameters and MACs by Regard's and by the printed formulas, on the paper's two sweeps."""
    rows = []
    for side, dim in (*((side, 256) for side in _SIDES), *((16, width) for width in _WIDTHS if width != 256)):
        for name, cost in _MECHANISMS.items():
            counted, (params, macs) = cost(_site(side, dim)), _PRINTED[name](side * side, dim)
            agree = "equal" if (counted.params, counted.macs) == (params, macs) else "differs"
            ratio = counted.macs / counted.params
            rows.append((name, side * side, dim, counted.params, params, counted.macs, macs, ratio, agree))
    return [Sheet(
        title="Parameters, multiply-accumulates and their ratio", rows=tuple(rows),
        columns=("mechanism", "N", "D", "parameters", "printed formula", "MACs", "printed MACs", "ratio", "verdict"),
        published=("printed formula", "printed MACs"),
        note="No biases and no class token, heads of width 32. The paper's FLOPs are multiply-accumulates here.",
    )]  # fmt: skip


def figure4(source: Source) -> Sequence[Sheet | Picture]:
    """Ratio of multiply-accumulates to parameters, against tokens at D = 256 and against width at N = 256."""

    sheets: list[Sheet | Picture] = []
    for name, fixed, points in (
        ("N", "D = 256", [(side, 256) for side in _SIDES]), ("D", "N = 256", [(16, width) for width in _WIDTHS]),
    ):  # fmt: skip
        xs = [side * side if name == "N" else dim for side, dim in points]
        costs = {mechanism: [cost(_site(*point)) for point in points] for mechanism, cost in _MECHANISMS.items()}
        ratios = {mechanism: [total.macs / total.params for total in totals] for mechanism, totals in costs.items()}
        edges = [sorted(ends) for ends in zip(ratios["SepConv"], ratios["self-attention"], strict=True)]
        inside = {
            key: sum(low <= ratio <= high for ratio, (low, high) in zip(ratios[key], edges, strict=True))
            for key in ("SKA", "CSKA")
        }
        between = ", ".join(f"{key} at {number} of {len(points)} points" for key, number in inside.items())
        sheets.append(Sheet(
            title=f"MACs per parameter against {name}, {fixed}", columns=("mechanism", name, "MACs per parameter"),
            rows=tuple((key, *cell) for key, values in ratios.items() for cell in zip(xs, values, strict=True)),
            note=f"Between the curves of SepConv and self-attention: {between}.",
            chart=Chart(x=name, y="MACs per parameter", series="mechanism", logs="xy"),
        ))  # fmt: skip
    return sheets


def table7(source: Source) -> Sequence[Sheet | Picture]:
    """Which weights are shared over positions, and how many of the two weights of a mechanism depend on the input."""
    rows = (
        ("SepConv", "spatially global", 0, "none"),
        ("self-attention", "no", 2, "queries and keys"),
        ("SKA", "no", 1, "queries; a key belongs to a position"),
        ("CSKA", "spatially global", 1, "queries; their logits are a convolution of them"),
    )
    columns = ("mechanism", "weights shared over positions", "dynamic weights", "which")
    note = "The cards of all mechanisms (`regard card SKA`) have this too."
    return [Sheet(title="Shared and dynamic weights", columns=columns, rows=rows, note=note)]


_QUESTION = "How do parameters and multiply-accumulates grow with tokens and width?"
TABLE6 = Analysis(
    name="ska_table6", title="What static keys cost", source=f"{SKA_PAPER}, Table 6", question=_QUESTION,
    compute=table6,
    notes=(
        "Static keys are N D parameters in the place of D^2: more than projected keys where tokens outnumber the "
        "width. DeiT-T grows from 5,717,416 to 5,726,632.",
    ),
)  # fmt: skip
FIGURE4 = Analysis(
    name="ska_fig4", title="Multiply-accumulates per parameter", source=f"{SKA_PAPER}, Figure 4",
    question=_QUESTION, compute=figure4,
)  # fmt: skip
TABLE7 = Analysis(
    name="ska_table7", title="Shared and dynamic weights", source=f"{SKA_PAPER}, Table 7", compute=table7,
    question="Which weights depend on the input, and which are shared over positions?",
)  # fmt: skip
