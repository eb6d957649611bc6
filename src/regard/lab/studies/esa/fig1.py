"""An Empirical Study of Spatial Attention Mechanisms, Figure 1: maps of factors, taps and kernels.

The paper's figure is a drawing; here maps are read from finished runs of `esa_fig3` (the four factors), `esa_table2`
(offsets of deformable convolution) and `esa_table3` (E2 and dynamic convolution in one window), as many as there are.
Inputs are photographs of scikit-learn, or a digit where a network takes grey images.
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
from regard.explain.layer_inputs import effective_cells, finest_grid
from regard.explain.pictures import figure
from regard.explain.sampling_points import SamplingPoints, dynamic_kernels, sampling_points
from regard.explain.views import KERNELS_NOTE, POINTS_NOTE, Row, kernel_rows, point_rows
from regard.lab.engine.analysis import Analysis, Source
from regard.lab.studies.overlays import SMOKE_NOTE, Photograph, cell_frame, first_runs, overlay, photograph
from regard.lab.studies.papers import ESA_PAPER
from regard.lab.train.load import load_trained
from regard.pages.sheets import Cell, Chart, Picture, Sheet

QUERIES = 3
"""Queries along each axis over which the numbers of terms and kernels are averaged."""
GROUPS = 5
"""Kernels that are drawn of a layer: the mean, and the first groups."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A trained network and its input photograph. label: its row and study."""

    label: str
    model: nn.Module
    photograph: Photograph

    @property
    def image(self) -> Tensor:
        """(C, H, W), as the network expects it."""
        return self.photograph.inputs[0]

    @property
    def picture(self) -> UInt8[np.ndarray, "height width 3"]:
        """The photograph in colour."""
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(self.photograph.image))).convert("RGB"))

    def draw(self, title: str, rows: Sequence[Row], note: str, side: float = 1.9) -> Picture:
        """Rows of panels as a picture of the page. side: of a panel, in inches."""
        image = figure(rows, self.picture, title, trained=True, note=note, side=side)
        return Picture(title=title, image=base64.b64encode(image).decode(), note=self.photograph.note)


@dataclass(frozen=True)
class Part:
    """A part of the figure. rows: of a study; the first with a finished run is drawn. read: returns the sheets."""

    study: str
    rows: tuple[str, ...]
    read: Callable[[Network], list[Sheet | Picture]]


def network(source: Source, study: str, rows: Sequence[str]) -> Network:
    """The first finished seed of the first of the rows that has one. Raises: ConfigError or StoreError if none has."""
    keys = first_runs(source, study)
    for row in rows:
        if row in keys:
            run = source.run(keys[row])
            model, picture = load_trained(run, source.store), photograph(run.task)
            return Network(label=f"{row} ({study})", model=model, photograph=picture)
    raise StoreError(f"no finished run of {study} ({source.scale} scale) in a row of the figure: {', '.join(rows)}; "
                     f"regard study run {study} --scale {source.scale} --rows '{rows[0]}'")  # fmt: skip


