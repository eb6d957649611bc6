"""An Empirical Study of Spatial Attention Mechanisms, Figure 1: what each factor, tap and kernel looks at.

The paper's figure is a drawing; here maps are read from trained runs of `esa_fig3` (the four factors), `esa_table2`
(offsets of deformable convolution) and `esa_table3` (E2 and dynamic convolution in one window), as far as these have
runs. Pictures are of scikit-learn's photographs (its digits for grey images).
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor, nn

from regard.core import Grid, RegardError, StoreError
from regard.explain.factor_terms import ALL, MEANING, TermMaps, term_maps
from regard.explain.layer_inputs import equal_cells, finest
from regard.explain.pictures import figure
from regard.explain.sampling_points import TapMoves, tap_kernels, tap_moves
from regard.explain.views import KERNELS_NOTE, MOVES_NOTE, Row, kernel_rows, move_rows
from regard.lab.analysis import Analysis, Cell, Chart, Picture, Sheet, Source, trained_runs
from regard.studies.mita.expert_choices import Photograph, overlay, photograph
from regard.train.load import trained

PLACES = 3
"""Queries along each axis over which the numbers of terms and kernels are averaged."""
GROUPS = 5
"""Kernels that are drawn of a layer: the mean, and the first groups."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A trained network, the picture it looks at, and what to call it."""

    label: str
    model: nn.Module
    shown: Photograph

    @property
    def image(self) -> Tensor:
        """(C, H, W), as the network expects it."""
        return self.shown.inputs[0]

    @property
    def picture(self) -> UInt8[np.ndarray, "height width 3"]:
        """What it looks at, in colour."""
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(self.shown.image))).convert("RGB"))

    def drawn(self, title: str, rows: Sequence[Row], note: str, side: float = 1.9) -> Picture:
        """Rows of panels as a picture of the page."""
        image = figure(rows, self.picture, title, trained=True, note=note, side=side)
        return Picture(title=title, image=base64.b64encode(image).decode(), note=self.shown.note)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """rows: of a study, the first with a finished run is read. read: makes the sheet and the pictures."""

    study: str
    rows: tuple[str, ...]
    read: Callable[[Network], list[Sheet | Picture]]


def network(source: Source, study: str, rows: Sequence[str]) -> Network:
    """The first finished seed of the first of the rows that has one. Raises: ConfigError or StoreError if none has."""
    runs = trained_runs(source, study)
    for row in rows:
        for label, _, key in runs:
            if label == row:
                run = source.run(key)
                return Network(label=f"{row} ({study})", model=trained(run, source.store), shown=photograph(run.task))
    raise StoreError(
        f"no finished run of {study} ({source.scale} scale) in a row that is drawn: {', '.join(rows)}; "
        f"regard study run {study} --scale {source.scale} --rows '{rows[0]}'"
    )


