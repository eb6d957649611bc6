"""Static Key Attention in Vision, Figure 5: attention maps of projected and of static keys in trained networks.

The paper shows the third stage of CAFormer-S18, maps averaged over heads. Its networks are three rows of Table 5, from
whose runs the maps are read; the ViT of Table 1 is shown beside them where that study has runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, RegardError, StoreError, UnsupportedError
from regard.core.eval_mode import eval_mode
from regard.explain.layer_inputs import effective_cells
from regard.explain.pictures import SAMPLES
from regard.lab.engine.analysis import Analysis, Source
from regard.lab.studies.papers import SKA_PAPER
from regard.lab.tasks.base import Task
from regard.lab.train.load import load_trained
from regard.lab.train.run import Run
from regard.pages.sheets import Cell, Chart, Picture, Sheet
from regard.swapping.capture import capture, with_regard_softmax
from regard.swapping.inspect import attention_layers, layer_grids, matching_layers

from ..overlays import SMOKE_NOTE, Photograph, cell_frame, first_inputs, first_runs, overlay, photograph

TEST_IMAGES = 16
"""Test images over which the numbers are averaged."""
HEADS = 4
"""Heads that are drawn one by one, in the last layer."""
_STUDY = "ska_table5"
# study -> its table, rows (softmax, SKA, CSKA) and the layers that are read
_READ: dict[str, tuple[str, tuple[str, ...], str]] = {
    _STUDY: ("Table 5", ("C, C, A, A", "C, C, SKA, A", "C, C, CSKA, A"), "stages.2.*"),
    "ska_table1": ("Table 1", ("Softmax", "SKA a", "CSKA"), "*"),
}


@dataclass(frozen=True, kw_only=True)
class Network:
    """A trained network and the glob of the layers that are read. label: its row and table."""

    label: str
    run: Run
    layers: str


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Weights of one layer between its patch tokens; a row sums to less than 1 with prefix or suffix tokens."""

    weights: Float[Tensor, "B H cells cells"]
    grid: Grid


def maps_of(model: nn.Module, inputs: Float[Tensor, "B C H W"], layers: str = "*") -> dict[str, Maps]:
    """The attention maps of the layers that match a glob, by name, in one forward pass; the model is not changed.

    The host's own attention is read through a copy with our softmax.
    Raises: SwapError if no layer matches; UnsupportedError if a layer has no weights between all tokens, or the copy
    and the model give different outputs, as with attention that is not plain softmax.
    """
    sites = attention_layers(model)
    ports = {name: sites[name] for name in matching_layers(model, layers)}
    grids = {name: grid for name, (grid, *_) in layer_grids(model, ports, inputs[:1]).items()}
    reader = with_regard_softmax(model, inputs, layers)
    with eval_mode(reader), capture(reader, layers) as captured:
        reader(inputs)
    maps = {}
    for name, weights in captured.items():
        grid = grids[name]
        if tuple(weights.shape[-2:]) != (grid.tokens, grid.tokens):
            raise UnsupportedError(f"{name} has no weights between all {grid.tokens} tokens of its grid")
        maps[name] = Maps(weights=weights[:, :, grid.span, grid.span], grid=grid)
    return maps


@dataclass(frozen=True, kw_only=True)
class MapStatistics:
    """Means over images, heads and queries of one layer; a row of its map is scaled to sum to 1 over the grid cells.

    cells: exp(entropy) of a row, the number of equal weights with the same entropy. distance: from the query, in cells.
    by_query: half the sum of |row - mean row of the queries|, 0 if all queries attend to the same cells.
    by_image: the same against the mean over images, 0 if the map does not depend on the content.
    """

    cells: float
    distance: float
    by_query: float
    by_image: float


def map_statistics(maps: Maps) -> MapStatistics:
    """Effective cells, distance and dependence on query and image of one layer."""
    grid, rows = maps.grid, maps.weights.double()
    rows = rows / rows.sum(-1, keepdim=True).clamp_min(1e-30)
    centres = torch.cartesian_prod(*map(torch.arange, grid.sides)).double()
    return MapStatistics(
        cells=float(effective_cells(rows).mean()),
        distance=float((rows * torch.cdist(centres, centres)).sum(-1).mean()),
        by_query=_change(rows, 2),
        by_image=_change(rows, 0),
    )


def _change(rows: Tensor, over: int) -> float:
    return float((rows - rows.mean(over, keepdim=True)).abs().sum(-1).mean() / 2)


def networks(source: Source) -> tuple[list[Network], list[str]]:
    """The first finished seed of every row that is read, and the labels of rows of the figure that have none.

    Raises: ConfigError or StoreError if no row has a finished run.
    """
    networks, missing = [], []
    for study, (table, rows, layers) in _READ.items():
        try:
            keys = first_runs(source, study)
        except RegardError:  # not run at this scale
            keys = {}
        for row in rows:
            label = f"{row} ({table})"
            if row in keys:
                networks.append(Network(label=label, run=source.run(keys[row]), layers=layers))
            elif study == _STUDY:
                missing.append(label)
    if not networks:
        finished = ", ".join(sorted(first_runs(source, _STUDY)))
        needed = " or ".join(repr(row) for row in _READ[_STUDY][1])
        raise StoreError(f"{_STUDY} has finished runs of {finished} only; the figure needs {needed}")
    return networks, missing


