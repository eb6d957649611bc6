"""What the layers of one kind were given in one forward pass of an image, and the cell of each that a query lies in."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Grid, GridError, UnsupportedError
from regard.swapping.inspect import calls_of
from regard.swapping.layer import CHILD


class Call(NamedTuple):
    """A module and the arguments of its last call."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def layers_of(model: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Module]:
    """The modules of a kind by the name of their layer: what a port holds is named after the layer it stands for."""
    return {
        f"{name}.".partition(f".{CHILD}.")[0].removesuffix("."): module
        for name, module in model.named_modules()
        if isinstance(module, kind)
    }


def calls(
    model: nn.Module, image: Float[Tensor, "C H W"], kind: type[nn.Module], what: str, layers: str = "*"
) -> dict[str, Call]:
    """One forward pass in evaluation mode: what each layer of a kind was called with, in the order of the network.

    what: the kind in words, for messages. layers: a glob of names. The model is left as it was.
    Raises: UnsupportedError if the model has no such layer; ConfigError if none of them matches.
    """
    there = layers_of(model, kind)
    if not there:
        raise UnsupportedError(f"{type(model).__name__} has no {what}, so there is nothing of that kind to show")
    chosen = {name: module for name, module in there.items() if fnmatchcase(name, layers)}
    if not chosen:
        raise ConfigError(f"no {what} matches {layers!r}; there are {', '.join(there)}")
    return {name: Call(chosen[name], *call) for name, call in calls_of(model, chosen, image[None]).items()}


def undivided(found: Mapping[str, Call], batches: Mapping[str, int]) -> dict[str, Call]:
    """The calls that got the whole image as a batch of 1. Raises: UnsupportedError if none did."""
    whole = {name: call for name, call in found.items() if batches[name] == 1}
    if not whole:
        raise UnsupportedError(f"these layers see the image in parts, not as a whole: {', '.join(found)}")
    return whole


def cells(grids: Mapping[str, Grid], query: tuple[int, int] | None) -> dict[str, tuple[int, int]]:
    """The (row, column) of each layer in which the centre of a cell lies.

    query: a cell of the finest of the grids, by default its middle one; other grids cover the same picture.
    Raises: GridError if the query lies outside that grid.
    """
    if not grids:
        return {}
    shown = finest(grids.values())
    y, x = cell_of(shown, query)
    return {
        name: ((2 * y + 1) * grid.height // (2 * shown.height), (2 * x + 1) * grid.width // (2 * shown.width))
        for name, grid in grids.items()
    }


def finest(grids: Iterable[Grid]) -> Grid:
    """The grid with the most cells, the first of equals."""
    return max(grids, key=lambda grid: grid.cells)


def cell_of(grid: Grid, query: tuple[int, int] | None) -> tuple[int, int]:
    """The (row, column) that is asked for, by default the middle. Raises: GridError if the grid does not have it."""
    y, x = query if query is not None else (grid.height // 2, grid.width // 2)
    if not (0 <= y < grid.height and 0 <= x < grid.width):
        raise GridError(
            f"query {y},{x} lies outside {grid}; rows are 0 to {grid.height - 1}, columns 0 to {grid.width - 1}"
        )
    return y, x


def equal_cells(weights: Float[Tensor, "*B n"]) -> Float[Tensor, "*B"]:
    """Over how many cells weights are spread: exp of their entropy, n where all are equal, 1 where one has all."""
    share = weights.double() / weights.double().sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.special.entr(share).sum(-1).exp()


def picked(values: Float[Tensor, "g ..."], part: str, kind: str) -> list[tuple[str, Tensor]]:
    """(title, values) of what is asked of heads or groups: their "mean", "all" of them and the mean, or a number.

    Raises: ConfigError for a number that does not exist.
    """
    mean = (f"mean of {len(values)} {kind}s" if len(values) > 1 else "", values.mean(0))
    if part == "mean" or (part == "all" and len(values) == 1):
        return [mean]
    if part == "all":
        return [mean, *((f"{kind} {i}", value) for i, value in enumerate(values))]
    if not part.isdecimal() or int(part) >= len(values):
        raise ConfigError(f"no {kind} {part!r}: give all, mean or a number from 0 to {len(values) - 1}")
    return [(f"{kind} {part}", values[int(part)])]
