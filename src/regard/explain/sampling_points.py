"""Where the taps of deformable convolutions sample, and the kernels of dynamic ones, for one cell of an image.

Places are (row, column) in cells of the map that is sampled; 0 is the centre of the first cell.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, UnsupportedError
from regard.mixers.convolutions.deformable import DeformableConv2d, check_offsets, positions
from regard.mixers.convolutions.dynamic import DynamicConvMixer

from .layer_inputs import calls, cells, undivided


@dataclass(frozen=True, kw_only=True)
class TapMoves:
    """One deformable convolution, seen from one cell.

    grid: of its outputs; cell: (row, column) on it. source: the grid that is sampled. rest: the taps before they move,
    rows first. points: where each group samples. factors: of the samples, None for version 1. field: how far the taps
    of every output move on average, over taps and groups, as a vector; lengths: the same without directions. All in
    cells of the source.
    """

    layer: str
    grid: Grid
    source: Grid
    cell: tuple[int, int]
    rest: Float[Tensor, "K 2"]
    points: Float[Tensor, "g K 2"]
    factors: Float[Tensor, "g K"] | None
    field: Float[Tensor, "hh ww 2"]
    lengths: Float[Tensor, "hh ww"]


@dataclass(frozen=True, kw_only=True)
class TapKernels:
    """One dynamic convolution, seen from one cell of its grid. kernels: of each group, summing to 1 over the taps."""

    layer: str
    grid: Grid
    cell: tuple[int, int]
    kernels: Float[Tensor, "g rows columns"]

    def map(self) -> Float[Tensor, "g h w"]:
        """The kernels laid on the grid around the cell; taps beyond the border, which see zero, are cut off."""
        groups, rows, columns = self.kernels.shape
        height, width = self.grid.height, self.grid.width
        on = self.kernels.new_zeros(groups, height + rows - 1, width + columns - 1)
        y, x = self.cell
        on[:, y : y + rows, x : x + columns] = self.kernels
        return on[:, rows // 2 : rows // 2 + height, columns // 2 : columns // 2 + width]


def tap_moves(
    model: nn.Module, image: Float[Tensor, "C H W"], query: tuple[int, int] | None = None, *, layers: str = "*"
) -> list[TapMoves]:
    """Where the deformable convolutions of a model sample for one cell of an image, in the order of the network.

    image: as the model expects it. query: (row, column) on the finest grid of outputs of these layers, by default the
    middle one; a coarser layer looks from the cell below it. layers: a glob of names.
    Raises: UnsupportedError if there is no such layer, or none gets the whole image; ConfigError if no name matches;
    GridError for a query outside the grid.
    """
    found = calls(model, image, DeformableConv2d, "deformable convolution of maps", layers)
    found = undivided(found, {name: len(call.args[0]) for name, call in found.items()})
    seen: dict[str, tuple[Grid, Grid, Tensor, Tensor, Tensor | None]] = {}
    with torch.no_grad():
        for name, call in found.items():
            conv, x = call.module, call.args[0]
            offsets, factors = conv.moves(x)
            places = (conv.stride, conv.padding, conv.dilation)
            frame = check_offsets(x, conv.weight, offsets, factors, conv.bias, *places)
            points, rest = (positions(at, frame)[0].double().cpu() for at in (offsets, offsets * 0))
            if factors is not None:
                factors = factors[0].unflatten(0, (frame.groups, -1)).double().cpu()
            seen[name] = (Grid(*frame.out), Grid(*x.shape[-2:]), points, rest, factors)
    grids = cells({name: one[0] for name, one in seen.items()}, query)
    moves = []
    for name, (grid, source, points, rest, factors) in seen.items():
        y, x = grids[name]
        moves.append(
            TapMoves(
                layer=name,
                grid=grid,
                source=source,
                cell=(y, x),
                rest=rest[0, :, y, x],
                points=points[:, :, y, x],
                factors=None if factors is None else factors[:, :, y, x],
                field=(points - rest).mean((0, 1)),
                lengths=(points - rest).norm(dim=-1).mean((0, 1)),
            )  # fmt: skip
        )
    return moves


def tap_kernels(
    model: nn.Module, image: Float[Tensor, "C H W"], query: tuple[int, int] | None = None, *, layers: str = "*"
) -> list[TapKernels]:
    """The kernels that the dynamic convolutions of a model predict for one cell of an image, in the network's order.

    Arguments and errors as in `tap_moves`. Layers on sequences (axes=1) have no picture and are left out.
    """
    found = calls(model, image, DynamicConvMixer, "dynamic convolution", layers)
    maps = {name: call for name, call in found.items() if call.module.config.axes == 2}
    if not maps:
        raise UnsupportedError(f"dynamic convolutions on sequences have no picture: {', '.join(found)}")
    given = {
        name: {**dict(zip(("x", "grid", "mask"), call.args, strict=False)), **call.kwargs}
        for name, call in maps.items()
    }
    maps = undivided(maps, {name: len(said["x"]) for name, said in given.items()})
    given = {name: given[name] for name in maps}
    places = cells({name: said["grid"] for name, said in given.items()}, query)
    kernels = []
    with torch.no_grad():
        for name, said in given.items():
            found_here = maps[name].module.kernels_at(said["x"], said["grid"], places[name], said.get("mask"))
            kernels.append(
                TapKernels(layer=name, grid=said["grid"], cell=places[name], kernels=found_here[0].double().cpu())
            )
    return kernels