def photographs(task: Task) -> list[Photograph]:
    """The sample photographs as the task's images, beginning with that of `photograph`; for grey images one digit."""
    first = photograph(task)
    if task.example()[0].shape[1] == 1:
        return [first]
    every = [photograph(task, name) for name in SAMPLES]
    return [first, *(picture for picture in every if picture.image != first.image)]


def queries(grid: Grid) -> dict[str, int]:
    """The chosen cells, by name: in the middle, and halfway between it and the upper left corner."""
    cells = {"middle": (grid.height // 2, grid.width // 2), "upper left": (grid.height // 4, grid.width // 4)}
    return {name: row * grid.width + column for name, (row, column) in cells.items()}


def overlays(maps: Maps, heads: int) -> dict[str, str]:
    """Overlays of the first image: for each chosen query the mean over heads, then single heads of the first query."""
    layers = {}
    for name, query in queries(maps.grid).items():
        frame = cell_frame(maps.grid, query)
        layers[f"{name}, mean of heads"] = overlay(maps.weights[0, :, query].mean(0), maps.grid, frame)
    name, query = next(iter(queries(maps.grid).items()))
    for head in range(min(heads, maps.weights.shape[1])):
        layers[f"{name}, head {head}"] = overlay(maps.weights[0, head, query], maps.grid, cell_frame(maps.grid, query))
    return layers


def figure5(source: Source) -> Sequence[Sheet | Picture]:
    """Numbers of every layer, and its maps over pictures."""
    trained_networks, missing = networks(source)
    lines: list[tuple[Cell, ...]] = []
    pictures: list[Picture] = []
    remarks = [f"Not trained yet: {'; '.join(missing)}."] if missing else []
    for network in trained_networks:
        model = load_trained(network.run, source.store)
        try:
            maps = maps_of(model, first_inputs(network.run.task, TEST_IMAGES), network.layers)
        except UnsupportedError as error:
            remarks.append(f"No maps of {network.label}: {error}.")
            continue
        lines += _lines(network.label, maps)
        pictures += _pictures(network, model)
    note = (
        f"Means over heads, queries and the first {TEST_IMAGES} test images; patch tokens only. Effective cells: "
        "exp(entropy) of a query's weights. Distance: from the query, in grid cells. By query, by image: how much of a "
        "query's weights lies elsewhere than in the mean over queries, or over images, 0 to 1."
    )
    sheet = Sheet(
        title="How far a layer attends, and what its maps depend on",
        columns=("network", "depth", "layer", "cells", "effective cells", "distance", "by query", "by image"),
        rows=tuple(lines),
        note=" ".join([note, *remarks]),
        chart=Chart(x="depth", y="by image", series="network"),
    )
    return [sheet, *pictures]


def _lines(label: str, layers: Mapping[str, Maps]) -> list[tuple[Cell, ...]]:
    lines: list[tuple[Cell, ...]] = []
    for depth, (layer, maps) in enumerate(layers.items(), 1):
        mean = map_statistics(maps)
        numbers = (round(mean.cells, 2), round(mean.distance, 2), round(mean.by_query, 4), round(mean.by_image, 4))
        lines.append((label, depth, layer, maps.grid.cells, *numbers))
    return lines


def _pictures(network: Network, model: nn.Module) -> list[Picture]:
    """All layers on the first photograph, the last also on the others; single heads in the last layer."""
    pictures = []
    for number, picture in enumerate(photographs(network.run.task)):
        layers = maps_of(model, picture.inputs, network.layers)
        last = next(reversed(layers))
        for layer, maps in layers.items():
            if layer == last or not number:
                drawn = overlays(maps, HEADS if layer == last and not number else 0)
                title = f"{network.label}, {layer}" + (", another picture" if number else "")
                pictures.append(Picture(title=title, image=picture.image, note=picture.note, layers=drawn))
    return pictures


ANALYSIS = Analysis(
    name="ska_fig5",
    title="Attention maps of static keys",
    source=f"{SKA_PAPER}, Figure 5",
    question="Do static keys attend to the same positions as projected keys?",
    compute=figure5,
    of=_STUDY,
    notes=(
        f"Each network is the first finished seed of its row; {SMOKE_NOTE}",
        "The opacity of a cell is its share of the largest weight of that map; the red frame is the query.",
        "Letters are the four stages; the third is read. In CAFormer-S18 it has the layers 7 to 15 that the paper "
        "shows, averaged over heads; the small CAFormer of the smoke and desk scales has two there.",
    ),
)
