"""The inputs of the layers of one kind in a forward pass of one image, and the grid cell of a query in each layer."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Grid, GridError, UnsupportedError
from regard.swapping.host_names import MIXER_CHILD
from regard.swapping.inspect import explain_inputs, layer_calls


class Call(NamedTuple):
    """A module and the arguments of its last call."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def layers_of(model: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Module]:
    """The modules of a class by the name of their layer; a module inside a port has the name of the port."""
    return {
        f"{name}.".partition(f".{MIXER_CHILD}.")[0].removesuffix("."): module
        for name, module in model.named_modules()
        if isinstance(module, kind)
    }


def recorded_calls(
    model: nn.Module, image: Float[Tensor, "C *frames H W"], kind: type[nn.Module], description: str, layers: str = "*"
) -> dict[str, Call]:
    """The arguments of each layer of a class in one forward pass in evaluation mode, in the order of the network.

    description: of one such layer, for messages. layers: a glob of names. The model is not changed.
    Raises: UnsupportedError if the model has no such layer; ConfigError if none of them matches.
    """
    present = layers_of(model, kind)
    if not present:
        raise UnsupportedError(f"{type(model).__name__} has no {description}, so there is none to show")
    chosen = {name: module for name, module in present.items() if fnmatchcase(name, layers)}
    if not chosen:
        raise ConfigError(f"no {description} matches {layers!r}; there are {', '.join(present)}")
    with explain_inputs(model, image[None]):
        return {name: Call(chosen[name], *call) for name, call in layer_calls(model, chosen, image[None]).items()}


def whole_image_calls(calls: Mapping[str, Call], batches: Mapping[str, int]) -> dict[str, Call]:
    """The calls whose input was the whole image, a batch of 1. Raises: UnsupportedError if there is none.

    batches: layer -> the batch size of its input; windows of an image are a larger batch.
    """
    whole = {name: call for name, call in calls.items() if batches[name] == 1}
    if not whole:
        raise UnsupportedError(f"these layers see the image in parts, not as a whole: {', '.join(calls)}")
    return whole


def query_cells(grids: Mapping[str, Grid], query: tuple[int, int] | None) -> dict[str, tuple[int, int]]:
    """The (row, column) of each layer's grid cell that contains the centre of the query.

    query: (row, column) on the finest of the grids, by default its middle cell; all grids cover the same picture.
    Raises: GridError if the query lies outside that grid.
    """
    if not grids:
        return {}
    finest = finest_grid(grids.values())
    y, x = query_cell(finest, query)
    return {
        name: ((2 * y + 1) * grid.height // (2 * finest.height), (2 * x + 1) * grid.width // (2 * finest.width))
        for name, grid in grids.items()
    }


def finest_grid(grids: Iterable[Grid]) -> Grid:
    """The grid with the most cells; the first of them if several have the most."""
    return max(grids, key=lambda grid: grid.cells)


def query_cell(grid: Grid, query: tuple[int, int] | None) -> tuple[int, int]:
    """The (row, column) of a query, by default the middle cell. Raises: GridError if it lies outside the grid."""
    y, x = query if query is not None else (grid.height // 2, grid.width // 2)
    if not (0 <= y < grid.height and 0 <= x < grid.width):
        raise GridError(f"query {y},{x} is outside {grid}: rows 0 to {grid.height - 1}, columns 0 to {grid.width - 1}")
    return y, x


def effective_cells(weights: Float[Tensor, "*B n"]) -> Float[Tensor, "*B"]:
    """The effective number of cells that weights cover: exp of their entropy, from 1 (one cell) to n (all equal)."""
    normalised = weights.double() / weights.double().sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.special.entr(normalised).sum(-1).exp()


def select_parts(values: Float[Tensor, "g ..."], part: str, kind: str) -> list[tuple[str, Tensor]]:
    """(title, values) of the selected heads or groups.

    part: "mean" of all, "all" (the mean, then each), or the number of one. kind: "head" or "group", for titles.
    Raises: ConfigError for a number that does not exist.
    """
    mean = (f"mean of {len(values)} {kind}s" if len(values) > 1 else "", values.mean(0))
    if part == "mean" or (part == "all" and len(values) == 1):
        return [mean]
    if part == "all":
        return [mean, *((f"{kind} {i}", value) for i, value in enumerate(values))]
    if not part.isdecimal() or int(part) >= len(values):
        raise ConfigError(f"no {kind} {part!r}: give all, mean or 0 to {len(values) - 1}")
    return [(f"{kind} {part}", values[int(part)])]
