"""The attention weights of all layers and heads for one picture, in eight bits, thinned where they are too many."""

import base64
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from regard.core import Grid, UnsupportedError
from regard.core.eval_mode import eval_mode
from regard.explain.rollout import rollout
from regard.swapping.capture import capture, readable_mixers, with_regard_softmax
from regard.swapping.layer import Port
from regard.swapping.shared_state import swapped_layers

LEVELS, SIGNED_LEVELS = 255, 127
"""Steps between zero and the largest weight of a row; of maps with negative weights."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Of one layer. codes: (H, Q, K), the weight is (code - zero) * scale / levels. scales: (H, Q), the largest of each
    row. grid: of its tokens; stride: so many cells of a side are one, of which queries are averaged and keys added.
    entropy (nats), distance (in cells), extra (share on tokens without a place): (H,), means over queries.
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

    @property
    def step(self) -> float:
        """Half of it is the largest error of a weight, as a share of the largest of its row."""
        return 1 / (SIGNED_LEVELS if self.signed else LEVELS)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the page; arrays as base64."""
        rows, columns = (-(-side // self.stride) for side in (self.grid.height, self.grid.width))
        return {
            "name": self.name, "heads": len(self.codes), "stride": self.stride, "rows": rows, "columns": columns,
            "prefix": self.grid.prefix, "suffix": self.grid.suffix, "zero": 128 if self.signed else 0,
            "levels": SIGNED_LEVELS if self.signed else LEVELS, "codes": _base64(self.codes),
            "scales": _base64(self.scales.astype("<f4")),
            **{key: _short(getattr(self, key)) for key in ("entropy", "distance", "extra")},
        }  # fmt: skip


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def _short(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in values]


@dataclass(frozen=True, eq=False)
class Reading:
    """Of one model: the layers in the order of their calls, the last one the rollout where there is one; why layers
    are left out, by name; the model's output."""

    layers: tuple[Weights, ...]
    left_out: Mapping[str, str]
    output: Any


def read_weights(model: nn.Module, image: Float[Tensor, "C H W"], layers: str, most: int) -> Reading:
    """The weights of the layers of a model, which is not changed; its own attention is read by Regard's softmax.

    image: as the model expects it. layers: a glob on layer names. most: bytes that they may take; where it would be
    more, cells are joined (`Weights.stride`), the same number in all layers.
    Raises: UnsupportedError if no layer has weights between tokens of the picture.
    """
    first = next(model.parameters())
    inputs = image[None].to(first.device, first.dtype)
    swapped = any(isinstance(module, Port) for module in model.modules())
    reader = model if swapped else with_regard_softmax(model, inputs, layers)
    found: dict[str, Weights] = {}
    left_out: dict[str, str] = {}
    with torch.no_grad(), eval_mode(reader):
        grids = _grids(reader, inputs, layers, left_out)
        stride = _stride({name: (grid, heads) for name, (grid, heads) in grids.items()}, most)
        with ExitStack() as stack:
            for name, (grid, _) in grids.items():
                keep = _keeper(found, grid, stride)
                stack.enter_context(capture(reader, name, reduce=keep))
            output = reader(inputs)
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UnsupportedError(f"no layer has weights between all tokens of the picture{reasons and f' ({reasons})'}")
    joined = _joined(reader, inputs, layers, found, stride, left_out)
    return Reading((*found.values(), *joined), left_out, output)


def _grids(reader: nn.Module, inputs: Tensor, layers: str, left_out: dict[str, str]) -> dict[str, tuple[Grid, int]]:
    """Grid and heads of each layer whose weights can be shown; of the others a reason."""
    found: dict[str, tuple[Grid, int]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            grid = kwargs["grid"] if "grid" in kwargs else args[1]
            if len(args[0]) != 1:
                left_out[name] = f"attends in {len(args[0])} windows"
            elif mixer.memory_grid(grid) is not None:
                left_out[name] = "has keys on another grid"
            else:
                found[name] = grid, mixer.site.heads

        return hook

    with ExitStack() as stack:
        for name in swapped_layers(reader, layers):
            try:
                mixer = readable_mixers(reader, name)[name]
            except UnsupportedError as error:
                left_out[name] = str(error).removeprefix(f"{name}: ")
                continue
            stack.callback(mixer.register_forward_pre_hook(record(name), with_kwargs=True).remove)
        reader(inputs)
    return found


def _stride(grids: Mapping[str, tuple[Grid, int]], most: int) -> int:
    """The fewest cells of a side that are joined so that all weights fit."""
    stride = 1
    while sum(heads * _tokens(grid, stride) ** 2 for grid, heads in grids.values()) > most:
        stride += 1
        if all(max(grid.height, grid.width) <= stride for grid, _ in grids.values()):
            break
    return stride


def _tokens(grid: Grid, stride: int) -> int:
    return grid.extra + -(-grid.height // stride) * -(-grid.width // stride)


def _keeper(found: dict[str, Weights], grid: Grid, stride: int) -> Callable[[str, Tensor], None]:
    def keep(name: str, weights: Tensor) -> None:
        found[name] = encode(name, weights[0], grid, stride)

    return keep


def _joined(
    reader: nn.Module, inputs: Tensor, layers: str, found: Mapping[str, Weights], stride: int, left_out: dict[str, str]
) -> list[Weights]:
    """The rollout over all layers, as a last one, where they have the same tokens."""
    grids = {weights.grid for weights in found.values()}
    if len(grids) != 1 or left_out or len(found) < 2:
        return []
    with suppress(UnsupportedError):
        return [encode("rollout over all layers", rollout(reader, inputs, layers), *grids, stride)]
    return []


def encode(name: str, weights: Float[Tensor, "H N M"], grid: Grid, stride: int) -> Weights:
    """Weights in eight bits; each row has its own scale."""
    entropy, distance, extra = _statistics(weights, grid)
    kept = _thin(weights, grid, stride)
    signed = bool((kept < -1e-6).any())
    scales = kept.abs().amax(-1).clamp_min(1e-12)
    levels = SIGNED_LEVELS if signed else LEVELS
    codes = (kept / scales[..., None] * levels).round().clamp(-levels, levels) + (128 if signed else 0)
    return Weights(
        name=name, grid=grid, stride=stride, codes=codes.clamp_min(0).to(torch.uint8).numpy(), scales=scales.numpy(),
        signed=signed, entropy=entropy, distance=distance, extra=extra,
    )  # fmt: skip


def _statistics(weights: Float[Tensor, "H N M"], grid: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of patch tokens as queries: mean entropy of the rows' shares, mean distance to patch keys, share on others."""
    rows = weights[:, grid.span].abs()
    shares = rows / rows.sum(-1, keepdim=True).clamp_min(1e-12)
    entropy = -(shares * shares.clamp_min(1e-12).log()).sum(-1).mean(-1)
    inside = shares[..., grid.span]
    y, x = (side.flatten().float() for side in torch.meshgrid(
        torch.arange(grid.height), torch.arange(grid.width), indexing="ij"
    ))  # fmt: skip
    apart = torch.hypot(y[:, None] - y, x[:, None] - x)
    within = inside.sum(-1)
    distance = ((inside * apart).sum(-1) / within.clamp_min(1e-12)).mean(-1)
    return entropy.numpy(), distance.numpy(), (1 - within).mean(-1).numpy()


def _thin(weights: Float[Tensor, "H N M"], grid: Grid, stride: int) -> Float[Tensor, "H Q K"]:
    """Blocks of stride x stride cells as one: the mean of their queries, the sum of their keys."""
    if stride == 1:
        return weights
    keys = _pooled(weights, grid, stride, mean=False)
    return _pooled(keys.mT.contiguous(), grid, stride, mean=True).mT


def _pooled(tokens: Float[Tensor, "H N M"], grid: Grid, stride: int, *, mean: bool) -> Float[Tensor, "H N K"]:
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


def bytes_of(layers: tuple[Weights, ...]) -> int:
    """That the codes take on a page, as base64."""
    return sum(math.ceil(weights.codes.size / 3) * 4 for weights in layers)
