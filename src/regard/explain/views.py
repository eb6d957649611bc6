"""Views of a model on a picture: attention maps, their terms, offsets of sampling points, or dynamic kernels.

`available_views` lists what a model has, `draw_view` draws one view as a PNG file.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from regard.core import ConfigError, UnsupportedError, nearest
from regard.mixers.convolutions.deformable import DeformableConv2d
from regard.mixers.convolutions.dynamic import DynamicConvMixer
from regard.mixers.factors.factors import FactorsOperator
from regard.mixers.shared.heads import HeadMixer
from regard.models.attended_block import Attended
from regard.swapping.inspect import attention_layers
from regard.swapping.layer import Port

from . import pictures
from .factor_terms import MEANING, TermMaps, term_maps
from .layer_inputs import effective_cells, layers_of, select_parts
from .sampling_points import DynamicKernels, SamplingPoints, dynamic_kernels, sampling_points
from .strips import strip_picture

VIEWS = ("maps", "terms", "offsets", "kernels")
TERMS_NOTE = "Each panel has its own scale. Covers n: as spread as n cells of equal weight (exp of the entropy)."
POINTS_NOTE = (
    "Rings: sampling points without offsets; dots: with offsets, in version 2 with the opacity of their factor. "
    "Right: the mean offset of every cell."
)
KERNELS_NOTE = "Kernel weights of the framed cell; inputs beyond the picture are zero. Each panel has its own scale."
_AMBER, _BACKGROUND, _MOST_ARROWS = "#ffb000", "#3b3f45", 16
_NO_TICKS: dict[str, Any] = dict.fromkeys(("left", "bottom", "labelleft", "labelbottom"), False)
Row = tuple[str, list[tuple[str, Callable[..., None]]]]


def available_views(model: nn.Module) -> tuple[str, ...]:
    """The `VIEWS` that a model has, in that order."""
    has = {
        "maps": _has_maps(model),
        "terms": bool(layers_of(model, FactorsOperator)),
        "offsets": bool(layers_of(model, DeformableConv2d)),
        "kernels": any(layer.config.axes == 2 for layer in layers_of(model, DynamicConvMixer).values()),  # type: ignore
    }
    return tuple(name for name in VIEWS if has[name])


def _has_maps(model: nn.Module) -> bool:
    """Whether some layer has weights between its tokens."""
    layers = [module.mixer for module in model.modules() if isinstance(module, Port)]
    if not layers:
        return any(port is not Attended for port in attention_layers(model).values())  # there are convolutions
    return any(isinstance(mixer, HeadMixer) and mixer.config.card.row_maps for mixer in layers)


def select_view(model: nn.Module, name: str = "auto") -> str:
    """The view of this name; "auto" is the first that the model has.

    Raises: ConfigError for an unknown name; UnsupportedError if the model does not have it, with those it has.
    """
    if name not in ("auto", *VIEWS):
        raise ConfigError(f"no view {name!r}; {nearest(name, ('auto', *VIEWS))}")
    has = available_views(model)
    if not has:
        raise UnsupportedError(
            f"{type(model).__name__} has nothing to show: no attention with weights between tokens, no Factors, no "
            "deformable and no dynamic convolution; regard.capture gives the weights of any layer"
        )
    if name == "auto":
        return has[0]
    if name not in has:
        raise UnsupportedError(f"{type(model).__name__} has no {name} to show; it has {', '.join(has)}")
    return name


def draw_view(
    view: str, model: nn.Module, image: Float[Tensor, "C *frames H W"],
    picture: UInt8[np.ndarray, "height width channels"], title: str, *, trained: bool,
    query: tuple[int, int] | None = None, layers: str = "*", last: bool = False, part: str = "", credit: str = "",
) -> tuple[bytes, list[str]]:  # fmt: skip
    """A view of a model on an image, as a PNG file, and the names of the layers in it.

    image: as the model expects it; picture: as it is shown, of a clip with the channels of all frames. query: (row,
    column) on the finest grid of the matching layers, by default the middle cell. layers: a glob of names; last: draw
    only the last of them. part: a head (or a group, for offsets and kernels) by its number, "mean", "all", or "" for
    the view's own default.
    Raises: the errors of `attention_maps`, `term_maps`, `sampling_points` and `dynamic_kernels`.
    """
    if view == "maps":
        maps = pictures.attention_maps(model, image, query, picture=picture, layers=layers, credit=credit)
        maps["layers"] = maps["layers"][-1:] if last else maps["layers"]
        drawn = pictures.draw(
            maps, f"{title}: attention from cell {_cell_text(maps['query'])}", trained=trained, head=part or "all"
        )
        return drawn, [layer["layer"] for layer in maps["layers"]]
    drawing = _DRAWINGS[view]
    results = drawing.collect(model, image, query, layers=layers)
    results = results[-1:] if last else results
    if image.ndim == 4:
        picture = strip_picture(picture, image, results[0].keys.depth if isinstance(results[0], TermMaps) else 1)
    colored = picture if picture.shape[-1] == 3 else picture.repeat(3, -1)
    rows = [row for result in results for row in drawing.rows(result, colored, part)]
    drawn = pictures.figure(
        rows, colored, f"{title}: {drawing.title}", trained=trained, credit=credit, note=drawing.note,
        side=drawing.side,
    )  # fmt: skip
    return drawn, [result.layer for result in results]


def _cell_text(cell: Sequence[int]) -> str:
    return f"{cell[0]},{cell[1]}"


def _row_title(layer: str, cell: Sequence[int], part: str = "") -> str:
    return f"{layer}\ncell {_cell_text(cell)}{', ' + part if part else ''}"


# terms


def term_rows(result: TermMaps, picture: np.ndarray, part: str = "") -> list[Row]:
    """A row for every selected head ("mean" by default), a panel for every term and for all together."""
    shape = (result.grid.height, result.grid.width)
    lines: dict[str, list[tuple[str, Callable[..., None]]]] = {}
    for name in result.names:
        for head, weights in select_parts(result.map(name), part or "mean", "head"):
            covered = float(effective_cells(weights.flatten()))
            paint = partial(pictures.overlay, picture=picture, weights=weights.numpy(), query=result.cell, shape=shape)
            lines.setdefault(head, []).append(
                (f"{name}: covers {covered:.0f} of {weights.numel()}\n{MEANING[name]}", paint)
            )
    return [(_row_title(result.layer, result.cell, head), panels) for head, panels in lines.items()]


# offsets


def point_rows(result: SamplingPoints, picture: np.ndarray, part: str = "") -> list[Row]:
    """The sampling points of the cell for each selected group (all by default), and the mean offsets of all cells."""
    all_values = result.points if result.factors is None else torch.cat([result.points, result.factors[..., None]], -1)
    panels: list[tuple[str, Callable[..., None]]] = []
    groups = select_parts(all_values, part or "all", "group")
    for group, values in groups if len(result.points) == 1 or part else groups[1:]:
        distance = float((values[:, :2] - result.regular).norm(dim=-1).mean())
        title = f"sampling points{', ' + group if group else ''}\nmean offset {distance:.2g} cells"
        panels.append((title, partial(paint_points, picture=picture, result=result, values=values)))
    factor = arrow_scale(result)
    note = f"\ndrawn {factor} times as long" if factor != 1 else "\n"
    panels.append((f"all cells{note}", partial(paint_field, picture=picture, result=result)))
    return [(_row_title(result.layer, result.cell), panels)]


def paint_points(axes: Any, picture: np.ndarray, result: SamplingPoints, values: Tensor) -> None:
    """The sampling points of one group without and with offsets, zoomed in; values (K, 2 or 3): row, column, factor."""
    regular, points = _pixels(result.regular, result, picture), _pixels(values[:, :2], result, picture)
    factors = values[:, 2].clamp(0, 1).numpy() if values.shape[1] == 3 else np.ones(len(values))
    size = np.array([picture.shape[1], picture.shape[0]])
    _show_dark(axes, picture)
    pictures.frame(axes, picture, result.cell, (result.grid.height, result.grid.width))
    axes.quiver(
        *regular.T, *(points - regular).T, angles="xy", scale_units="xy", scale=1, color=_AMBER, width=0.008,
        headwidth=3.5, headlength=4, headaxislength=4, minlength=0.1, alpha=0.35 + 0.65 * factors, zorder=3,
    )  # fmt: skip
    axes.scatter(*regular.T, s=22, facecolors="none", edgecolors="white", linewidths=1.1, zorder=4)
    axes.scatter(*points.T, s=16, color=_AMBER, alpha=0.15 + 0.85 * factors, edgecolors="none", zorder=5)
    around = np.concatenate([regular, points])
    cell = size / [result.source.width, result.source.height]
    middle, half = (around.max(0) + around.min(0)) / 2, (around.max(0) - around.min(0)) / 2 + cell
    half = max(half / size) * size  # the picture's proportions
    axes.set_xlim(middle[0] - half[0], middle[0] + half[0])
    axes.set_ylim(middle[1] + half[1], middle[1] - half[1])


def _show_dark(axes: Any, picture: np.ndarray) -> None:
    """The darkened picture, on a background that shows its border."""
    axes.axis("on")
    axes.tick_params(**_NO_TICKS)
    axes.set_facecolor(_BACKGROUND)
    axes.imshow(pictures.darken(picture), extent=(0, picture.shape[1], picture.shape[0], 0))


def paint_field(axes: Any, picture: np.ndarray, result: SamplingPoints) -> None:
    """Mean offsets as arrows, one per cell (every n-th on large grids), lengthened by `arrow_scale`."""
    height, width = picture.shape[:2]
    axes.imshow(pictures.darken(picture), extent=(0, width, height, 0))
    step = -(-max(result.grid.height, result.grid.width) // _MOST_ARROWS)
    field = result.field.numpy()[::step, ::step]
    rows, columns = np.meshgrid(
        *(np.arange(0, side, step) + 0.5 for side in (result.grid.height, result.grid.width)), indexing="ij"
    )
    x, y = columns * width / result.grid.width, rows * height / result.grid.height
    scale = arrow_scale(result)
    across, down = field[..., 1] * width / result.source.width, field[..., 0] * height / result.source.height
    axes.quiver(
        x, y, across * scale, down * scale, angles="xy", scale_units="xy", scale=1, color=_AMBER, width=0.006,
        headwidth=4, headlength=4, headaxislength=3.5, minlength=0.1, zorder=3,
    )  # fmt: skip
    pictures.frame(axes, picture, result.cell, (result.grid.height, result.grid.width))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)


def arrow_scale(result: SamplingPoints) -> int:
    """The factor by which arrows are lengthened, a power of two: the longest spans at least half a drawn cell."""
    step = -(-max(result.grid.height, result.grid.width) // _MOST_ARROWS)
    spacing = step * result.source.height / result.grid.height
    longest = float(result.field.norm(dim=-1).max())
    factor = 1
    while 0 < longest * factor < spacing / 2 and factor < 1024:
        factor *= 2
    return factor


def _pixels(points: Float[Tensor, "K 2"], result: SamplingPoints, picture: np.ndarray) -> np.ndarray:
    """(row, column) in cells of the sampled map -> (x, y) in pixels of the picture."""
    height, width = picture.shape[:2]
    y, x = ((points.numpy()[:, :2] + 0.5) * [height / result.source.height, width / result.source.width]).T
    return np.stack([x, y], -1)


# kernels


def kernel_rows(result: DynamicKernels, picture: np.ndarray, part: str = "") -> list[Row]:
    """The kernels of the selected groups ("mean" by default), eight in a row."""
    selected = select_parts(result.kernels, part or "mean", "group")
    panels: list[tuple[str, Callable[..., None]]] = [
        (f"{group or 'kernel'}\ncovers {float(effective_cells(kernel.flatten())):.0f} of {kernel.numel()} weights",
         partial(paint_kernel, picture=picture, result=result, kernel=kernel.numpy()))
        for group, kernel in selected
    ]  # fmt: skip
    return [(_row_title(result.layer, result.cell), panels[start : start + 8]) for start in range(0, len(panels), 8)]


def paint_kernel(axes: Any, picture: np.ndarray, result: DynamicKernels, kernel: np.ndarray) -> None:
    """The whole kernel as a heat map over the part of the picture that it covers."""
    height, width = picture.shape[:2]
    step_y, step_x = height / result.grid.height, width / result.grid.width
    top, left = (result.cell[0] - kernel.shape[0] // 2) * step_y, (result.cell[1] - kernel.shape[1] // 2) * step_x
    bottom, right = top + kernel.shape[0] * step_y, left + kernel.shape[1] * step_x
    _show_dark(axes, picture)
    axes.imshow(pictures.amber(kernel), extent=(left, right, bottom, top), interpolation="nearest")
    pictures.frame(axes, picture, result.cell, (result.grid.height, result.grid.width))
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


class _Drawing(NamedTuple):
    """How a view is drawn: a function that collects data, the panels of a layer, title, note, inches per panel."""

    collect: Callable[..., Sequence[Any]]
    rows: Callable[..., list[Row]]
    title: str
    note: str
    side: float


_DRAWINGS = {
    "terms": _Drawing(term_maps, term_rows, "what each term attends to", TERMS_NOTE, 1.9),
    "offsets": _Drawing(sampling_points, point_rows, "where convolutions sample", POINTS_NOTE, 2.6),
    "kernels": _Drawing(dynamic_kernels, kernel_rows, "weights of predicted kernels", KERNELS_NOTE, 1.9),
}
