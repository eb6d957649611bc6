"""Static Key Attention in Vision, Figure 5: where projected and where static keys look in trained networks.

The paper shows the third stage of CAFormer-S18, maps averaged over heads. Its networks are three rows of Table 5, from
whose runs the maps are read; the ViT of Table 1 stands beside them where that study has runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, RegardError, StoreError, UnsupportedError
from regard.core.eval_mode import resting
from regard.explain.layer_inputs import equal_cells
from regard.explain.pictures import SAMPLES
from regard.lab.analysis import Analysis, Cell, Chart, Picture, Sheet, Source, trained_runs
from regard.studies.mita.expert_choices import Photograph, first_inputs, overlay, photograph
from regard.swapping.capture import capture, readable
from regard.swapping.inspect import all_sites, grids_of, matching
from regard.tasks.base import Task
from regard.train.load import trained
from regard.train.run import Run

PICTURED = 16
"""Test images for the numbers."""
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
    """Weights of one layer between the cells of its grid (queries, then keys); less than 1 a row with extra tokens."""

    weights: Float[Tensor, "B H cells cells"]
    grid: Grid


def maps_of(model: nn.Module, inputs: Float[Tensor, "B C H W"], layers: str = "*") -> dict[str, Maps]:
    """The attention maps of the layers that match a glob, by name, in one forward pass; the model stays as it is.

    Attention of the host's own is read through a copy with our softmax.
    Raises: SwapError if no layer matches; UnsupportedError if a layer has no weights between all cells, or the copy
    computes something else than the model, as with attention that is not plain softmax.
    """
    sites = all_sites(model)
    ports = {name: sites[name] for name in matching(model, layers)}
    grids = {name: grid for name, (grid, _) in grids_of(model, ports, inputs[:1]).items()}
    reader = readable(model, inputs, layers)
    with resting(reader), capture(reader, layers) as found:
        reader(inputs)
    made = {}
    for name, weights in found.items():
        grid = grids[name]
        if tuple(weights.shape[-2:]) != (grid.tokens, grid.tokens):
            raise UnsupportedError(f"{name} has no weights between all {grid.tokens} tokens of its grid")
        made[name] = Maps(weights=weights[:, :, grid.span, grid.span], grid=grid)
    return made


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a layer looks, as means over images, heads and queries; a row of its map is taken to sum to 1 over cells.

    cells: exp(entropy) of a row, the number of cells that it would spread over evenly. distance: from the query, in
    cells. by_query: half the sum of |row - mean row of the queries|, 0 if all queries look at the same cells.
    by_image: the same against the mean over images, 0 if content decides nothing.
    """

    cells: float
    distance: float
    by_query: float
    by_image: float


def look_of(maps: Maps) -> Look:
    """Numbers of one layer."""
    grid, rows = maps.grid, maps.weights.double()
    rows = rows / rows.sum(-1, keepdim=True).clamp_min(1e-30)
    steps = [torch.arange(side, dtype=rows.dtype) for side in (grid.height, grid.width)]
    places = torch.cartesian_prod(*steps)
    return Look(
        cells=float(equal_cells(rows).mean()),
        distance=float((rows * torch.cdist(places, places)).sum(-1).mean()),
        by_query=_change(rows, 2),
        by_image=_change(rows, 0),
    )


def _change(rows: Tensor, over: int) -> float:
    return float((rows - rows.mean(over, keepdim=True)).abs().sum(-1).mean() / 2)


def networks(source: Source) -> tuple[list[Network], list[str]]:
    """The first finished seed of every row that is read, and the labels of rows of the figure without one.

    Raises: ConfigError or StoreError if no row has a finished run.
    """
    found, missing = [], []
    for study, (table, rows, layers) in _READ.items():
        first: dict[str, str] = {}
        for row, _, key in _finished(source, study):
            first.setdefault(row, key)
        for row in rows:
            label = f"{row} ({table})"
            if row in first:
                found.append(Network(label=label, run=source.run(first[row]), layers=layers))
            elif study == _STUDY:
                missing.append(label)
    if not found:
        done = {row for row, _, _ in trained_runs(source, _STUDY)}
        wanted = " or ".join(repr(row) for row in _READ[_STUDY][1])
        raise StoreError(f"{_STUDY} has finished runs of {', '.join(sorted(done))} only; the figure needs {wanted}")
    return found, missing


def _finished(source: Source, study: str) -> list[tuple[str, int, str]]:
    try:
        return trained_runs(source, study)
    except RegardError:  # not run at this scale; who has nothing at all is told by `networks`
        return []