def queries(grid: Grid, number: int = PLACES) -> list[tuple[int, int]]:
    """Cells spread evenly over a grid, at most so many along an axis."""
    rows, columns = (
        sorted({(2 * i + 1) * side // (2 * number) for i in range(number)}) for side in (grid.height, grid.width)
    )
    return [(row, column) for row in rows for column in columns]


def _framed(grid: Grid, cell: tuple[int, int]) -> Tensor:
    """True at the cell, (cells,)."""
    where = torch.zeros(grid.height, grid.width, dtype=torch.bool)
    where[cell] = True
    return where.flatten()


# terms


def loudness(found: TermMaps) -> dict[str, tuple[float, float, float]]:
    """Of each term and of all: deviation of the logits over the keys seen, cells covered, and distance in cells.

    Means over heads. covered: as many equal cells have the same entropy. distance: of the weights from the query.
    """
    rows, columns = torch.meshgrid(torch.arange(found.keys.height), torch.arange(found.keys.width), indexing="ij")
    scale = found.grid.height / found.keys.height  # cells of the queries to one of the keys
    far = torch.hypot((rows * scale - found.cell[0]).double(), (columns * scale - found.cell[1]).double())
    seen = found.bias[0, found.keys.span] > -torch.inf
    said = {}
    for name in found.names:
        logits = sum(found.logits.values(), start=found.bias) if name == ALL else found.logits[name]
        weights = found.map(name)
        weights = weights / weights.sum((1, 2), keepdim=True).clamp_min(1e-30)
        said[name] = (
            float(logits[:, found.keys.span][:, seen].std(-1, correction=0).mean()),
            float(equal_cells(weights.flatten(1)).mean()),
            float((weights * far).sum((1, 2)).mean()),
        )
    return said


def read_terms(net: Network) -> list[Sheet | Picture]:
    """A map of each term and of all terms, layer by layer; numbers are means over a few queries."""
    middle = term_maps(net.model, net.image)
    places = queries(finest(found.grid for found in middle))
    measured = [[loudness(found) for found in term_maps(net.model, net.image, place)] for place in places]
    lines: list[tuple[Cell, ...]] = []
    pictures: list[Sheet | Picture] = []
    for place, found in enumerate(middle):
        names = found.names if len(found.logits) > 1 else found.names[:1]
        for name in names:
            values = [fmean(one[place][name][number] for one in measured) for number in range(3)]
            lines.append((found.layer, name, MEANING[name], *(round(value, 3) for value in values), found.keys.cells))
        frame = _framed(found.grid, found.cell) if found.grid.cells == found.keys.cells else None
        layers = {
            f"{name}: {MEANING[name]}": overlay(found.map(name).mean(0).flatten(), found.keys, frame) for name in names
        }
        title = f"Terms of {net.label}: {found.layer}, from cell {found.cell[0]},{found.cell[1]}"
        pictures.append(Picture(title=title, image=net.shown.image, note=net.shown.note, layers=layers))
    sheet = Sheet(
        title=f"Terms of {net.label}",
        columns=("layer", "term", "it is", "deviation of logits", "cells covered", "distance in cells", "cells"),
        rows=tuple(lines),
        note=f"Means over heads and {len(places)} queries on the picture. Each term has its own softmax, in which a "
        "term whose logits deviate little covers all cells; the layer adds the logits, so the one that deviates most "
        "decides. Covered: as many equal weights have the same entropy.",
        chart=Chart(kind="bars", x="layer", y="deviation of logits", series="term"),
    )
    return [sheet, *pictures]


# offsets


def read_moves(net: Network) -> list[Sheet | Picture]:
    """Where the taps of the middle cell sample, and how those of all cells move on average, layer by layer."""
    moves = tap_moves(net.model, net.image)
    rows = [row for found in moves for row in move_rows(found, net.picture)]
    drawn = net.drawn(f"Taps of {net.label}", rows, MOVES_NOTE, side=2.6)
    sheet = Sheet(
        title=f"Taps of {net.label}",
        columns=("layer", "moved on average", "moved at most", "in the framed cell", "all in one direction", "cells"),
        rows=tuple(_moved(found) for found in moves),
        note="In cells of the map that is sampled, on the picture; a cell counts the mean of its taps. All in one "
        "direction: the length of the mean movement of a cell's taps, averaged over cells: as long as the movement "
        "itself where taps move together, 0 where they only spread or draw together.",
    )
    return [sheet, drawn]


def _moved(found: TapMoves) -> tuple[Cell, ...]:
    lengths = found.lengths
    values = (lengths.mean(), lengths.max(), lengths[found.cell], found.field.norm(dim=-1).mean())
    return (found.layer, *(round(float(value), 4) for value in values), found.grid.cells)


# kernels


def read_kernels(net: Network) -> list[Sheet | Picture]:
    """The kernels of the middle cell, layer by layer; numbers are means over a few queries."""
    middle = tap_kernels(net.model, net.image)
    places = queries(finest(found.grid for found in middle))
    measured = [tap_kernels(net.model, net.image, place) for place in places]
    lines: list[tuple[Cell, ...]] = []
    panels: list[Row] = []
    for place, found in enumerate(middle):
        own = [one[place] for one in measured]
        rows, columns = found.kernels.shape[1:]
        values = (
            fmean(float(equal_cells(one.kernels.flatten(1)).mean()) for one in own),
            fmean(float(one.kernels[:, rows // 2, columns // 2].mean()) for one in own),
            fmean(1 - float(one.map().sum((1, 2)).mean()) for one in own),
        )
        lines.append((found.layer, *(round(value, 4) for value in values), rows * columns))
        panels += [(name, shown[:GROUPS]) for name, shown in kernel_rows(found, net.picture, "all")[:1]]
    drawn = net.drawn(f"Kernels of {net.label}", panels, KERNELS_NOTE)
    sheet = Sheet(
        title=f"Kernels of {net.label}",
        columns=("layer", "taps covered", "weight of the own cell", "weight beyond the border", "taps"),
        rows=tuple(lines),
        note=f"Means over groups and {len(places)} queries on the picture. Covered: as many equal weights have the "
        "same entropy. Taps beyond the border count in the softmax and see zero.",
    )
    return [sheet, drawn]


READINGS = (
    Reading(study="esa_fig3", rows=("1111",), read=read_terms),
    Reading(
        study="esa_table2",
        rows=("0010 + deformable", "w/o + deformable", "1111 + deformable"),
        read=read_moves,
    ),
    Reading(
        study="esa_table3",
        rows=("0100 in 7x7", "0100 in 5x5", "0100 in 13x13", "0100 in 3x3"),
        read=read_terms,
    ),
    Reading(
        study="esa_table3",
        rows=("dynamic 7x7", "dynamic 5x5", "dynamic 13x13", "dynamic 3x3"),
        read=read_kernels,
    ),
)


def compute(source: Source) -> Sequence[Sheet | Picture]:
    """All that the studies have runs for, and what is missing. Raises: as `network`, if nothing is there."""
    parts: list[Sheet | Picture] = []
    errors: list[tuple[Reading, RegardError]] = []
    drawn: list[tuple[Cell, ...]] = []
    for reading in READINGS:
        try:
            net = network(source, reading.study, reading.rows)
        except RegardError as error:
            errors.append((reading, error))
            drawn.append((reading.study, reading.rows[0], None, "no finished run"))
            continue
        row = net.label.partition(" (")[0]
        drawn.append((reading.study, reading.rows[0], row, "drawn" if row == reading.rows[0] else "in its place"))
        parts += reading.read(net)
    if not parts:
        raise errors[0][1]
    told = Sheet(title="What is drawn", columns=("study", "row wanted", "row drawn", "state"), rows=tuple(drawn))
    return [told, *parts]


ANALYSIS = Analysis(
    name="esa_fig1",
    title="What each factor attends to, where taps sample, and what dynamic kernels weigh",
    source="An Empirical Study of Spatial Attention Mechanisms in Deep Networks, Figure 1",
    question="Which cells does each of the four factors choose in a trained network, apart and together?",
    compute=compute,
    of="esa_fig3",
    notes=(
        "The paper's figure is a drawing of the terms; these are trained networks on a photograph. A frame marks the "
        "cell that looks.",
        "Amber is scaled to the largest weight of each map, so that flat maps are amber all over: read the cells "
        "covered beside them.",
        "Networks are the first finished seed of a row; a smoke run is hardly trained, and shows the road only. "
        "Offsets and kernels are of `esa_table2` and `esa_table3`, at the same scale.",
    ),
)
