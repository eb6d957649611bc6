"""The attention weights of all layers and heads for one picture, in eight bits, thinned where they are too many."""

import base64
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int16, Int32, UInt8
from torch import Tensor, nn

from regard.core import Grid, Mask, UnsupportedError
from regard.core.eval_mode import eval_mode
from regard.core.view import Samples, View
from regard.explain.rollout import Rollout
from regard.explain.strips import strip, strip_order
from regard.swapping.capture import capture, readable_mixers, with_regard_softmax
from regard.swapping.layer import Port
from regard.swapping.shared_state import swapped_layers

MOST_TOKENS = 5_000
"""Of a layer: all weights of more take minutes and gigabytes."""
PARTS = 128
"""Of a cell, to which the place of a sampled point is exact."""
SAMPLED = "sampling points"
"""The name of the view that they are."""
LEVELS, SIGNED_LEVELS = 255, 127
"""Steps between zero and the largest weight of a row; of maps with negative weights."""
ROLLOUT = "rollout over all layers"
"""The name of the last layer, which is the product of the others."""


@dataclass(frozen=True, eq=False)
class CodedView:
    """A `regard.core.view.View`. bits: of a set, packed along the tokens; codes, scales, signed: of a map, as in
    `Weights`. row_of: as in `View`."""

    name: str
    row_of: Int32[np.ndarray, "H N"] | None
    bits: UInt8[np.ndarray, "H R bytes"] | None = None
    codes: UInt8[np.ndarray, "H R T"] | None = None
    scales: Float[np.ndarray, "H R"] | None = None
    signed: bool = False

    @property
    def size(self) -> int:
        """Bytes on the page, before base64."""
        return sum(x.nbytes for x in (self.row_of, self.bits, self.codes, self.scales) if x is not None)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the page; arrays as base64."""
        values: Any = self.codes if self.bits is None else self.bits
        about = {"name": self.name, "set": self.bits is not None, "rows": values.shape[1], "values": _base64(values)}
        of = None if self.row_of is None else _base64(self.row_of.astype("<i4"))
        map_only = (
            {} if self.scales is None else _code_facts(self.signed) | {"scales": _base64(self.scales.astype("<f4"))}
        )
        return about | {"of": of} | map_only


@dataclass(frozen=True, eq=False)
class CodedPoints:
    """A `regard.core.view.Samples`. places: (y, x) in parts of a cell; shares: of the largest of its query's, or None
    where all queries have the same points."""

    places: Int16[np.ndarray, "H R P 2"]
    shares: UInt8[np.ndarray, "H N P"] | None

    @property
    def size(self) -> int:
        """Bytes on the page, before base64."""
        return self.places.nbytes + (0 if self.shares is None else self.shares.nbytes)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the page; arrays as base64."""
        shares = None if self.shares is None else _base64(self.shares)
        places = _base64(self.places.astype("<i2"))
        return {"places": places, "shares": shares, "count": self.places.shape[2], "parts": PARTS}


