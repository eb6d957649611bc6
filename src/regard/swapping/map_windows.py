"""Windows of a map, maybe with a cyclic shift, as Swin cuts them: the map is padded with zeros first."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MapWindows:
    """Windows of `size` (rows, columns) of a map of `sides` (height, width) cells, shifted by `shift` (down, across).

    Of a volume all three begin with frames. A side that one window covers is not shifted.
    """

    sides: tuple[int, ...]
    size: tuple[int, ...]
    shift: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of windows along each side."""
        return tuple(-(-side // size) for side, size in zip(self.sides, self.size, strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        """The sides of the padded map."""
        return tuple(count * size for count, size in zip(self.counts, self.size, strict=True))

    @property
    def shifts(self) -> tuple[int, ...]:
        """The shifts in use."""
        return tuple(s if n > side else 0 for s, n, side in zip(self.shift, self.padded, self.size, strict=True))

    def cut(self, x: Float[Tensor, "B ... C"]) -> Float[Tensor, "BW N C"]:
        """The windows of each map (B, h, w, C), row by row, with the tokens of each."""
        beyond = [full - side for full, side in zip(self.padded, self.sides, strict=True)]
        x = F.pad(x, (0, 0, *(number for most in reversed(beyond) for number in (0, most))))
        if any(self.shifts):
            x = torch.roll(x, [-shift for shift in self.shifts], self._axes)
        return self._split(x)

    def join(self, windows: Float[Tensor, "BW N C"]) -> Float[Tensor, "B ... C"]:
        """The inverse of `cut`."""
        axes = len(self.size)
        x = windows.unflatten(1, self.size).unflatten(0, (-1, *self.counts))
        x = x.permute(0, *(axis for i in self._axes for axis in (i, axes + i)), 2 * axes + 1)
        for axis in self._axes:
            x = x.flatten(axis, axis + 1)
        if any(self.shifts):
            x = torch.roll(x, self.shifts, self._axes)
        return x[(slice(None), *(slice(side) for side in self.sides))]

    def mask(self, x: Tensor) -> Float[Tensor, "W N N"] | None:
        """-100 between tokens of a window that are no neighbours in the image; None without a shift.

        x: a tensor with the dtype and device of the mask.
        """
        if not any(self.shifts):
            return None
        parts = torch.zeros((), dtype=torch.long, device=x.device)
        for side, size, shift in zip(self.padded, self.size, self.shifts, strict=True):
            parts = 3 * parts[..., None] + _part(side, size, shift, x.device)
        parts = self._split(parts[None, ..., None])[..., 0]  # (W, N)
        return (parts[:, None] != parts[:, :, None]).to(x.dtype) * -100.0

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(range(1, len(self.size) + 1))

    def _split(self, x: Tensor) -> Tensor:
        """(B, sides, C) of padded maps as windows (B W, N, C)."""
        axes = len(self.size)
        for axis in reversed(self._axes):
            x = x.unflatten(axis, (-1, self.size[axis - 1]))
        order = (*range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2))
        return x.permute(0, *order, 2 * axes + 1).flatten(axes + 1, 2 * axes).flatten(0, axes)


def _part(side: int, size: int, shift: int, device: torch.device) -> Tensor:
    """For each row or column: 0, 1 in the last window, 2 in what the shift has brought there."""
    place = torch.arange(side, device=device)
    return (place >= side - size).long() + (place >= side - shift).long()
