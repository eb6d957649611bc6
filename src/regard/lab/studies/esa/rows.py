"""Rows of Figure 3, Table 2 and Table 3 of the ESA paper, for any of its three tasks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from regard.lab.engine.study import Claim, Row
from regard.lab.studies.controls import CONTROLS
from regard.mixers import DynamicConv, Factors

from .costs import ACCURACY3, PRINTED, PRINTED_PAIRS, TABLE3

TERMS = tuple(f"{number:04b}" for number in range(15, 0, -1))
PAIRS = tuple((before, after) for before, after, *_ in PRINTED_PAIRS)
"""Table 2: (configuration with E2, the one without to which deformable convolution is added)."""
_COLUMN = {"map": ("detection", 2), "miou": ("segmentation", 3), "bleu": ("", 4)}


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Printed values of one task by label: the metric of the configurations of Table 2, and of those with deformable
    convolution, and GMACs of the whole network."""

    metric: str
    regular: Mapping[str, float] = field(default_factory=dict)
    deformable: Mapping[str, float] = field(default_factory=dict)
    macs: Mapping[str, float] = field(default_factory=dict)

    def row(self, label: str, deformable: bool = False) -> dict[str, int | float]:
        """The printed values of a configuration, {} if there are none."""
        value = (self.deformable if deformable else self.regular).get(label)
        values: dict[str, int | float] = {} if value is None else {self.metric: value}
        return values | ({"macs": 1e9 * self.macs[label]} if label in self.macs else {})


def printed_values(metric: str) -> Printed:
    """The printed values of the task with this metric."""
    layout, column = _COLUMN[metric]
    values = [[float(value) for value in pair[column].split(" -> ")] for pair in PRINTED_PAIRS]
    regular = {before: value[0] for (before, _), value in zip(PAIRS, values, strict=True)}
    deformable = {after: value[1] for (_, after), value in zip(PAIRS, values, strict=True)}
    return Printed(metric=metric, regular=regular, deformable=deformable, macs=PRINTED.get(layout, {}))


def values_at(metric: str, scale: str) -> Printed:
    """The printed values of the task with this metric at paper scale, none at the others."""
    return printed_values(metric) if scale == "paper" else Printed(metric=metric)


def controls(values: Printed) -> tuple[Row, ...]:
    """The rows that the baseline has to beat."""
    return tuple(replace(row, paper=values.row(row.label)) for row in CONTROLS)


def factor_rows(values: Printed) -> tuple[Row, ...]:
    """The 15 configurations of Figure 3 with attention; without controls."""
    return tuple(Row(terms, Factors(terms=terms), paper=values.row(terms)) for terms in TERMS)


def figure3_rows(values: Printed, deformable: Callable[[str, dict[str, int | float]], Row]) -> tuple[Row, ...]:
    """The configurations of Figure 3, the controls, and key content with deformable convolution, as in `pair_rows`."""
    return (*factor_rows(values), *controls(values), deformable("0010", values.row("0010", deformable=True)))


def pair_rows(values: Printed, deformable: Callable[[str, dict[str, int | float]], Row]) -> tuple[Row, ...]:
    """Both sides of the pairs of Table 2, and the controls. deformable(terms, printed): the row with convolution."""
    before = tuple(Row(terms, Factors(terms=terms), paper=values.row(terms)) for terms, _ in PAIRS[1:])
    after = tuple(deformable(terms, values.row(terms, deformable=True)) for _, terms in PAIRS)
    return (*before, *after, *controls(values))


def window_rows(widths: tuple[int, ...], axes: int, published: str = "", kernel_bias: bool = True) -> tuple[Row, ...]:
    """E2 and dynamic convolution in windows of each width, and the controls.

    axes: 1 for text, 2 for images. published: the metric whose printed values the rows have, "" = none.
    """
    rows = []
    for side, name in enumerate(("0100 in", "dynamic")):
        for n in widths:
            mixer = DynamicConv(kernel=n, kernel_bias=kernel_bias) if side else Factors(terms="0100", window=n)
            label = f"{name} {n}" if axes == 1 else f"{name} {n}x{n}"
            rows.append(Row(label, mixer, paper=_window(published, n, side) if published else {}))
    return (*rows, *CONTROLS)


def _window(metric: str, width: int, side: int) -> dict[str, int | float]:
    """Printed values of Table 3 for a width, {} for others. side: 0 = E2, 1 = dynamic convolution."""
    if width not in ACCURACY3:
        return {}
    column = ("map", "miou", "bleu").index(metric)
    value = float(ACCURACY3[width][column].split(" -> ")[side])
    layout = _COLUMN[metric][0]
    return {metric: value} | ({"macs": 1e9 * TABLE3[layout][width][side]} if layout else {})


def factor_claims(metric: str) -> tuple[Claim, ...]:
    """The findings of Figure 3 on self-attention."""
    alike = (("0111", "1111"), ("0110", "1111"), ("1100", "0011"))
    return (
        *(Claim("0011", "w/o", metric), Claim("0011", "w/o", metric, than=("1111", "0011"))),
        *(Claim(*pair, metric, within=1.0) for pair in alike),
        Claim("0010", "w/o", metric),
    )