@dataclass(frozen=True, eq=False)
class Weights:
    """Of one layer. codes: (H, Q, K), the weight is (code - zero) * scale / levels. scales: (H, Q), the largest of each
    row. grid: of its tokens; stride: so many cells of a side are one, of which queries are averaged and keys added.
    entropy (nats), distance (in cells), extra (share on tokens without a place): (H,), means over queries.
    points: of a layer that samples between the cells; then weights are the shares of its samples.
    places: of a layer in windows, the cell of each token of each window, (windows, T); then Q counts the tokens of all
    windows, and K those of one. frames: of a clip, side by side on the grid.
    """

    name: str
    grid: Grid
    stride: int
    codes: UInt8[np.ndarray, "H Q K"]
    scales: Float[np.ndarray, "H Q"]
    signed: bool
    entropy: Float[np.ndarray, " H"]
    distance: Float[np.ndarray, " H"]
    extra: Float[np.ndarray, " H"]
    places: Int32[np.ndarray, "W T"] | None = None
    views: tuple[CodedView, ...] = ()
    frames: int = 1
    points: CodedPoints | None = None

    @property
    def levels(self) -> int:
        """Steps between zero and the largest weight of a row, of which half a one is the largest error."""
        return SIGNED_LEVELS if self.signed else LEVELS

    def to_json(self) -> dict[str, Any]:
        """Plain data for the page; arrays as base64."""
        rows, columns = (-(-side // self.stride) for side in (self.grid.height, self.grid.width))
        return {
            "name": self.name, "heads": len(self.codes), "stride": self.stride, "rows": rows, "columns": columns,
            "frames": self.frames,
            "prefix": self.grid.prefix, "suffix": self.grid.suffix, **_code_facts(self.signed),
            "codes": _base64(self.codes), "scales": _base64(self.scales.astype("<f4")),
            "views": [view.to_json() for view in self.views],
            "points": None if self.points is None else self.points.to_json(),
            **{key: _short(getattr(self, key)) for key in ("entropy", "distance", "extra")},
            "places": None if self.places is None else self.places.tolist(),
        }  # fmt: skip


def _code_facts(signed: bool) -> dict[str, int]:
    return {"zero": 128 if signed else 0, "levels": SIGNED_LEVELS if signed else LEVELS}


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def _short(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in values]


@dataclass(frozen=True, eq=False)
class Reading:
    """Of one model: the layers in the order of their calls, the last one the rollout where there is one; why layers
    are left out, by name; the model's output; the names of views that are too large for the page."""

    layers: tuple[Weights, ...]
    left_out: Mapping[str, str]
    output: Any
    hidden_views: tuple[str, ...] = ()


def read_weights(model: nn.Module, image: Float[Tensor, "C *frames H W"], layers: str, most: int) -> Reading:
    """The weights of the layers of a model, which is not changed; its own attention, also in single layers, is read by
    Regard's softmax.

    image: as the model expects it. layers: a glob on layer names. most: bytes that they may take; where it would be
    more, cells are joined (`Weights.stride`), the same number in all layers. Frames of a clip lie side by side.
    Raises: UnsupportedError if no layer has weights between tokens of the picture, or one has too many tokens.
    """
    weight = next(model.parameters())
    inputs = image[None].to(weight.device, weight.dtype)
    reader = with_regard_softmax(model, inputs, layers, _check_tokens)
    found: dict[str, Weights] = {}
    left_out: dict[str, str] = {}
    with torch.no_grad(), eval_mode(reader):
        places = _places(reader, inputs, layers, left_out)
        stride = _stride(places.values(), most)
        alike = len({place.grid for place in places.values()}) == 1 and not left_out
        whole = all(place.windows is None and place.samples is None for place in places.values())
        total = Rollout() if alike and whole else None
        space = most - sum(place.size(1) for place in places.values()) if stride == 1 else 0
        shown, hidden = _views_that_fit(places.values(), space)
        with ExitStack() as stack:
            for name, place in places.items():
                keep = _keeper(found, place.only(shown), stride, total)
                if place.samples is None:
                    stack.enter_context(capture(reader, name, reduce=keep))
                else:
                    keep(name, place.samples.on_tokens(place.grid)[None].float().cpu())
            output = reader(inputs)
    found = {name: found[name] for name in places if name in found}
    if not found:
        reasons = "; ".join(
            f"{first}{f' and {len(further)} more' if further else ''}: {reason}"
            for reason, (first, *further) in by_reason(left_out).items()
        )
        raise UnsupportedError(f"no layer has weights between all tokens of the picture{reasons and f' ({reasons})'}")
    if total is not None and len(found) > 1:
        (place,) = {place.grid: place for place in places.values()}.values()
        found[ROLLOUT] = encode(ROLLOUT, total.shares(), place.grid, stride, place.frames)
    return Reading(tuple(found.values()), left_out, output, tuple(hidden))


def by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of the layers that are left out for each reason. left_out: as in `Reading`."""
    found: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        found.setdefault(reason, []).append(name)
    return found


def _check_tokens(name: str, grid: Grid) -> None:
    """Raises: UnsupportedError for more tokens than a page shows."""
    if grid.tokens > MOST_TOKENS:
        raise UnsupportedError(
            f"{name} has {grid.tokens:,} tokens, of which a page shows {MOST_TOKENS:,} at most: give a smaller --size "
            "(size= in Python)"
        )


@dataclass(frozen=True, eq=False)
class _Place:
    """Where the tokens of a layer lie. windows: as `Weights.places`. views: of a layer of the whole picture. frames: of
    a clip, side by side on the grid; order: the layer's token at each place, None where they are in this order."""

    grid: Grid
    heads: int
    windows: Int32[np.ndarray, "W T"] | None = None
    views: tuple[CodedView, ...] = ()
    frames: int = 1
    order: Tensor | None = None
    samples: Samples | None = None
    points: CodedPoints | None = None

    @property
    def shown_beside(self) -> dict[str, int]:
        """Names and bytes of what the page shows beside weights."""
        points = {} if self.points is None else {SAMPLED: self.points.size}
        return points | {view.name: view.size for view in self.views}

    def only(self, names: Collection[str]) -> "_Place":
        """With what these names are of."""
        views = tuple(view for view in self.views if view.name in names)
        return replace(self, views=views, points=self.points if SAMPLED in names else None)

    def size(self, stride: int) -> int:
        """The number of its weights."""
        if self.windows is not None:
            return self.heads * self.windows.size * self.windows.shape[1]
        cells = -(-self.grid.height // stride) * -(-self.grid.width // stride)
        return self.heads * (self.grid.extra + cells) ** 2


def _places(reader: nn.Module, inputs: Tensor, layers: str, left_out: dict[str, str]) -> dict[str, _Place]:
    """Of each layer whose weights can be shown; of the others a reason."""
    found: dict[str, _Place] = {}

    def record(name: str, without_weights: str) -> Callable[..., None]:
        def hook(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = _call(*args, **kwargs)
            grid, number = call[1], len(call[0])
            _check_tokens(name, grid)
            if name in found or name in left_out:
                found.pop(name, None)
                left_out[name] = "is called more than once in a pass, so that its weights are of no single picture"
                return
            samples = mixer.samples(*call) if number == 1 and grid.depth == 1 else None
            windows = window_places(reader, name, grid, number) if number != 1 else None
            if samples is not None:
                found[name] = _Place(grid, len(samples.shares), samples=samples, points=encode_points(samples))
            elif without_weights:
                left_out[name] = without_weights
            elif mixer.memory_grid(grid) is not None:
                left_out[name] = "has keys on another grid"
            elif windows is not None:
                found[name] = _Place(Grid(*windows[0]), mixer.site.heads, windows[1])
            elif number != 1:
                left_out[name] = f"attends in {number} windows, whose places are not known"
            else:
                order = None if grid.depth == 1 else strip_order(grid)
                views = mixer.operator.views(mixer.operator_inputs(*call))
                coded = tuple(encode_view(view if order is None else _reordered(view, order)) for view in views)
                found[name] = _Place(strip(grid), mixer.site.heads, None, coded, grid.depth, order)

        return hook

    with ExitStack() as stack:
        for name in swapped_layers(reader, layers):
            why, mixer = "", cast(Port, reader.get_submodule(name)).mixer
            try:
                readable_mixers(reader, name)
            except UnsupportedError as error:
                why = str(error).removeprefix(f"{name}: ")
            stack.callback(mixer.register_forward_pre_hook(record(name, why), with_kwargs=True).remove)
        reader(inputs)
    return found


def _call(x: Tensor, grid: Grid, mask: Mask | None = None, rope: Any = None) -> tuple[Tensor, Grid, Mask | None, Any]:
    """The arguments of a layer's forward pass, in their order."""
    return x, grid, mask, rope


def _reordered(view: View, order: Tensor) -> View:
    """A view with its tokens, and its queries, in another order."""
    rows = view.rows[..., order]
    if view.row_of is not None:
        return replace(view, rows=rows, row_of=view.row_of[..., order])
    return replace(view, rows=rows[:, order] if rows.shape[1] == len(order) else rows)


def encode_view(view: View) -> CodedView:
    """A view with one bit for each token of a set, and one byte for each number of a map."""
    of = None if view.row_of is None else view.row_of.to(torch.int32).cpu().numpy()
    if view.rows.dtype == torch.bool:
        return CodedView(view.name, of, bits=np.packbits(view.rows.cpu().numpy(), axis=-1))
    codes, scales, signed = _encode(view.rows.float().cpu())
    return CodedView(view.name, of, codes=codes, scales=scales, signed=signed)


def encode_points(samples: Samples) -> CodedPoints:
    """Samples with two numbers of 16 bits for each place, and one byte for each share."""
    places = (samples.points * PARTS).round().clamp(-(2**15), 2**15 - 1).to(torch.int16).cpu().numpy()
    if places.shape[1] == 1:
        return CodedPoints(places, None)
    largest = samples.shares.amax(-1, keepdim=True).clamp_min(1e-12)
    return CodedPoints(places, (255 * samples.shares / largest).round().to(torch.uint8).cpu().numpy())


def _views_that_fit(places: Collection[_Place], space: int) -> tuple[set[str], list[str]]:
    """Names of views that take no more than `space` bytes together, the smallest first; those of the others."""
    sizes: dict[str, int] = {}
    for place in places:
        for name, size in place.shown_beside.items():
            sizes[name] = sizes.get(name, 0) + size
    fitting: set[str] = set()
    for name in sorted(sizes, key=lambda name: sizes[name]):
        space -= sizes[name]
        if space >= 0:
            fitting.add(name)
    return fitting, [name for name in sizes if name not in fitting]


def window_places(
    model: nn.Module, name: str, window: Grid, number: int
) -> tuple[tuple[int, int], Int32[np.ndarray, "W T"]] | None:
    """The sides of the map, and the cell of each token of each window, of a block that says its `input_resolution` and
    `shift_size`, as those of Swin do; None for other blocks, and for maps that are padded."""
    block: Any = model.get_submodule(name.rpartition(".")[0])
    sides, shift = getattr(block, "input_resolution", None), getattr(block, "shift_size", None)
    if sides is None or shift is None or window.extra:
        return None
    height, width = map(int, sides)
    rows, columns = height // window.height, width // window.width
    if (rows * window.height, columns * window.width, rows * columns) != (height, width, number):
        return None
    by = tuple(-int(step) for step in shift) if isinstance(shift, tuple | list) else (-int(shift), -int(shift))
    cells = np.roll(np.arange(height * width, dtype=np.int32).reshape(height, width), by, (0, 1))
    parts = cells.reshape(rows, window.height, columns, window.width).swapaxes(1, 2)
    return (height, width), parts.reshape(number, window.cells)


def _stride(places: Collection[_Place], most: int) -> int:
    """The fewest cells of a side that are joined so that all weights fit; 1 where none can be joined."""
    whole = [each for each in places if each.windows is None]
    widths = [each.grid.width // each.frames for each in whole if each.frames > 1]  # of frames, which are not joined
    steps = range(1, max((max(each.grid.height, each.grid.width // each.frames) for each in whole), default=1) + 1)
    possible = [step for step in steps if not any(width % step for width in widths)]
    return next((s for s in possible if sum(each.size(s) for each in places) <= most), possible[-1])


def _keeper(
    found: dict[str, Weights], place: _Place, stride: int, total: Rollout | None
) -> Callable[[str, Tensor], None]:
    def keep(name: str, weights: Tensor) -> None:
        if place.order is not None:
            weights = weights[..., place.order, :][..., place.order]
        if total is not None:
            total.add(weights)
        found[name] = (
            replace(encode(name, weights[0], place.grid, stride, place.frames), views=place.views, points=place.points)
            if place.windows is None
            else encode_windows(name, weights, place.grid, place.windows)
        )

    return keep


def encode(name: str, weights: Float[Tensor, "H N M"], grid: Grid, stride: int, frames: int = 1) -> Weights:
    """Weights in eight bits; each row has its own scale. frames: side by side on the grid; distances are of places."""
    y, x = (side.flatten() for side in np.indices((grid.height, grid.width)))
    x = x % (grid.width // frames)
    statistics = _statistics(weights[:, grid.span], grid.span, np.hypot(y[:, None] - y, x[:, None] - x))
    return Weights(name, grid, stride, *_encode(_thin(weights, grid, stride)), *statistics, frames=frames)


def encode_windows(
    name: str, weights: Float[Tensor, "W H T T"], grid: Grid, places: Int32[np.ndarray, "W T"]
) -> Weights:
    """As `encode`, of a layer in windows. grid: of the map. places: as in `Weights`."""
    y, x = np.divmod(places[0], grid.width)  # a window that the shift did not tear
    rows = weights.transpose(0, 1)
    apart = np.tile(np.hypot(y[:, None] - y, x[:, None] - x), (len(places), 1))
    flat = rows.flatten(1, 2)
    return Weights(name, grid, 1, *_encode(flat), *_statistics(flat, slice(None), apart), places)


def _encode(kept: Float[Tensor, "H Q K"]) -> tuple[np.ndarray, np.ndarray, bool]:
    """Codes, scales, and whether weights are negative."""
    signed = bool((kept < -1e-6).any())
    scales = kept.abs().amax(-1).clamp_min(1e-12)
    levels = SIGNED_LEVELS if signed else LEVELS
    codes = (kept / scales[..., None] * levels).round() + (128 if signed else 0)
    return codes.clamp(0, 255).to(torch.uint8).numpy(), scales.numpy(), signed


def _statistics(
    rows: Float[Tensor, "H Q M"], places: slice, apart: Float[np.ndarray, "Q K"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean entropy of the rows' shares, mean distance to keys with a place, share on others. apart: their distances."""
    rows = rows.abs()
    shares = rows / rows.sum(-1, keepdim=True).clamp_min(1e-12)
    entropy = -(shares * shares.clamp_min(1e-12).log()).sum(-1).mean(-1)
    inside = shares[..., places]
    within = inside.sum(-1)
    distance = ((inside * torch.from_numpy(apart).float()).sum(-1) / within.clamp_min(1e-12)).mean(-1)
    return entropy.numpy(), distance.numpy(), (1 - within).clamp_min(0).mean(-1).numpy()


def _thin(weights: Float[Tensor, "H N M"], grid: Grid, stride: int) -> Float[Tensor, "H Q K"]:
    """Blocks of stride x stride cells as one: the mean of their queries, the sum of their keys."""
    if stride == 1:
        return weights
    keys = _pool(weights, grid, stride, mean=False)
    return _pool(keys.mT.contiguous(), grid, stride, mean=True).mT


def _pool(tokens: Float[Tensor, "H N M"], grid: Grid, stride: int, *, mean: bool) -> Float[Tensor, "H N K"]:
    """The last axis, which counts tokens of the grid, in blocks; smaller blocks at the ends are whole."""
    before, cells, after = tokens.tensor_split((grid.prefix, grid.prefix + grid.cells), -1)
    cells = cells.unflatten(-1, (grid.height, grid.width))
    pad = (-grid.width % stride, -grid.height % stride)
    cells = torch.nn.functional.pad(cells, (0, pad[0], 0, pad[1]))
    pooled = torch.nn.functional.avg_pool2d(cells, stride) * stride**2
    if mean:
        ones = torch.nn.functional.pad(torch.ones(1, 1, grid.height, grid.width), (0, pad[0], 0, pad[1]))
        pooled = pooled / (torch.nn.functional.avg_pool2d(ones, stride)[0] * stride**2)
    return torch.cat([before, pooled.flatten(-2), after], -1)
