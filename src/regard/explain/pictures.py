"""Attention maps of a picture: as data for a study's page, and drawn over the picture.

The pictures are scikit-learn's sample photographs (china.jpg by 白士 李, flower.jpg by dany13, both CC BY 2.0) and its
handwritten digits (UCI, CC BY 4.0).
"""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from textwrap import wrap
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps
from torch import Tensor, nn

from regard.core import ConfigError, Grid, UnsupportedError, nearest, require
from regard.core.eval_mode import eval_mode
from regard.core.plain_text import plain_text
from regard.swapping.capture import capture, readable_mixers, with_regard_softmax
from regard.swapping.layer import Port
from regard.swapping.shared_state import swapped_layers

from .layer_inputs import finest_grid, query_cell
from .strips import on_strip, strip, strip_picture, token_at

SAMPLES = ("china", "flower")
CREDITS = {
    "china": "photograph china.jpg by Baishi Li, CC BY 2.0, from scikit-learn's sample images",
    "flower": "photograph flower.jpg by dany13, CC BY 2.0, from scikit-learn's sample images",
    "digit": "handwritten digit of scikit-learn's digits (UCI ML repository, CC BY 4.0)",
}
"""The source of each sample picture, printed wherever it is shown."""
_LINE = 0.18
"""Height of a line of text in inches."""
WARNING = "untrained weights: these maps show the initialisation, not what a model has learned"


