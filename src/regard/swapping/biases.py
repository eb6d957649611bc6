"""What a swapped layer keeps of its host's logits: position biases of tables and MLPs, shift masks, scales."""

import copy
import math
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core import Grid, Mask, Mixer, UnsupportedError
from regard.mixers.shared.heads import drops_bias

BIASES = "biases"
"""The name of a module below the mixer that computes position biases (1, H, N, N)."""


def check_heads(mixer: Mixer, heads: int) -> None:
    """Raises: UnsupportedError if the mechanism has another number of heads than a layer's biases."""
    if mixer.site.heads != heads:
        raise UnsupportedError(
            f"{mixer.site.name} adds relative position biases of {heads} heads, which do not "
            f"fit the {mixer.site.heads} heads of {type(mixer.config).__name__}; leave heads= out"
        )


def add_biases(mixer: Mixer, biases: nn.Module, heads: int, name: str = BIASES) -> None:
    """Give a mixer a module of position biases; nothing if it has no logits, as after a removal, or drops them.

    Raises: UnsupportedError if the mechanism has another number of heads.
    """
    if mixer.config.uses and not drops_bias(mixer.config):
        check_heads(mixer, heads)
        mixer.add_module(name, biases)


def keep_biases(mixer: Mixer, host: Any, name: str) -> None:
    """Give a mixer a copy of the host's module `name`, which computes biases for each head; nothing if it has none.

    Raises: UnsupportedError if the mechanism has another number of heads.
    """
    module = getattr(host, name, None)
    if module is not None:
        add_biases(mixer, copy.deepcopy(module), host.num_heads, name)


def mix_biased(mixer: Mixer, x: Tensor, grid: Grid, shared: Tensor | None) -> Tensor:
    """A mixer's output with the biases of its own module `rel_pos`, else with those that the host's layers share."""
    own: Any = getattr(mixer, "rel_pos", None)
    bias = shared if own is None else own.get_bias()
    return mixer(x, grid, None if bias is None or not mixer.config.uses else Mask(bias=bias))


def mix_windows(mixer: Mixer, x: Float[Tensor, "B N C"], grid: Grid, mask: Float[Tensor, "W N N"] | None) -> Tensor:
    """A mixer's output in windows, with the biases of its own module `biases` and the mask of shifted windows.

    mask: for the W windows of an image, added to the logits.
    """
    biases: Any = getattr(mixer, BIASES, None)
    if biases is None:  # a removed attention has no logits
        return mixer(x, grid)
    tokens = x.shape[1]  # a clip shorter than the windows has their first frames
    bias = biases(tokens) if isinstance(biases, TableBiases) else biases()[..., :tokens, :tokens]
    return mixer(x, grid, Mask(bias=with_shift_mask(bias, mask, len(x))))


def with_shift_mask(
    bias: Float[Tensor, "1 H N N"], mask: Float[Tensor, "W N N"] | None, windows: int
) -> Float[Tensor, "B H N N"]:
    """Position biases plus the mask of the windows of an image, for a batch of `windows` windows."""
    return bias if mask is None else bias + mask.repeat(windows // len(mask), 1, 1)[:, None]


class TableBiases(nn.Module):
    """Biases (1, H, N, N) that a table (offsets, H) holds, found by an index (N N,) or (N, N); copies of the host's."""

    index: Tensor

    def __init__(self, table: Tensor, index: Int[Tensor, "..."], persistent: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(table.detach().clone())
        self.register_buffer("index", index.clone(), persistent)

    def forward(self, tokens: int | None = None) -> Float[Tensor, "1 H N N"]:
        """tokens: the first ones alone."""
        return of_pairs(self.table, self.index, tokens)


def of_pairs(
    table: Float[Tensor, "offsets H"], index: Int[Tensor, "..."], tokens: int | None = None
) -> Float[Tensor, "1 H N N"]:
    """The row of a table for each pair of query and key. tokens: of the first ones alone, None = of all."""
    number = math.isqrt(index.numel())
    pairs = index.view(number, number)[:tokens, :tokens]
    return table[pairs.flatten()].unflatten(0, pairs.shape).permute(2, 0, 1).contiguous()[None]


class ContinuousBiases(nn.Module):
    """SwinV2's biases 16 sigmoid(mlp(coordinates of an offset)); copies of the host's MLP, coordinates and index."""

    coordinates: Tensor
    index: Tensor

    def __init__(self, mlp: nn.Module, coordinates: Tensor, index: Int[Tensor, "..."], persistent: bool) -> None:
        super().__init__()
        self.mlp = copy.deepcopy(mlp)
        self.register_buffer("coordinates", coordinates.clone(), persistent)
        self.register_buffer("index", index.clone(), persistent)

    def forward(self) -> Float[Tensor, "1 H N N"]:
        return continuous_biases(self.mlp, self.coordinates, self.index)


def continuous_biases(
    mlp: nn.Module, coordinates: Float[Tensor, "1 y x 2"], index: Int[Tensor, "..."]
) -> Float[Tensor, "1 H N N"]:
    """16 sigmoid(mlp(coordinates)), a row for each offset, found by an index."""
    return 16 * of_pairs(mlp(coordinates).flatten(0, 2), index).sigmoid()


class Cosine(nn.Module):
    """Vectors (B, H, N, d) of length 1, times the learned exp(logit_scale) of each head, at most 100."""

    def __init__(self, logit_scale: Tensor | None = None) -> None:
        super().__init__()
        self.logit_scale = None if logit_scale is None else nn.Parameter(logit_scale.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x_unit = F.normalize(x, dim=-1)
        if self.logit_scale is None:
            return x_unit
        scale = self.logit_scale.view(-1, 1, 1).clamp(max=math.log(100.0)).exp()
        return x_unit * (scale * x.shape[-1] ** 0.5)  # mechanisms divide by the root of the width


class Scaled(nn.Module):
    """Queries times a number, for a host that divides logits by another number than the root of the width."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def use_cosine(mixer: Mixer, logit_scale: Tensor) -> None:
    """Give a mixer cosine attention with learned scales: its norms of queries and keys become `Cosine`."""
    for role in set("qk") & set(mixer.config.uses):
        setattr(mixer, f"{role}_norm", Cosine(logit_scale if role == "q" else None))
