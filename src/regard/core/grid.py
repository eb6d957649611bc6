"""Grid: the positions of a sequence's tokens on the image."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .errors import INSTEAD_OF_TORCHSCRIPT, GridError
from .validation import is_whole, plain_number, short_repr

_MOST = 10**12
"""The most windows whose factors are looked for."""
_SIDES = ("height", "width", "prefix", "suffix")


@dataclass(frozen=True)
class Grid:
    """height x width patch tokens in rows, with `prefix` tokens before and `suffix` tokens after them.

    Prefix and suffix tokens are class, distillation and register tokens: they have no position on the image.
    Raises: GridError if a number is not whole, a side is below 1, or a number of tokens is negative.
    """

    height: int
    width: int
    prefix: int = 0
    suffix: int = 0

    def __post_init__(self) -> None:
        for name in _SIDES:
            value = getattr(self, name)
            if type(value) is not int and not isinstance(value, torch.SymInt):  # SymInt: a size that is traced
                object.__setattr__(self, name, _whole(name, value))
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
        if not isinstance(x, Tensor) or x.ndim < 2:
            raise GridError(f"tokens are a tensor (..., {self.tokens}, channels), not {_shape(x)}")
        self.check_number(x.shape[-2])

    def check_number(self, tokens: int) -> None:
        """Raises GridError unless this is the grid's number of tokens."""
        if tokens != self.tokens:
            raise GridError(f"{tokens} tokens do not fit {self} (= {self.tokens}); pass the grid of this input")

    def to_map(self, x: Float[Tensor, "*B N C"]) -> tuple[Float[Tensor, "*B E C"], Float[Tensor, "*B C h w"]]:
        """Split tokens into prefix and suffix tokens, joined, and the map of the patch tokens (a view if possible)."""
        self.check(x)
        cells = x[..., self.span, :].mT.unflatten(-1, (self.height, self.width))
        if not self.extra:
            return x[..., :0, :], cells
        return torch.cat([x[..., : self.prefix, :], x[..., self.prefix + self.cells :, :]], -2), cells

    def from_map(self, extra: Float[Tensor, "*B E C"], cells: Float[Tensor, "*B C h w"]) -> Float[Tensor, "*B N C"]:
        """The inverse of `to_map`."""
        fit = isinstance(cells, Tensor) and isinstance(extra, Tensor) and cells.ndim >= 3 and extra.ndim >= 2
        if not fit or cells.shape[-2:] != (self.height, self.width) or extra.shape[-2] != self.extra:
            raise GridError(f"a map of {_shape(cells)} and {_shape(extra)} other tokens do not fit {self}")
        tokens = cells.flatten(-2).mT
        if self.extra and extra.shape[:-2] + extra.shape[-1:] != tokens.shape[:-2] + tokens.shape[-1:]:
            raise GridError(f"a map of {_shape(cells)} and {_shape(extra)} other tokens differ in batch or channels")
        if not self.extra:
            return tokens
        return torch.cat([extra[..., : self.prefix, :], tokens, extra[..., self.prefix :, :]], -2)

    def every(self, stride: int) -> "Grid":
        """Every stride-th row and column, from the first; prefix and suffix stay."""
        return Grid(-(-self.height // stride), -(-self.width // stride), self.prefix, self.suffix)

    def factor(self, m: int) -> tuple[int, int]:
        """m windows as (rows, columns): the factorisation nearest to the grid's aspect ratio; ties take more rows.

        Raises: GridError if no factorisation fits the grid (m < 1, or m prime and larger than both sides).
        """
        m = _whole("m", m)
        divisors = [r for r in range(1, math.isqrt(m) + 1) if m % r == 0] if 1 <= m <= min(self.cells, _MOST) else []
        pairs = {(r, m // r) for r in divisors} | {(m // r, r) for r in divisors}
        options = [(r, c) for r, c in pairs if r <= self.height and c <= self.width]
        if not options:
            close = _nearest_products(m, self.height, self.width)
            raise GridError(
                f"m={m}: {m} windows cannot be laid on {self}; nearest possible: {', '.join(map(str, sorted(close)))}"
            )
        aspect = math.log(self.height / self.width)
        return min(options, key=lambda rc: (round(abs(math.log(rc[0] / rc[1]) - aspect), 9), -rc[0]))


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
