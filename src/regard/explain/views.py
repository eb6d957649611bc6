"""What can be shown of a model on a picture: maps of attention, its terms, offsets, or kernels.

`views_of` says what a model has, `draw_view` draws one of them as a PNG file.
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
from regard.swapping.inspect import all_sites
from regard.swapping.layer import Port

from . import pictures
from .factor_terms import MEANING, TermMaps, term_maps
from .layer_inputs import equal_cells, layers_of, picked
from .sampling_points import TapKernels, TapMoves, tap_kernels, tap_moves

VIEWS = ("maps", "terms", "offsets", "kernels")
TERMS_NOTE = "Each panel has its own scale; a weight as spread as n equal cells is said to cover n."
MOVES_NOTE = (
    "Rings: taps before they move; dots: where they sample, in version 2 with the opacity of their factor. "
    "Right: how the taps of every cell move on average."
)
KERNELS_NOTE = "What the taps of the framed cell weigh; beyond the picture they see zero. Each panel has its own scale."
_AMBER, _BEYOND, _CELLS = "#ffb000", "#3b3f45", 16
_BARE: dict[str, Any] = dict.fromkeys(("left", "bottom", "labelleft", "labelbottom"), False)
Row = tuple[str, list[tuple[str, Callable[..., None]]]]


def views_of(model: nn.Module) -> tuple[str, ...]:
    """Which of `VIEWS` a model has, in that order."""
    has = {
        "maps": _has_maps(model),
        "terms": bool(layers_of(model, FactorsOperator)),
        "offsets": bool(layers_of(model, DeformableConv2d)),
        "kernels": any(layer.config.axes == 2 for layer in layers_of(model, DynamicConvMixer).values()),  # type: ignore
    }
    return tuple(name for name in VIEWS if has[name])


def _has_maps(model: nn.Module) -> bool:
    """Whether tokens lie on one grid that can be read, and some layer has weights between them."""
    if not hasattr(getattr(model, "patch_embed", None), "grid_size"):
        return False
    layers = [module.mixer for module in model.modules() if isinstance(module, Port)]
    if not layers:
        return bool(all_sites(model))
    return any(isinstance(mixer, HeadMixer) and mixer.config.card.row_maps for mixer in layers)


def chosen_view(model: nn.Module, asked: str = "auto") -> str:
    """The view that is asked for; "auto" is the first that the model has.

    Raises: ConfigError for an unknown name; UnsupportedError if the model does not have it, with those it has.
    """
    if asked not in ("auto", *VIEWS):
        raise ConfigError(f"no view {asked!r}; {nearest(asked, ('auto', *VIEWS))}")
    has = views_of(model)
    if not has:
        raise UnsupportedError(
            f"{type(model).__name__} has nothing to show: no attention between the tokens of one grid, no Factors, no "
            "deformable and no dynamic convolution"
        )
    if asked == "auto":
        return has[0]
    if asked not in has:
        raise UnsupportedError(f"{type(model).__name__} has no {asked} to show; it has {', '.join(has)}")
    return asked


def draw_view(
    view: str,
    model: nn.Module,
    image: Float[Tensor, "C H W"],
    picture: UInt8[np.ndarray, "height width channels"],
    title: str,
    *,
    trained: bool,
    query: tuple[int, int] | None = None,
    layers: str = "*",
    last: bool = False,
    part: str = "",
    credit: str = "",
) -> tuple[bytes, list[str]]:
    """A view of a model on an image, as a PNG file, and the names of the layers in it.

    image: as the model expects it; picture: as it is shown. query: (row, column) of the cell that looks, on the finest
    grid of the layers that match, by default the middle one. layers: a glob of names; last: draw only the last of them.
    part: a head (or a group, for offsets and kernels) by its number, "mean", "all", or "" for the view's own default.
    Raises: UnsupportedError, ConfigError, GridError: as `attention_of`, `term_maps`, `tap_moves`, `tap_kernels`.
    """
    if view == "maps":
        found = pictures.attention_of(model, image, query, picture=picture, layers=layers, credit=credit)
        found["layers"] = found["layers"][-1:] if last else found["layers"]
        drawn = pictures.draw(
            found, f"{title}: attention from cell {_told(found['query'])}", trained=trained, head=part or "all"
        )
        return drawn, [layer["layer"] for layer in found["layers"]]
    drawing = _DRAWINGS[view]
    shown = drawing.collect(model, image, query, layers=layers)
    shown = shown[-1:] if last else shown
    colored = picture if picture.shape[-1] == 3 else picture.repeat(3, -1)
    rows = [row for one in shown for row in drawing.rows(one, colored, part)]
    drawn = pictures.figure(
        rows, colored, f"{title}: {drawing.words}", trained=trained, credit=credit, note=drawing.note,
        side=drawing.side,
    )  # fmt: skip
    return drawn, [one.layer for one in shown]


def _told(cell: Sequence[int]) -> str:
    return f"{cell[0]},{cell[1]}"


def _name(layer: str, cell: Sequence[int], part: str = "") -> str:
    return f"{layer}\ncell {_told(cell)}{', ' + part if part else ''}"


# terms


def term_rows(found: TermMaps, picture: np.ndarray, part: str = "") -> list[Row]:
    """A row for every head that is asked for ("mean" by default), a panel for every term and for all together."""
    shape = (found.grid.height, found.grid.width)
    lines: dict[str, list[tuple[str, Callable[..., None]]]] = {}
    for name in found.names:
        for said, weights in picked(found.map(name), part or "mean", "head"):
            many = float(equal_cells(weights.flatten()))
            paint = partial(pictures.overlay, picture=picture, weights=weights.numpy(), query=found.cell, shape=shape)
            lines.setdefault(said, []).append(
                (f"{name}: covers {many:.0f} of {weights.numel()}\n{MEANING[name]}", paint)
            )
    return [(_name(found.layer, found.cell, said), panels) for said, panels in lines.items()]


# offsets


def move_rows(found: TapMoves, picture: np.ndarray, part: str = "") -> list[Row]:
    """The taps of the cell for each group that is asked for (all by default), near by, and the field of all cells."""
    places = found.points if found.factors is None else torch.cat([found.points, found.factors[..., None]], -1)
    panels: list[tuple[str, Callable[..., None]]] = []
    groups = picked(places, part or "all", "group")
    for said, values in groups if len(found.points) == 1 or part else groups[1:]:
        far = float((values[:, :2] - found.rest).norm(dim=-1).mean())
        title = f"taps{', ' + said if said else ''}\nmoved {far:.2g} cells"
        panels.append((title, partial(paint_taps, picture=picture, found=found, values=values)))
    factor = magnified(found)
    more = f"\ndrawn {factor} times as long" if factor != 1 else "\n"
    panels.append((f"all cells{more}", partial(paint_field, picture=picture, found=found)))
    return [(_name(found.layer, found.cell), panels)]


def paint_taps(axes: Any, picture: np.ndarray, found: TapMoves, values: Tensor) -> None:
    """The taps of one group and where they sample, near by; values (K, 2 or 3): row, column, factor."""
    rest, points = _pixels(found.rest, found, picture), _pixels(values[:, :2], found, picture)
    factors = values[:, 2].clamp(0, 1).numpy() if values.shape[1] == 3 else np.ones(len(values))
    size = np.array([picture.shape[1], picture.shape[0]])
    _open(axes, picture)
    pictures.frame(axes, picture, found.cell, (found.grid.height, found.grid.width))
    axes.quiver(
        *rest.T, *(points - rest).T, angles="xy", scale_units="xy", scale=1, color=_AMBER, width=0.008, headwidth=3.5,
        headlength=4, headaxislength=4, minlength=0.1, alpha=0.35 + 0.65 * factors, zorder=3,
    )  # fmt: skip
    axes.scatter(*rest.T, s=22, facecolors="none", edgecolors="white", linewidths=1.1, zorder=4)
    axes.scatter(*points.T, s=16, color=_AMBER, alpha=0.15 + 0.85 * factors, edgecolors="none", zorder=5)
    around = np.concatenate([rest, points])
    cell = size / [found.source.width, found.source.height]
    middle, half = (around.max(0) + around.min(0)) / 2, (around.max(0) - around.min(0)) / 2 + cell
    half = max(half / size) * size  # the picture's proportions
    axes.set_xlim(middle[0] - half[0], middle[0] + half[0])
    axes.set_ylim(middle[1] + half[1], middle[1] - half[1])


def _open(axes: Any, picture: np.ndarray) -> None:
    """The darkened picture, on a ground that shows where it ends."""
    axes.axis("on")
    axes.tick_params(**_BARE)
    axes.set_facecolor(_BEYOND)
    axes.imshow(pictures.darkened(picture), extent=(0, picture.shape[1], picture.shape[0], 0))


def paint_field(axes: Any, picture: np.ndarray, found: TapMoves) -> None:
    """How the taps move on average, an arrow a cell (every n-th on large grids), as long as `magnified` says."""
    height, width = picture.shape[:2]
    axes.imshow(pictures.darkened(picture), extent=(0, width, height, 0))
    step = -(-max(found.grid.height, found.grid.width) // _CELLS)
    field = found.field.numpy()[::step, ::step]
    rows, columns = np.meshgrid(
        *(np.arange(0, side, step) + 0.5 for side in (found.grid.height, found.grid.width)), indexing="ij"
    )
    x, y = columns * width / found.grid.width, rows * height / found.grid.height
    scale = magnified(found)
    across, down = field[..., 1] * width / found.source.width, field[..., 0] * height / found.source.height
    axes.quiver(
        x, y, across * scale, down * scale, angles="xy", scale_units="xy", scale=1, color=_AMBER, width=0.006,
        headwidth=4, headlength=4, headaxislength=3.5, minlength=0.1, zorder=3,
    )  # fmt: skip
    pictures.frame(axes, picture, found.cell, (found.grid.height, found.grid.width))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)


def magnified(found: TapMoves) -> int:
    """How many times as long the field is drawn, a power of two: its longest arrow spans half a drawn cell or more."""
    step = -(-max(found.grid.height, found.grid.width) // _CELLS)
    room = step * found.source.height / found.grid.height
    longest = float(found.field.norm(dim=-1).max())
    factor = 1
    while 0 < longest * factor < room / 2 and factor < 1024:
        factor *= 2
    return factor


def _pixels(places: Float[Tensor, "K 2"], found: TapMoves, picture: np.ndarray) -> np.ndarray:
    """(row, column) in cells of the sampled map -> (x, y) in pixels of the picture."""
    height, width = picture.shape[:2]
    y, x = ((places.numpy()[:, :2] + 0.5) * [height / found.source.height, width / found.source.width]).T
    return np.stack([x, y], -1)


# kernels


def kernel_rows(found: TapKernels, picture: np.ndarray, part: str = "") -> list[Row]:
    """The kernels of the groups that are asked for ("mean" by default), eight in a row."""
    shown = picked(found.kernels, part or "mean", "group")
    panels: list[tuple[str, Callable[..., None]]] = [
        (f"{said or 'kernel'}\ncovers {float(equal_cells(kernel.flatten())):.0f} of {kernel.numel()} taps",
         partial(paint_kernel, picture=picture, found=found, kernel=kernel.numpy()))
        for said, kernel in shown
    ]  # fmt: skip
    return [(_name(found.layer, found.cell), panels[start : start + 8]) for start in range(0, len(panels), 8)]


def paint_kernel(axes: Any, picture: np.ndarray, found: TapKernels, kernel: np.ndarray) -> None:
    """All taps as a heat map, over the part of the picture that they see."""
    height, width = picture.shape[:2]
    step_y, step_x = height / found.grid.height, width / found.grid.width
    top, left = (found.cell[0] - kernel.shape[0] // 2) * step_y, (found.cell[1] - kernel.shape[1] // 2) * step_x
    bottom, right = top + kernel.shape[0] * step_y, left + kernel.shape[1] * step_x
    _open(axes, picture)
    axes.imshow(pictures.amber(kernel), extent=(left, right, bottom, top), interpolation="nearest")
    pictures.frame(axes, picture, found.cell, (found.grid.height, found.grid.width))
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


class _Drawing(NamedTuple):
    """How a view is made: what collects it, the panels of one layer, what stands above and below, inches a panel."""

    collect: Callable[..., Sequence[Any]]
    rows: Callable[..., list[Row]]
    words: str
    note: str
    side: float


_DRAWINGS = {
    "terms": _Drawing(term_maps, term_rows, "what each term attends to", TERMS_NOTE, 1.9),
    "offsets": _Drawing(tap_moves, move_rows, "where taps sample", MOVES_NOTE, 2.6),
    "kernels": _Drawing(tap_kernels, kernel_rows, "what predicted kernels weigh", KERNELS_NOTE, 1.9),
}
