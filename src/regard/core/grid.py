"""Grid: the positions of a sequence's tokens on the image."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .errors import GridError


@dataclass(frozen=True)
class Grid:
    """height x width patch tokens in rows, with `prefix` tokens before and `suffix` tokens after them.

    Prefix and suffix tokens are class, distillation and register tokens: they have no position on the image.
    Raises: GridError if a side is below 1 or a number of tokens is negative.
    """

    height: int
    width: int
    prefix: int = 0
    suffix: int = 0

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1 or min(self.prefix, self.suffix) < 0:
            raise GridError(f"a grid has at least 1x1 patch tokens and no negative number of others, not {self}")

    @classmethod
    def sequence(cls, length: int, prefix: int = 0) -> "Grid":
        """A one-dimensional sequence: one row of `length` tokens."""
        return cls(1, length, prefix)

    @property
    def cells(self) -> int:
        """The number of patch tokens: height * width."""
        return self.height * self.width

    @property
    def extra(self) -> int:
        """The number of tokens without a position on the image: prefix + suffix."""
        return self.prefix + self.suffix

    @property
    def tokens(self) -> int:
        """All tokens: prefix + height * width + suffix."""
        return self.prefix + self.cells + self.suffix

    @property
    def span(self) -> slice:
        """The indices of the patch tokens among all tokens."""
        return slice(self.prefix, self.prefix + self.cells)

    def __str__(self) -> str:
        return f"{self.height}x{self.width} patch + {self.prefix} prefix + {self.suffix} suffix tokens"

    def check(self, x: Tensor) -> None:
        """Raises GridError unless the second last axis of x (..., N, C) has as many entries as the grid has tokens."""
        if x.shape[-2] != self.tokens:
            raise GridError(f"{x.shape[-2]} tokens do not fit {self} (= {self.tokens}); pass the grid of this input")

    def to_map(self, x: Float[Tensor, "*B N C"]) -> tuple[Float[Tensor, "*B E C"], Float[Tensor, "*B C h w"]]:
        """Split tokens into prefix and suffix tokens, joined, and the map of the patch tokens (a view if possible)."""
        self.check(x)
        cells = x[..., self.span, :].mT.unflatten(-1, (self.height, self.width))
        if not self.extra:
            return x[..., :0, :], cells
        return torch.cat([x[..., : self.prefix, :], x[..., self.prefix + self.cells :, :]], -2), cells

    def from_map(self, extra: Float[Tensor, "*B E C"], cells: Float[Tensor, "*B C h w"]) -> Float[Tensor, "*B N C"]:
        """The inverse of `to_map`."""
        if cells.shape[-2:] != (self.height, self.width) or extra.shape[-2] != self.extra:
            shapes = f"a map of {'x'.join(map(str, cells.shape[-2:]))} and {extra.shape[-2]} other tokens"
            raise GridError(f"{shapes} do not fit {self}")
        tokens = cells.flatten(-2).mT
        if not self.extra:
            return tokens
        return torch.cat([extra[..., : self.prefix, :], tokens, extra[..., self.prefix :, :]], -2)

    def factor(self, m: int) -> tuple[int, int]:
        """m windows as (rows, columns): the factorisation nearest to the grid's aspect ratio; ties take more rows.

        Raises: GridError if no factorisation fits the grid (m < 1, or m prime and larger than both sides).
        """
        options = [(r, m // r) for r in range(1, min(m, self.height) + 1) if m % r == 0 and m // r <= self.width]
        if not options:
            possible = {r * c for r in range(1, self.height + 1) for c in range(1, self.width + 1)}
            close = sorted(possible, key=lambda n: (abs(n - m), n))[:4]
            raise GridError(
                f"{m} windows cannot be laid on {self}; nearest possible: {', '.join(map(str, sorted(close)))}"
            )
        aspect = math.log(self.height / self.width)
        return min(options, key=lambda rc: (round(abs(math.log(rc[0] / rc[1]) - aspect), 9), -rc[0]))