def photographs(task: Task) -> list[Photograph]:
    """The free photographs as the task's images, or for grey images a digit; the picture of every study comes first."""
    first = photograph(task)
    if task.example().shape[1] == 1:
        return [first]
    others = [photograph(task, name) for name in SAMPLES]
    return [first, *(other for other in others if other.image != first.image)]


def queries(grid: Grid) -> dict[str, int]:
    """The chosen cells, by name: in the middle, and halfway between it and the upper left corner."""
    places = {"middle": (grid.height // 2, grid.width // 2), "upper left": (grid.height // 4, grid.width // 4)}
    return {name: row * grid.width + column for name, (row, column) in places.items()}


def overlays(maps: Maps, heads: int) -> dict[str, str]:
    """Where each chosen query looks, averaged over heads, then for the first one some heads alone; first image only."""
    drawn = {}
    for name, query in queries(maps.grid).items():
        frame = torch.arange(maps.grid.cells) == query
        drawn[f"{name}, mean of heads"] = overlay(maps.weights[0, :, query].mean(0), maps.grid, frame)
    name, query = next(iter(queries(maps.grid).items()))
    for head in range(min(heads, maps.weights.shape[1])):
        frame = torch.arange(maps.grid.cells) == query
        drawn[f"{name}, head {head}"] = overlay(maps.weights[0, head, query], maps.grid, frame)
    return drawn


def figure5(source: Source) -> Sequence[Sheet | Picture]:
    """Numbers of every layer, and its maps over pictures."""
    found, missing = networks(source)
    lines: list[tuple[Cell, ...]] = []
    pictures: list[Picture] = []
    left = [f"Not trained yet: {'; '.join(missing)}."] if missing else []
    for network in found:
        model = trained(network.run, source.store)
        try:
            tested = maps_of(model, first_inputs(network.run.task, PICTURED), network.layers)
        except UnsupportedError as error:
            left.append(f"No maps of {network.label}: {error}.")
            continue
        lines += _lines(network.label, tested)
        pictures += _pictures(network, model)
    sheet = Sheet(
        title="How far, and by what, a layer looks",
        columns=("network", "depth", "layer", "cells", "effective cells", "distance", "by query", "by image"),
        rows=tuple(lines),
        note=" ".join(
            [
                f"Means over heads, queries and the first {PICTURED} test images; cells only. Effective cells: "
                "exp(entropy) of a query's weights. Distance: from the query, in cells. By query, by image: how much "
                "of a query's weights lies elsewhere than in the mean over queries, or over images, 0 to 1.",
                *left,
            ]
        ),
        chart=Chart(x="depth", y="by image", series="network"),
    )
    return [sheet, *pictures]


def _lines(label: str, found: Mapping[str, Maps]) -> list[tuple[Cell, ...]]:
    lines: list[tuple[Cell, ...]] = []
    for depth, (layer, maps) in enumerate(found.items(), 1):
        look = look_of(maps)
        numbers = (round(look.cells, 2), round(look.distance, 2), round(look.by_query, 4), round(look.by_image, 4))
        lines.append((label, depth, layer, maps.grid.cells, *numbers))
    return lines


def _pictures(network: Network, model: nn.Module) -> list[Picture]:
    """All layers on the first photograph, the last also on the others; single heads in the last layer."""
    made = []
    for number, shown in enumerate(photographs(network.run.task)):
        found = maps_of(model, shown.inputs, network.layers)
        last = next(reversed(found))
        for layer, maps in found.items():
            if layer == last or not number:
                layers = overlays(maps, HEADS if layer == last and not number else 0)
                title = f"{network.label}, {layer}" + (", another picture" if number else "")
                made.append(Picture(title=title, image=shown.image, note=shown.note, layers=layers))
    return made


ANALYSIS = Analysis(
    name="ska_fig5",
    title="Where static keys look",
    source="Static Key Attention in Vision, Figure 5",
    question="Do learned keys look where projected keys look?",
    compute=figure5,
    of=_STUDY,
    notes=(
        "Each network is the first finished seed of its row; a smoke run is hardly trained, and shows the road only.",
        "The opacity of a cell is its share of the largest weight of that map; the red frame is the query.",
        "Letters are the four stages; the third is read. In CAFormer-S18 it has the layers 7 to 15 that the paper "
        "shows, averaged over heads; the small CAFormer of the smoke and desk scales has two there.",
    ),
)