def sample_image(
    size: int | tuple[int, int], grey: bool = False, name: str = "flower"
) -> UInt8[np.ndarray, "height width channels"]:
    """A sample picture of a size (height, width): a photograph with 3 channels, or with grey=True a digit with 1.

    The photograph is cropped to the aspect ratio around its centre. The digit fills two thirds of the shorter side, and
    has at least 8 pixels where they fit.
    Raises: ConfigError for an unknown photograph.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if grey:
        require("sklearn")

        from sklearn.datasets import load_digits

        side = min(height, width, max(8, round(min(height, width) * 2 / 3)))
        digit = Image.fromarray((load_digits().images[2] * 255 / 16).astype(np.uint8))
        canvas = Image.new("L", (width, height))
        canvas.paste(digit.resize((side, side), Image.Resampling.BILINEAR), ((width - side) // 2, (height - side) // 2))
        return np.asarray(canvas)[..., None]
    if name not in SAMPLES:
        raise ConfigError(f"no sample photograph {name!r}; {nearest(name, SAMPLES)}")
    require("sklearn")

    from sklearn.datasets import load_sample_image

    photograph = Image.fromarray(load_sample_image(f"{name}.jpg"))
    return np.asarray(ImageOps.fit(photograph, (width, height), method=Image.Resampling.BICUBIC))


def attention_maps(
    model: nn.Module, image: Float[Tensor, "C *frames H W"], query: tuple[int, int] | None = None,
    grid: Grid | None = None, *,
    picture: UInt8[np.ndarray, "height width channels"] | None = None, layers: str = "*", credit: str = "",
) -> dict[str, Any]:  # fmt: skip
    """The attention weights of every layer and head of a model for one query of an image, as plain data (maps.json).

    image: as the model expects it. query: (row, column) of the query's cell; by default the middle one. grid: of the
    tokens of all layers; by default each layer's own, where it has the rows and columns of the finest. picture: shown
    below the maps, by default the image stretched to 0..255. credit: the source of the picture, stored with the maps.
    Returns image (base64 PNG), credit, grid, query, layers; each layer has its name, its heads and their mean as lists
    of height * width weights. Frames of a clip lie side by side: on the grid, the query, and in the picture, which is
    then to be given with the channels of all frames.
    Layers without weights between all tokens (channels, windows, other grids) are left out; so are weights
    on prefix and suffix tokens, so a map may sum to less than 1.
    Raises: GridError if the query lies outside the grid; UnsupportedError if the model's own attention is not softmax.
    """
    reader, inputs = _reader(model, image, layers)
    grids = {name: grid or own for name, own in _grids(reader, inputs, layers).items()}
    finest = grid or finest_grid([*grids.values()] or [Grid(1, 1)])
    cells = strip(finest)
    y, x = query_cell(cells, query)
    alike = {name: of for name, of in grids.items() if of.sides == finest.sides}
    queries = {name: token_at(of, (y, x)) for name, of in alike.items()}
    entries = []
    for name, rows in _rows(reader, inputs, queries).items():
        if rows.shape[-1] == alike[name].tokens:
            heads = on_strip(rows[0, :, 0, alike[name].span], alike[name]).flatten(1)  # (H, h*w)
            entries.append({"layer": name, "heads": _round(heads), "mean": _round(heads.mean(0))})
    shown = _stretch(image) if picture is None else strip_picture(picture, image, finest.depth)
    size = [cells.height, cells.width]
    encoded = base64.b64encode(png(shown)).decode()
    return {"image": encoded, "credit": credit, "grid": size, "query": [y, x], "layers": entries}


def _reader(model: nn.Module, image: Tensor, layers: str) -> tuple[nn.Module, Tensor]:
    """The model, or a copy with Regard's softmax where no layer is swapped, and its input.

    Raises: UnsupportedError if the copy computes something else.
    """
    example = next(model.parameters())
    inputs = image[None].to(example.device, example.dtype)
    has_swaps = any(isinstance(module, Port) for module in model.modules())
    return model if has_swaps else with_regard_softmax(model, inputs, layers), inputs


def _grids(reader: nn.Module, inputs: Tensor, layers: str) -> dict[str, Grid]:
    """The grids of the layers that have weights between tokens, and get all tokens of the image at once."""
    grids: dict[str, Grid] = {}

    def recorder(name: str) -> Callable[..., None]:
        def record(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(args[0]) == 1:
                grids[name] = kwargs["grid"] if "grid" in kwargs else args[1]

        return record

    with eval_mode(reader), torch.no_grad(), ExitStack() as stack:
        for name in swapped_layers(reader, layers):
            with suppress(UnsupportedError):
                mixer = readable_mixers(reader, name)[name]
                stack.callback(mixer.register_forward_pre_hook(recorder(name), with_kwargs=True).remove)
        reader(inputs)
    return grids


def _rows(reader: nn.Module, inputs: Tensor, queries: Mapping[str, int]) -> dict[str, Tensor]:
    """The weights (1, H, 1, M) of a query of each layer; none if an operator has none."""
    try:
        with eval_mode(reader), torch.no_grad(), ExitStack() as stack:
            maps = [stack.enter_context(capture(reader, name, queries=(query,))) for name, query in queries.items()]
            reader(inputs)
    except UnsupportedError:  # which some operators raise in the forward pass only
        return {}
    return {name: rows for each in maps for name, rows in each.items()}


def _round(weights: Tensor) -> list[Any]:
    """Nested lists rounded to five decimals, more than a picture shows."""
    return np.round(weights.double().cpu().numpy(), 5).tolist()


def _stretch(image: Tensor) -> UInt8[np.ndarray, "height width channels"]:
    values = image.detach().float().cpu().permute(1, 2, 0)
    low, high = values.min(), values.max()
    return ((values - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8).numpy()


def png(picture: UInt8[np.ndarray, "height width channels"]) -> bytes:
    """A picture with 1 or 3 channels as a PNG file."""
    out = io.BytesIO()
    Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(out, "PNG", optimize=True)
    return out.getvalue()


def draw(maps: Mapping[str, Any], title: str, *, trained: bool, head: str = "all") -> bytes:
    """The maps of `attention_maps` over their picture, a row of panels for each layer, as a PNG file.

    head: "all", "mean" or a number. Each panel is scaled to its own largest weight. A warning about
    untrained weights and the credit are printed below.
    Raises: UnsupportedError if there is no map; ConfigError for a head that does not exist.
    """
    if not maps["layers"]:
        raise UnsupportedError("no layer of this model has weights between all tokens of the picture")
    shape = tuple(maps["grid"])
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(maps["image"]))).convert("RGB"))
    rows = [
        (layer["layer"], [
            (name, partial(overlay, picture=picture, weights=np.reshape(weights, shape), query=maps["query"]))
            for name, weights in _panels(layer, head)
        ])
        for layer in maps["layers"]
    ]  # fmt: skip
    return figure(rows, picture, title, trained=trained, credit=str(maps.get("credit") or ""), aspect=shape)


@plain_text()
def figure(
    rows: Sequence[tuple[str, Sequence[tuple[str, Callable[..., None]]]]], picture: UInt8[np.ndarray, "height width 3"],
    title: str, *, trained: bool, credit: str = "", note: str = "", aspect: tuple[int, int] | None = None,
    side: float = 1.9,
) -> bytes:  # fmt: skip
    """Rows of panels as a PNG file: a layer's name over the picture, then (title, function that draws on the axes).

    trained: if False, a warning is printed below, with note and credit. aspect: (height, width) of a panel, by
    default that of the picture. side: width of a panel in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = 1 + max(len(panels) for _, panels in rows)
    height, width = aspect or picture.shape[:2]
    credit = " ".join(word for word in credit.split() if word.isascii())  # the font has ASCII only
    header = wrap(title, int(11 * side * across))
    footer = [] if trained else [(line, True) for line in wrap(WARNING, int(12 * side * across))]
    for text in (note, f"picture: {credit}" if credit else ""):
        footer += [(line, False) for line in wrap(text, int(15 * side * across))]
    total = 0.3 + _LINE * (len(header) + len(footer)) + (side * height / width + 0.36) * len(rows)
    canvas = Figure(figsize=(side * across, total), layout="constrained")
    canvas.get_layout_engine().set(rect=(0, _LINE * len(footer) / total, 1, 1 - _LINE * len(footer) / total))  # type: ignore
    canvas.suptitle("\n".join(header), x=0.01, ha="left", fontsize=11)
    for index, (line, is_warning) in enumerate(reversed(footer)):
        style = (
            {"fontsize": 10, "color": "#b3261e", "weight": "bold"}
            if is_warning
            else {"fontsize": 8, "color": "#5f6368"}
        )
        canvas.text(0.01, (_LINE * index + 0.04) / total, line, ha="left", va="bottom", **style)  # type: ignore[arg-type]
    for (layer, panels), row in zip(rows, canvas.subplots(len(rows), across, squeeze=False), strict=True):
        for axes in row:
            axes.set_axis_off()
        row[0].imshow(picture)
        row[0].set_title(layer, fontsize=9, loc="left")
        for axes, (name, paint) in zip(row[1:], panels, strict=False):
            paint(axes)
            axes.set_title(name, fontsize=9, loc="left")
    FigureCanvasAgg(canvas)
    out = io.BytesIO()
    canvas.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def _panels(layer: Mapping[str, Any], head: str) -> list[tuple[str, list[float]]]:
    """(title, weights) of the selected panels. Raises: ConfigError for a head that does not exist."""
    heads = [(f"head {i}", weights) for i, weights in enumerate(layer["heads"])]
    if head == "mean":
        return [("mean", layer["mean"])]
    if head == "all":
        return [*heads, ("mean", layer["mean"])]
    if not head.isdecimal() or int(head) >= len(heads):
        raise ConfigError(f"no head {head!r} in {layer['layer']}: give all, mean or 0 to {len(heads) - 1}")
    return [heads[int(head)]]


