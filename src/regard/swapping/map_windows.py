"""Windows of a map, maybe with a cyclic shift, as Swin cuts them: the map is padded with zeros first."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MapWindows:
    """Windows of `size` (rows, columns) of a map of `height` x `width` cells, shifted by `shift` (down, across).

    A side that one window covers is not shifted.
    """

    height: int
    width: int
    size: tuple[int, int]
    shift: tuple[int, int]

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of the padded map."""
        return -(-self.height // self.size[0]) * self.size[0], -(-self.width // self.size[1]) * self.size[1]

    @property
    def shifts(self) -> tuple[int, int]:
        """The shifts in use."""
        down, across = (s if n > side else 0 for s, n, side in zip(self.shift, self.padded, self.size, strict=True))
        return down, across

    def cut(self, x: Float[Tensor, "B h w C"]) -> Float[Tensor, "BW N C"]:
        """The windows of each image, row by row, with the tokens of each."""
        (height, width), (rows, columns) = self.padded, self.size
        x = F.pad(x, (0, 0, 0, width - self.width, 0, height - self.height))
        if any(self.shifts):
            x = torch.roll(x, (-self.shifts[0], -self.shifts[1]), (1, 2))
        return x.unflatten(2, (-1, columns)).unflatten(1, (-1, rows)).transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def join(self, windows: Float[Tensor, "BW N C"]) -> Float[Tensor, "B h w C"]:
        """The inverse of `cut`."""
        (height, width), (rows, columns) = self.padded, self.size
        down, across = height // rows, width // columns
        x = windows.unflatten(1, self.size).unflatten(0, (-1, down, across)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shifts):
            x = torch.roll(x, self.shifts, (1, 2))
        return x[:, : self.height, : self.width]

    def mask(self, x: Tensor) -> Float[Tensor, "W N N"] | None:
        """-100 between tokens of a window that are no neighbours in the image; None without a shift.

        x: a tensor with the dtype and device of the mask.
        """
        if not any(self.shifts):
            return None
        sides = zip(self.padded, self.size, self.shifts, strict=True)
        down, across = (_part(side, size, shift, x.device) for side, size, shift in sides)
        parts = (3 * down[:, None] + across).unflatten(1, (-1, self.size[1])).unflatten(0, (-1, self.size[0]))
        parts = parts.transpose(1, 2).flatten(2).flatten(0, 1)  # (W, N)
        return (parts[:, None] != parts[:, :, None]).to(x.dtype) * -100.0


def _part(side: int, size: int, shift: int, device: torch.device) -> Tensor:
    """For each row or column: 0, 1 in the last window, 2 in what the shift has brought there."""
    place = torch.arange(side, device=device)
    return (place >= side - size).long() + (place >= side - shift).long()
