"""Shared by the convolutions: the layer that mixes the map of the patch tokens, shifted maps and bilinear sampling.

Prefix and suffix tokens have no position on the map: they are not convolved, and the field `extra` says what they get.
Padded tokens (`Mask.keep`) are zero, like positions beyond the border.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core import ConfigError, Grid, GridError, Mask, Mixer, MixerConfig, Site
from regard.mixers.shared.precision import upcast


@dataclass(frozen=True, kw_only=True)
class TapsConfig(MixerConfig):
    """kernel: taps along an axis, centred (odd). axes: 2, or 1 for sequences (grids of one row).

    causal: the taps end at the query (decoders; axes=1, any kernel); those left of the first token read zero. extra:
    the output of prefix and suffix tokens, the "mean" of the patch tokens' outputs or "zero"; always zero where causal.
    A host's rotary positions and heads are not used.
    Raises: ConfigError for even or impossible numbers, or causal without axes=1.
    """

    kernel: int = 3
    axes: Literal[1, 2] = 2
    causal: bool = False
    extra: Literal["mean", "zero"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal and self.axes == 2:
            raise ConfigError("causal taps are for sequences: causal=True needs axes=1")
        if self.kernel < 1 or (self.kernel % 2 == 0 and not self.causal):
            raise ConfigError(f"kernel is an odd number of taps (any where causal), not {self.kernel}")

    @property
    def masks(self) -> frozenset[str]:  # type: ignore[override]
        """Padding, and causal where the taps are causal."""
        return frozenset({"padding", "causal"} if self.causal else {"padding"})

    @property
    def sides(self) -> tuple[int, int]:
        """The number of taps in a column and in a row."""
        return (self.kernel if self.axes == 2 else 1), self.kernel

    @property
    def taps(self) -> int:
        """The number of taps."""
        return self.sides[0] * self.sides[1]


class TapsMixer(Mixer):
    """A layer on the map of the patch tokens; a subclass writes `mix`."""

    config: TapsConfig

    def __init__(self, config: TapsConfig, site: Site) -> None:
        super().__init__(config, site)
        self.proj_drop = nn.Dropout(site.drop)

    def mix(
        self, x: Float[Tensor, "B C h w"], valid: Bool[Tensor, "B 1 h w"] | None, plain: bool
    ) -> Float[Tensor, "B C h w"]:
        """The convolution. x: zero where padded. valid: False where padded, None without padding."""
        raise NotImplementedError

    def compute(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Any, plain: bool) -> Tensor:
        self.check(x, grid, mask)
        if self.config.axes == 1 and grid.height > 1:
            raise GridError(f"axes=1 is for sequences (one row), not {grid}; use axes=2")
        extra, image, valid = self.split(x, grid, mask)
        out = self.mix(image, valid, plain)
        if grid.extra:
            extra = self._extra_output(out, valid).expand(-1, grid.extra, -1)
        return cast(Tensor, self.proj_drop(grid.from_map(extra.to(out.dtype), out)))

    def split(
        self, x: Float[Tensor, "B N C"], grid: Grid, mask: Mask | None
    ) -> tuple[Float[Tensor, "B E C"], Float[Tensor, "B C h w"], Bool[Tensor, "B 1 h w"] | None]:
        """Prefix and suffix tokens, and the map of the patch tokens and `valid` for `mix`."""
        if mask is None or mask.keep is None:
            return *grid.to_map(x), None
        valid = mask.keep[:, grid.span].unflatten(-1, (grid.height, grid.width))[:, None]
        return *grid.to_map(x.masked_fill(~mask.keep[..., None], 0.0)), valid

    def _extra_output(self, out: Tensor, valid: Tensor | None) -> Tensor:
        """The output of prefix and suffix tokens, (B, 1, C)."""
        if self.config.causal or self.config.extra == "zero":
            return out.new_zeros(out.shape[0], 1, out.shape[1])
        if valid is None:
            return out.mean((2, 3))[:, None]
        mean = (upcast(out) * valid).sum((2, 3)) / valid.sum((2, 3)).clamp_min(1)
        return mean.to(out.dtype)[:, None]


LARGEST_DILATION = 1024
"""Cells: taps farther apart read nothing but padding, which takes memory."""


def check_dilation(dilation: int) -> None:
    """Raises: ConfigError unless a dilation is between 1 and `LARGEST_DILATION`."""
    if not 1 <= dilation <= LARGEST_DILATION:
        raise ConfigError(f"dilation is between 1 and {LARGEST_DILATION} cells, not {dilation}")


def margins(sides: tuple[int, int], dilation: int, causal: bool) -> tuple[int, int, int, int]:
    """The padding (left, right, top, bottom) with which the output of a convolution is as large as its input."""
    rows, columns = ((side - 1) * dilation for side in sides)
    return (columns, 0, 0, 0) if causal else (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)


def shifted_views(
    x: Float[Tensor, "*B h w"], sides: tuple[int, int], dilation: int = 1, causal: bool = False
) -> list[Float[Tensor, "*B h w"]]:
    """The zero-padded map shifted by every tap, taps row by row: views, one for each tap."""
    return views(F.pad(x, margins(sides, dilation, causal)), sides, x.shape[-2:], dilation)


def views(
    padded: Float[Tensor, "*B hh ww"], sides: tuple[int, int], size: Sequence[int], dilation: int = 1
) -> list[Float[Tensor, "*B h w"]]:
    """The same for a map that is padded already. size: (h, w) of the output."""
    height, width = size
    return [
        padded[..., i * dilation : i * dilation + height, j * dilation : j * dilation + width]
        for i in range(sides[0])
        for j in range(sides[1])
    ]


def grouped_product(
    weight: Float[Tensor, "O c *K"], unfolded: Float[Tensor, "B C K h w"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "B O h w"]:
    """sum over taps and channels of weight * unfolded, in C / c groups of contiguous channels. The plain form."""
    groups = unfolded.shape[1] // weight.shape[1]
    factors = weight.flatten(2).unflatten(0, (groups, -1)), unfolded.unflatten(1, (groups, -1))
    out = torch.einsum("gock,bgckhw->bgohw", *factors).flatten(1, 2)
    return out if bias is None else out + bias[:, None, None]


def own_kernels(x: Float[Tensor, "B C h w"], kernels: Float[Tensor, "B C 3 3"]) -> Float[Tensor, "B C h w"]:
    """A depth-wise convolution whose kernels differ between images; zeros beyond the border."""
    if not len(x):  # a convolution cannot have 0 groups
        return x * kernels.sum()
    planes = x.flatten(0, 1)[None]
    out = F.conv2d(planes, kernels.flatten(0, 1)[:, None], padding=1, groups=planes.shape[1])
    return out[0].unflatten(0, x.shape[:2])


def check_groups(name: str, groups: int, site: Site) -> None:
    """Raises ConfigError unless the groups divide the channels."""
    if groups < 1 or site.dim % groups:
        divisors = [n for n in range(1, site.dim + 1) if site.dim % n == 0]
        near = ", ".join(map(str, sorted(sorted(divisors, key=lambda n: abs(n - groups))[:3])))
        raise ConfigError(f"{name}: {groups} groups do not divide {site.dim} channels; nearest possible: {near}")


def sample_maps(
    x: Float[Tensor, "B C h w"], points: Float[Tensor, "B g K hh ww 2"], factors: Tensor | None
) -> Float[Tensor, "B C K L"]:
    """Bilinear samples, zero beyond the border, times factors (B, g, K, hh, ww), by `grid_sample`: taps along the rows.

    points: (y, x) in grid cells; g groups of channels, K taps, L = hh ww positions. Sides are padded to powers of two:
    whole points stay whole when `grid_sample` scales them, and have the right derivative.
    """
    batch, groups, taps, height, width, _ = points.shape
    sides = [1 << (int(side) - 1).bit_length() for side in x.shape[2:]]
    scale = 1 / points.new_tensor(sides)
    positions = torch.addcmul(scale - 1, points, 2 * scale).flip(-1).to(x.dtype)  # (x, y), half-pixel centres
    maps = F.pad(x, (0, sides[1] - x.shape[3], 0, sides[0] - x.shape[2])).unflatten(1, (groups, -1)).flatten(0, 1)
    samples = F.grid_sample(maps, positions.reshape(batch * groups, taps * height, width, 2), align_corners=False)
    samples = samples.reshape(batch, groups, maps.shape[1], taps, height * width)
    if factors is not None:
        factors = factors.flatten(3)[:, :, None].to(x.dtype)
        samples = samples * factors if torch.is_grad_enabled() else samples.mul_(factors)
    return samples.flatten(1, 2)


def sample_rows(
    x: Float[Tensor, "B C h w"], points: Float[Tensor, "B g K hh ww 2"], factors: Tensor | None
) -> Float[Tensor, "B C K L"]:
    """The same by gathering the channels of the four corners; weights are float32 until they multiply the values."""
    batch, groups, taps, out_h, out_w, _ = points.shape
    height, width = x.shape[2:]
    rows = x.unflatten(1, (groups, -1)).permute(0, 3, 4, 1, 2).flatten(0, 3)
    points = points.permute(0, 3, 4, 2, 1, 5).flatten(1, 2)  # (B, L, K, g, 2)
    factors = None if factors is None else upcast(factors).permute(0, 3, 4, 2, 1).flatten(1, 2)
    low = points.detach().floor()
    part = points - low  # NaN where a point is NaN, and so is the sample
    low = low.nan_to_num(0.0)
    image = torch.arange(batch, device=x.device)[:, None, None, None] * (height * width)
    total = x.new_zeros(())
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = (part[..., 0] if i else 1 - part[..., 0]) * (part[..., 1] if j else 1 - part[..., 1])
        row, column = low[..., 0] + i, low[..., 1] + j
        weight = weight * ((row >= 0) & (row < height) & (column >= 0) & (column < width))
        weight = weight if factors is None else weight * factors
        cell = row.clamp(0, height - 1).long() * width + column.clamp(0, width - 1).long()
        index = (image + cell) * groups + torch.arange(groups, device=x.device)
        total = total + rows.index_select(0, index.flatten()) * weight.to(x.dtype).flatten()[:, None]
    return total.view(batch, out_h * out_w, taps, x.shape[1]).permute(0, 3, 2, 1)


def tent(distance: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """max(0, 1 - |distance|), the weight of a cell in linear interpolation; right derivatives where it bends."""
    near = distance.clamp(-2, 2)
    return torch.where(near < 0, 1 + near, 1 - near) * ((near >= -1) & (near < 1))


def line_reference(x: Float[Tensor, "B g c n"], points: Float[Tensor, "B g K m"]) -> Float[Tensor, "B g c K m"]:
    """Linear interpolation at points of a line, as a sum over all positions; zero beyond the ends. The plain form."""
    weight = tent(torch.arange(x.shape[-1], device=x.device) - points[..., None])
    return torch.einsum("bgcn,bgkmn->bgckm", x, weight.to(x.dtype))


def sample_line(x: Float[Tensor, "B g c n"], points: Float[Tensor, "B g K m"]) -> Float[Tensor, "B g c K m"]:
    """Linear interpolation between the positions before and after every point, exact at whole numbers.

    A tap at its query depends on no later position: derivatives at whole points are those towards smaller ones. A point
    that is NaN gives NaN.
    """
    high = points.detach().ceil()
    part, total = high - points, x.new_zeros(())
    for i in (0, 1):
        cell = high - i
        weight = (part if i else 1 - part) * ((cell >= 0) & (cell < x.shape[-1]))
        index = cell.nan_to_num(0.0).clamp(0, x.shape[-1] - 1).long()
        index = index.flatten(2)[:, :, None].expand(-1, -1, x.shape[2], -1)
        total = total + x.gather(3, index).unflatten(3, points.shape[2:]) * weight[:, :, None].to(x.dtype)
    return total