def overlay(
    axes: Any, picture: np.ndarray, weights: np.ndarray, query: Sequence[int], shape: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """The picture in dark grey, the weights in amber (opacity = share of the largest), the query cell framed.

    weights: (rows, columns) over the whole picture. query: (row, column) on a grid of `shape`, that of the weights.
    """
    height, width = picture.shape[:2]
    axes.imshow(darken(picture), extent=(0, width, height, 0))
    axes.imshow(amber(weights), extent=(0, width, height, 0), interpolation="nearest")
    frame(axes, picture, query, shape or weights.shape)


def darken(picture: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "height width 3"]:
    """The picture in dark grey, so that amber is visible on it."""
    return (picture.mean(-1, keepdims=True).repeat(3, -1) * 0.62).astype(np.uint8)


def amber(weights: np.ndarray) -> np.ndarray:
    """Weights as RGBA (rows, columns, 4): amber, with opacity = share of the largest weight."""
    top = float(weights.max())
    share = weights / top if top > 0 and math.isfinite(top) else np.zeros_like(weights)
    colors = np.empty((*weights.shape, 4))
    colors[..., :3], colors[..., 3] = (1.0, 0.69, 0.0), 0.88 * np.clip(share, 0, 1)
    return colors


def frame(axes: Any, picture: np.ndarray, query: Sequence[int], shape: Sequence[int]) -> None:
    """A white frame around a cell of a grid of `shape` over the picture."""
    step_y, step_x = picture.shape[0] / shape[0], picture.shape[1] / shape[1]
    left, top_edge = query[1] * step_x, query[0] * step_y
    xs = [left, left + step_x, left + step_x, left, left]
    ys = [top_edge, top_edge, top_edge + step_y, top_edge + step_y, top_edge]
    axes.plot(xs, ys, color="black", linewidth=2.4, solid_joinstyle="miter")
    axes.plot(xs, ys, color="white", linewidth=1.2, solid_joinstyle="miter")