def queries(grid: Grid, number: int = QUERIES) -> list[tuple[int, int]]:
    """Cells spread evenly over a grid, at most `number` along an axis."""
    rows, columns = (
        sorted({(2 * i + 1) * side // (2 * number) for i in range(number)}) for side in (grid.height, grid.width)
    )
    return [(row, column) for row in rows for column in columns]


# terms


def term_statistics(maps: TermMaps) -> dict[str, tuple[float, float, float]]:
    """For each term and all together: deviation of the logits over the visible keys, effective cells, and distance.

    Means over heads. Effective cells: the number of equal weights with the same entropy. Distance: mean distance of the
    weights from the query, in grid cells.
    """
    rows, columns = torch.meshgrid(torch.arange(maps.keys.height), torch.arange(maps.keys.width), indexing="ij")
    scale = maps.grid.height / maps.keys.height  # cells of the queries to one of the keys
    distances = torch.hypot((rows * scale - maps.cell[0]).double(), (columns * scale - maps.cell[1]).double())
    visible = maps.bias[0, maps.keys.span] > -torch.inf
    statistics = {}
    for name in maps.names:
        logits = sum(maps.logits.values(), start=maps.bias) if name == ALL else maps.logits[name]
        weights = maps.map(name)
        weights = weights / weights.sum((1, 2), keepdim=True).clamp_min(1e-30)
        statistics[name] = (
            float(logits[:, maps.keys.span][:, visible].std(-1, correction=0).mean()),
            float(effective_cells(weights.flatten(1)).mean()),
            float((weights * distances).sum((1, 2)).mean()),
        )
    return statistics


def read_terms(net: Network) -> list[Sheet | Picture]:
    """A map of each term and of all terms, layer by layer; numbers are means over a few queries."""
    middle = term_maps(net.model, net.image)
    cells = queries(finest_grid(maps.grid for maps in middle))
    measured = [[term_statistics(maps) for maps in term_maps(net.model, net.image, cell)] for cell in cells]
    lines: list[tuple[Cell, ...]] = []
    pictures: list[Sheet | Picture] = []
    for index, maps in enumerate(middle):
        names = maps.names if len(maps.logits) > 1 else maps.names[:1]
        for name in names:
            values = [fmean(statistics[index][name][number] for statistics in measured) for number in range(3)]
            lines.append((maps.layer, name, MEANING[name], *(round(value, 3) for value in values), maps.keys.cells))
        row, column = maps.cell
        same_grid = maps.grid.cells == maps.keys.cells
        frame = cell_frame(maps.grid, row * maps.grid.width + column) if same_grid else None
        layers = {
            f"{name}: {MEANING[name]}": overlay(maps.map(name).mean(0).flatten(), maps.keys, frame) for name in names
        }
        title = f"Terms of {net.label}: {maps.layer}, from cell {row},{column}"
        pictures.append(Picture(title=title, image=net.photograph.image, note=net.photograph.note, layers=layers))
    sheet = Sheet(
        title=f"Terms of {net.label}",
        columns=("layer", "term", "meaning", "deviation of logits", "cells covered", "distance in cells", "cells"),
        rows=tuple(lines),
        note=f"Means over heads and {len(cells)} queries on the picture. Each term has its own softmax, in which a "
        "term whose logits deviate little covers all cells; the layer adds the logits, so the one that deviates most "
        "decides. Cells covered: the number of equal weights with the same entropy.",
        chart=Chart(kind="bars", x="layer", y="deviation of logits", series="term"),
    )
    return [sheet, *pictures]


# offsets


def read_offsets(net: Network) -> list[Sheet | Picture]:
    """Where the taps of the middle cell sample, and how those of all cells move on average, layer by layer."""
    layers = sampling_points(net.model, net.image)
    rows = [row for points in layers for row in point_rows(points, net.picture)]
    drawn = net.draw(f"Taps of {net.label}", rows, POINTS_NOTE, side=2.6)
    sheet = Sheet(
        title=f"Taps of {net.label}",
        columns=("layer", "moved on average", "moved at most", "in the framed cell", "all in one direction", "cells"),
        rows=tuple(_offset_cells(points) for points in layers),
        note="In grid cells of the map that is sampled, on the picture; a cell counts the mean of its taps. All in one "
        "direction: the length of the mean movement of a cell's taps, averaged over cells. It equals the movement "
        "itself where taps move together, and is 0 where they only spread or contract.",
    )
    return [sheet, drawn]


def _offset_cells(points: SamplingPoints) -> tuple[Cell, ...]:
    lengths = points.lengths
    values = (lengths.mean(), lengths.max(), lengths[points.cell], points.field.norm(dim=-1).mean())
    return (points.layer, *(round(float(value), 4) for value in values), points.grid.cells)


# kernels


def read_kernels(net: Network) -> list[Sheet | Picture]:
    """The kernels of the middle cell, layer by layer; numbers are means over a few queries."""
    middle = dynamic_kernels(net.model, net.image)
    cells = queries(finest_grid(kernels.grid for kernels in middle))
    measured = [dynamic_kernels(net.model, net.image, cell) for cell in cells]
    lines: list[tuple[Cell, ...]] = []
    panels: list[Row] = []
    for index, shown in enumerate(middle):
        of_layer = [layers[index] for layers in measured]
        rows, columns = shown.kernels.shape[1:]
        values = (
            fmean(float(effective_cells(kernels.kernels.flatten(1)).mean()) for kernels in of_layer),
            fmean(float(kernels.kernels[:, rows // 2, columns // 2].mean()) for kernels in of_layer),
            fmean(1 - float(kernels.map().sum((1, 2)).mean()) for kernels in of_layer),
        )
        lines.append((shown.layer, *(round(value, 4) for value in values), rows * columns))
        panels += [(name, row[:GROUPS]) for name, row in kernel_rows(shown, net.picture, "all")[:1]]
    drawn = net.draw(f"Kernels of {net.label}", panels, KERNELS_NOTE)
    sheet = Sheet(
        title=f"Kernels of {net.label}",
        columns=("layer", "taps covered", "weight of the own cell", "weight beyond the border", "taps"),
        rows=tuple(lines),
        note=f"Means over groups and {len(cells)} queries on the picture. Taps covered: the number of equal weights "
        "with the same entropy. Taps beyond the border count in the softmax and see zero.",
    )
    return [sheet, drawn]


PARTS = (
    Part("esa_fig3", ("1111",), read_terms),
    Part("esa_table2", ("0010 + deformable", "w/o + deformable", "1111 + deformable"), read_offsets),
    Part("esa_table3", tuple(f"0100 in {n}x{n}" for n in (7, 5, 13, 3)), read_terms),
    Part("esa_table3", tuple(f"dynamic {n}x{n}" for n in (7, 5, 13, 3)), read_kernels),
)


def compute(source: Source) -> Sequence[Sheet | Picture]:
    """Every part that has a finished run, and a list of all parts. Raises: as `network`, if none has a finished run."""
    pages: list[Sheet | Picture] = []
    errors: list[RegardError] = []
    states: list[tuple[Cell, ...]] = []
    for part in PARTS:
        first = part.rows[0]
        try:
            net = network(source, part.study, part.rows)
        except RegardError as error:
            errors.append(error)
            states.append((part.study, first, None, "no finished run"))
            continue
        row = net.label.partition(" (")[0]
        states.append((part.study, first, row, "drawn" if row == first else "drawn instead"))
        pages += part.read(net)
    if not pages:
        raise errors[0]
    columns = ("study", "preferred row", "row drawn", "state")
    return [Sheet(title="Rows in this figure", columns=columns, rows=tuple(states)), *pages]


ANALYSIS = Analysis(
    name="esa_fig1",
    title="What each factor attends to, where taps sample, and what dynamic kernels weigh",
    source=f"{ESA_PAPER}, Figure 1",
    question="Which positions does each of the four factors attend to in a trained network, apart and together?",
    compute=compute,
    of="esa_fig3",
    notes=(
        "The paper's figure is a drawing of the terms; these are trained networks on a photograph. A frame marks the "
        "cell of the query.",
        "Amber is scaled to the largest weight of each map, so that a flat map is amber all over: see the number of "
        "cells covered.",
        f"Networks are the first finished seed of a row; {SMOKE_NOTE}",
        "Offsets and kernels are of `esa_table2` and `esa_table3`, at the same scale.",
    ),
)
