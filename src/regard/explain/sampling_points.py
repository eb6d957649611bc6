"""The sampling points of deformable convolutions and the kernels of dynamic ones, for one output cell.

Positions are (row, column) in cells of the map that is sampled; 0 is the centre of the first cell.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, UnsupportedError
from regard.mixers.convolutions.deformable import DeformableConv2d, check_offsets, positions
from regard.mixers.convolutions.dynamic import DynamicConvMixer

from .layer_inputs import query_cells, recorded_calls, whole_image_calls


@dataclass(frozen=True, kw_only=True)
class SamplingPoints:
    """The sampling points of one deformable convolution for one output cell.

    grid: of its outputs; cell: (row, column) on it. source: the grid that is sampled. regular: the points without
    offsets, rows first. points: the points of each group. factors: of the samples, None for version 1. field: the mean
    offset of every output cell over points and groups, as a vector; lengths: the mean length of its offsets. All in
    cells of the source.
    """

    layer: str
    grid: Grid
    source: Grid
    cell: tuple[int, int]
    regular: Float[Tensor, "K 2"]
    points: Float[Tensor, "g K 2"]
    factors: Float[Tensor, "g K"] | None
    field: Float[Tensor, "hh ww 2"]
    lengths: Float[Tensor, "hh ww"]


@dataclass(frozen=True, kw_only=True)
class DynamicKernels:
    """The kernels of one dynamic convolution at one cell of its grid, one per group; each sums to 1."""

    layer: str
    grid: Grid
    cell: tuple[int, int]
    kernels: Float[Tensor, "g rows columns"]

    def map(self) -> Float[Tensor, "g h w"]:
        """The kernels on the grid, centred on the cell, without the parts beyond the border, where inputs are zero."""
        groups, rows, columns = self.kernels.shape
        height, width = self.grid.height, self.grid.width
        padded = self.kernels.new_zeros(groups, height + rows - 1, width + columns - 1)
        y, x = self.cell
        padded[:, y : y + rows, x : x + columns] = self.kernels
        return padded[:, rows // 2 : rows // 2 + height, columns // 2 : columns // 2 + width]


def sampling_points(
    model: nn.Module, image: Float[Tensor, "C H W"], query: tuple[int, int] | None = None, *, layers: str = "*"
) -> list[SamplingPoints]:
    """The sampling points of a model's deformable convolutions for one cell of an image, in the order of the network.

    image: as the model expects it. query: (row, column) on the finest grid of outputs of these layers, by default the
    middle cell; a coarser layer uses the cell that contains it. layers: a glob of names.
    Raises: UnsupportedError if there is no such layer, or none gets the whole image; ConfigError if no name matches;
    GridError for a query outside the grid.
    """
    calls = recorded_calls(model, image, DeformableConv2d, "deformable convolution of maps", layers)
    calls = whole_image_calls(calls, {name: len(call.args[0]) for name, call in calls.items()})
    samples: dict[str, tuple[Grid, Grid, Tensor, Tensor, Tensor | None]] = {}
    with torch.no_grad():
        for name, call in calls.items():
            conv, x = call.module, call.args[0]
            offsets, factors = conv.moves(x)
            geometry = (conv.stride, conv.padding, conv.dilation)
            frame = check_offsets(x, conv.weight, offsets, factors, conv.bias, *geometry)
            points, regular = (positions(at, frame)[0].double().cpu() for at in (offsets, offsets * 0))
            if factors is not None:
                factors = factors[0].unflatten(0, (frame.groups, -1)).double().cpu()
            samples[name] = (Grid(*frame.out), Grid(*x.shape[-2:]), points, regular, factors)
    positions_of = query_cells({name: grid for name, (grid, *_) in samples.items()}, query)
    results = []
    for name, (grid, source, points, regular, factors) in samples.items():
        y, x = positions_of[name]
        results.append(
            SamplingPoints(
                layer=name, grid=grid, source=source, cell=(y, x), regular=regular[0, :, y, x],
                points=points[:, :, y, x], factors=None if factors is None else factors[:, :, y, x],
                field=(points - regular).mean((0, 1)), lengths=(points - regular).norm(dim=-1).mean((0, 1)),
            )
        )  # fmt: skip
    return results


def dynamic_kernels(
    model: nn.Module, image: Float[Tensor, "C H W"], query: tuple[int, int] | None = None, *, layers: str = "*"
) -> list[DynamicKernels]:
    """The kernels that a model's dynamic convolutions predict for one cell of an image, in the order of the network.

    Arguments and errors as in `sampling_points`. Layers on sequences (axes=1) have no picture and are left out.
    """
    calls = recorded_calls(model, image, DynamicConvMixer, "dynamic convolution", layers)
    maps = {name: call for name, call in calls.items() if call.module.config.axes == 2}
    if not maps:
        raise UnsupportedError(f"dynamic convolutions on sequences have no picture: {', '.join(calls)}")
    arguments = {
        name: {**dict(zip(("x", "grid", "mask"), call.args, strict=False)), **call.kwargs}
        for name, call in maps.items()
    }
    maps = whole_image_calls(maps, {name: len(inputs["x"]) for name, inputs in arguments.items()})
    arguments = {name: arguments[name] for name in maps}
    positions_of = query_cells({name: inputs["grid"] for name, inputs in arguments.items()}, query)
    kernels = []
    with torch.no_grad():
        for name, inputs in arguments.items():
            grid, cell = inputs["grid"], positions_of[name]
            predicted = maps[name].module.kernels_at(inputs["x"], grid, cell, inputs.get("mask"))
            kernels.append(DynamicKernels(layer=name, grid=grid, cell=cell, kernels=predicted[0].double().cpu()))
    return kernels
