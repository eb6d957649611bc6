"""Grid: the positions of a sequence's tokens on the image."""

import math
from dataclasses import dataclass, field
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from .errors import INSTEAD_OF_TORCHSCRIPT, GridError
from .validation import is_whole, plain_number, short_repr

_MOST = 10**12
"""The most windows whose factors are looked for."""
_SIDES = ("height", "width", "prefix", "suffix", "depth")


@dataclass(frozen=True, repr=False)
class Grid:
    """height x width patch tokens in rows, with `prefix` tokens before and `suffix` tokens after them.

    Prefix and suffix tokens are class, distillation and register tokens: they have no position on the image.
    depth: frames of a clip or slices of a volume, each height x width tokens, one after the other.
    Raises: GridError if a number is not whole, a side is below 1, or a number of tokens is negative.
    """

    height: int
    width: int
    prefix: int = 0
    suffix: int = 0
    depth: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for name in _SIDES:
            value = getattr(self, name)
            if type(value) is not int and not isinstance(value, torch.SymInt):  # SymInt: a size that is traced
                object.__setattr__(self, name, _whole(name, value))
        if min(self.height, self.width, self.depth) < 1 or min(self.prefix, self.suffix) < 0:
            raise GridError(f"a grid has at least 1x1 patch tokens and no negative number of others, not {self}")

    @classmethod
    def sequence(cls, length: int, prefix: int = 0) -> "Grid":
        """A one-dimensional sequence: one row of `length` tokens."""
        return cls(1, length, prefix)

    @property
    def cells(self) -> int:
        """The number of patch tokens: depth * height * width."""
        return self.depth * self.height * self.width

    @property
    def sides(self) -> tuple[int, ...]:
        """(height, width), or (depth, height, width) where there are several frames."""
        return (self.height, self.width) if self.depth == 1 else (self.depth, self.height, self.width)

    @property
    def patches(self) -> "Grid":
        """The patch tokens alone."""
        return Grid(self.height, self.width, depth=self.depth)

    @property
    def frame(self) -> "Grid":
        """The patch tokens of one frame."""
        return Grid(self.height, self.width)

    @property
    def extra(self) -> int:
        """The number of tokens without a position on the image: prefix + suffix."""
        return self.prefix + self.suffix

    @property
    def tokens(self) -> int:
        """All tokens: prefix + cells + suffix."""
        return self.prefix + self.cells + self.suffix

    @property
    def span(self) -> slice:
        """The indices of the patch tokens among all tokens."""
        return slice(self.prefix, self.prefix + self.cells)

    def __str__(self) -> str:
        sides = "x".join(map(str, self.sides))
        return f"{sides} patch + {self.prefix} prefix + {self.suffix} suffix tokens"

    def __repr__(self) -> str:
        given = _SIDES if self.depth != 1 else _SIDES[:-1]
        return f"Grid({', '.join(f'{name}={getattr(self, name)}' for name in given)})"

    def check(self, x: Tensor) -> None:
        """Raises GridError unless the second last axis of x (..., N, C) has as many entries as the grid has tokens."""
        if not isinstance(x, Tensor) or x.ndim < 2:
            raise GridError(f"tokens are a tensor (..., {self.tokens}, channels), not {_shape(x)}")
        self.check_number(x.shape[-2])

    def check_number(self, tokens: int) -> None:
        """Raises GridError unless this is the grid's number of tokens."""
        if tokens != self.tokens:
            raise GridError(f"{tokens} tokens do not fit {self} (= {self.tokens}); pass the grid of this input")

    def to_map(self, x: Float[Tensor, "*B N C"]) -> tuple[Float[Tensor, "*B E C"], Float[Tensor, "..."]]:
        """Split tokens into prefix and suffix tokens, joined, and the map of the patch tokens (a view if possible).

        The map is (*B, C, h, w), with frames (*B, C, depth, h, w).
        """
        self.check(x)
        cells = x[..., self.span, :].mT.unflatten(-1, self.sides)
        if not self.extra:
            return x[..., :0, :], cells
        return torch.cat([x[..., : self.prefix, :], x[..., self.prefix + self.cells :, :]], -2), cells

    def from_map(self, extra: Float[Tensor, "*B E C"], cells: Float[Tensor, "..."]) -> Float[Tensor, "*B N C"]:
        """The inverse of `to_map`."""
        sides = self.sides
        fit = isinstance(cells, Tensor) and isinstance(extra, Tensor) and cells.ndim > len(sides) and extra.ndim >= 2
        if not fit or cells.shape[-len(sides) :] != sides or extra.shape[-2] != self.extra:
            raise GridError(f"a map of {_shape(cells)} and {_shape(extra)} other tokens do not fit {self}")
        tokens = cells.flatten(-len(sides)).mT
        if self.extra and extra.shape[:-2] + extra.shape[-1:] != tokens.shape[:-2] + tokens.shape[-1:]:
            raise GridError(f"a map of {_shape(cells)} and {_shape(extra)} other tokens differ in batch or channels")
        if not self.extra:
            return tokens
        return torch.cat([extra[..., : self.prefix, :], tokens, extra[..., self.prefix :, :]], -2)

    def every(self, stride: int) -> "Grid":
        """Every stride-th row and column, from the first; frames, prefix and suffix stay."""
        rows, columns = (-(-side // stride) for side in (self.height, self.width))
        return Grid(rows, columns, self.prefix, self.suffix, depth=self.depth)

    def stacked(self) -> "Grid":
        """The same tokens with the frames below each other: depth * height rows."""
        return Grid(self.depth * self.height, self.width, self.prefix, self.suffix) if self.depth != 1 else self

    def row_major(self) -> "Grid":
        """The same tokens in one row: an image without a second side."""
        return Grid(1, self.cells, self.prefix, self.suffix)

    def factor(self, m: int) -> tuple[int, ...]:
        """m windows as (rows, columns), or (frames, rows, columns): those whose sides, in cells, are most alike.

        Ties take more frames, then more rows.
        Raises: GridError if no factorisation fits the grid (m < 1, or m prime and larger than all sides).
        """
        m = _whole("m", m)
        options = self._factors(m)
        if not options:
            near = (n for step in range(1, self.cells) for n in (m - step, m + step) if self._factors(n))
            close = _nearest_products(m, self.height, self.width) if self.depth == 1 else [*islice(near, 4)]
            raise GridError(
                f"m={m}: {m} windows cannot be laid on {self}; nearest possible: {', '.join(map(str, sorted(close)))}"
            )
        ranks = [(round(_unlike(self.sides, each), 9), *[-number for number in each]) for each in options]
        return options[ranks.index(min(ranks))]  # torch.compile of 2.11 cannot trace min(options, key=...)

    def _factors(self, m: int) -> list[tuple[int, ...]]:
        """All ways to lay m windows on the grid, as numbers of windows along each side."""
        options: list[tuple[int, ...]] = [(m,)] if 1 <= m <= min(self.cells, _MOST) else []
        for side in self.sides[:-1]:
            options = [(*of, r, last // r) for *of, last in options for r in _divisors(last) if r <= side]
        return [each for each in options if each[-1] <= self.width]


def _divisors(number: int) -> list[int]:
    low = [r for r in range(1, math.isqrt(number) + 1) if number % r == 0]
    return sorted({*low, *(number // r for r in low)})


def _unlike(sides: tuple[int, ...], counts: tuple[int, ...]) -> float:
    """The logarithm of the longest over the shortest side of a window."""
    lengths = [math.log(side / count) for side, count in zip(sides, counts, strict=True)]
    return max(lengths) - min(lengths)


def _shape(x: object) -> str:
    return "x".join(map(str, x.shape)) if isinstance(x, Tensor) else short_repr(x)


def _whole(name: str, value: object) -> int:
    """A number of Python or NumPy. Raises: GridError for other values."""
    number = plain_number(value)
    if isinstance(value, Tensor) and torch.jit.is_tracing():
        raise GridError(f"torch.jit.trace gives sizes as tensors, and a grid needs numbers; {INSTEAD_OF_TORCHSCRIPT}")
    if not is_whole(number):
        raise GridError(f"{name} of a grid is a whole number, not {short_repr(value)}")
    return int(number)


def _nearest_products(m: int, height: int, width: int) -> list[int]:
    """The numbers nearest to m, at most four, that are rows times columns of a grid."""
    m = min(max(m, 1), height * width)
    rows = range(1, min(height, 100_000) + 1)
    possible = {r * c for r in rows for c in range(max(1, min(m // r, width) - 4), min(m // r + 5, width) + 1)}
    return sorted(possible, key=lambda n: (abs(n - m), n))[:4]
